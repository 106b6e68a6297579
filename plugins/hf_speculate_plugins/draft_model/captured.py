"""The draft of a draft model as one function of tensors with fixed shapes, so that it can be captured or compiled.

Each level of a draft is a forward of some hundred kernels, which the host launches more slowly than a GPU runs them.
The function reads the committed tokens that the cache lacks, and grows the chain or tree after them. Its depth is one
of few. For a draft that is to be less deep, it computes the other levels for nothing. The reference is the session's
own loop of forwards, which also makes the drafts that cannot be captured.

Accepted tokens are read again, so the cache holds committed tokens only. That costs no time: the function always reads
as many tokens as a whole accepted path has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_speculate.attention import tree_backends
from hf_speculate.cache import PreallocatedLayer, as_cache
from hf_speculate.drafting import DraftRequest, DraftState, Warpers
from hf_speculate.forward import Scorer, problem_with_capture, problem_with_graph
from hf_speculate.graphs import PromptMasks, Stacks, capacity_for, lease_of, pool_of
from hf_speculate.target import has_native_layers, num_positions, takes_position_ids
from hf_speculate.tree import DraftTree

from ..draft_graph import (
    CapturedRanking,
    DraftPlan,
    DraftResult,
    SlotPlace,
    TextSlots,
    first_nodes,
    form_of,
    graph_depths,
    request_inputs,
    result_of,
    rows_of_plan,
    states_at,
)
from ..trees import Frontier, grow_tree, num_candidates
from .options import DraftModelOptions


def model_draft(
    model: Any,
    stacks: Stacks,
    inputs: dict[str, Tensor],
    warpers: Warpers,
    vocab_size: int,
    groups: int,
    depth: int,
    top_k: int,
    max_nodes: int,
) -> DraftResult:
    """Reads committed tokens and grows a dynamic tree after the last one.

    Args:
        inputs: inputs of `TextSlots`, whose plan ends with the tokens; `request_inputs`.
        vocab_size: number of token ids that may be drafted.
        groups: query heads for each KV head if masks are folded (`fold`), else 1.
    """
    plan = DraftPlan(inputs["plan"])
    levels = SlotLevels(model, TextSlots(stacks, inputs), inputs, warpers, vocab_size, groups)
    tree = grow_tree(
        plan.roots,
        levels.read(plan.own, plan.counts)[:, 0],
        levels.expand,
        depth=depth,
        top_k=top_k,
        max_nodes=max_nodes,
        limit=plan.limit,
    )
    levels.slots.drop()
    return result_of(tree)


class SlotLevels:
    """The forwards of `model_draft`, which has the same arguments."""

    def __init__(
        self,
        model: Any,
        slots: TextSlots,
        inputs: dict[str, Tensor],
        warpers: Warpers,
        vocab_size: int,
        groups: int,
    ):
        self.slots = slots
        self._model, self._vocab_size, self._groups = model, vocab_size, groups
        self._rank = CapturedRanking(inputs, vocab_size, warpers)

    def read(self, tokens: Int[Tensor, "B J"], counts: Int[Tensor, " B"]) -> Float[Tensor, "B 1 C"]:
        """Appends committed tokens to the text; returns scores of the root's children."""
        logits = self._run(tokens, self.slots.next_place(tokens.shape[1]))
        self.slots.keep(counts)
        return self._scores(states_at(logits, counts - 1)[:, None], 0)

    def expand(self, frontier: Frontier) -> Float[Tensor, "B F C"]:
        """Scores of the children of a level."""
        tokens = frontier.forest.token_ids[:, frontier.num_cached :]
        logits = self._run(tokens, self.slots.node_place(frontier.forest.plan, tokens.shape[1]))
        return self._scores(logits, frontier.depth)

    def _run(self, tokens: Int[Tensor, "B N"], place: SlotPlace) -> Float[Tensor, "B N W"]:
        """Logits of tokens."""
        form = "kernel" if place.metadata.starts is not None else "folded" if self._groups > 1 else "stock"
        with place.metadata.masking(form, self._groups, self.slots.stacks[0].dtype) as mask:
            output = self._model(
                input_ids=tokens,
                position_ids=place.positions,
                attention_mask=mask,
                **as_cache(place.cache),
                use_cache=True,
                return_dict=True,
            )
        return output.logits[..., : self._vocab_size]

    def _scores(self, logits: Tensor, depth: int) -> Tensor:
        scores = self._rank(logits, depth)
        return scores.nan_to_num(nan=0.0, neginf=-torch.inf)  # a tree sorts by value, and NaN would come first


def captured_drafts(
    scorer: Scorer, request: DraftRequest, options: DraftModelOptions, prompt_mask: Tensor | None
) -> CapturedDrafts | None:
    """The captured drafts of a session; None if it captures nothing, or for a reason that its graph runner counts."""
    runner, model = request.graph_runner, scorer.model
    if runner is None or has_native_layers(model):
        return None
    if problem := _problem(scorer, request):
        request.record.refuse(runner.state, problem)
        return None
    return CapturedDrafts(scorer, request, options, prompt_mask)


def _problem(scorer: Scorer, request: DraftRequest) -> str:
    """The reason why no draft can be captured; "" if drafts can."""
    model = scorer.model
    if problem := problem_with_graph(scorer) or problem_with_capture(model):
        return problem
    if num_positions(model.config) is not None or not takes_position_ids(model):
        return "positions without RoPE"
    if scorer.device != request.input_ids.device:
        return "another device than the target's"
    is_plain = all(type(layer) is PreallocatedLayer for layer in scorer.cache.cache.layers)
    return "" if is_plain else "layers without entries of their own"


class CapturedDrafts:
    """The drafts of one session, each a call of `model_draft`; for its arguments see `captured_drafts`."""

    def __init__(self, scorer: Scorer, request: DraftRequest, options: DraftModelOptions, prompt_mask: Tensor | None):
        assert request.graph_runner is not None
        models = scorer.model, request.target
        sizes = (model.config.get_text_config(decoder=True).vocab_size for model in models)
        self._scorer, self._runner, self._options = scorer, request.graph_runner, options
        self._prompt_mask = None if prompt_mask is None else prompt_mask.bool()
        self._vocab_size = min(sizes)
        self._groups = scorer.attention.groups if scorer.attention.form == "folded" else 1
        self._prompts = PromptMasks()
        self._starts = None
        if request.graph_runner.backend is None and scorer.attention.captured_form(scorer.attention_dtype) == "kernel":
            self._starts = scorer.text_starts
        self._num_read = options.depth + 1  # tokens of a whole accepted path
        self._lease = lease_of(scorer.cache.cache, pool_of(scorer.model))

    def can_read(self, new: Iterable[Sequence[int]]) -> bool:
        """Whether a captured draft can read these tokens of each row. It appends to a cache that holds entries."""
        is_filled = all(layer.is_initialized for layer in self._layers)
        return is_filled and max(map(len, new)) <= self._num_read

    def draft(
        self, new: Sequence[Sequence[int]], positions: Sequence[int], state: DraftState, depth: int, top_k: int
    ) -> DraftTree | None:
        """Commits tokens and drafts after them; None, and nothing done, if this draft cannot be captured.

        Args:
            new: committed tokens of each row that the cache lacks, at least one (see `can_read`).
            positions: position of the first of them.
        """
        scorer, top_k = self._scorer, min(top_k, self._vocab_size)
        if len({tuple(buffer.shape[1::2] for buffer in layer.buffers) for layer in self._layers}) > 1:
            scorer.record.refuse(self._runner.state, "layers of several shapes")
            return None
        key: Any = self._runner.choose(scorer.model, model_draft, self._keys(len(new), state, depth, top_k))

        def arguments() -> tuple[Any, ...]:
            return self._arguments(key, new, positions, state, depth)

        with tree_backends(scorer.device):
            result = self._runner.run(
                scorer.model, scorer.device, key, model_draft, arguments, lambda: None, scorer.record
            )
        if result is None:
            return None
        scorer.cache.has_moved = True
        scorer.cache.keep([range(len(tokens)) for tokens in new])
        tree = first_nodes(result, num_candidates(depth, top_k), depth)
        return DraftTree.chain(tree.token_ids, tree.values) if top_k == 1 else tree

    @property
    def _layers(self) -> list[Any]:
        return self._scorer.cache.cache.layers

    def _keys(self, batch_size: int, state: DraftState, depth: int, top_k: int) -> list[Any]:
        """Keys of the functions that can draft this, the least deep first."""
        end = self._scorer.cache.append_index
        num_columns = state.num_columns if state.samples else 0
        kernel = self._starts is not None
        form = self._num_read, num_columns, self._groups, kernel, self._vocab_size, self._scorer.attention_dtype

        def key_of(levels: int) -> tuple[Any, ...]:
            shape = levels, top_k, levels if top_k == 1 else self._options.max_nodes
            capacity = capacity_for(end + self._num_read + (levels - 1) * top_k)
            return batch_size, capacity, shape, *form, *form_of(state)

        return [key_of(levels) for levels in graph_depths(depth, self._options.depth)]

    def _arguments(
        self, key: Any, new: Sequence[Sequence[int]], positions: Sequence[int], state: DraftState, depth: int
    ) -> tuple[Any, ...]:
        """The arguments of `model_draft`, its inputs in buffers."""
        (batch_size, capacity, shape), device, lengths = key[:3], self._scorer.device, self._scorer.cache.lengths
        stacks, buffers = self._lease.place(self._layers, capacity), self._lease.buffers(batch_size, capacity)
        padded = [[*tokens, *[tokens[-1]] * (self._num_read - len(tokens))] for tokens in new]
        rows = rows_of_plan(lengths, positions, map(len, new), state.root_ids, depth, padded)
        inputs = {"plan": DraftPlan.place(buffers, rows, device)}
        if self._starts is not None:
            inputs["starts"] = self._prompts.place_starts(buffers, self._starts, device)
        inputs["prompt"] = self._prompts.place(buffers, (batch_size, capacity), device, self._prompt_mask)
        inputs |= request_inputs(buffers, state, shape[0], device)
        return self._scorer.model, stacks, inputs, tuple(state.warpers), self._vocab_size, self._groups, *shape
