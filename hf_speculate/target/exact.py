"""The forward over a draft tree, bit for bit as stock's single steps: see `walk`; `probing` finds where it can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..cache import TreeCache
from ..tree import DraftTree
from .masks import layer_windows
from .scoring import Scorer
from .walk import Sizes, Walk, depth_first, no_mask, walking


class ExactScorer(Scorer):
    """A `Scorer` whose logits, and the entries that it appends, are those of stock's single steps, bit for bit.

    Args:
        sizes: see `Sizes`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TreeCache,
        prompt_mask: Tensor | None = None,
        token_kwargs: Mapping[str, Tensor] | None = None,
        *,
        sizes: Sizes,
    ):
        super().__init__(model, cache, prompt_mask, token_kwargs=token_kwargs)
        self._sizes = sizes
        whole = self._whole_prompt_mask
        self._stock_mask = None if whole is None or bool(whole.all()) else whole
        windows = layer_windows(model.config)
        self._windows = windows if any(windows) else ()
        self._mask_dtype = model.dtype if model.config._attn_implementation == "eager" else None

    def __call__(self, tree: DraftTree, *args: Any, num_cached: int = 0, **kwargs: Any) -> Any:
        if num_cached:
            raise ValueError("an exact forward runs a whole tree.")
        walk = Walk(
            base=self.cache.append_index,
            visits=[depth_first(parents) for parents in tree.host.parents],
            lengths=self.cache.present_lengths,
            prompt_mask=None if self._stock_mask is None else self._stock_mask[list(self.cache.rows)],
            windows=self._windows,
            mask_dtype=self._mask_dtype,
        )
        rows = tree.batch_size * tree.num_nodes
        sizes = {shape: of_shape for shape, of_shape in self._sizes.items() if rows not in of_shape}
        with walking(walk, sizes if rows > 1 else {}):
            return super().__call__(tree, *args, **kwargs)

    def mask(self, tree: DraftTree, num_cached: int = 0) -> Tensor | dict[str, Tensor]:
        """Nothing to look at: every node is attended for by itself."""
        mask = no_mask(self.device)
        return {kind.name: mask for kind in self._layer_types} if len(self._layer_types) > 1 else mask
