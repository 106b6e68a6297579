"""Scoring of trees with static shapes, so that the target's forward can be captured as a CUDA graph, or compiled.

A graph is for one number of nodes, one cache capacity and one batch size. Trees are padded to the next of a few sizes,
and cache buffers have a power of two of entries. Everything else comes in as tensors with fixed addresses (`buffers`),
most of it in one copy from the host, the *plan*. So texts may grow, and trees and requests may change, without another
graph. The plain reference is `EagerRunner`, which also runs what has no graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import MaskForm
from ..cache import PreallocatedLayer, as_cache
from ..graphs import Buffers, GraphRunner, PromptMasks, can_capture, capacity_for, lease_of, pool_of
from ..stats import GRAPH, NATIVE
from ..target import has_foreign_hooks, has_length_dependent_rope, native_decoder_runner, num_embeddings
from ..transfers import copy_all, copy_to_device, to_device
from ..tree import DraftTree
from ..verification import BatchedChoice, ChoiceInputs, ScoredTable
from .scorer import EagerRunner, Forward, Nodes, Runner, Scorer
from .tree_forward import NODES, tree_forward


NODE_BUCKETS = (1, 8, 16, 32, 64, 128)


def width_for(num_nodes: int) -> int:
    """The smallest bucket for `num_nodes` nodes."""
    return _widths(num_nodes)[0]


def _widths(num_nodes: int) -> list[int]:
    """The smallest bucket for `num_nodes` nodes and the next one, which also works if it is already there."""
    return [bucket for bucket in NODE_BUCKETS if bucket >= num_nodes][:2]


@dataclass(frozen=True, kw_only=True)
class GraphUse:
    """A request's use of its scored trees.

    Attributes:
        choice: choice of all tokens at once; None leaves it to the host.
        choice_inputs: inputs of the choice; None without one.
        keeps_outputs: whether logits and states are kept beyond the round.
        last_layer: layer whose output the drafter reads before the final norm; None if it does not.
        shows_cache: whether others get the cache. Then they get copies, as the next request uses the buffers.
    """

    choice: BatchedChoice | None = None
    choice_inputs: ChoiceInputs | None = None
    keeps_outputs: bool = False
    last_layer: nn.Module | None = None
    shows_cache: bool = False


def with_graphs(scorer: Scorer, runner: GraphRunner, use: GraphUse) -> Scorer:
    """The scorer, changed to capture or compile its forwards where possible.

    Args:
        runner: graph runner of the request.
        use: the request's use of scored trees.
    """
    native = native_decoder_runner(scorer.model)
    if native is not None:
        if not (reason := native.problem()):
            return scorer
        scorer.record.refuse(NATIVE, reason)
    problem = problem_with_graph(scorer)
    if use.last_layer is not None and runner.backend is not None:
        problem = "the drafter reads the last layer by a hook, which breaks the graph"
    if can_capture(scorer.device):
        problem = problem or problem_with_capture(scorer.model)
    if problem:
        runner.refuse(problem)
        return scorer
    scorer.forward = Forward(GraphTreeRunner(scorer, runner, use), EagerRunner())
    return scorer


def problem_with_graph(scorer: Scorer) -> str:
    """The reason why forwards of `scorer` cannot be captured; "" if they can."""
    model, name = scorer.model, type(scorer.model).__name__
    if type(scorer.forward) is not Forward or scorer.shape != "tree" or scorer.has_windows:
        return f"not every layer of {name} keeps all of the text"
    if not model._can_compile_fullgraph:
        return f"transformers does not compile {name} as one graph"
    if scorer.position_offsets is not None:
        return "positions of texts and pictures are counted apart"
    if has_length_dependent_rope(model.config):
        return "RoPE that depends on the longest position"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the model lies on several devices"
    return ""


def problem_with_capture(model: Any) -> str:
    """The reason why forwards of `model` would not be the same if they were replayed; "" if they are."""
    if has_foreign_hooks(model):
        return "hooks on the model, which a replay would not call"
    return "the model is in training mode" if model.training else ""


class GraphTreeRunner(Runner):
    """Captured or compiled forwards.

    Args:
        scorer: scorer whose inputs it runs. `problem_with_graph` must be "" for it.
        runner: graph runner of the request.
        use: the request's use of scored trees.
    """

    name = GRAPH
    can_leave_rows_out = False  # another number of rows is another graph
    takes_unread = True
    widths = NODE_BUCKETS

    def __init__(self, scorer: Scorer, runner: GraphRunner, use: GraphUse):
        self._runner, self._use, self.state = runner, use, runner.state
        self._pool = pool_of(scorer.model)
        self._vocab_size = num_embeddings(scorer.model)
        self._prompts = PromptMasks()
        self._problem_with_layers: str | None = None  # found out once the prompt has run
        self._form: tuple[MaskForm, int, torch.dtype] | None = None
        lease_of(scorer.cache.cache, self._pool)

    def run(self, scorer: Scorer, nodes: Nodes) -> Any | None:
        tree, cache = nodes.tree, scorer.cache
        options, num_nodes, num_prefix = scorer.all_kwargs(nodes), tree.num_nodes, cache.append_index
        choice = self._choice(tree)
        attention = self._attention(scorer)
        form = *attention, repr(options), None if choice is None else choice.key
        reserved = max(layer.reserved for layer in _layers(scorer))
        keys = [
            (tree.batch_size, width, capacity_for(max(num_prefix + width, reserved)), *form)
            for width in _widths(num_nodes)
        ]
        key: Any = self._runner.choose(scorer.model, tree_forward, keys)
        _, width, capacity = key[:3]

        def inputs() -> tuple[Any, ...]:
            more = options, choice, self._vocab_size, attention
            return scorer.model, self._use.last_layer, *self._inputs(scorer, nodes, width, capacity), *more

        result = self._runner.run(scorer.model, scorer.device, key, tree_forward, inputs, lambda: None)
        if result is None:
            return None
        for layer in _layers(scorer):
            layer.length = num_prefix + num_nodes
        cache.has_moved = choice is not None
        return self._output(scorer, result, num_nodes, width)

    def _output(self, scorer: Scorer, result: dict[str, Any], num_nodes: int, width: int) -> Any:
        """The result in the form of the model's own output, with the attributes that only this forward has."""
        # Its import takes a fifth of a second, which models spend anyway.
        from transformers.modeling_outputs import CausalLMOutputWithPast

        keep = torch.clone if self._use.keeps_outputs else (lambda tensor: tensor)
        states: Any = result["hidden_states"]
        if states is not None and "words" not in result:  # else the states along the path are what is read
            states = tuple(None if state is None else state[:, :num_nodes].clone() for state in states)
        output: Any = CausalLMOutputWithPast(
            logits=keep(result["logits"][:, :num_nodes]), **as_cache(scorer.cache.cache), hidden_states=states
        )
        if "words" in result:
            output.table = ScoredTable(result["words"], width)
            output.along = result["along"]
        if result["last"] is not None:
            last = result["last"][:, :num_nodes]
            output.last = last if "words" in result else last.clone()
        return output

    def release(self, scorer: Scorer) -> None:
        """Releases the buffers: plain `generate` makes its own when the cache grows."""
        for layer in _layers(scorer):
            layer.allocate = None
        if self._use.shows_cache:
            cache = scorer.cache.cache
            lease_of(cache, self._pool).end(cache)

    def _attention(self, scorer: Scorer) -> tuple[MaskForm, int, torch.dtype]:
        """Form of masks, query heads for each KV head, dtype of masks. Found out once a request."""
        if self._form is None:
            form, dtype = scorer.attention.form, scorer.attention_dtype
            if self._runner.backend is None and scorer.text_starts is not None:
                form = scorer.attention.captured_form(dtype)
            self._form = form, scorer.attention.groups, dtype
        return self._form

    def _choice(self, tree: DraftTree) -> BatchedChoice | None:
        """The choice, if it can be made for this tree."""
        use = self._use
        return use.choice if use.choice_inputs is not None and use.choice_inputs.fit(tree) else None

    def problem(self, scorer: Scorer, nodes: Nodes) -> str:
        options = scorer.all_kwargs(nodes)
        if scorer.token_kwargs:
            return f"arguments {sorted(scorer.token_kwargs)}"
        if nodes.num_cached or nodes.tree.num_nodes > NODE_BUCKETS[-1]:
            return f"a tree of more than {NODE_BUCKETS[-1]} nodes, or a part of one"
        if any(name != "output_hidden_states" or value is True for name, value in options.items()):
            return f"arguments {sorted(options)}"
        if self._problem_with_layers is None:
            self._problem_with_layers = _problem_with(_layers(scorer), scorer.device)
        return self._problem_with_layers

    def _inputs(self, scorer: Scorer, nodes: Nodes, width: int, capacity: int) -> tuple[Any, dict[str, Tensor]]:
        """The stacks of the cache, and the inputs of `tree_forward`."""
        tree, device = nodes.tree, scorer.device
        lease = lease_of(scorer.cache.cache, self._pool)
        stacks = lease.place(_layers(scorer), capacity)
        buffers = lease.buffers(tree.batch_size, capacity)
        inputs = {
            "plan": _plan(buffers, scorer, nodes, width),
            **self._prompt_inputs(buffers, scorer, tree.batch_size, capacity),
        }
        if self._choice(tree) is not None:
            inputs["values"] = values = buffers.tensor(
                ("values", width), (tree.batch_size, width), torch.float32, device
            )
            if tree.values is not None and tree.unread is not None:
                count = min(width, tree.num_nodes)
                values[:, :count].copy_(tree.values[:, :count])
            assert self._use.choice_inputs is not None
            inputs |= self._use.choice_inputs.fill(
                lambda name, shape, dtype: buffers.tensor(name, shape, dtype, device), tree, width, scorer.num_columns
            )
        return stacks, inputs

    def _prompt_inputs(self, buffers: Buffers, scorer: Scorer, batch_size: int, capacity: int) -> dict[str, Tensor]:
        """Inputs that stay for a whole request: whether entries are real [B, M], and where rows start [B]."""
        starts = self._prompts.place_starts(buffers, scorer.text_starts or [0] * batch_size, scorer.device)
        prompt = self._prompts.place(buffers, (batch_size, capacity), scorer.device, scorer.prompt_mask)
        return {"prompt": prompt, "starts": starts}


def _plan(buffers: Buffers, scorer: Scorer, nodes: Nodes, width: int) -> Tensor:
    """The plan of `GraphNodes`. A tree that is on the device is copied into it there, unread."""
    tree, cache = nodes.tree, scorer.cache
    rows, missing = [], [0] * (width - tree.num_nodes)
    for row, length in enumerate(cache.present_lengths):
        place = [length, nodes.root_positions[cache.rows[row]], tree.num_nodes]
        if tree.unread is None:
            tokens, parents = tree.host.token_ids[row], tree.host.parents[row]
            rows.append([*place, *tokens, *missing, *parents, *missing])
        else:
            rows.append([*place, tree.unread.roots[row], *[0] * (width - 1), *[-1] * width])
    shape = tree.batch_size, NODES + 2 * width
    plan = buffers.tensor(("plan", width), shape, torch.long, scorer.device)
    copy_to_device(rows, plan)
    if tree.unread is not None:
        _copy_tree(plan, tree, width)
    return plan


def _copy_tree(plan: Tensor, tree: DraftTree, width: int) -> None:
    """Copies tokens and parents of an unread tree into a plan."""
    count = tree.num_nodes
    pairs = [(plan[:, NODES + 1 : NODES + count], tree.token_ids[:, 1:])]
    first = plan[:, NODES + width :]
    if isinstance(tree.parents, Tensor):
        pairs.append((first[:, 1:count], tree.parents[:, 1:].expand(tree.batch_size, -1)))
    else:
        parents = to_device(list(tree.parents), plan.device)
        pairs.append((first[:, 1:count], parents[:, 1:].expand(tree.batch_size, -1)))
    copy_all([target for target, _ in pairs], [source for _, source in pairs])


def _problem_with(layers: Sequence[Any], device: torch.device) -> str:
    """The reason why layers of a filled cache have no static form; "" if they have one."""
    if not all(type(layer) is PreallocatedLayer and layer.is_initialized for layer in layers):
        return "layers that hold nothing"
    if len({tuple(buffer.shape[1::2] for buffer in layer.buffers) for layer in layers}) > 1:
        return "layers of several shapes"
    return "" if all(layer.device == device for layer in layers) else "a cache on several devices"


def _layers(scorer: Scorer) -> list[Any]:
    return scorer.cache.cache.layers
