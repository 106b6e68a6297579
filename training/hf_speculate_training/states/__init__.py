"""What a head learns from: the target's hidden states at every token of a batch.

`TargetReader` runs the target's decoder over packed documents and finds out, before anything is trained, whether it
keeps them apart and whether its logits are its output matrix times its last state. `write_features` keeps what the
reader gives on disk, and `FeatureCache` hands it back bit by bit: the target's decoder runs once for all epochs.
`ForeignFeatures` reads what vLLM wrote for `speculators`.
"""

from .cache_index import FeatureCacheError
from .feature_cache import FeatureCache, cache_key, feature_bytes, write_features
from .foreign_features import ForeignFeatures, is_foreign, write_foreign_features
from .target_states import TargetReader, TargetStates, visible


__all__ = [
    "FeatureCache",
    "FeatureCacheError",
    "ForeignFeatures",
    "TargetReader",
    "TargetStates",
    "cache_key",
    "feature_bytes",
    "is_foreign",
    "visible",
    "write_features",
    "write_foreign_features",
]
