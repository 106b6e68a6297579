"""Training methods: their contract, how installed ones are found, and the parts that several of them share.

A `TrainingMethod` is a module around a decode head that turns a batch and the target's states into a loss. It is found
by name through the entry-point group `hf_speculate.training_methods`; the built-in ones (`block`, `eagle`, `medusa`)
are found like any other. They share entries (the predictions that count), losses (plain and lean in memory), the
teacher and the draft vocabulary. A method of your own can take these parts, too.
"""

from ..names import check_method as check_method
from ..names import installed_methods as installed_methods
from .contract import SMALL_HIDDEN_SIZE as SMALL_HIDDEN_SIZE
from .contract import CountTokens as CountTokens
from .contract import NoOptions as NoOptions
from .contract import StepOutput as StepOutput
from .contract import TrainingMethod as TrainingMethod
from .contract import load_method as load_method
from .entries import Entries as Entries
from .entries import shared_size as shared_size
from .entries import tokens_ahead as tokens_ahead
from .heads import count_tokens as count_tokens
from .heads import detached_copy as detached_copy
from .heads import trainable as trainable
from .losses import HardTargets as HardTargets
from .losses import SoftTargets as SoftTargets
from .losses import Targets as Targets
from .losses import Teacher as Teacher
from .losses import lean_cross_entropy as lean_cross_entropy
from .losses import plain_cross_entropy as plain_cross_entropy
