"""Parts that all command lines share, including those of plug-ins and the trainer.

Targets, speculators, prompts and devices by name (a wrong name is a `SpeculateError` of one line); options, each
declared once; tables, clocks, a progress bar, and the line of JSON at the end of a command. Nothing in here measures
anything.

Options and their checks need no torch, so that help and errors come at once. What does is imported when it is first
asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .checks import check_temperatures as check_temperatures
from .checks import checked as checked
from .options import MODEL_FORMS as MODEL_FORMS
from .options import BatchSizes as BatchSizes
from .options import Category as Category
from .options import Device as Device
from .options import Exact as Exact
from .options import GgufBackend as GgufBackend
from .options import JsonOnly as JsonOnly
from .options import Limit as Limit
from .options import NewTokens as NewTokens
from .options import PromptFiles as PromptFiles
from .options import Raw as Raw
from .options import Repeats as Repeats
from .options import Specs as Specs
from .options import TargetDtype as TargetDtype
from .options import TargetOption as TargetOption
from .options import Temperatures as Temperatures
from .options import Threads as Threads
from .options import new_tokens_option as new_tokens_option
from .options import speculator_option as speculator_option
from .options import speculators_option as speculators_option
from .options import target_option as target_option
from .options import temperature_option as temperature_option
from .prompts import Prompt as Prompt
from .prompts import builtin_prompts as builtin_prompts
from .prompts import chat_ids as chat_ids
from .prompts import check_prompts as check_prompts
from .prompts import read_prompts as read_prompts
from .prompts import readable as readable
from .prompts import tokenize as tokenize
from .reporting import console as console
from .reporting import prepare as prepare
from .reporting import progress as progress
from .reporting import report as report
from .reporting import say as say
from .reporting import say_json as say_json
from .settings import add_command as add_command
from .settings import command_of as command_of
from .tables import Grid as Grid
from .tables import by_depth as by_depth
from .targets import bundled as bundled
from .targets import check_backend as check_backend
from .targets import check_target as check_target
from .targets import default_specs as default_specs
from .targets import default_target as default_target
from .targets import load_target as load_target
from .targets import make_spec as make_spec
from .targets import neutralize as neutralize
from .targets import parse_spec as parse_spec
from .targets import parse_specs as parse_specs
from .targets import target_path as target_path


if TYPE_CHECKING:
    from .with_torch import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module(f"{__name__}.with_torch"), name)
