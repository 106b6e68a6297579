"""One forward of a causal LM over a draft tree: inputs, positions, masks, cache.

Used for the target by the decoding loop and by drafters that run a causal LM of their own. Nothing here names an
architecture: any decoder-only model whose forward takes a 4-D mask, position ids and a `Cache` works.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from .cache import PreallocatedLayer, TreeCache, has_only_full_attention
from .devices import execution_device
from .tree import DraftTree


# A tree needs an additive 4-D mask; these attentions take one. (A *bool* 4-D mask is silently wrong with "eager", which
# adds it to the scores, and is converted once a layer by "sdpa": none is ever made.)
TREE_ATTENTION = ("eager", "sdpa")

Shape = Literal["tree", "chain", "single"]


def supported_shape(model: PreTrainedModel, cache: Cache) -> tuple[Shape, str]:
    """The widest draft that `model` can score with `cache`, and why it is not wider ("" for trees)."""
    if not has_only_full_attention(cache):
        kinds = sorted({type(layer).__name__ for layer in cache.layers})
        return "single", f"cache layers {kinds} cannot be indexed: no drafts"
    attention = model.config._attn_implementation
    if attention not in TREE_ATTENTION:
        return "chain", f"attention {attention!r} takes no tree mask: chains only"
    return "tree", ""


def _rope_parameters(config: PreTrainedConfig) -> Iterator[dict]:
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]


def has_length_dependent_rope(config: PreTrainedConfig) -> bool:
    """Whether the forward depends on its longest position (RoPE types `dynamic` and `longrope`)."""
    return any(p.get("rope_type") in ("dynamic", "longrope") for p in _rope_parameters(config))


def rope_depth_limit(config: PreTrainedConfig, root_position: int) -> int | None:
    """How deep a tree may go so that its longest position leaves RoPE as a one-token forward would have it.

    Args:
        root_position: the largest position id of a root in the batch.
    Returns:
        The depth (0: no draft), or None for no limit.
    """
    limits = []
    for parameters in _rope_parameters(config):
        if parameters.get("rope_type") == "dynamic":
            limits.append(max(config.get_text_config(decoder=True).max_position_embeddings - 1 - root_position, 0))
        elif parameters.get("rope_type") == "longrope":
            last_short = parameters["original_max_position_embeddings"] - 1
            if root_position <= last_short:
                limits.append(last_short - root_position)
    return min(limits, default=None)


class Scorer:
    """Runs a causal LM over draft trees on top of one cache, rows of a batch having their own lengths.

    Args:
        model: the causal LM.
        cache: its tree cache.
        prompt_mask: bool or int [B, M0], which of the first M0 cache entries are real (left padding and holes are 0);
            None when all are.
        shape: "tree", or "chain" for attentions that take no tree mask.
        forward_kwargs: further keyword arguments of every forward.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TreeCache,
        prompt_mask: Tensor | None = None,
        shape: Shape = "tree",
        forward_kwargs: Mapping[str, Any] | None = None,
    ):
        self.model = model
        self.cache = cache
        self.shape = shape
        self._prompt_mask = None if prompt_mask is None else prompt_mask.bool()
        self._forward_kwargs = dict(forward_kwargs or {})
        # Of offloaded embeddings `model.device` is "meta".
        self.device = execution_device(model.get_input_embeddings()) or model.device

    def __call__(
        self,
        tree: DraftTree,
        root_positions: Sequence[int],
        *,
        num_cached: int = 0,
        forward_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Scores nodes of `tree`; the cache then holds N appended, uncommitted entries a row.

        Args:
            tree: B rows; must be a chain if `shape` is "chain".
            root_positions: position id of the root of each row.
            num_cached: the first nodes, already appended by calls since the last commit; only the others are run
                (how a drafter grows a tree level by level).
            forward_kwargs: further keyword arguments of this forward.
        Returns:
            The model's output; `logits` is [B, N - num_cached, V], `logits[r, i]` scores the token after node
            `num_cached + i`.
        """
        device = self.device
        depths = tree.plan.depths[:, num_cached:]
        position_ids = torch.tensor(root_positions, device=depths.device)[:, None] + depths
        return self.model(
            input_ids=tree.token_ids[:, num_cached:].to(device),
            position_ids=position_ids.to(device),
            attention_mask=self.mask(tree, num_cached),
            past_key_values=self.cache.cache,
            use_cache=True,
            logits_to_keep=tree.num_nodes - num_cached,
            return_dict=True,
            **self._forward_kwargs,
            **(forward_kwargs or {}),
        )

    def mask(self, tree: DraftTree, num_cached: int = 0) -> Tensor | None:
        """The attention mask of a forward over the nodes of `tree` behind the first `num_cached`.

        Returns:
            None for a root alone over a prefix without holes (the stock decoding step), additive
            [B, 1, N - num_cached, M + N] for trees, int64 [B, M + N] for chains under the model's own causal mask.
        """
        num_prefix, num_nodes = self.cache.append_index, tree.num_nodes
        visible = self._visible_prefix(num_prefix)
        if visible is None and (num_nodes == 1 or self.shape == "chain"):
            return None
        if self.shape == "chain" and visible is not None:
            return torch.cat([visible, visible.new_ones(visible.shape[0], num_nodes)], dim=1).long()
        dtype, device = self._attention_dtype, self.device
        size = (tree.batch_size, 1, num_nodes - num_cached, num_prefix + num_nodes)
        mask = torch.zeros(size, dtype=dtype, device=device)
        if visible is not None:
            mask[..., :num_prefix].masked_fill_(~visible[:, None, None, :], torch.finfo(dtype).min)
        mask[..., num_prefix:] = tree.plan.bias(dtype, device)[:, None, num_cached:]
        return mask

    @property
    def _attention_dtype(self) -> torch.dtype:
        """dtype of queries and keys, which `sdpa` wants of its mask; under autocast it is not the model's."""
        first = next(iter(self.cache.cache.layers), None)
        return first.dtype if isinstance(first, PreallocatedLayer) and first.is_initialized else self.model.dtype

    def _visible_prefix(self, num_prefix: int) -> Tensor | None:
        """bool [B, num_prefix]: entries that are real; None if all are."""
        if self._prompt_mask is None and not self.cache.is_ragged:
            return None
        device = self.device
        lengths = torch.tensor(self.cache.lengths, device=device)
        visible = torch.arange(num_prefix, device=device) < lengths[:, None]
        if self._prompt_mask is not None:
            width = min(self._prompt_mask.shape[1], num_prefix)
            visible[:, :width] &= self._prompt_mask[:, :width].to(device)
        return visible
