"""Speculators: a drafter with the engine's options and statistics, ways to get one, and speculators attached to
models."""

from .attaching import attach as attach
from .attaching import attached as attached
from .attaching import attached_to as attached_to
from .attaching import detach as detach
from .attaching import resolve as resolve
from .attaching import speculators as speculators
from .options import EngineOptions as EngineOptions
from .options import read_options as read_options
from .speculator import AutoSpeculator as AutoSpeculator
from .speculator import Speculator as Speculator
from .speculator import make_speculator as make_speculator
from .speculator import without_verdicts as without_verdicts
