"""The parts that all heads of decoder layers share: modules, files, drafter, session, KV cache, compiled forwards.

The drafters and sessions of methods are built on these; nothing here knows a method.
"""

from .captured import CapturedForwards as CapturedForwards
from .drafter import HeadDrafter as HeadDrafter
from .drafter import HeadSession as HeadSession
from .drafter import LoadedDrafter as LoadedDrafter
from .drafter import can_prepare as can_prepare
from .files import HeadFiles as HeadFiles
from .files import Limit as Limit
from .files import Written as Written
from .following import check_follows as check_follows
from .following import is_placed as is_placed
from .following import placed_copy as placed_copy
from .head import MLP as MLP
from .head import Attend as Attend
from .head import Attention as Attention
from .head import CachedAttention as CachedAttention
from .head import FeedingHead as FeedingHead
from .head import LoadedHead as LoadedHead
from .head import PlacedAttention as PlacedAttention
from .head import SharingHead as SharingHead
from .head import dense_state as dense_state
from .head import keep_packed as keep_packed
from .head import known_rows as known_rows
from .head import rotary_embedding as rotary_embedding
from .head_cache import HeadCache as HeadCache
from .head_cache import Place as Place
