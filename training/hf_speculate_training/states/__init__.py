"""The target's hidden states at every token of a batch, from which a head learns.

`TargetReader` runs the target's decoder over packed documents. It finds out first whether the decoder keeps them apart,
and whether its logits are its output matrix times its last state. `write_features` keeps these states on disk, and
`FeatureCache` returns them bit by bit, so the decoder runs once for all epochs.
"""

from .feature_cache import FeatureCache as FeatureCache
from .feature_cache import FeatureCacheError as FeatureCacheError
from .feature_cache import cache_key as cache_key
from .feature_cache import feature_bytes as feature_bytes
from .feature_cache import write_features as write_features
from .target_states import TargetReader as TargetReader
from .target_states import TargetStates as TargetStates
from .target_states import visible as visible
