"""Checks of every tree that a drafter returns: it can be wrong only in speed.

The loop sets node 0 itself and computes the plan from the parents. A tree on the host is checked before it is scored.
Reading a tree from a device first would make the target wait. So forwards run it with clamped values, to keep kernels
from failing (`DraftTree.clamped`), and it is checked when the host reads it (`DraftTree.host`). That is usually after
its forward, and always before any of its tokens is emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DrafterError
from ..tree import PADDING_PARENT, ROOT_PARENT, DraftTree, HostFacts, HostTree


# Largest number of nodes to score, root included. No published tree has more than about 100, and a mask has N x N
# entries.
MAX_NODES = 512


class DraftChecks:
    """Checks the trees of one drafter.

    Args:
        name: name of the drafter, for errors.
        vocab_size: number of token ids that the target has embeddings for.
        max_nodes: largest number of nodes to score, root included.
    """

    def __init__(self, name: str, vocab_size: int, max_nodes: int = MAX_NODES):
        self._name = name
        self._vocab_size = vocab_size
        self._max_nodes = max_nodes

    def admit(self, tree: Any, roots: Sequence[int]) -> DraftTree:
        """A version of `tree` that can be scored, with `roots` as its nodes 0.

        Raises:
            DrafterError: the result is not a tree, has another number of rows, or breaks an invariant of `DraftTree`.
                For a tree on a device this is raised where its `host` is first used.
        """
        if not isinstance(tree, DraftTree):
            raise self._error(f"returned {type(tree).__name__}, not a DraftTree")
        self._check_form(tree, len(roots))
        if tree.num_nodes == 1:
            return DraftTree.root_only(torch.tensor(roots, dtype=torch.long, device="cpu"))
        tree = _as_it_is(tree.first(self._max_nodes - 1))
        if _is_on_host(tree):
            return self._on_host(tree, roots)
        parents = tree.parents
        max_depth = tree.max_depth if isinstance(parents, Tensor) else self._check_structure(parents)

        def checked(host: HostTree) -> HostTree:
            depth = self._check(host)
            if depth > max_depth:
                raise self._error(f"drafted a tree of depth {depth} with max_depth={max_depth}")
            return _with_roots(host, roots)

        depth = min(max(max_depth, 0), tree.num_nodes - 1)
        admitted = DraftTree(tree.token_ids, parents, depth, values=tree.values)
        admitted.unread = HostFacts(roots, self._vocab_size)
        admitted.host_copy.through(tree.host_copy, checked)
        return admitted

    def _on_host(self, tree: DraftTree, roots: Sequence[int]) -> DraftTree:
        host = tree.host
        depth = self._check(host)
        tokens = tree.token_ids
        if any(row[0] != root for row, root in zip(host.token_ids, roots, strict=True)):
            tokens = torch.cat([torch.tensor(roots, dtype=torch.long, device="cpu")[:, None], tokens[:, 1:]], dim=1)
            host = _with_roots(host, roots)
        return tree.checked(tokens, depth, host)

    def _check_form(self, tree: DraftTree, num_rows: int) -> None:
        tokens, parents = tree.token_ids, tree.parents
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.dtype != torch.long or tokens.is_meta:
            given = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
            raise self._error(f"drafted token_ids that are {given}; they must be int64 [B, N] with data")
        if len(tokens) != num_rows:
            raise self._error(f"drafted {len(tokens)} rows for {num_rows}")
        values = tree.values
        if values is not None and not (
            isinstance(values, Tensor)
            and values.is_floating_point()
            and values.shape == tokens.shape
            and values.device == tokens.device
        ):
            given = f"{list(values.shape)} ({values.dtype}, {values.device})" if isinstance(values, Tensor) else values
            raise self._error(
                f"gave the values {given} to {list(tokens.shape)} nodes; expected floats of that shape and device"
            )
        if not tokens.shape[1]:
            raise self._error("drafted no nodes: node 0, the root, is always there")
        if isinstance(parents, Tensor):
            is_fit = parents.dtype == torch.long and parents.shape[1:] == tokens.shape[1:] and not parents.is_meta
            if not is_fit or len(parents) not in (1, num_rows):
                raise self._error(
                    f"drafted parents {parents.dtype} {list(parents.shape)} for {list(tokens.shape)} nodes"
                )
            if not isinstance(tree.max_depth, int):
                raise self._error(f"drafted a tree with max_depth={tree.max_depth!r}, not an int")
        elif len(parents) not in (1, num_rows) or any(len(row) != tokens.shape[1] for row in parents):
            raise self._error(f"drafted {[len(row) for row in parents]} parents for {list(tokens.shape)} nodes")

    def _check(self, host: HostTree) -> int:
        """Checks tokens and structure; returns the depth of the deepest node."""
        for row, (tokens, parents) in enumerate(zip(host.token_ids, host.parents, strict=True)):
            if min(tokens[1:], default=0) < 0 or max(tokens[1:], default=0) >= self._vocab_size:
                wrong = next(token for token in tokens[1:] if not 0 <= token < self._vocab_size)
                raise self._error(f"drafted token {wrong} in row {row}; the target has 0 to {self._vocab_size - 1}")
            self._check_siblings(row, tokens, parents)
        return self._check_structure(host.parents)

    def _check_structure(self, rows: Sequence[Sequence[int]]) -> int:
        """Checks the parents; returns the depth of the deepest node."""
        deepest = 0
        for row, parents in enumerate(rows):
            if parents[0] != ROOT_PARENT:
                raise self._error(f"drafted a node 0 with parent {parents[0]} in row {row}; it is the root, parent -1")
            depths = [0]
            for node in range(1, len(parents)):
                parent = parents[node]
                if parent == PADDING_PARENT:
                    depths.append(-1)
                elif isinstance(parent, int) and 0 <= parent < node and depths[parent] >= 0:
                    depths.append(depths[parent] + 1)
                else:
                    raise self._error(f"drafted node {node} with parent {parent} in row {row}; parents come first")
            deepest = max(deepest, *depths)
        return deepest

    def _check_siblings(self, row: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
        nodes = [pair for pair in zip(parents, tokens, strict=True) if pair[0] >= 0]
        if len(set(nodes)) < len(nodes):
            parent, token = next(pair for pair in nodes if nodes.count(pair) > 1)
            raise self._error(f"drafted token {token} twice below node {parent} of row {row}")

    def _error(self, problem: str) -> DrafterError:
        return DrafterError(
            f"drafter {self._name!r} {problem}. The text emitted so far and the cache are valid; to continue, "
            "generate without `speculator=`."
        )


def _as_it_is(tree: DraftTree) -> DraftTree:
    """A new tree from its tensors: these may have changed since it was derived from another tree."""
    if not tree.host_copy.is_derived:
        return tree
    parents = tree.parents
    max_depth = tree.max_depth if isinstance(parents, Tensor) else None
    return DraftTree(tree.token_ids, parents, max_depth, values=tree.values)


def _with_roots(host: HostTree, roots: Sequence[int]) -> HostTree:
    tokens = [[root, *row[1:]] for row, root in zip(host.token_ids, roots, strict=True)]
    return HostTree(tokens, host.parents, host.values)


def _is_on_host(tree: DraftTree) -> bool:
    parents = tree.parents
    return tree.token_ids.device.type == "cpu" and not (isinstance(parents, Tensor) and parents.device.type != "cpu")
