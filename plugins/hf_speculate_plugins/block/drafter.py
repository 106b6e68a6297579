"""The `block` drafter: one-pass heads in all their layouts, and their sessions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_speculate.drafting import DraftRequest, DraftState
from hf_speculate.target import GenerativeModel
from hf_speculate.transfers import to_device
from hf_speculate.tree import DraftTree

from ..heads import HeadCache, HeadDrafter, HeadSession, LoadedHead
from ..trees import trimmed
from .head import BlockHead
from .saving import BlockFiles
from .spec import BlockConventions, BlockOptions
from .steps import CapturedSteps, PlainSteps, read_prompt


class BlockSession(HeadSession[BlockHead]):
    """Drafts for one request: trees from one forward of the head per round.

    The context holds keys and values of the target's features of every committed token. It grows when tokens are
    committed. Entries of a block are never kept.
    """

    _steps: PlainSteps | CapturedSteps | None
    _last: Tensor | None = None  # int64 [B, 2], the token before the root of every row, and the root

    @torch.no_grad()
    def observe(self, tokens: Tensor, features: Mapping[int, Tensor], lengths: Tensor) -> None:
        head, steps = self._loaded.head, self._steps
        if head.spec.reads_before_anchor:
            self._last = self._last_two(tokens, lengths)
        states = [features[layer] for layer in head.spec.feature_layers]
        if self._text is not None:
            # Of the prompt's tokens only the last is new, see `DraftSession.observe`.
            self._text += tokens[0, -1:].tolist() if steps is None else tokens[0, : int(lengths[0])].tolist()
        if steps is not None:
            steps.context(states, lengths.tolist())
            return
        head_cache = self._begin(tokens)
        last = read_prompt(head, head_cache, head.join(states))
        record = self._request.record
        self._steps = PlainSteps(self._loaded, head_cache, self.options, last, record)
        if self._runner is not None:
            self._steps = CapturedSteps(self._steps, self._loaded, head_cache, self.options, self._runner, record)

    @torch.no_grad()
    def draft(self, state: DraftState) -> DraftTree:
        head_cache, steps, spec = self._head_cache, self._steps, self._loaded.head.spec
        if head_cache is None or steps is None:
            raise RuntimeError("draft() before the first observe()")
        depth = min(self.options.depth or spec.max_depth, spec.max_depth, state.max_depth)
        if not depth:
            return DraftTree.root_only(state.root_ids)
        try:
            tree = steps.tree(state, depth, None if self._last is None else self._last[:, 0])
        finally:
            head_cache.drop()
        # On a device impossible nodes stay, because the host would have to wait to find them.
        return trimmed(tree, state.active) if tree.token_ids.device.type == "cpu" else tree

    def _last_two(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """`_last` after `lengths[r]` more tokens of each row."""
        last = self._last
        if last is None:  # `tokens` are the prompt's; they lack only the token before its first feature
            count = tokens.shape[1]
            text = torch.cat([tokens[:, :1], self._request.input_ids.to(tokens.device)], dim=1)
            last = text[:, max(-count, -text.shape[1]), None].expand(-1, 2)
        ends = to_device(lengths, tokens.device)[:, None] + torch.arange(2, device=tokens.device, dtype=torch.long)
        return torch.cat([last, tokens], dim=1).gather(1, ends)

    def _carried_state(self, head_cache: HeadCache) -> HeadCache:
        if self._steps is not None:
            self._steps.commit_pending()
        return head_cache


class BlockDrafter(HeadDrafter[BlockHead]):
    """Drafts a whole block in one forward of a head; for its arguments see `HeadDrafter`.

    Heads are saved as "zlab" (z-lab's, JetSpec's and LiLiCorr's), "deepspec", "modelopt" or "speculators" ("vllm"); by
    default in the layout that they were read from, or the first that can express them.
    """

    name = "block"
    options_classes = (BlockOptions, BlockConventions)
    head_files = BlockFiles

    def __init__(self, loaded: LoadedHead[BlockHead], target: GenerativeModel, options: BlockOptions | None = None):
        super().__init__(loaded, target, options)
        self.feature_layers = tuple(dict.fromkeys(self.spec.feature_layers))

    def __repr__(self) -> str:
        return f"BlockDrafter({self.spec.method}, {self.spec.dialect}, block of {self.spec.block_size}, {self.options})"

    def start(self, request: DraftRequest) -> BlockSession:
        loaded = self.ready(request.target)
        return BlockSession(loaded, self.options, self.conversations, request)
