"""Drafts from text, by counts of what followed, smoothed over contexts of several lengths.

Text is the request's own and, on demand, what earlier requests wrote and a corpus. Unlike prompt lookup, what follows
is ranked by how often it did, after several context lengths at once, and a draft continues past the end of an
occurrence.
"""

from .drafter import SuffixDrafter as SuffixDrafter
from .options import SuffixOptions as SuffixOptions
from .store import SuffixStore as SuffixStore
