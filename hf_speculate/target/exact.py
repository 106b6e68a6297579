"""The forward over a draft tree, bit for bit as stock's single steps: see `walk`; `probing` finds where it can be."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from .masks import layer_windows
from .scoring import Forward, Nodes, Scorer
from .walk import Sizes, Walk, depth_first, no_mask, walking


class ExactForward(Forward):
    """A forward whose logits, and the entries that it appends, are those of stock's single steps, bit for bit.

    Args:
        model: the target.
        prompt_mask: bool or int [B, M0], as the scorer has it.
        sizes: numbers of rows whose products can be trusted, see `Sizes`.
    """

    def __init__(self, model: PreTrainedModel, prompt_mask: Tensor | None, sizes: Sizes):
        self._sizes = sizes
        whole = None if prompt_mask is None else prompt_mask.bool()
        self._stock_mask = None if whole is None or bool(whole.all()) else whole
        windows = layer_windows(model.config)
        self._windows = windows if any(windows) else ()
        self._mask_dtype = model.dtype if model.config._attn_implementation == "eager" else None

    def run(self, scorer: Scorer, nodes: Nodes) -> Any:
        """Every node is attended for by itself, so the model is given no mask to look at."""
        tree, cache = nodes.tree, scorer.cache
        if nodes.num_cached:
            raise ValueError("an exact forward runs a whole tree.")
        walk = Walk(
            base=cache.append_index,
            visits=[depth_first(parents) for parents in tree.host.parents],
            lengths=cache.present_lengths,
            prompt_mask=None if self._stock_mask is None else self._stock_mask[list(cache.rows)],
            windows=self._windows,
            mask_dtype=self._mask_dtype,
        )
        rows = tree.batch_size * tree.num_nodes
        sizes = {shape: of_shape for shape, of_shape in self._sizes.items() if rows not in of_shape}
        mask = no_mask(scorer.device)
        kinds = scorer.layer_types
        with walking(walk, sizes if rows > 1 else {}):
            return scorer.run_model(nodes, {kind.name: mask for kind in kinds} if len(kinds) > 1 else mask)
