"""The policy decides how much a round drafts: a budget of nodes and depth, or nothing.

The adaptive policy learns what rounds cost and how reliable a drafter's values are. It drafts another level, or scores
another node, only while that pays. The other policies always draft the same amount, or repeat a recorded run. A policy
changes the speed of a text, never the text.
"""

from .acceptance import Acceptance as Acceptance
from .acceptance import Average as Average
from .adaptive import Adaptive as Adaptive
from .contract import NOTHING as NOTHING
from .contract import UNLIMITED as UNLIMITED
from .contract import Budget as Budget
from .contract import DraftPolicy as DraftPolicy
from .contract import PolicyRequest as PolicyRequest
from .contract import PolicySession as PolicySession
from .contract import Situation as Situation
from .early_stopping import PathProbabilities as PathProbabilities
from .fixed import Fixed as Fixed
from .fixed import Replay as Replay
