"""The policy decides how much a round drafts: a budget of nodes and depth, or nothing.

The adaptive policy learns what rounds cost and how reliable a drafter's values are. It drafts another level, or scores
another node, only while that pays. The fixed policy always drafts the same amount. A policy changes the speed of a
text, never the text.

# The account of the adaptive policy

The policy keeps an account, so that useless drafts cost little. Its unit is the time of a one-token forward: a round
without a draft costs 1, and every token is worth 1.

- The *balance* is the loss that drafts may still make. It starts with 0.6, or with 3 where forwards are padded to a few
  sizes, as in CUDA graphs.
- Before a round, the policy computes the *possible loss* of a draft: the cost of the round if no draft token is
  accepted, less 1. It begins only drafts whose possible loss is not above the balance. If there are none, it drafts
  nothing.
- Before its first draft of a request, a drafter reads the prompt. The usual time for that, up to 2, counts for the
  possible loss and for the charge.
- After a round with a draft, the balance grows by the tokens of the round, and falls by its charge. In a batch, tokens
  are averaged over rows.
- After every round, the balance also grows by the *allowance*, 1 % of the charge. So a draft is tried again after some
  rounds without one.
- The balance stays between -0.1 and 8. A request takes over at most 5 from the request before.
- The *charge* is the time of the round. If similar rounds were timed before, it differs by at most 10 % from the time
  expected from these. A round that another process delayed says nothing about drafting.
- If no similar rounds were timed, a slow round is charged in full. The *surcharge* is the loss of the balance by time
  that is more than 10 % above the expected time. If recent rounds show that the machine is busy, the surcharge is added
  to the balance again. It falls by 5 % per round.
- Only rounds without draft nodes show what they take. While drafts gain less than 30 %, every 33rd round is such a
  round. If it takes over 10 % less than expected, another one follows after the next draft.

An example: a one-token forward takes one second. Drafting takes 0.1 seconds per level, and verifying 4 nodes takes 1.2
seconds. All this was timed before.

| round | nodes | levels | tokens | seconds | charge | balance | surcharge |
|---|---|---|---|---|---|---|---|
| 1 | 4 | 2 | 1 | 1.40 | 1.40 | 0.21 | 0.00 |
| 2 | 1 | 1 | 2 | 1.15 | 1.15 | 1.08 | 0.00 |
| 3 | 4 | 2 | 3 | 1.40 | 1.40 | 2.69 | 0.00 |
| 4 | 16 | 2 | 2 | 2.40 | 2.40 | 2.31 | 0.49 |
| 5 | 4 | 2 | 2 | 2.60 | 1.53 | 2.80 | 0.46 |

1. No node is right. The round emits one token for 1.4: 0.6 + 1 - 1.4 + 0.014 = 0.214.
2. The same draft could lose 0.4, more than the balance. The policy drafts one node, which can lose 0.15. It is right.
3. Now the draft of 4 nodes is possible again. Two nodes are right, so the round emits three tokens.
4. A forward of 16 nodes was never timed, so it is charged in full. The surcharge is paid back if the machine is busy.
5. Another process delays the forward by 1.2 seconds. For the delay, only 10 % of the expected time are charged.
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
