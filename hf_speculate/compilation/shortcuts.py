"""Straight to a compiled graph: what a graph depends on is checked once a request, not at every call.

Before each call dynamo looks through every module, hook and flag that the graph was made from; for a model of 20 layers
that takes a millisecond on a CPU. Within one request none of them changes, and the arguments are the same tensors with
other contents (`buffers`). So the first call goes through dynamo, and shows what the graph was given and what became
of what it returned; later ones repeat it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


Run = Callable[..., Sequence[Any]]
Call = tuple[Run, Sequence[Any], Sequence[Any]]
"""What ran, its inputs, and its outputs."""

_watched = threading.local()


@contextmanager
def watching() -> Iterator[list[Call]]:
    """The calls of graphs in this thread meanwhile, of `Watched` ones."""
    _watched.calls = calls = []
    try:
        yield calls
    finally:
        _watched.calls = None


class Watched:
    """A compiled graph whose calls `watching` shows."""

    def __init__(self, run: Run):
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
        arguments: of the function that was compiled.
        call: of its graph.
        places: for each leaf of the function's result, which output of the graph it is, or the leaf itself.
        form: of the result.
    """

    def __init__(self, arguments: Sequence[Any], call: Call, places: Sequence[Any], form: TreeSpec):
        self._leaves = list(_leaves(arguments))
        self._run, self._inputs, _ = call
        self._places, self._form = places, form

    @classmethod
    def of(cls, arguments: Sequence[Any], calls: Sequence[Call], result: Any) -> Shortcut | None:
        """None where dynamo did more than to call one graph and to hand on what that returned."""
        if len(calls) != 1:
            return None
        leaves, form = tree_flatten(result)
        index = {id(output): place for place, output in enumerate(calls[0][2])}
        if any(isinstance(leaf, Tensor) and id(leaf) not in index for leaf in leaves):
            return None
        places = [(index[id(leaf)], None) if isinstance(leaf, Tensor) else (None, leaf) for leaf in leaves]
        return cls(arguments, calls[0], places, form)

    def fits(self, arguments: Sequence[Any]) -> bool:
        """Whether these are the arguments again: the same objects, tensors at least."""
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
