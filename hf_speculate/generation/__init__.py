"""A `generate` call from end to end: the bridge that takes it over from transformers, and the loop that runs it.

The bridge wraps three methods of `GenerationMixin`. Requests are checked and prepared here. Then the loop drafts,
scores, verifies, keeps and publishes one round after the other. Decisions made once a request belong here; what a round
needs comes from the other packages.
"""

from .bridge import install as install
from .bridge import uninstall as uninstall
from .call import PreparedCall as PreparedCall
from .call import streamed as streamed
