"""Top-p sampling without sorting the vocabulary. The result is exactly that of transformers' sort.

Sorting 151936 scores takes longer than the forward of a small packed model, and every node of a tree needs it. Usually
the most probable tokens are enough to decide which ones are kept. A row is sorted if they are not, or if rounding could
change the decision.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.generation.logits_process import TopPLogitsWarper


_CANDIDATES = 512  # number of most probable tokens to consider
_MIN_VOCABULARY = 8 * _CANDIDATES  # sorting fewer scores takes no longer
# A decision that is closer to the limit than this probability may be wrong. With 151936 scores, both float32 sums are
# accurate to 1e-6.
_MARGIN = 4e-6


def top_p(warper: TopPLogitsWarper, scores: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
    """The scores that `warper` keeps; all others become its filter value.

    On an accelerator the warper itself sorts. To find the rows that need sorting, the host would have to wait.
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
    """Whether each of the most probable tokens is kept, and whether transformers surely keeps the same tokens of a row.

    A token is kept if the total probability of the tokens before it is below `limit`.

    Args:
        values: scores of the most probable tokens, largest first.
    """
    probs = (values - scores.logsumexp(-1, keepdim=True)).exp()
    before = probs.cumsum(-1) - probs
    kept = before < limit
    kept[:, 0] = True
    is_clear = (before - limit).abs() > _MARGIN
    is_clear[:, 0] = True
    border = kept.sum(-1, keepdim=True).clamp(max=_CANDIDATES - 1)  # the first token that is dropped
    # If scores at the border are equal, transformers' sort may keep any of them. If all candidates are kept, further
    # tokens may be kept, too.
    is_open = (values.gather(-1, border) == values.gather(-1, border - 1)) | kept[:, -1:]
    return kept, is_clear.all(-1) & ~is_open[:, 0]
