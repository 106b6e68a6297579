"""The versions of transformers that this package works with, and what differs between them.

Only this package knows versions. Its face imports no transformers, because it is imported before transformers is known
to be new enough. `stock` has the names that differ, and is imported by its path.
"""

from .versions import OLDEST as OLDEST
from .versions import WORKING as WORKING
from .versions import check_feature as check_feature
from .versions import check_version as check_version
from .versions import explained as explained
from .versions import incompatible as incompatible
from .versions import installed_version as installed_version
from .versions import too_old as too_old
