"""The `block` drafter: one-pass heads in all their layouts, and their sessions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_speculate.drafting import DraftRequest, DraftState
from hf_speculate.target import GenerativeModel
from hf_speculate.transfers import to_device
from hf_speculate.tree import DraftTree

from ..heads import HeadDrafter, HeadSession, LoadedHead, Reading
from ..trees import trimmed
from .head import BlockHead
from .saving import BlockFiles
from .spec import BlockConventions, BlockOptions
from .steps import CompiledSteps, PlainSteps, read_prompt


class BlockSession(HeadSession[BlockHead]):
    """Drafts for one request: trees from one forward of the head a round.

    The context, keys and values of the target's features of every committed token, grows when tokens are committed. Of
    a block nothing is kept.
    """

    _steps: PlainSteps | CompiledSteps | None
    _last: Tensor | None = None  # int64 [B, 2], the root of every row and the token before it, this one first

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
        reading = self._begin(tokens)
        last = read_prompt(head, reading, head.join(states))
        self._steps = PlainSteps(self._loaded, reading, self.options, last)
        if self._compiler is not None:
            self._steps = CompiledSteps(self._steps, self._loaded, reading, self.options, self._compiler)

    @torch.no_grad()
    def draft(self, state: DraftState) -> DraftTree:
        reading, steps, spec = self._reading, self._steps, self._loaded.head.spec
        if reading is None or steps is None:
            raise RuntimeError("draft() before the first observe()")
        depth = min(self.options.depth or spec.max_depth, spec.max_depth, state.max_depth)
        if not depth:
            return DraftTree.root_only(state.root_ids)
        try:
            tree = steps.tree(state, depth, None if self._last is None else self._last[:, 0])
        finally:
            reading.drop()
        # On a device, nodes that are impossible stay: the host would have to wait to see which.
        return trimmed(tree, state.active) if tree.token_ids.device.type == "cpu" else tree

    def _last_two(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """`_last` after rows were told of `lengths` more tokens each."""
        last = self._last
        if last is None:  # of a prompt: only the token before its first feature is not among them
            count = tokens.shape[1]
            text = torch.cat([tokens[:, :1], self._request.input_ids.to(tokens.device)], dim=1)
            last = text[:, max(-count, -text.shape[1]), None].expand(-1, 2)
        ends = to_device(lengths, tokens.device)[:, None] + torch.arange(2, device=tokens.device, dtype=torch.long)
        return torch.cat([last, tokens], dim=1).gather(1, ends)

    def _left(self, reading: Reading) -> Reading:
        if self._steps is not None:
            self._steps.settle()
        return reading


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
        loaded = self.follow(request.target)
        loaded.head.quantize_for_drafting()
        return BlockSession(loaded, self.options, self.conversations, request)
