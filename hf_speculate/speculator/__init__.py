"""Speculators: drafters with the engine's options and statistics, by name, folder or Hub id.

registry       installed drafters by name, and speculators in one line of text
repositories   folders and Hub repositories of heads, found and downloaded
options        the engine's options
publishing     the publisher of heads, which a package above registers
speculator     `Speculator` and `AutoSpeculator`
attaching      speculators attached to models
"""

from . import registry as registry  # which the command line imports before the package
from .attaching import attach as attach
from .attaching import attached as attached
from .attaching import attached_to as attached_to
from .attaching import detach as detach
from .attaching import resolve as resolve
from .attaching import speculators as speculators
from .options import EngineOptions as EngineOptions
from .options import check_sizes as check_sizes
from .options import read_options as read_options
from .options import takers_of as takers_of
from .publishing import Publisher as Publisher
from .publishing import register_publisher as register_publisher
from .registry import SpeculatorSpec as SpeculatorSpec
from .registry import find_installed as find_installed
from .registry import installed_drafters as installed_drafters
from .registry import load_drafter as load_drafter
from .registry import load_installed as load_installed
from .registry import path_problem as path_problem
from .registry import unknown_name_message as unknown_name_message
from .repositories import WEIGHTS as WEIGHTS
from .repositories import drafter_class_for as drafter_class_for
from .repositories import head_folder as head_folder
from .repositories import local_folder as local_folder
from .speculator import AutoSpeculator as AutoSpeculator
from .speculator import Speculator as Speculator
from .speculator import make_speculator as make_speculator
from .speculator import without_verdicts as without_verdicts
