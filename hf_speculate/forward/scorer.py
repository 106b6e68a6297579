"""One forward of a causal LM over a draft tree: inputs, positions, masks, cache.

The decoding loop uses it for the target, and drafters for a causal LM of their own. It works with any decoder-only
model whose forward takes a 4-D mask, position ids and a `Cache`; no code here names an architecture.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..attention import AttentionMetadata, Mask, PromptRows, TreeAttention, TreeMask, tree_backends
from ..cache import PreallocatedLayer, TreeCache, as_cache
from ..stats import EAGER, NATIVE, RunnerRecord
from ..target import (
    GenerativeModel,
    Shape,
    counts_along_cache,
    ignores_masks,
    input_device,
    layer_types_of,
    may_hold_rows,
    native_decoder_runner,
    native_runner,
    takes_position_ids,
    takes_tree_masks,
)
from ..transfers import to_device
from ..tree import DraftTree


# Context length at which copying a row of the cache costs as much as running it in one forward over a tree. (One CPU
# core, bf16, 8 nodes: 3 000 for a model of 16M parameters, 10 000 for one of 0.5B.)
_COPY_CONTEXT = 4096


@dataclass(frozen=True)
class Nodes:
    """The nodes of a tree that a forward runs.

    Attributes:
        tree: draft tree of the rows that the cache holds (`TreeCache.rows`); a chain if the scorer's shape is "chain".
        root_positions: position id of the root of each row of the batch.
        num_cached: number of nodes already appended by calls since the last commit; only later nodes are run. A drafter
            grows its tree this way, level by level.
        forward_kwargs: further keyword arguments of this forward.
    """

    tree: DraftTree
    root_positions: Sequence[int]
    num_cached: int
    forward_kwargs: Mapping[str, Any]


class Runner(ABC):
    """A way to run the target over the nodes of a tree.

    Class attributes:
        name: the name that statistics show.
        state: adjective for a forward that it runs (`RunnerRecord.refuse`).
        can_leave_rows_out: whether the number of rows may change.
        widths: numbers of nodes to which trees are padded, ascending; empty if they are not.
        takes_unread: whether trees may come as they lie on the device (`DraftTree.unread`).
    """

    name: ClassVar[str]
    state: str = ""
    can_leave_rows_out = True
    takes_unread = False
    widths: Sequence[int] = ()

    def problem(self, scorer: Scorer, nodes: Nodes) -> str:
        """The reason why it cannot run these nodes; "" if it can."""
        return ""

    @abstractmethod
    def run(self, scorer: Scorer, nodes: Nodes) -> Any | None:
        """The model's output (`Scorer.__call__`). The scorer's cache then holds the nodes.

        None, and nothing was changed, if it turns out that the next runner must run them.
        """

    def release(self, scorer: Scorer) -> None:
        """Gives back at the end of a request what it holds."""


class EagerRunner(Runner):
    """A plain forward of the model, with the mask of the tree: the reference, which runs everything.

    A packed model chooses inside between the kernel and its modules. It is then "native" where statistics show it.
    """

    name = EAGER

    def run(self, scorer: Scorer, nodes: Nodes) -> Any:
        metadata = scorer.metadata(nodes)
        mask = scorer.arranged_mask(nodes, metadata)
        output = scorer.run_model(nodes, metadata, mask)
        scorer.sums_masked = not isinstance(mask, TreeMask) or mask.is_made
        return output


class Forward:
    """The forward of one round over the nodes of a tree, by the first runner that can run them.

    It is the reference for `ExactForward`, `RecurrentForward` and `RecomputingForward`, in which a round needs more.

    Args:
        runners: the runners, the fastest first. The last one runs everything.

    Attributes:
        needs_equal_rows: whether all rows must have the same length.
        keeps_backends: whether attention must use the backends of plain `generate`, to get the same bits.
    """

    needs_equal_rows = False
    keeps_backends = False

    def __init__(self, *runners: Runner):
        self.runners = runners or (EagerRunner(),)

    @property
    def can_leave_rows_out(self) -> bool:
        """Whether the number of rows may change."""
        return self.runners[0].can_leave_rows_out

    @property
    def takes_unread(self) -> bool:
        """Whether trees may come as they lie on the device."""
        return self.runners[0].takes_unread

    @property
    def widths(self) -> Sequence[int]:
        """Numbers of nodes to which trees are padded, ascending; empty if they are not."""
        return self.runners[0].widths

    def run(self, scorer: Scorer, nodes: Nodes) -> Any:
        """The model's output (`Scorer.__call__`). The scorer's cache then holds the nodes."""
        *faster, last = self.runners
        for runner in faster:
            if problem := runner.problem(scorer, nodes):
                scorer.record.refuse(runner.state, problem)
            elif (output := runner.run(scorer, nodes)) is not None:
                scorer.record.ran(runner.name)
                return output
        return last.run(scorer, replace(nodes, tree=nodes.tree.clamped) if faster else nodes)

    def takes_root_only(self, scorer: Scorer) -> bool:
        """Whether the next forward can only be a plain decoding step."""
        return False

    def finish(self, scorer: Scorer) -> None:
        """Ends the request. A cache that lags behind gets all committed entries, and runners release what they hold."""
        for runner in self.runners:
            runner.release(scorer)


class Scorer:
    """Scores draft trees with a causal LM on one cache, in which rows have their own lengths.

    It builds the inputs of a forward; a `Forward` runs them.

    Args:
        model: causal LM that scores.
        cache: tree cache of the model.
        prompt_mask: bool or int [B, M0], False for left padding and holes among the first M0 cache entries; None when
            all are real.
        shape: "tree", or "chain" for attentions that take no tree mask.
        forward_kwargs: further keyword arguments of every forward.
        token_kwargs: arguments among `forward_kwargs` with a value for each token: [B, 1], the value for a row's new
            tokens.
        forward: forward that runs the model.
        record: record of the runners of its forwards.

    Attributes:
        has_windows: whether some layers do not see the whole text.
        position_offsets: int64 [kinds, B, 1], what position ids of each kind have more than a text's; None if the model
            has one kind. Set before the first forward.
        sums_masked: whether the last forward may have added masked entries, with the weight 0.
        num_columns: width of the model's logits, once the prompt has run.
        num_rerun: number of committed tokens that the last forward ran again before the nodes.
        whole_output: states and attentions of the last forward if it ran the whole text; else None.
    """

    def __init__(
        self,
        model: GenerativeModel,
        cache: TreeCache,
        prompt_mask: Tensor | None = None,
        shape: Shape = "tree",
        forward_kwargs: Mapping[str, Any] | None = None,
        token_kwargs: Mapping[str, Tensor] | None = None,
        forward: Forward | None = None,
        record: RunnerRecord | None = None,
    ):
        self.model = model
        self.forward = forward or Forward()
        self.record = record or RunnerRecord()
        self.sums_masked, self.num_columns, self.num_rerun, self.whole_output = True, 0, 0, None
        self.cache = cache
        native = native_runner(model)
        self.cache.mover = None if native is None else native.move_entries
        self._native = native or native_decoder_runner(model)
        self.shape = shape
        self._prompt = PromptRows(prompt_mask, cache.rows)
        self._num_idle = 0
        self.forward_kwargs = dict(forward_kwargs or {})
        self.token_kwargs = dict(token_kwargs or {})
        self.layer_types = layer_types_of(model)
        self.has_windows = any(layer_type.window is not None for layer_type in self.layer_types)
        self.takes_position_ids = takes_position_ids(model)
        self.position_offsets: Tensor | None = None
        self.device = input_device(model)
        self.attention = TreeAttention(model, self.device)

    def __call__(
        self,
        tree: DraftTree,
        root_positions: Sequence[int],
        *,
        num_cached: int = 0,
        forward_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Scores nodes of `tree`. The cache then holds N appended, uncommitted entries a row. Arguments: see `Nodes`.

        Returns:
            The model's output for these rows. `logits` is [R, N - num_cached, V]; `logits[r, i]` scores the token after
            node `num_cached + i`.
        """
        tree = tree if self.forward.takes_unread else tree.clamped
        nodes = Nodes(tree, root_positions, num_cached, forward_kwargs or {})
        with self.backends:
            return self.forward.run(self, nodes)

    @property
    def backends(self) -> AbstractContextManager[None]:
        """A context for forwards of the request: of its prompt and of trees."""
        return nullcontext() if self.forward.keeps_backends else tree_backends(self.device)

    def run_model(self, nodes: Nodes, metadata: AttentionMetadata, mask: Mask | TreeMask) -> Any:
        """The model's output for nodes at the positions of `metadata`, under a mask."""
        tokens, num_cached = nodes.tree.token_ids, nodes.num_cached
        count = nodes.tree.num_nodes - num_cached
        inputs = self.all_kwargs(nodes)
        if self.takes_position_ids:
            inputs["position_ids"] = self.of_all_kinds(metadata.positions())
        if self.token_kwargs:
            inputs |= self.for_tokens(count)
        return self.call_model(
            input_ids=to_device(tokens[:, num_cached:] if num_cached else tokens, self.device),
            attention_mask=mask,
            **as_cache(self.cache.cache),
            use_cache=True,
            logits_to_keep=count,
            **inputs,
        )

    def call_model(self, **inputs: Any) -> Any:
        """The output of the model, whose forward is counted by its runner."""
        if self._native is None:
            self.record.ran(EAGER)
            return self.model(**inputs, return_dict=True)
        self._native.last_problem = "a forward that was replaced, or compiled by torch.compile"
        output = self.model(**inputs, return_dict=True)
        if problem := self._native.last_problem:
            self.record.refuse(NATIVE, problem)
        self.record.ran(EAGER if problem else NATIVE)
        return output

    def metadata(self, nodes: Nodes) -> AttentionMetadata:
        """The metadata of a forward over nodes."""
        return AttentionMetadata(
            nodes.tree,
            self.cache.present_lengths,
            self.cache.append_index,
            self.device,
            nodes.num_cached,
            self.prompt_mask,
            [nodes.root_positions[row] for row in self.cache.rows],
            # only the kernel reads them, and on another device they cost a wait
            starts=None if self._native is None else self.text_starts,
        )

    def arranged_mask(self, nodes: Nodes, metadata: AttentionMetadata) -> Mask | TreeMask:
        """The mask in the form for the model, or the tree alone if the model can take it."""
        tree, is_whole = nodes.tree, self.shape == "tree" and not nodes.num_cached and not self.has_windows
        needs_mask = tree.num_nodes > 1 or metadata.is_ragged
        has_ranges = is_whole and needs_mask and metadata.starts is not None and tree.is_small
        if has_ranges and takes_tree_masks(self.model):
            return TreeMask(metadata, partial(self._arranged, metadata))
        return self._arranged(metadata)

    def _arranged(self, metadata: AttentionMetadata) -> Mask:
        sees_prefix = metadata.visible_prefix is None and not self.has_windows
        return self.attention.arrange(self.mask(metadata), metadata.num_nodes, sees_prefix)

    def of_all_kinds(self, positions: Tensor) -> Tensor:
        """Position ids [R, N] of the present rows as the model takes them: [kinds, R, N] if it has several kinds."""
        if self.position_offsets is None:
            return positions
        return positions + to_device(self.position_offsets[:, list(self.cache.rows)], self.device)

    def all_kwargs(self, nodes: Nodes) -> dict[str, Any]:
        """The further keyword arguments of the forward over nodes."""
        return {**self.forward_kwargs, **nodes.forward_kwargs}

    def set_forward_kwargs(self, forward_kwargs: Mapping[str, Any]) -> None:
        """Sets further keyword arguments of every later forward."""
        self.forward_kwargs = dict(forward_kwargs)

    def for_tokens(self, count: int) -> dict[str, Tensor]:
        """The `token_kwargs` of a forward over `count` tokens of the present rows."""
        rows = list(self.cache.rows)
        return {name: values[rows].expand(-1, count) for name, values in self.token_kwargs.items()}

    @property
    def needs_equal_rows(self) -> bool:
        """Whether rows must have the same length: some part of the model counts along the cache or gets no mask."""
        reaches_no_mask = self.has_windows or ignores_masks(self.model) or bool(counts_along_cache(self.model))
        return self.forward.needs_equal_rows or (self.shape == "chain" and reaches_no_mask)

    @property
    def takes_root_only(self) -> bool:
        """Whether the next forward can only be a plain decoding step."""
        return self.forward.takes_root_only(self)

    def leave_out(self, finished: Sequence[int]) -> bool:
        """Takes finished rows out of the cache and the forwards, before a round.

        Finished rows slow every forward down. Leaving them out copies the other rows, once. It happens as soon as the
        rows have cost as much as the copy.

        Args:
            finished: indices of finished rows of the batch, not all rows.

        Returns:
            Whether any row has left now.
        """
        idle = set(self.cache.rows).intersection(finished)
        if not idle or not self._can_leave_out:
            return False
        self._num_idle += len(idle)
        if self._num_idle < (len(self.cache.rows) - len(idle)) * self.cache.append_index / _COPY_CONTEXT:
            return False
        self._num_idle = 0
        self.cache.set_aside(idle)
        return True

    @cached_property
    def _can_leave_out(self) -> bool:
        return self.forward.can_leave_rows_out and not may_hold_rows(self.model, self.forward_kwargs)

    def finish(self) -> None:
        """Ends the request (`Forward.finish`)."""
        self.forward.finish(self)

    def mask(self, metadata: AttentionMetadata) -> Tensor | dict[str, Tensor] | None:
        """The attention mask of a forward.

        Returns:
            None for a root alone after a prefix without holes (the stock decoding step). int64 [B, M + N] for chains
            under the model's own causal mask. Additive [B, 1, n, M + N] for the n new nodes of trees, by layer type if
            there are several. M is the number of entries that the layers show.
        """
        visible, num_nodes = metadata.visible_prefix, metadata.num_nodes
        if visible is None and (num_nodes == 1 or self.shape == "chain"):
            return None
        if self.shape == "chain" and visible is not None:
            return torch.cat([visible, visible.new_ones(visible.shape[0], num_nodes)], dim=1).long()
        dtype, num_rows, masks = self.attention_dtype, len(metadata.lengths), {}
        for layer_type in self.layer_types:
            mask = metadata.additive(layer_type, dtype, self.cache.visible_from(layer_type.layer_index))
            masks[layer_type.name] = mask.expand(num_rows, -1, -1, -1)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @property
    def prompt_mask(self) -> Tensor | None:
        """bool [R, M0] for the rows that the cache holds; None when all entries are real."""
        return self._prompt.mask(self.cache.rows)

    @property
    def text_starts(self) -> Sequence[int] | None:
        """Index of the first real entry of each row; None if the prompt has holes after it. Found out once a mask."""
        return self._prompt.starts(self.cache.rows)

    @property
    def attention_dtype(self) -> torch.dtype:
        """dtype of queries and keys, which `sdpa` requires of its mask. Under autocast it is not the model's."""
        first = next((layer for layer in self.cache.cache.layers if isinstance(layer, PreallocatedLayer)), None)
        return first.dtype if first is not None and first.is_initialized else self.model.dtype
