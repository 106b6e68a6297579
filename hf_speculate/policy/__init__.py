"""How much every round drafts: a budget of nodes and depth, or nothing.

The adaptive policy learns what rounds cost and how far drafts are accepted, and takes the budget with the most expected
tokens per second. A policy changes the speed of a text, never the text.
"""

from .acceptance import Acceptance as Acceptance
from .adaptive import NOTHING as NOTHING
from .adaptive import UNLIMITED as UNLIMITED
from .adaptive import Budget as Budget
from .adaptive import Experience as Experience
from .adaptive import Tuner as Tuner
from .costs import RoundCosts as RoundCosts
from .costs import Timings as Timings
