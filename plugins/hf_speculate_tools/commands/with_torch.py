"""The names that this package exports only when they are asked for, because their modules import torch."""

from .machine import drafter_list as drafter_list
from .machine import environment as environment
from .machine import find_device as find_device
from .machine import find_dtype as find_dtype
from .machine import spread as spread
from .machine import synchronize as synchronize
from .machine import timed as timed
from .typing import DRAFTED as DRAFTED
from .typing import DraftTypist as DraftTypist
from .typing import Typist as Typist
from .typing import side_by_side as side_by_side
