"""Speculative decoding as a plug-in for transformers: `model.generate(..., speculator=...)`."""

from .drafter import Drafter as Drafter
from .drafter import DraftRequest as DraftRequest
from .drafter import DraftSession as DraftSession
from .drafter import DraftState as DraftState
from .errors import SpeculateError as SpeculateError
from .generate import install as install
from .generate import uninstall as uninstall
from .registry import installed_drafters as installed_drafters
from .speculator import AutoSpeculator as AutoSpeculator
from .speculator import Speculator as Speculator
from .speculator import attach as attach
from .speculator import detach as detach
from .stats import SpeculationStats as SpeculationStats
from .streaming import stream as stream
from .tree import DraftTree as DraftTree


__version__ = "0.1.0"

install()
