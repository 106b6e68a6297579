"""One request of a one-pass head: what it has read, and the trees that it draws from one forward a round."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_speculate.drafting import Conversations, DraftRequest, DraftSession, DraftState
from hf_speculate.transfers import to_device
from hf_speculate.tree import DraftTree

from ..heads import CachedAttention, Reading
from ..trees import best_trees
from .checkpoint import LoadedHead
from .masks import block_masks
from .options import BlockOptions
from .scores import BlockScores


class BlockSession(DraftSession):
    """Drafts for one request.

    The context, keys and values of what the target said of every committed token, grows when tokens are committed; of a
    block nothing is kept.

    Args:
        loaded: the head.
        options: how much is drafted.
        conversations: where earlier turns are found, and this one is left.
        request: what is to be drafted for.
    """

    def __init__(
        self,
        loaded: LoadedHead,
        options: BlockOptions,
        conversations: Conversations[Reading],
        request: DraftRequest,
    ):
        self.options = options
        self._loaded, self._request, self._conversations = loaded, request, conversations
        self._text = request.text
        self.carries_over = self._text is not None
        self._reading: Reading | None = None
        if request.compiler is not None:
            request.compiler.refuse("drafts of one-pass heads")

    @torch.no_grad()
    def observe(self, tokens: Tensor, features: Mapping[int, Tensor], lengths: Tensor) -> None:
        head, reading = self._loaded.head, self._reading
        context = head.fuse([features[layer] for layer in head.spec.feature_layers])
        if self._text is not None:
            # Of the prompt's tokens only the last is new, see `DraftSession.observe`.
            self._text += tokens[0, -1:].tolist() if reading is None else tokens[0, : int(lengths[0])].tolist()
        if reading is None:
            num_rows, count = tokens.shape
            self._reading = reading = Reading.begin(
                head, self._request, (num_rows, count), lambda first: self._resumed(first, count)
            )
            self._append(reading, context, reading.prompt_positions)
            reading.keep_all()
        else:
            self._append(reading, context, reading.positions_at(torch.arange(tokens.shape[1])[None]))
            reading.keep(lengths.tolist())

    @torch.no_grad()
    def draft(self, state: DraftState) -> DraftTree:
        if self._reading is None:
            raise RuntimeError("draft() before the first observe()")
        spec = self._loaded.head.spec
        depth = min(self.options.depth or spec.max_depth, spec.max_depth, state.max_depth)
        if not depth:
            return DraftTree.root_only(state.root_ids)
        slots = self._block(state.root_ids)[:, spec.first_slot : spec.first_slot + depth]
        scores = BlockScores(self._loaded.head, self._loaded.target_ids, self.options, state, slots)
        return best_trees(state, scores.children(), self.options.max_nodes, depth)

    def close(self) -> None:
        """Leaves what was read to the next turn."""
        if self._reading is not None and self._text is not None and self._request.cache is not None:
            self._conversations.keep(self._request.cache, self._text, self._reading)
        self._reading = None

    def _append(self, reading: Reading, context: Tensor, positions: Tensor) -> None:
        cache = reading.cache.cache
        self._loaded.head.read(context, positions, lambda layer, *keys_values: cache.update(*keys_values, layer))

    def _block(self, anchors: Tensor) -> Tensor:
        """States of all slots behind what was read, [B, S, H]."""
        reading, head = self._reading, self._loaded.head
        assert reading is not None
        positions = reading.positions_at(torch.arange(head.spec.block_size)[None])
        masks = block_masks(head.spec, positions, reading.entry_positions(), reading.visible(), head.dtype)
        attend = CachedAttention(reading.cache.cache, masks)
        try:
            return head(head.block_ids(to_device(anchors, head.device)), positions, attend)
        finally:
            reading.drop()

    def _resumed(self, first: int, count: int) -> Reading | None:
        """The last turn's reading, if it read all entries before `first` as the text now has them."""
        carried = self._conversations.take(self._request.cache, self._text)
        if carried is None or first == 0:
            return None
        num_alike, reading = carried
        return reading.resumed(first, count) if num_alike >= first else None
