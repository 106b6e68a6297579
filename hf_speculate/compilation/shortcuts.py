"""Direct calls of a compiled graph: its guards are checked once a request, not at every call.

Before each call dynamo checks every module, hook and flag that the graph was made from. For a model of 20 layers that
takes a millisecond on a CPU. Within one request none of them changes, and the arguments are the same tensors with other
contents (`buffers`). So the first call goes through dynamo, which shows the inputs of the graph and how its outputs
become the result. Later calls repeat that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


GraphFunction = Callable[..., Sequence[Any]]
Call = tuple[GraphFunction, Sequence[Any], Sequence[Any]]
"""A graph function, its inputs and its outputs."""

_watched = threading.local()


@contextmanager
def watching() -> Iterator[list[Call]]:
    """A context that lists the calls of graphs (`WatchedGraph`) in this thread."""
    _watched.calls = calls = []
    try:
        yield calls
    finally:
        _watched.calls = None


class WatchedGraph:
    """A compiled graph whose calls `watching` lists."""

    def __init__(self, run: GraphFunction):
        self._run = run

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        outputs = self._run(*inputs)
        calls = getattr(_watched, "calls", None)
        if calls is not None:
            calls.append((self._run, inputs, outputs))
        return outputs


class Shortcut:
    """One call of a graph, to be repeated.

    Args:
        arguments: arguments of the compiled function.
        call: call of its graph.
        places: index of the graph's output for each leaf of the function's result, or the leaf itself.
        form: structure of the result.
    """

    def __init__(self, arguments: Sequence[Any], call: Call, places: Sequence[Any], form: TreeSpec):
        self._leaves = list(_leaves(arguments))
        self._run, self._inputs, _ = call
        self._places, self._form = places, form

    @classmethod
    def of(cls, arguments: Sequence[Any], calls: Sequence[Call], result: Any) -> Shortcut | None:
        """A shortcut for this call; None if dynamo did more than call one graph and pass its outputs on."""
        if len(calls) != 1:
            return None
        leaves, form = tree_flatten(result)
        index = {id(output): place for place, output in enumerate(calls[0][2])}
        if any(isinstance(leaf, Tensor) and id(leaf) not in index for leaf in leaves):
            return None
        places = [(index[id(leaf)], None) if isinstance(leaf, Tensor) else (None, leaf) for leaf in leaves]
        return cls(arguments, calls[0], places, form)

    def fits(self, arguments: Sequence[Any]) -> bool:
        """Whether the arguments are the same again: the same tensor objects and equal other values."""
        leaves = list(_leaves(arguments))
        return len(leaves) == len(self._leaves) and all(map(_is_same, leaves, self._leaves))

    def __call__(self) -> Any:
        outputs = self._run(*self._inputs)
        return tree_unflatten([leaf if place is None else outputs[place] for place, leaf in self._places], self._form)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from _leaves(each)
    elif isinstance(value, list | tuple):
        yield len(value)
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, str | int | float) and type(one) is type(other) and one == other)
