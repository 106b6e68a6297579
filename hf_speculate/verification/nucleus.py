"""Top-p without sorting the vocabulary, and with the very result that transformers' sort gives.

Sorting 151936 scores takes longer than a small packed model's forward, and every node of a tree needs it. The most
probable tokens alone decide, unless the flat tail does or a decision hangs on rounding: such rows are sorted.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.generation.logits_process import TopPLogitsWarper


_CANDIDATES = 512  # most probable tokens that are looked at
_MIN_VOCABULARY = 8 * _CANDIDATES  # sorting fewer scores takes no longer
# Probability within which a decision may be wrong: both sums, in float32, are within 1e-6 (of 151936 scores).
_MARGIN = 4e-6


def top_p(warper: TopPLogitsWarper, scores: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
    """The scores that `warper` leaves; others are its filter value.

    On other devices than a CPU the warper itself sorts: finding out which rows it has to do would be a wait.
    """
    if scores.device.type != "cpu" or scores.shape[-1] < _MIN_VOCABULARY or warper.min_tokens_to_keep > 1:
        return warper(None, scores)  # type: ignore[arg-type]
    values, tokens = scores.topk(_CANDIDATES, dim=-1)
    kept, is_sure = _decide(scores, values, warper.top_p)
    result = torch.full_like(scores, warper.filter_value)
    result.scatter_(-1, tokens, values.masked_fill(~kept, warper.filter_value))
    if not is_sure.all():
        result[~is_sure] = warper(None, scores[~is_sure])  # type: ignore[arg-type]
    return result


def _decide(
    scores: Float[Tensor, "R V"], values: Float[Tensor, "R K"], limit: float
) -> tuple[Bool[Tensor, "R K"], Bool[Tensor, " R"]]:
    """The most probable tokens, best first, that are kept; and the rows where transformers decides alike for sure.

    A token is kept while those before it have less than `limit` together.
    """
    probs = (values - scores.logsumexp(-1, keepdim=True)).exp()
    before = probs.cumsum(-1) - probs
    kept = before < limit
    kept[:, 0] = True
    is_clear = (before - limit).abs() > _MARGIN
    is_clear[:, 0] = True
    border = kept.sum(-1, keepdim=True).clamp(max=_CANDIDATES - 1)  # the first token that goes
    # Of equal scores at the border, transformers' sort keeps any; and where all candidates are kept, more may be.
    is_open = (values.gather(-1, border) == values.gather(-1, border - 1)) | kept[:, -1:]
    return kept, is_clear.all(-1) & ~is_open[:, 0]
