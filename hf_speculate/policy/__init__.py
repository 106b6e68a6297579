"""The policy: how much every round drafts, a budget of nodes and depth, or nothing.

The adaptive policy learns what rounds cost and what a drafter's values mean; it drafts another level and scores another
node only while that pays. Others always draft alike, or repeat what was written down. A policy changes the speed of a
text, never the text.
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
from .costs import Timings as Timings
from .deepening import PathProbabilities as PathProbabilities
from .deepening import WhilePaying as WhilePaying
from .fixed import Fixed as Fixed
from .fixed import Replay as Replay
from .kept import device_name as device_name
