"""The KV cache: entries are appended, those of an accepted path are kept, the others go, at a cost of their own number.

The unit is a cache layer of ours in an ordinary transformers `Cache`; `TreeCache` steers the layers of one cache and
commits by one integer a row. Rows that have ended can be set aside, and come back in the end.
"""

from .layers import PreallocatedLayer as PreallocatedLayer
from .tree_cache import CACHE_NAME as CACHE_NAME
from .tree_cache import INDEXABLE as INDEXABLE
from .tree_cache import OLD_CACHE_NAME as OLD_CACHE_NAME
from .tree_cache import TreeCache as TreeCache
from .tree_cache import as_cache as as_cache
from .tree_cache import cache_of as cache_of
from .tree_cache import is_indexable as is_indexable
