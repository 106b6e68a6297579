"""The draft of a round, plain and compiled: heads on the newest state, and a static tree filled with their best tokens.

A compiled draft is one graph, which fills the whole tree. A less deep tree is a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from hf_speculate.drafting import DraftRequest, DraftState, Warpers
from hf_speculate.graphs import Buffers, GraphRunner, SetKey, pool_of
from hf_speculate.stats import RunnerRecord
from hf_speculate.transfers import copy_to_device, to_device
from hf_speculate.tree import DraftTree

from ..draft_graph import form_of, log_noise_of, request_inputs, states_at
from ..trees import best_log_probs, slot_scores
from .head import HeadForward, MedusaHeads, QuantizedHeadForward, QuantizedOutputs
from .tree import StaticTree, TreeTensors, tree_tensors


# Log-probability of tokens that the request cuts: 0 x -inf would be NaN.
_IMPOSSIBLE = -1e4


class Seen(NamedTuple):
    """The target's newest states.

    Attributes:
        states: [B, J, H], states of the round's tokens; J is at most `max_seen`.
        last: index of each row's newest one.
    """

    states: Float[Tensor, "B J H"]
    last: Sequence[int]

    @classmethod
    def of(cls, states: Float[Tensor, "B J H"], lengths: Sequence[int], num_heads: int) -> Seen:
        """The states of an observation. Of a prompt's many states, only the newest are kept."""
        seen = cls(states, [max(length, 1) - 1 for length in lengths])  # ended rows keep one that is never used
        return seen if states.shape[1] <= max_seen(num_heads) else cls(seen.newest()[:, None], [0] * len(lengths))

    def newest(self) -> Float[Tensor, "B H"]:
        """The newest state of every row."""
        return states_at(self.states, to_device(self.last, self.states.device))


def max_seen(num_heads: int) -> int:
    """Number of states along the longest path, the root included."""
    return num_heads + 1


class PlainSteps:
    """The draft without compilation; the reference."""

    def __init__(self, heads: MedusaHeads, forward: HeadForward, record: RunnerRecord):
        self._heads, self._forward, self._record = heads, forward, record

    @torch.no_grad()
    def draft(self, seen: Seen, state: DraftState, tree: StaticTree, depth: int) -> DraftTree:
        """The first `depth` levels of `tree`, filled."""
        heads, tree = self._heads, tree.cut(depth)
        logits = self._forward(seen.newest().to(heads.device, heads.dtype), tree.max_depth)
        self._record.ran(self._forward.runner)
        noise = state.log_noise(range(tree.max_depth), logits.shape[-1], heads.token_ids)
        noise = None if noise is None else noise.transpose(0, 1)
        form, roots = tree_tensors(tree, logits.device), to_device(state.root_ids, logits.device)
        tokens, values = filled(form, tree.num_ranks, roots, logits, noise, state.warpers, heads.token_ids)
        return DraftTree(tokens, tree.parents, values=values)

    def close(self) -> None:
        """Gives back buffers; there are none."""


def filled(
    form: TreeTensors,
    num_ranks: int,
    roots: Int[Tensor, " B"],
    logits: Float[Tensor, "D B Vd"],
    log_noise: Float[Tensor, "D B C"] | None,
    warpers: Warpers,
    token_ids: Int[Tensor, " Vd"] | None,
) -> tuple[Int[Tensor, "B N"], Float[Tensor, "B N"]]:
    """Tokens and values of a static tree.

    Args:
        log_noise: noise of the heads' steps, see `DraftState.log_noise`.
        token_ids: target token of each column of `logits`; None where they are the same.
    """
    log_probs, best = best_log_probs(slot_scores(logits, log_noise, warpers), num_ranks)
    log_probs, best = (part.transpose(0, 1).flatten(1)[:, form.columns] for part in (log_probs, best))
    tokens = best if token_ids is None else token_ids[best]
    # The heads know nothing of each other's tokens: the probabilities along a path multiply.
    values = functional.pad(log_probs.clamp(min=_IMPOSSIBLE), (1, 0)) @ form.sums
    return torch.cat([roots[:, None], tokens], dim=1), values


# Columns of a draft's plan: root id, index of the newest state.
_ROOT, _LAST = range(2)


def medusa_draft(
    heads: MedusaHeads,
    lm_head: nn.Module | None,
    inputs: dict[str, Tensor],
    form: TreeTensors,
    warpers: Warpers,
    depth: int,
    num_ranks: int,
) -> tuple[Tensor, Tensor]:
    """Tokens and values of a static tree [B, N].

    Args:
        inputs: `plan` [B, 2]; `features` [B, J, H], of which one is the newest state of a row; `request_inputs`.
    """
    plan, token_ids = inputs["plan"], inputs.get("target_ids")
    logits = heads(states_at(inputs["features"], plan[:, _LAST]), lm_head, depth)
    log_noise = log_noise_of(inputs, logits.shape[-1])
    return filled(form, num_ranks, plan[:, _ROOT], logits, log_noise, warpers, token_ids)


class CapturedSteps:
    """The draft as one graph with fixed shapes."""

    def __init__(
        self,
        plain: PlainSteps,
        heads: MedusaHeads,
        lm_head: nn.Module | None,
        runner: GraphRunner,
        record: RunnerRecord,
    ):
        self._plain, self._heads, self._lm_head, self._runner = plain, heads, lm_head, runner
        self._record = record
        self._sets: dict[SetKey, Buffers] = {}

    def draft(self, seen: Seen, state: DraftState, tree: StaticTree, depth: int) -> DraftTree:
        heads, form = self._heads, tree_tensors(tree, self._heads.device)

        def arguments() -> tuple[Any, ...]:
            inputs = self._inputs(seen, state, tree.max_depth)
            return heads, self._lm_head, inputs, form, tuple(state.warpers), tree.max_depth, tree.num_ranks

        key = (len(state.root_ids), heads.dtype, tree, *form_of(state))
        result = self._runner.run(heads, heads.device, key, medusa_draft, arguments, lambda: None, self._record)
        if result is None:
            return self._plain.draft(seen, state, tree, depth)
        tree = tree.cut(depth)
        tokens, parents, values = (part[:, : 1 + len(tree.paths)] for part in (result[0], form.parents, result[1]))
        return DraftTree(tokens, parents, max_depth=tree.max_depth, values=values)

    def _inputs(self, seen: Seen, state: DraftState, depth: int) -> dict[str, Tensor]:
        """The inputs of `medusa_draft`, in buffers."""
        heads, (batch_size, count, hidden_size) = self._heads, seen.states.shape
        buffers, device = self._buffers(batch_size), heads.device
        shape = batch_size, max_seen(heads.num_heads), hidden_size
        features = buffers.tensor("features", shape, heads.dtype, device)
        features[:, :count].copy_(seen.states)
        plan = buffers.tensor("plan", (batch_size, 2), torch.long, device)
        return {
            "plan": copy_to_device(list(zip(state.root_ids.tolist(), seen.last, strict=True)), plan),
            "features": features,
            **request_inputs(buffers, state, depth, device, heads.token_ids),
        }

    def _buffers(self, batch_size: int) -> Buffers:
        key = (batch_size, 0)
        if key not in self._sets:
            self._sets[key] = pool_of(self._heads).take(key)
        return self._sets[key]

    def close(self) -> None:
        """Gives back the buffers."""
        pool_of(self._heads).put_back(self._sets)
        self._sets = {}


Steps = PlainSteps | CapturedSteps


def steps_of(heads: MedusaHeads, quantized: QuantizedOutputs, request: DraftRequest) -> Steps:
    """The steps of one request: captured where there is a graph runner, and that is possible and faster."""
    # Looked up here and not kept in the drafter, which would keep the target alive.
    lm_head = request.target.get_output_embeddings() if heads.output_weight is None else None
    runner, record = request.graph_runner, request.record
    plain = PlainSteps(heads, HeadForward(heads, lm_head), record)
    if runner is not None:
        if not (problem := _problem_with(heads, lm_head, runner)):
            return CapturedSteps(plain, heads, lm_head, runner, record)
        record.refuse(runner.state, problem)
    if outputs := quantized.of(request.target):
        return PlainSteps(heads, QuantizedHeadForward(heads, outputs), record)
    return plain


def _problem_with(heads: MedusaHeads, lm_head: nn.Module | None, runner: GraphRunner) -> str:
    """The reason why a draft is not compiled; "" if it is."""
    has_many = heads.output_weight is not None and len(heads.output_weight) > 1
    if runner.backend == "inductor" and has_many and heads.device.type == "cpu":
        return "Medusa heads with matrices of their own take longer compiled by inductor on a CPU"
    if lm_head is not None and any(parameter.device != heads.device for parameter in lm_head.parameters()):
        return "Medusa heads and the target's output layer on different devices"
    return ""
