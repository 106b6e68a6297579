"""Compiled functions of static shapes: a bounded number for each module, kept as long as the module.

Dynamo counts the graphs of a code object, and fails at the ninth if a function must be one graph. So each function here
is compiled for one set of shapes under its own code object. Beyond `MAX_GRAPHS` for one number of rows, or
`MAX_BATCH_SIZES` different numbers, functions run uncompiled. The caller's grad mode does not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from inspect import unwrap
from types import FunctionType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._dynamo import exc
from torch._dynamo.backends.registry import list_backends, lookup_backend
from torch._dynamo.exc import TorchDynamoException

from ..errors import first_line
from ..messages import get_logger
from .capture import Recorder, capturing, is_capturable
from .shortcuts import Shortcut, WatchedGraph, watching


logger = get_logger(__name__)

# Raised when hooks or adapters have changed too often for one graph. Older versions of torch have another name for it.
_LimitHit: Any = getattr(exc, "FailOnRecompileLimitHit", TorchDynamoException)

# Limits of one function of one module, for one number of rows. Compiling a graph takes seconds to minutes.
MAX_GRAPHS = 8
MAX_BATCH_SIZES = 4
# A larger graph can also do the work of a smaller one. The smaller one is compiled after it was wanted this often, in
# this share of all calls.
ASKED_OFTEN, ASKED_SHARE = 32, 0.25

Result = TypeVar("Result")


@dataclass
class Graphs:
    """The compiled functions of one module.

    Attributes:
        by_key: compiled functions by function name and key; None where compiling failed.
        asked: number of calls of `choose`, by function and by function and key.
    """

    backend: str
    captures: bool = False
    by_key: dict[tuple[str, Hashable], Callable[..., Any] | None] = field(default_factory=dict)
    asked: Counter[Hashable] = field(default_factory=Counter)

    def get(self, function: Callable[..., Any], key: Hashable) -> tuple[Callable[..., Any] | None, bool]:
        """`function` compiled for `key` (None if it must run uncompiled), and whether it is new."""
        traced: Any = unwrap(function)
        name = traced.__name__
        if (name, key) in self.by_key:
            return self.by_key[name, key], False
        if not self.has_room(name, key):
            return None, False
        own_name = f"{name}_{len(self.by_key)}"
        own = FunctionType(traced.__code__.replace(co_name=own_name), traced.__globals__, own_name)
        compile_graph = capturing(self.backend) if self.captures else lookup_backend(self.backend)
        self.by_key[name, key] = torch.compile(
            own, fullgraph=True, dynamic=False, backend=lambda *graph: WatchedGraph(compile_graph(*graph))
        )
        return self.by_key[name, key], True

    def has_room(self, name: str, key: Hashable) -> bool:
        """Whether another graph of a function may be compiled."""
        counts = Counter(_rows(known) for known_name, known in self.by_key if known_name == name)
        return counts[_rows(key)] < MAX_GRAPHS and len({*counts, _rows(key)}) <= MAX_BATCH_SIZES

    def choose(self, name: str, keys: Sequence[Hashable]) -> Hashable:
        """The key of the graph to use; see `Compiler.choose`."""
        best = keys[0]
        self.asked[name, best] += 1
        self.asked[name] += 1
        known = next((key for key in keys if self.by_key.get((name, key)) is not None), best)
        if known == best or (name, best) in self.by_key or not self.has_room(name, best):
            return known
        asked = self.asked[name, best]
        return best if asked > ASKED_OFTEN and asked > ASKED_SHARE * self.asked[name] else known


def _rows(key: Hashable) -> Hashable:
    return key[0] if isinstance(key, tuple) else None


_graphs: WeakKeyDictionary[nn.Module, dict[tuple[str, bool], Graphs]] = WeakKeyDictionary()


def graphs_of(module: nn.Module, backend: str, captures: bool = False) -> Graphs:
    """The compiled functions of `module`."""
    return _graphs.setdefault(module, {}).setdefault((backend, captures), Graphs(backend, captures))


def find_backend(compile: bool | str) -> str | None:
    """The backend of `torch.compile` for `Speculator(compile=)`, or None.

    Raises:
        ValueError: torch has no backend of this name.
    """
    if isinstance(compile, bool):
        return "inductor" if compile else None
    if compile not in (known := list_backends(None)):
        raise ValueError(f"compile={compile!r} is no backend of torch.compile; possible: True, {', '.join(known)}.")
    return compile


class Compiler:
    """Compiles functions of the target and of its drafter for one request.

    Args:
        backend: name of the `torch.compile` backend.
        fallbacks: counter of what runs uncompiled, by reason.

    Attributes:
        num_slow: number of calls so far that compiled something or recorded a CUDA graph.
    """

    def __init__(self, backend: str, fallbacks: Counter[str]):
        self.backend = backend
        self.num_slow = 0
        self._fallbacks = fallbacks
        self._shortcuts: dict[Callable[..., Any], Shortcut | None] = {}

    def refuse(self, problem: str) -> None:
        """Counts a function that runs uncompiled."""
        self._fallbacks[f"not compiled: {problem}"] += 1

    def choose(
        self, module: nn.Module, device: torch.device, function: Callable[..., Any], keys: Sequence[Hashable]
    ) -> Hashable:
        """Chooses between several graphs of a function that can all do the work. The other arguments are those of
        `run`.

        Args:
            keys: keys of these graphs, the cheapest to run first. A later one is used if it exists, unless the first
                one is needed often. So graphs for rare cases, such as the end of a text, are not compiled.
        """
        graphs = graphs_of(module, self.backend, is_capturable(device, self.backend))
        return graphs.choose(function.__name__, keys)

    def run(
        self,
        module: nn.Module,
        device: torch.device,
        key: Hashable,
        function: Callable[..., Any],
        inputs: Callable[[], tuple[Any, ...]],
        plain: Callable[[], Result],
    ) -> Any | Result:
        """The result of the compiled `function(*inputs())`, or of `plain()` if that cannot be compiled.

        Args:
            module: module that owns the graphs.
            device: device of the computation.
            key: everything that a graph is compiled for: shapes, dtypes and options. A tuple begins with the number of
                rows.
            function: function without free variables. It may write its inputs in place.
            inputs: function that makes the arguments, tensors with fixed addresses (`Buffers`).
        """
        graphs = graphs_of(module, self.backend, is_capturable(device, self.backend))
        compiled, is_new = graphs.get(function, key)
        name = function.__name__
        if compiled is None:
            self.refuse(
                "a graph that did not compile"
                if (name, key) in graphs.by_key
                else f"more than {MAX_GRAPHS} graphs, or {MAX_BATCH_SIZES} batch sizes"
            )
            return plain()
        num_recorded = Recorder.num_recorded
        try:
            # A graph depends on the grad mode, so use one mode whatever the caller's is.
            with torch.inference_mode(False), torch.no_grad():
                result = self._call(compiled, inputs())
            self.num_slow += is_new or Recorder.num_recorded > num_recorded
            return result
        except (TorchDynamoException, _LimitHit) as error:
            graphs.by_key[name, key] = None
            self.num_slow += 1
            logger.warning(f"{name} runs uncompiled, torch.compile failed: {first_line(error)}")
            self.refuse("a graph that did not compile")
            return plain()

    def _call(self, compiled: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        known = self._shortcuts.get(compiled)
        if known is not None and known.fits(arguments):
            return known()
        # Guard hooks too: steering, accelerate or adapters may add or remove them later.
        with watching() as calls, torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            result = compiled(*arguments)
        self._shortcuts[compiled] = Shortcut.of(arguments, calls, result)
        return result
