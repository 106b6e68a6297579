"""Drafts from text, by counts of what followed, smoothed over contexts of several lengths.

The texts are the request's own and, if options ask for them, outputs of earlier requests and a corpus. Next tokens are
ranked by how often they followed contexts of several lengths. Unlike in prompt lookup, a draft can continue past the
end of an occurrence.
"""

from .drafter import SuffixDrafter as SuffixDrafter
from .options import SuffixOptions as SuffixOptions
from .store import SuffixStore as SuffixStore
