"""Training methods: their contract, how installed ones are found, and the parts that several of them share.

A `TrainingMethod` is a module around a decode head that turns a batch and the target's states into a loss. It is found
by name through the entry-point group `hf_speculate.training_methods`; the built-in ones (`block`, `eagle`, `medusa`)
are found like any other. They share entries (the predictions that count), losses (plain and lean in memory), the
teacher and the draft vocabulary. A method of your own can take these parts, too.
"""

from .contract import (
    GROUP,
    SMALL_HIDDEN_SIZE,
    CountTokens,
    NoOptions,
    StepOutput,
    TrainingMethod,
    check_method,
    installed_methods,
    load_method,
)
from .entries import Entries, Normalizer, counted_entries, emitting_positions, shared_size, tokens_ahead
from .heads import (
    choose_vocabulary,
    copy_rows,
    count_tokens,
    detached_copy,
    draft_vocabulary,
    suggested_vocabulary,
    target_rows,
    trainable,
)
from .losses import (
    EntryLosses,
    HardTargets,
    SoftTargets,
    Targets,
    Teacher,
    TeacherRows,
    lean_cross_entropy,
    plain_cross_entropy,
)


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
