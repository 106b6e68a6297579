"""What a block says of every node that a tree could have: tables on the host, and along paths for recurrent heads.

The noise of a step belongs to the step, not to the path: it is added before candidates are chosen. A Markov head's bias
comes before temperature and cuts, the noise behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_speculate.drafting import DraftState, warped
from hf_speculate.transfers import to_device

from ..trees import log_shares
from .head import BlockHead
from .options import BlockOptions
from .search import Children


class BlockScores:
    """Of one block and all rows.

    Args:
        head: the head.
        target_ids: target id of each draft id; None where they are the same.
        options: how many children and candidates count.
        state: the situation before the round.
        states: of the slots that propose, [B, D, H], after the final norm.
    """

    def __init__(
        self,
        head: BlockHead,
        target_ids: Int[Tensor, " Vd"] | None,
        options: BlockOptions,
        state: DraftState,
        states: Float[Tensor, "B D H"],
    ):
        self._head, self._target_ids, self._options = head, target_ids, options
        self._state, self._states = state, states
        self._logits = head.logits(states)
        self._anchors = to_device(state.root_ids, states.device)
        self._width = 1 if state.chains_only else options.top_k

    @torch.no_grad()
    def children(self) -> Callable[[int, int, Any], Children]:
        """What `best_tree` asks for, for each row: (row, depth, place) -> children."""
        spec = self._head.spec
        if spec.markov == "rnn":
            return _Paths([self.of_row(row) for row in range(len(self._anchors))])
        return _Table(*zip(*self._levels(), strict=True))

    def of_row(self, row: int) -> BlockScores:
        if len(self._anchors) == 1:
            return self
        states = self._states[row : row + 1]
        return BlockScores(self._head, self._target_ids, self._options, self._state.select([row]), states)

    def follow(self, depth: int, token_id: int, carried: Float[Tensor, " r"]) -> Children:
        """Children behind a token of the slot before, of the only row, where a recurrent state comes along the path."""
        markov, candidates = self._head.markov_head, self.candidates(depth)
        codes = markov.codes(torch.tensor([token_id], device=self._states.device))
        inputs, carried = markov.inputs(self._states[0, depth, None], codes, carried[None])
        scores = self.behind(depth, inputs[None], candidates)[0, 0]
        shares, places = scores.topk(min(self._width, len(scores)))
        token_ids = self.to_target(candidates[0, places]).tolist()
        return Children(shares.tolist(), token_ids, [(token, carried[0]) for token in token_ids])

    def start(self) -> tuple[int, Float[Tensor, " r"]]:
        """What `follow` takes at the first slot, of the only row."""
        anchor = self._anchors[:1]
        return int(anchor), self._head.markov_head.start(self._head.markov_head.codes(anchor))[0]

    def _levels(self) -> list[tuple[list[Any], list[Any], list[Any]]]:
        """For every depth log-probabilities, target ids and places [B][P][K] of the best children of each of the P
        places of the level above (one where children do not depend on their parent)."""
        spec = self._head.spec
        is_paired = spec.markov is not None or spec.selector_rank > 0
        previous = self._anchors[:, None]
        levels = []
        for depth in range(self._states.shape[1]):
            if not is_paired:
                shares, columns = log_shares(self.ranked(depth), min(self._width, self._logits.shape[-1]))
                places = torch.zeros_like(columns)
            else:
                candidates = self.candidates(depth)
                scores = self.behind(depth, self.inputs(depth, previous), candidates)
                shares, places = scores.topk(min(self._width, scores.shape[-1]), dim=-1)
                columns = candidates[:, None].expand(-1, scores.shape[1], -1).gather(-1, places)
                if self._options.min_confidence and spec.confidence:
                    shares = shares.masked_fill(~self._is_sure(depth, previous)[..., None], -torch.inf)
                previous = self.to_target(candidates)
            levels.append((shares.tolist(), self.to_target(columns).tolist(), places.tolist()))
        return levels

    def ranked(self, depth: int) -> Float[Tensor, "B 1 Vd"]:
        """Scores of a slot's tokens by themselves, with the noise of their step."""
        return self._state.child_scores(self._logits[:, depth : depth + 1], depth, self._target_ids).float()

    def candidates(self, depth: int) -> Int[Tensor, "B M"]:
        """Columns of the tokens of a slot that are scored behind others."""
        spec, ranked = self._head.spec, self.ranked(depth)[:, 0]
        # What the request cuts by the slot alone may come back with what the token before says.
        ranked = torch.where(ranked.isfinite(), ranked, self._logits[:, depth, : ranked.shape[-1]].float() - 1e6)
        count = spec.selector_top_k or self._options.candidates
        return ranked.topk(min(count, ranked.shape[-1]), dim=-1).indices

    def inputs(self, depth: int, previous: Int[Tensor, "B P"]) -> Float[Tensor, "B P r"]:
        """What the tokens before a slot are to its Markov head or selector."""
        states = self._states[:, depth, None].expand(-1, previous.shape[1], -1)
        if self._head.spec.selector_rank:
            return self._head.candidate_selector.inputs(states, previous)
        markov = self._head.markov_head
        codes = markov.codes(previous)
        return markov.inputs(states, codes, codes)[0]

    def behind(
        self, depth: int, inputs: Float[Tensor, "B P r"], candidates: Int[Tensor, "B M"]
    ) -> Float[Tensor, "B P M"]:
        """Log-probabilities of candidates behind each of the tokens that `inputs` stand for."""
        head, alone = self._head, self.ranked(depth)
        columns = candidates[:, None].expand(-1, inputs.shape[1], -1)
        part = head.candidate_selector if head.spec.selector_rank else head.markov_head
        logits = self._logits[:, depth].gather(-1, candidates)[:, None] + part.bias(inputs, columns)
        scores = logits.float()
        if self._state.samples:
            noise = self._state.log_noise((depth,), self._logits.shape[-1], self._target_ids)
            assert noise is not None
            scores = (
                warped(logits, self._state.warpers)
                - to_device(noise[:, 0], logits.device).gather(-1, candidates)[:, None]
            )
        if head.spec.selector_rank:
            return scores.log_softmax(-1)
        # Other tokens of the vocabulary keep what the slot alone gives them.
        others = alone.scatter(-1, candidates[:, None], -torch.inf).logsumexp(-1, keepdim=True)
        return scores - torch.logaddexp(scores.logsumexp(-1, keepdim=True), others)

    def to_target(self, columns: Int[Tensor, "*N"]) -> Int[Tensor, "*N"]:
        return columns if self._target_ids is None else self._target_ids[columns]

    def _is_sure(self, depth: int, previous: Int[Tensor, "B P"]) -> Tensor:
        states = self._states[:, depth, None].expand(-1, previous.shape[1], -1)
        return torch.sigmoid(self._head.confidence(states, previous)) >= self._options.min_confidence


class _Table:
    """Children that depend on no more than their parent's token."""

    def __init__(self, shares: Any, token_ids: Any, places: Any):
        self._shares, self._token_ids, self._places = shares, token_ids, places

    def __call__(self, row: int, depth: int, place: int) -> Children:
        return Children(*(table[depth][row][place] for table in (self._shares, self._token_ids, self._places)))


class _Paths:
    """Children that depend on the whole path to them: scored when they are asked for."""

    def __init__(self, rows: Sequence[BlockScores]):
        self._rows = rows

    @torch.no_grad()
    def __call__(self, row: int, depth: int, place: Any) -> Children:
        scores = self._rows[row]
        token_id, carried = scores.start() if depth == 0 else place
        return scores.follow(depth, token_id, carried)
