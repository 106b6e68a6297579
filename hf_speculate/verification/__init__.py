"""The choice of a round's tokens: the request's own processors, sampler and criteria, applied along the draft tree.

The sampler chooses a token at every node that the walk visits, with the noise that stock would draw at that step. So
the text is stock's by construction. This package also keeps the text so far, its records, and when each row ends.
"""

from .batched import BatchedChoice as BatchedChoice
from .batched import ChoiceInputs as ChoiceInputs
from .batched import ScoredTable as ScoredTable
from .batched import reason_for_host as reason_for_host
from .natively import most_probable as most_probable
from .natively import stand_in as stand_in
from .noise import Noise as Noise
from .noise import RngState as RngState
from .processors import see_rows_alone as see_rows_alone
from .records import LayerRecord as LayerRecord
from .records import Records as Records
from .records import StepRecord as StepRecord
from .sampler import Sampler as Sampler
from .sampler import TaintedScores as TaintedScores
from .sampler import are_tainted as are_tainted
from .sequences import Sequences as Sequences
from .stopping import Stopping as Stopping
from .typical import TypicalAcceptance as TypicalAcceptance
from .typical import TypicalSampler as TypicalSampler
from .walk import Verdict as Verdict
from .walk import Verifier as Verifier
