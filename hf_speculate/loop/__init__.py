"""The loop of a request: draft, score, verify, keep and publish, one round after the other.

`loop` has the rounds; `decoding` is the state of a request between them. Whatever is decided once a request comes from
`hf_speculate.request`.
"""

from .ahead import Ahead as Ahead
from .decoding import Decoding as Decoding
from .delivery import Delivery as Delivery
from .limits import DepthLimits as DepthLimits
from .listeners import round_listeners as round_listeners
from .loop import decode as decode
from .meter import Meter as Meter
from .meter import RoundClock as RoundClock
from .prompt import Prompt as Prompt
from .recomputing import follow_recomputing as follow_recomputing
from .recomputing import recomputing_switch as recomputing_switch
from .rows import Rows as Rows
from .stock_step import TOKEN_KWARGS as TOKEN_KWARGS
from .stock_step import StockStep as StockStep
