"""The versions of transformers that this package works with, and what differs between them.

The face imports no transformers, which may be too old. `stock` does, and is imported by its path.
"""

from .versions import WORKING as WORKING
from .versions import check_feature as check_feature
from .versions import check_version as check_version
from .versions import explained as explained
from .versions import incompatible as incompatible
from .versions import installed_version as installed_version
from .versions import too_old as too_old
