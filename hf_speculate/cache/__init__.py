"""The KV cache of speculative decoding: append entries, keep those of an accepted path, drop the others.

The cost of each step depends on the number of entries changed, not on the length of the text. The unit is a cache layer
of our own in an ordinary transformers `Cache`. `TreeCache` controls the layers of one cache and commits by setting one
integer a row. Finished rows can be set aside, and come back at the end.
"""

from ..compatibility.stock import CACHE_NAME as CACHE_NAME
from ..compatibility.stock import OLD_CACHE_NAME as OLD_CACHE_NAME
from ..compatibility.stock import as_cache as as_cache
from ..compatibility.stock import cache_of as cache_of
from .layers import PreallocatedLayer as PreallocatedLayer
from .sliding import SlidingLayer as SlidingLayer
from .tree_cache import INDEXABLE as INDEXABLE
from .tree_cache import TreeCache as TreeCache
from .tree_cache import is_indexable as is_indexable
from .tree_cache import reserving as reserving
