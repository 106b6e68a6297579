"""Functions of static shapes: compiled, captured, or both. Each module has a bounded number; they end with it.

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

from ..errors import OptionError, first_line
from ..messages import get_logger
from ..stats import GRAPH, RunnerRecord
from .cuda_graphs import CudaGraphs, can_capture, modules_in, state_of, tensors_in
from .fused import fusing


logger = get_logger(__name__)

# Raised when hooks or adapters have changed too often for one graph. Older versions of torch have another name for it.
_LimitHit: Any = getattr(exc, "FailOnRecompileLimitHit", TorchDynamoException)

# Limits of one compiled function of one module, for one number of rows. Compiling a graph takes seconds to minutes.
MAX_GRAPHS = 8
MAX_BATCH_SIZES = 4
# A larger graph can also do the work of a smaller one. The smaller one is made after it was wanted this often, in this
# share of all calls.
ASKED_OFTEN, ASKED_SHARE = 32, 0.25

Result = TypeVar("Result")


@dataclass
class Graphs:
    """The functions of one module.

    Attributes:
        backend: backend of `torch.compile`; None leaves functions as they are.
        by_key: functions by name and key; None where compiling failed.
        asked: number of calls of `choose`, by function and by function and key.
        cuda_graphs: the CUDA graphs of them, on devices that have such.
    """

    backend: str | None
    by_key: dict[tuple[str, Hashable], Callable[..., Any] | None] = field(default_factory=dict)
    asked: Counter[Hashable] = field(default_factory=Counter)
    cuda_graphs: CudaGraphs = field(default_factory=CudaGraphs)

    def get(self, function: Callable[..., Any], key: Hashable) -> tuple[Callable[..., Any] | None, bool]:
        """`function` compiled for `key` (None if it must run uncompiled), and whether it is new."""
        traced: Any = unwrap(function)
        name = traced.__name__
        if (name, key) in self.by_key:
            return self.by_key[name, key], False
        if self.backend is None:
            self.by_key[name, key] = function
            return function, True
        if not self.has_room(name, key):
            return None, False
        own_name = f"{name}_{len(self.by_key)}"
        own = FunctionType(traced.__code__.replace(co_name=own_name), traced.__globals__, own_name)
        self.by_key[name, key] = torch.compile(own, fullgraph=True, dynamic=False, backend=lookup_backend(self.backend))
        return self.by_key[name, key], True

    def has_room(self, name: str, key: Hashable) -> bool:
        """Whether another graph of a function may be made. CudaGraphs without a compiler are limited elsewhere."""
        if self.backend is None:
            return True
        counts = Counter(_rows(known) for known_name, known in self.by_key if known_name == name)
        return counts[_rows(key)] < MAX_GRAPHS and len({*counts, _rows(key)}) <= MAX_BATCH_SIZES

    def choose(self, name: str, keys: Sequence[Hashable]) -> Hashable:
        """The key of the graph to use; see `GraphRunner.choose`."""
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


_graphs: WeakKeyDictionary[nn.Module, dict[str | None, Graphs]] = WeakKeyDictionary()


def graphs_of(module: nn.Module, backend: str | None) -> Graphs:
    """The functions of `module` under a backend."""
    return _graphs.setdefault(module, {}).setdefault(backend, Graphs(backend))


def graph_runner_for(compile: bool | str | None, device: torch.device, fallbacks: Counter[str]) -> GraphRunner | None:
    """The compiler of a request for `Speculator(compile=)`; None if everything runs as it is.

    By default functions are captured where that is possible, and not compiled.
    """
    backend = find_backend(compile)
    if backend is None and (compile is False or not can_capture(device)):
        return None
    return GraphRunner(backend, fallbacks)


def find_backend(compile: bool | str | None) -> str | None:
    """The backend of `torch.compile` for `Speculator(compile=)`, or None.

    Raises:
        OptionError: torch has no backend of this name.
    """
    if compile is None or isinstance(compile, bool):
        return "inductor" if compile else None
    if compile not in (known := list_backends(None)):
        raise OptionError(f"compile={compile!r} is not a backend of torch.compile; possible: True, {', '.join(known)}.")
    return compile


class GraphRunner:
    """Runs functions of the target and of its drafter with static shapes, for one request: compiled, captured, or both.

    Args:
        backend: name of the `torch.compile` backend; None compiles nothing, which is of use where functions are
            captured.
        fallbacks: counter of what runs as it is, by reason.

    Attributes:
        num_slow: number of calls so far that compiled or captured something.
    """

    def __init__(self, backend: str | None, fallbacks: Counter[str]):
        self.backend = backend
        self.num_slow = 0
        self._record = RunnerRecord(fallbacks=fallbacks)
        self._states: dict[int, int] = {}
        self._seen: set[Hashable] = set()
        self._sizes: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers and results of all graphs that the request has used."""
        return sum(self._sizes.values())

    @staticmethod
    def captures(device: torch.device) -> bool:
        """Whether functions on `device` are captured."""
        return can_capture(device)

    @property
    def state(self) -> str:
        """The adjective for functions that it runs: "recorded" or "compiled"."""
        return "recorded" if self.backend is None else "compiled"

    def refuse(self, problem: str) -> None:
        """Notes why a function of the target runs as it is. Drafters have their own record for that."""
        self._record.refuse(self.state, problem)

    def choose(self, module: nn.Module, function: Callable[..., Any], keys: Sequence[Hashable]) -> Hashable:
        """Chooses between several graphs of a function that can all do the work. The other arguments are those of
        `run`.

        Args:
            keys: keys of these graphs, the cheapest to run first. A later one is used if it exists, unless the first
                one is needed often. So there are no graphs for rare cases, such as the end of a text.
        """
        return graphs_of(module, self.backend).choose(function.__name__, keys)

    def run(
        self,
        module: nn.Module,
        device: torch.device,
        key: Hashable,
        function: Callable[..., Any],
        inputs: Callable[[], tuple[Any, ...]],
        plain: Callable[[], Result],
        record: RunnerRecord | None = None,
    ) -> Any | Result:
        """The result of `function(*inputs())`, compiled or captured; or of `plain()` if that is not possible.

        A captured result is overwritten by the next call that does the same.

        Args:
            module: module that owns the graphs.
            device: device of the computation.
            key: everything that a graph is made for: shapes, dtypes and options. A tuple begins with the number of
                rows.
            function: function without free variables. It may write its inputs in place. Its arguments are modules,
                tensors with fixed addresses (`Buffers`), and values that `key` names.
            inputs: function that makes the arguments.
            record: record of a drafter, which counts the call; None for the target's, which are counted elsewhere.
        """
        record = record or self._record
        graphs, name = graphs_of(module, self.backend), function.__name__
        made, is_new = graphs.get(function, key)
        if made is None:
            has_failed = (name, key) in graphs.by_key
            limits = f"more than {MAX_GRAPHS} graphs, or {MAX_BATCH_SIZES} batch sizes"
            record.refuse(self.state, "a graph that did not compile" if has_failed else limits)
            return plain()
        num_slow = CudaGraphs.num_captured + CudaGraphs.num_warmed
        try:
            # A graph depends on the grad mode, so use one mode whatever the caller's is.
            with torch.inference_mode(False), torch.no_grad():
                result = self._call(graphs, made, (name, key), inputs(), device, record)
            self.num_slow += is_new or CudaGraphs.num_captured + CudaGraphs.num_warmed > num_slow
            record.ran(GRAPH)
            return result
        except (TorchDynamoException, _LimitHit) as error:
            graphs.by_key[name, key] = None
            self.num_slow += 1
            logger.warning(f"{name} runs uncompiled, torch.compile failed: {first_line(error)}")
            record.refuse(self.state, "a graph that did not compile")
            return plain()

    def _call(
        self,
        graphs: Graphs,
        made: Callable[..., Any],
        kind: Hashable,
        arguments: tuple[Any, ...],
        device: torch.device,
        record: RunnerRecord,
    ) -> Any:
        if not can_capture(device):
            return _guarded(made, *arguments)
        kind = kind, tuple(map(self._state, modules_in(arguments)))
        if graphs.cuda_graphs.cannot_be_captured(kind):
            record.refuse(self.state, "capturing failed (a warning gave the reason)")
        function = fusing(made) if self.backend is None else _Guarded(made)
        result = graphs.cuda_graphs.run(function, kind, arguments, device)
        if kind not in self._seen:
            self._seen.add(kind)
            self._sizes |= {tensor.data_ptr(): tensor.nbytes for tensor in tensors_in((arguments, result))}
        return result

    def _state(self, module: nn.Module) -> int:
        """`state_of` a module, once a request."""
        if id(module) not in self._states:
            self._states[id(module)] = state_of([module])
        return self._states[id(module)]


def _guarded(compiled: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a compiled function. It guards hooks too: steering, accelerate or adapters may add or remove them later."""
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        return compiled(*arguments)


class _Guarded:
    def __init__(self, compiled: Callable[..., Any]):
        self._compiled = compiled

    def __call__(self, *arguments: Any) -> Any:
        return _guarded(self._compiled, *arguments)
