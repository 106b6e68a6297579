"""Heads on disk and on the Hub: found, downloaded, and compared with the target that they were trained for."""

from .provenance import PROVENANCE_FILE as PROVENANCE_FILE
from .provenance import read_provenance as read_provenance
from .repositories import WEIGHTS as WEIGHTS
from .repositories import drafter_class_for as drafter_class_for
from .repositories import local_folder as local_folder
from .targets import check_head_vocabulary as check_head_vocabulary
from .targets import check_origin as check_origin
from .targets import check_stated_name as check_stated_name
from .targets import describe_identity as describe_identity
from .targets import head_record as head_record
