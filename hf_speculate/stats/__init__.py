"""What speculation did: counts, acceptance, times, and what follows from them for its user.

Definitions (vLLM's wording): mean acceptance length = tokens emitted by rounds / rounds that had a draft, the bonus
token included; the token from the prefill and rounds without a draft (N = 1) are counted apart. Acceptance rate at
depth d = rounds accepted to depth >= d / rounds that had a node there (unconditional). A "round" here is one row's
share of a round, so a batch of 4 rows makes 4.
"""

from .advice import Advice as Advice
from .advice import HeadRecord as HeadRecord
from .advice import of_heads as of_heads
from .statistics import SpeculationStats as SpeculationStats
