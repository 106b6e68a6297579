"""Scores of the nodes of a block's tree: the scores of a node's slot, and a part that depends on its path.

Noise belongs to a step, not to a path, so candidates are chosen with it. A Markov head's bias is added before
temperature and cuts, the noise after them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_speculate.drafting import DraftState, Warpers, warped
from hf_speculate.transfers import to_device

from ..heads import LoadedHead
from ..trees import ChildLogProbs, slot_log_probs, slot_scores
from .head import BlockHead
from .spec import BlockOptions, BlockSpec


# Number of a slot's tokens that are scored after tokens of the slot before. Sampled requests need more, because noise
# raises improbable tokens.
_CANDIDATES, _SAMPLED_CANDIDATES = 64, 256
_CUT = -1e5  # puts cut tokens below all others, and is small enough for float32 to keep their order


class BlockRequest(NamedTuple):
    """Facts that the scores of a block depend on in addition to its states.

    Attributes:
        width: most children of a node.
        anchors: int64 [B], the roots.
        log_noise: noise of the steps of the slots that propose [B, D, C]; None for a greedy request.
        before: int64 [B], tokens before the roots, where the head reads them (`BlockSpec.reads_before_anchor`).
        last: state of each row's last context entry [B, H] (`BlockHead.fuse`), where the head has a lattice.
    """

    target_ids: Tensor | None
    width: int
    anchors: Tensor
    log_noise: Tensor | None
    warpers: Warpers
    before: Tensor | None = None
    last: Tensor | None = None

    @classmethod
    def of(cls, loaded: LoadedHead[BlockHead], options: BlockOptions, state: DraftState, depth: int) -> BlockRequest:
        """The facts before a round, for so many slots; tensors on the head's device."""
        device, target_ids = loaded.head.device, loaded.target_ids
        noise = state.log_noise(range(depth), loaded.spec.draft_vocab_size, target_ids)
        width = num_children(loaded.spec, options, state)
        anchors, noise = to_device(state.root_ids, device), None if noise is None else noise.to(device)
        return cls(target_ids, width, anchors, noise, state.warpers)


def num_children(spec: BlockSpec, options: BlockOptions, state: DraftState) -> int:
    """Most children of a node."""
    return 1 if state.chains_only else min(options.top_k, _num_candidates(spec, state.samples))


def _num_candidates(spec: BlockSpec, samples: bool) -> int:
    """Number of a slot's tokens that can become children. Heads that score pairs score only the best ones."""
    if not spec.scores_pairs:
        return spec.draft_vocab_size
    return min(spec.num_candidates or (_SAMPLED_CANDIDATES if samples else _CANDIDATES), spec.draft_vocab_size)


class BlockScores:
    """Scores of one block and all rows.

    Attributes:
        ranked: float32 [B, D, C], scores of every slot's tokens by themselves, with the noise of their steps.
        candidates: int64 [B, D, M], columns of the tokens of every slot that are scored after others; only heads that
            score pairs have them.
    """

    candidates: Tensor

    def __init__(
        self,
        head: BlockHead,
        request: BlockRequest,
        states: Float[Tensor, "B D H"],
        features: Float[Tensor, "B D F"] | None = None,
        carried: Float[Tensor, "B 1 s"] | None = None,
    ):
        """Scores the slots by themselves.

        Args:
            states: states of the slots that propose.
            features: the slots' features for the Markov head; None takes their states.
            carried: state of the Markov head at the first slot that proposes; None if there is none.
        """
        self._head, self._request, self._carried = head, request, carried
        self._states = states if features is None else features
        self._logits = head.logits(states)
        self.ranked = slot_scores(self._logits, request.log_noise, request.warpers).float()
        if head.spec.scores_pairs:
            self.candidates = self._candidates()
            self._alone = self._logits.gather(-1, self.candidates)
            part = head.candidate_selector if head.spec.selector_rank else head.markov_head
            self._rows = part.rows(self.candidates)
            self._noise = None if request.log_noise is None else request.log_noise.gather(-1, self.candidates)
            # The total of all tokens that are not candidates.
            self._others = self.ranked.scatter(-1, self.candidates, -torch.inf).logsumexp(-1, keepdim=True)

    @classmethod
    def of_block(cls, head: BlockHead, request: BlockRequest, slots: Float[Tensor, "B S H"], depth: int) -> BlockScores:
        """The scores of the first `depth` slots that propose, of the states of a whole block."""
        first = head.spec.first_slot
        if head.spec.lattice is not None:
            return LatticeScores(head, request, slots[:, first:])
        states, features, carried = slots[:, first : first + depth], None, None
        if head.spec.markov == "xpress":
            features = head.markov_head.refiner.features(slots)
            if request.before is not None:
                codes = head.codes(request.before[:, None])
                _, carried = head.markov_head.inputs(features[:, :1], codes)
            features = features[:, first : first + depth]
        return cls(head, request, states, features, carried)

    def child_log_probs(self) -> ChildLogProbs:
        """The function that `best_tree` calls for every level."""
        if self._head.spec.scores_pairs:
            return self._after_parents
        return slot_log_probs(self.ranked, self._request.target_ids, self._request.width)

    def following(
        self, depth: int, token_ids: Int[Tensor, "B W"], carried: Float[Tensor, "B W _"] | None = None
    ) -> tuple[Float[Tensor, "B W M"], Float[Tensor, "B W _"] | None]:
        """Log-probabilities of a slot's candidates after tokens of the slot before, and the state for the next slot of
        the path (`MarkovHead.inputs`).

        Args:
            carried: state from the slots before; None at the first slot, or if there is none.
        """
        inputs, carried = self._inputs(depth, token_ids, carried)
        scores = self._drawn(depth, self._alone[:, depth, None] + inputs @ self._rows[:, depth].mT)
        if self._head.spec.selector_rank:
            return scores.log_softmax(-1), carried
        # All other tokens of the vocabulary keep the scores of the slot alone.
        others = self._others[:, depth, None]
        return scores - torch.logaddexp(scores.logsumexp(-1, keepdim=True), others), carried

    def to_target(self, columns: Int[Tensor, "*N"]) -> Int[Tensor, "*N"]:
        target_ids = self._request.target_ids
        return columns if target_ids is None else target_ids[columns]

    def _candidates(self) -> Int[Tensor, "B D M"]:
        ranked = self.ranked
        if self._request.log_noise is not None:
            # A token that is cut by the scores of the slot alone may be allowed after another token.
            alone = self._logits[..., : ranked.shape[-1]].float()
            ranked = torch.where(ranked.isfinite(), ranked, alone + _CUT)
        count = _num_candidates(self._head.spec, samples=self._request.log_noise is not None)
        return ranked.topk(min(count, ranked.shape[-1]), dim=-1).indices

    def _drawn(self, depth: int, scores: Float[Tensor, "B W M"]) -> Float[Tensor, "B W M"]:
        """Scores of a slot's candidates as the request draws them: warped, with the noise of the slot's step."""
        if self._noise is None:
            return scores.float()
        return warped(scores, self._request.warpers) - self._noise[:, depth, None]

    def _inputs(self, depth: int, token_ids: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Inputs of the Markov head or selector after these tokens, and the recurrent state."""
        head, states = self._head, self._states[:, depth, None].expand(-1, token_ids.shape[1], -1)
        if head.spec.selector_rank:
            return head.candidate_selector.inputs(states, token_ids), None
        return head.markov_head.inputs(states, head.codes(token_ids), carried, depth + head.spec.first_slot)

    def _after_parents(self, depth: int, token_ids: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """The `ChildLogProbs` of a head that scores pairs."""
        carried = self._carried
        if depth and carried is not None:
            carried = carried.gather(1, previous[..., None].expand(-1, -1, carried.shape[-1]))
        scores, self._carried = self.following(depth, token_ids, carried)
        log_probs, places = scores.topk(min(self._request.width, scores.shape[-1]), dim=-1)
        columns = self.candidates[:, depth, None].expand_as(scores).gather(-1, places)
        return log_probs, self.to_target(columns)


class LatticeScores(BlockScores):
    """Scores of one block of a LiLiCorr head: of the steps between the best tokens of neighbouring slots.

    The noise does not choose the candidates: the lattice was trained with the best ones of each slot, in their order.

    Attributes:
        candidates: int64 [B, S, K], the best tokens of all slots that propose, the most probable first. A draft that
            ends early has those of all slots, too: they change each other's scores.
        steps: float32 [B, S, K, K], scores of each slot's candidates (last) after those of the slot before. All rows of
            the first slot are those after the anchor.
    """

    def __init__(self, head: BlockHead, request: BlockRequest, states: Float[Tensor, "B S H"]):
        assert request.last is not None
        self._head, self._request, self._carried = head, request, None
        logits, noise = head.logits(states).float(), request.log_noise
        if noise is not None:
            logits = logits[..., : noise.shape[-1]]
        log_probs, self.candidates = logits.log_softmax(-1).topk(head.spec.num_candidates, dim=-1)
        embeddings = head.embed(self.to_target(self.candidates))
        self.steps = head.lilicorr(embeddings, log_probs, states, request.last)
        self._noise = None if noise is None else noise.gather(-1, self.candidates[:, : noise.shape[1]])

    def following(
        self, depth: int, token_ids: Int[Tensor, "B W"], carried: Tensor | None = None
    ) -> tuple[Float[Tensor, "B W K"], Tensor | None]:
        before = self.to_target(self.candidates[:, max(depth - 1, 0), None])
        ranks = (before == token_ids[..., None]).long().argmax(-1, keepdim=True)
        scores = self.steps[:, depth].gather(1, ranks.expand(-1, -1, self.steps.shape[-1]))
        return self._drawn(depth, scores).log_softmax(-1), carried
