"""How much every round drafts: a budget of nodes and depth, or nothing.

The adaptive policy learns what rounds cost and how far drafts are accepted, and takes the budget with the most expected
tokens per second; others always draft alike, or repeat what was written down. A policy changes the speed of a text,
never the text.
"""

from .adaptive import Adaptive as Adaptive
from .contract import NOTHING as NOTHING
from .contract import UNLIMITED as UNLIMITED
from .contract import Budget as Budget
from .contract import DraftPolicy as DraftPolicy
from .contract import PolicyRequest as PolicyRequest
from .contract import PolicySession as PolicySession
from .contract import Situation as Situation
from .costs import Timings as Timings
from .fixed import Fixed as Fixed
from .fixed import Replay as Replay
