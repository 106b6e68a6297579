"""Statistics of speculation: counts, acceptance, times, and advice that follows from them.

Definitions (vLLM's wording): mean acceptance length = tokens that drafted rounds emitted / number of these rounds, the
bonus token included. A drafted round is one with a draft. Prefill tokens and rounds without a draft (N = 1) are counted
apart. Acceptance rate at depth d = rounds accepted to depth >= d / rounds that had a node there (unconditional). A
"round" here is one row's share of a round, so a batch of 4 rows makes 4.
"""

from .advice import Advice as Advice
from .advice import HeadRecord as HeadRecord
from .advice import of_heads as of_heads
from .runners import EAGER as EAGER
from .runners import GRAPH as GRAPH
from .runners import NATIVE as NATIVE
from .runners import RunnerRecord as RunnerRecord
from .statistics import SpeculationStats as SpeculationStats
