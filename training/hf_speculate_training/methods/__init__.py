"""Training methods: what one is, how an installed one is found, and what several of them are made from.

A `TrainingMethod` is a module around a decode head that turns a batch and the target's states into a loss; it is found
by name through the entry-point group `hf_speculate.training_methods`, the built-in ones (`block`, `eagle`, `medusa`)
like any other. Entries (which predictions count), losses (plain and lean in memory), the teacher and the draft
vocabulary are the parts that they share, and that a method of your own can take.
"""

from .contract import SMALL_HIDDEN_SIZE, CountTokens, NoOptions, StepOutput, TrainingMethod
from .entries import Entries, Normalizer, counted_entries, emitting_positions, tokens_ahead
from .losses import EntryLosses, HardTargets, SoftTargets, Targets, lean_cross_entropy, plain_cross_entropy
from .processes import shared_size
from .registry import GROUP, check_method, installed_methods, load_method
from .teacher import Teacher, TeacherRows
from .vocabulary import choose_vocabulary, count_tokens, draft_vocabulary, suggested_vocabulary
from .weights import copy_rows, detached_copy, target_rows, trainable


__all__ = [
    "GROUP",
    "SMALL_HIDDEN_SIZE",
    "CountTokens",
    "Entries",
    "EntryLosses",
    "HardTargets",
    "NoOptions",
    "Normalizer",
    "SoftTargets",
    "StepOutput",
    "Targets",
    "Teacher",
    "TeacherRows",
    "TrainingMethod",
    "check_method",
    "choose_vocabulary",
    "copy_rows",
    "count_tokens",
    "counted_entries",
    "detached_copy",
    "draft_vocabulary",
    "emitting_positions",
    "installed_methods",
    "lean_cross_entropy",
    "load_method",
    "plain_cross_entropy",
    "shared_size",
    "suggested_vocabulary",
    "target_rows",
    "tokens_ahead",
    "trainable",
]
