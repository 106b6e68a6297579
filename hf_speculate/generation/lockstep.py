"""When rows of a batch must go on together: something looks at all of them at once, or counts along the longest."""

from __future__ import annotations

from ..models import GenerativeModel
from ..target import Scorer, has_length_dependent_rope
from ..verification import Sampler, Stopping


def lockstep_reason(
    target: GenerativeModel, scorer: Scorer, sampler: Sampler, stopping: Stopping, has_streamer: bool
) -> str:
    """Why all rows must emit the same number of tokens a round; "" if each may go on alone."""
    if not sampler.row_wise:
        return "a logits processor that is not known to be row-wise"
    if not stopping.row_wise:
        return "a stopping criterion that is not known to be row-wise"
    if has_length_dependent_rope(target.config):
        return "RoPE that depends on the longest position"
    if scorer.needs_equal_rows:
        return "attention that takes no mask or counts along the cache"
    return "a streamer" if has_streamer else ""
