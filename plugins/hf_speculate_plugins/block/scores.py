"""What a block says of every node that a tree could have: tables of all slots, and along paths for recurrent heads.

The noise of a step belongs to the step, not to the path: it is added before candidates are chosen. A Markov head's bias
comes before temperature and cuts, the noise behind them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_speculate.drafting import DraftState, Warpers, warped
from hf_speculate.transfers import to_device

from ..trees import Children, ChildrenOf, SlotTable, slot_children, slot_scores
from .checkpoint import LoadedHead
from .head import BlockHead
from .options import BlockOptions


_CUT = -1e5  # behind everything that is not cut, and little enough for float32 to keep an order


class BlockRequest(NamedTuple):
    """What the scores of a block depend on beside its states.

    Attributes:
        target_ids: target id of each draft id; None where they are the same.
        options: how many children and candidates count.
        width: children of a node at the most.
        anchors: int64 [B], the roots.
        log_noise: of the steps of the slots that propose [B, D, C]; None for a greedy request.
        warpers: of the request.
    """

    target_ids: Tensor | None
    options: BlockOptions
    width: int
    anchors: Tensor
    log_noise: Tensor | None
    warpers: Warpers

    @classmethod
    def of(cls, loaded: LoadedHead, options: BlockOptions, state: DraftState, depth: int) -> BlockRequest:
        """At the situation before a round, for so many slots; tensors on the head's device."""
        device, target_ids = loaded.head.device, loaded.target_ids
        noise = state.log_noise(range(depth), loaded.spec.draft_vocab_size, target_ids)
        width = 1 if state.chains_only else options.top_k
        anchors, noise = to_device(state.root_ids, device), None if noise is None else noise.to(device)
        return cls(target_ids, options, width, anchors, noise, state.warpers)


class BlockScores:
    """Of one block and all rows.

    Args:
        head: the head.
        request: whom the scores are for.
        states: of the slots that propose, [B, D, H], after the final norm.

    Attributes:
        ranked: float32 [B, D, C], scores of every slot's tokens by themselves, with the noise of their steps.
        candidates: int64 [B, D, M], columns of the tokens of every slot that are scored behind others; of heads that
            score pairs.
    """

    candidates: Tensor

    def __init__(self, head: BlockHead, request: BlockRequest, states: Float[Tensor, "B D H"]):
        self._head, self._request, self._states = head, request, states
        self._logits = head.logits(states)
        self.ranked = slot_scores(self._logits, request.log_noise, request.warpers).float()
        self._scores_pairs = head.spec.markov is not None or head.spec.selector_rank > 0
        if self._scores_pairs:
            self.candidates = self._candidates()
            # Tokens that are no candidates, together.
            self._others = self.ranked.scatter(-1, self.candidates, -torch.inf).logsumexp(-1, keepdim=True)

    def children(self) -> ChildrenOf:
        """What `best_trees` asks for."""
        return _Paths(self) if self._head.spec.markov == "rnn" else SlotTable(*self.tables())

    @torch.no_grad()
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of a `SlotTable`, of heads whose children depend on no more than their parent."""
        request, width = self._request, self._request.width
        if not self._scores_pairs:
            return slot_children(self.ranked, request.target_ids, width)
        previous = self._previous()
        scores = self.behind(self.inputs(previous))
        shares, places = scores.topk(min(width, scores.shape[-1]), dim=-1)
        columns = self.candidates[:, :, None].expand_as(scores).gather(-1, places)
        if request.options.min_confidence and self._head.spec.confidence:
            shares = shares.masked_fill(~self._is_sure(previous)[..., None], -torch.inf)
        return shares, self.to_target(columns), places

    def _candidates(self) -> Int[Tensor, "B D M"]:
        ranked = self.ranked
        if self._request.log_noise is not None:
            # What the request cuts by the slot alone may come back with what the token before says.
            alone = self._logits[..., : ranked.shape[-1]].float()
            ranked = torch.where(ranked.isfinite(), ranked, alone + _CUT)
        count = self._head.spec.selector_top_k or self._request.options.candidates
        return ranked.topk(min(count, ranked.shape[-1]), dim=-1).indices

    def inputs(self, previous: Int[Tensor, "B D P"]) -> Float[Tensor, "B D P r"]:
        """What the tokens before each slot are to its Markov head or selector."""
        states = self._states[:, :, None].expand(-1, -1, previous.shape[-1], -1)
        if self._head.spec.selector_rank:
            return self._head.candidate_selector.inputs(states, previous)
        codes = self._head.markov_head.codes(previous)
        return self._head.markov_head.inputs(states, codes, codes)[0]

    def behind(self, inputs: Float[Tensor, "R E P r"], slot: int = 0, row: int = 0) -> Float[Tensor, "R E P M"]:
        """Log-probabilities of the candidates behind each of the tokens that `inputs` stand for.

        Args:
            slot, row: that the first of `inputs` belong to.
        """
        head = self._head
        part = head.candidate_selector if head.spec.selector_rank else head.markov_head
        place = slice(row, row + inputs.shape[0]), slice(slot, slot + inputs.shape[1])
        candidates = self.candidates[place]
        alone = self._logits[place].gather(-1, candidates)
        scores = self._with_noise(alone[:, :, None] + part.bias(inputs, candidates), place, candidates)
        if head.spec.selector_rank:
            return scores.log_softmax(-1)
        # Other tokens of the vocabulary keep what the slot alone gives them.
        return scores - torch.logaddexp(scores.logsumexp(-1, keepdim=True), self._others[place][:, :, None])

    def to_target(self, columns: Int[Tensor, "*N"]) -> Int[Tensor, "*N"]:
        target_ids = self._request.target_ids
        return columns if target_ids is None else target_ids[columns]

    def start(self, row: int) -> tuple[int, Float[Tensor, " r"]]:
        """What `follow` takes at the first slot of a row."""
        markov, anchor = self._head.markov_head, self._request.anchors[row]
        return int(anchor), markov.start(markov.codes(anchor))

    def follow(self, row: int, depth: int, token_id: int, carried: Float[Tensor, " r"]) -> Children:
        """Children behind a token of the slot before, where a recurrent state comes along the path."""
        markov = self._head.markov_head
        codes = markov.codes(torch.tensor([token_id], device=self._states.device))
        inputs, carried = markov.inputs(self._states[row, depth, None], codes, carried[None])
        scores = self.behind(inputs[None, None], depth, row)[0, 0, 0]
        shares, places = scores.topk(min(self._request.width, len(scores)))
        token_ids = self.to_target(self.candidates[row, depth, places]).tolist()
        return Children(shares.tolist(), token_ids, [(token, carried[0]) for token in token_ids])

    def _previous(self) -> Int[Tensor, "B D M"]:
        """Tokens before each slot: its predecessor's candidates; before the first one the anchor, all the same."""
        anchors = self._request.anchors[:, None, None].expand(-1, 1, self.candidates.shape[-1])
        return torch.cat([anchors, self.to_target(self.candidates[:, :-1])], dim=1)

    def _with_noise(
        self, logits: Float[Tensor, "R E P M"], place: tuple[slice, ...], columns: Int[Tensor, "R E M"]
    ) -> Float[Tensor, "R E P M"]:
        """Scores as `DraftState.child_scores` makes them, of some columns behind P tokens each.

        Args:
            place: of these among the rows and slots.
        """
        if self._request.log_noise is None:
            return logits.float()
        flat = warped(logits.flatten(1, -2), self._request.warpers).view(logits.shape)
        return flat - self._request.log_noise[place].gather(-1, columns)[:, :, None]

    def _is_sure(self, previous: Int[Tensor, "B D P"]) -> Tensor:
        states = self._states[:, :, None].expand(-1, -1, previous.shape[-1], -1)
        return torch.sigmoid(self._head.confidence(states, previous)) >= self._request.options.min_confidence


class _Paths:
    """Children that depend on the whole path to them: scored when they are asked for."""

    def __init__(self, scores: BlockScores):
        self._scores = scores

    @torch.no_grad()
    def __call__(self, row: int, depth: int, place: Any) -> Children:
        token_id, carried = self._scores.start(row) if depth == 0 else place
        return self._scores.follow(row, depth, token_id, carried)
