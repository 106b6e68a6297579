"""The drafting side of the loop: the contract of a drafting method, and the driver that calls it.

A `Drafter` is weights and options; a `DraftSession` is its state for one request. The driver gives it hidden states and
committed tokens, and checks everything that it returns. A third-party drafter needs this module and
`hf_speculate.tree`; nothing else is promised.
"""

from .ahead import Pending as Pending
from .calibration import CALIBRATION_FILE as CALIBRATION_FILE
from .calibration import MEMORY as MEMORY
from .calibration import Calibration as Calibration
from .calibration import CalibrationTable as CalibrationTable
from .calibration import rising as rising
from .checks import MAX_NODES as MAX_NODES
from .checks import DraftChecks as DraftChecks
from .choices import Choices as Choices
from .contract import RAW_LAST as RAW_LAST
from .contract import Drafter as Drafter
from .contract import DraftSession as DraftSession
from .contract import SavedHead as SavedHead
from .conversations import Conversations as Conversations
from .conversations import cached_text as cached_text
from .conversations import common_prefix as common_prefix
from .conversations import remember_text as remember_text
from .driver import Drafting as Drafting
from .features import FeatureTaps as FeatureTaps
from .features import check_taps as check_taps
from .features import finite as finite
from .features import last_layer as last_layer
from .observations import Observation as Observation
from .observations import joined as joined
from .observations import new_tokens as new_tokens
from .ranking import Warpers as Warpers
from .ranking import rank_children as rank_children
from .ranking import warped as warped
from .requests import DraftRequest as DraftRequest
from .requests import DraftState as DraftState
from .requests import EarlyStopping as EarlyStopping
