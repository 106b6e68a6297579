"""One request of a one-pass head: what it has read, and the trees that it draws from one forward a round."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_speculate.drafting import Conversations, DraftRequest, DraftSession, DraftState
from hf_speculate.tree import DraftTree

from ..heads import Reading, problem_with_head
from ..trees import trimmed
from .checkpoint import LoadedHead
from .compiled import CompiledSteps
from .options import BlockOptions
from .steps import PlainSteps, Steps, read_prompt


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
        self._text = request.carried_text
        self.carries_over = self._text is not None
        self._compiler = request.compiler
        if self._compiler is not None and (problem := problem_with_head(loaded.head)):
            self._compiler.refuse(problem)
            self._compiler = None
        self._reading: Reading | None = None
        self._steps: Steps | None = None

    @torch.no_grad()
    def observe(self, tokens: Tensor, features: Mapping[int, Tensor], lengths: Tensor) -> None:
        head, reading, steps = self._loaded.head, self._reading, self._steps
        joined = head.join([features[layer] for layer in head.spec.feature_layers])
        if self._text is not None:
            # Of the prompt's tokens only the last is new, see `DraftSession.observe`.
            self._text += tokens[0, -1:].tolist() if reading is None else tokens[0, : int(lengths[0])].tolist()
        if reading is None or steps is None:
            num_rows, count = tokens.shape
            self._reading = reading = Reading.begin(
                head, self._request, (num_rows, count), lambda first: self._resumed(first, count)
            )
            read_prompt(head, reading, joined)
            self._steps = PlainSteps(self._loaded, reading, self.options)
            if self._compiler is not None:
                self._steps = CompiledSteps(self._steps, self._loaded, reading, self.options, self._compiler)
        else:
            steps.context(joined)
            reading.keep(lengths.tolist())

    @torch.no_grad()
    def draft(self, state: DraftState) -> DraftTree:
        reading, steps, spec = self._reading, self._steps, self._loaded.head.spec
        if reading is None or steps is None:
            raise RuntimeError("draft() before the first observe()")
        depth = min(self.options.depth or spec.max_depth, spec.max_depth, state.max_depth)
        if not depth:
            return DraftTree.root_only(state.root_ids)
        try:
            return trimmed(steps.tree(state, depth), state.active)
        finally:
            reading.drop()

    def close(self) -> None:
        """Leaves what was read to the next turn."""
        if self._reading is not None and self._text is not None and self._request.cache is not None:
            self._conversations.keep(self._request.cache, self._text, self._reading)
        self._reading = self._steps = None

    def _resumed(self, first: int, count: int) -> Reading | None:
        """The last turn's reading, if it read all entries before `first` as the text now has them."""
        carried = self._conversations.take(self._request.cache, self._text)
        if carried is None or first == 0:
            return None
        num_alike, reading = carried
        return reading.resumed(first, count) if num_alike >= first else None
