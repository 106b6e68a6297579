"""Parts that all command lines share, including those of plug-ins and the trainer.

Targets, speculators, prompts and devices by name (a wrong name is a `SpeculateError` of one line); options, each
declared once; tables, clocks, a progress bar, and the line of JSON at the end of a command. Nothing in here measures
anything.
"""

from .machine import drafter_list as drafter_list
from .machine import environment as environment
from .machine import find_device as find_device
from .machine import find_dtype as find_dtype
from .machine import spread as spread
from .machine import synchronize as synchronize
from .machine import timed as timed
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
from .prompts import Prompt as Prompt
from .prompts import builtin_prompts as builtin_prompts
from .prompts import chat_ids as chat_ids
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
from .settings import check_temperatures as check_temperatures
from .settings import command_of as command_of
from .tables import Grid as Grid
from .tables import by_depth as by_depth
from .targets import bundled as bundled
from .targets import default_specs as default_specs
from .targets import default_target as default_target
from .targets import load_target as load_target
from .targets import make_spec as make_spec
from .targets import neutralize as neutralize
from .targets import parse_spec as parse_spec
from .targets import parse_specs as parse_specs
from .targets import target_path as target_path
from .typing import DRAFTED as DRAFTED
from .typing import DraftTypist as DraftTypist
from .typing import Typist as Typist
from .typing import side_by_side as side_by_side
