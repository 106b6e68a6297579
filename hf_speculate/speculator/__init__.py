"""Speculators: drafters with the engine's options and statistics, by name, folder or Hub id.

registry       installed drafters by name, and speculators in one line of text
repositories   folders and Hub repositories of heads, found and downloaded
provenance     the origin of a head; targets, weights: whether it was trained for this target
options        the engine's options
speculator     `Speculator` and `AutoSpeculator`
attaching      speculators attached to models
"""

from .attaching import attach as attach
from .attaching import attached as attached
from .attaching import attached_to as attached_to
from .attaching import detach as detach
from .attaching import resolve as resolve
from .attaching import speculators as speculators
from .options import EngineOptions as EngineOptions
from .options import read_options as read_options
from .provenance import PROVENANCE_FILE as PROVENANCE_FILE
from .provenance import read_provenance as read_provenance
from .registry import SpeculatorSpec as SpeculatorSpec
from .registry import find_installed as find_installed
from .registry import installed_drafters as installed_drafters
from .registry import load_drafter as load_drafter
from .registry import load_installed as load_installed
from .registry import unknown_name_message as unknown_name_message
from .repositories import WEIGHTS as WEIGHTS
from .repositories import drafter_class_for as drafter_class_for
from .repositories import local_folder as local_folder
from .speculator import AutoSpeculator as AutoSpeculator
from .speculator import Speculator as Speculator
from .speculator import make_speculator as make_speculator
from .speculator import without_verdicts as without_verdicts
from .targets import check_head_vocabulary as check_head_vocabulary
from .targets import check_origin as check_origin
from .targets import check_stated_name as check_stated_name
from .targets import describe_identity as describe_identity
from .targets import head_record as head_record
from .weights import compare_weights as compare_weights
from .weights import sample_weights as sample_weights
