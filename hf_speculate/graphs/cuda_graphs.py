"""CUDA graphs of functions over tensors with fixed addresses: captured at the second call, replayed from then on.

A forward of a small model is some hundred kernels, and the host takes longer to launch them than the device to run
them. A graph launches all of them at once. It needs no compiler and takes tens of milliseconds.

A graph holds addresses: those of its arguments (`Buffers` keep theirs) and those of the weights. So it is looked up
by the addresses of the arguments and by the state of their modules (`state_of`), which the caller computes once a
request. Do not change a model during a call.

All graphs of a device share one pool of memory, because replays never overlap: one lock orders those of all
threads, and a replay on another stream waits for the last one. A later graph may have its results where an earlier
one has intermediate values, so results are copied to memory outside the pool. The next replay of the same graph
overwrites them, and no other one does.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import first_line
from ..messages import get_logger


logger = get_logger(__name__)

MAX_CUDA_GRAPHS = 32
"""Largest number of graphs of one module. The one that was unused longest is freed."""

Function = Callable[..., Any]


def can_capture(device: torch.device) -> bool:
    """Whether functions on `device` can be captured."""
    return device.type == "cuda"


@dataclass(frozen=True)
class CudaGraph:
    """A captured call.

    Attributes:
        replay: function that runs it again, on what its arguments hold now.
        outputs: result of the call; every replay overwrites its tensors.
    """

    replay: Callable[[], None]
    outputs: Any


class CudaGraphs:
    """The graphs of one module's functions.

    Class attributes:
        num_captured: number of graphs made so far, of all modules.
        num_warmed: number of calls so far that ran as they are, before a capture.
    """

    num_captured: ClassVar[int] = 0
    num_warmed: ClassVar[int] = 0

    def __init__(self) -> None:
        self._graphs: OrderedDict[Hashable, CudaGraph] = OrderedDict()
        self._warm: OrderedDict[Hashable, Any] = OrderedDict()  # kind -> results without data
        self._failed: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def num_bytes(self) -> int:
        """Memory of the results of all graphs."""
        return sum(tensor.nbytes for each in self._graphs.values() for tensor in tensors_in(each.outputs))

    def run(self, function: Function, kind: Hashable, arguments: Sequence[Any], device: torch.device) -> Any:
        """The result of `function(*arguments)`, computed by a replay from the second call on.

        Args:
            function: function that launches the same kernels at every call. It may change its arguments' tensors in
                place, but nothing else.
            kind: everything that decides which kernels are launched. The first call of a kind runs as it is: libraries
                load kernels and allocate workspaces, which a capture must not contain.
            device: device of the computation.
        """
        with _LOCK:
            if kind in self._failed:
                return function(*arguments)
            if kind not in self._warm:
                results = function(*arguments)
                self._warm[kind] = mapped(lambda tensor: torch.empty_like(tensor, device="meta"), results)
                while len(self._warm) > 8 * MAX_CUDA_GRAPHS:
                    self._warm.popitem(last=False)
                CudaGraphs.num_warmed += 1
                return results
            key = kind, tuple(tensor.data_ptr() for tensor in tensors_in(arguments))
            try:
                graph = self._graphs.get(key) or self._capture(key, function, arguments, device, self._warm[kind])
            except Exception as error:
                self._failed.add(kind)
                heal(device)
                name = getattr(function, "__name__", "a forward")
                where = logger.isEnabledFor(logging.DEBUG)  # the first line names the error, the traceback its cause
                logger.warning(f"{name} is not captured: {first_line(error)}", exc_info=where)
                return function(*arguments)
            self._graphs.move_to_end(key)
            graph.replay()
            return graph.outputs

    def cannot_be_captured(self, kind: Hashable) -> bool:
        """Whether capturing this kind has failed."""
        return kind in self._failed

    def _capture(
        self, key: Hashable, function: Function, arguments: Sequence[Any], device: torch.device, like: Any
    ) -> CudaGraph:
        while len(self._graphs) >= MAX_CUDA_GRAPHS:
            self._graphs.popitem(last=False)
        outputs = mapped(lambda tensor: torch.empty_like(tensor, device=device), like)
        self._graphs[key] = capture(function, arguments, device, outputs)
        CudaGraphs.num_captured += 1
        return self._graphs[key]


_LOCK = threading.RLock()
"""A capture and another thread's use of the same stream, pool or generator would break each other."""

_anchors: list[Any] = []  # graphs that must not be freed
_last_streams: dict[torch.device, Any] = {}


@cache
def _capture_stream(device: torch.device) -> Any:
    """The stream of all captures, on which nothing else runs. So the workspace that cuBLAS keeps for it lies in the
    pool of the graphs, and clearing workspaces does not take it from them."""
    return torch.cuda.Stream(device)


@cache
def _pool(device: torch.device) -> Any:
    """The memory pool of all graphs. A pool whose graphs have all been freed must not be used again, so one tiny
    graph keeps it."""
    pool, value = torch.cuda.graph_pool_handle(), torch.zeros(1, device=device, dtype=torch.float32)
    graph = torch.cuda.CUDAGraph()
    _captured(graph, pool, device, lambda: value.add_(1))
    _anchors.append((graph, value))
    return pool


def capture(function: Function, arguments: Sequence[Any], device: torch.device, outputs: Any) -> CudaGraph:
    """Captures `function(*arguments)` without computing it. Its result goes to `outputs`, which has the same shapes.

    `torch.cuda.graph` would wait for the device and empty its caches, which takes longer than the capture.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), _without_gc():
        outputs = _captured(graph, _pool(device), device, lambda: kept(function(*arguments), outputs))

    def replay() -> None:
        stream = torch.cuda.current_stream(device)
        if (last := _last_streams.get(device)) is not None and last != stream:
            stream.wait_stream(last)
        _last_streams[device] = stream
        graph.replay()

    return CudaGraph(replay, outputs)


def kept(results: Any, outputs: Any) -> Any:
    """Results of a captured call, copied to `outputs`."""

    def keep(result: Tensor, output: Tensor) -> Tensor:
        if result.shape != output.shape:
            raise RuntimeError(f"results were {list(output.shape)} and are {list(result.shape)} now")
        return output.copy_(result)

    return mapped(keep, results, outputs)


def _captured(graph: Any, pool: Any, device: torch.device, function: Callable[[], Any]) -> Any:
    """The result of `function`, whose kernels are captured into `graph`."""
    with torch.cuda.stream(_capture_stream(device)):
        try:
            # Other threads may use the device meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            outputs = function()
        except BaseException:
            _give_up(graph, pool, device)
            raise
        try:
            graph.capture_end()
        except BaseException:
            _give_up(graph, pool, device)
            raise
    return outputs


def _give_up(graph: Any, pool: Any, device: torch.device) -> None:
    """Ends a capture that has failed, so that torch can be used as before.

    Where the capture is invalid, `capture_end` raises before it has notified allocators and random generators that it
    is over. The allocator of the device is notified here. The others are notified by the next capture that succeeds, in
    a new pool: the old one counts as being captured to.
    """
    with suppress(RuntimeError):
        graph.capture_end()
    names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")
    end = next((found for name in names if (found := getattr(torch._C, name, None)) is not None), None)
    if end is not None:
        with suppress(RuntimeError):
            end(torch.cuda.current_device(), pool)
    _anchors.append(graph)  # an allocator still queries whether it captures
    _pool.cache_clear()


def heal(device: torch.device) -> None:
    """Makes a capture that succeeds, after one that has failed (`_give_up`)."""
    if device.type == "cuda":
        with torch.cuda.device(device), _without_gc(), suppress(RuntimeError):
            _pool(device)


@contextmanager
def _without_gc() -> Iterator[None]:
    """Garbage may hold graphs and events; freeing one breaks a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a structure of tuples, lists and dicts. Modules are left out."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def mapped(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """A structure of tuples, lists and dicts with `function(tensor, *those at its place in others)` for each tensor."""
    if isinstance(value, Tensor):
        return function(value, *others)
    if isinstance(value, dict):
        return {key: mapped(function, each, *(other[key] for other in others)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        found = [mapped(function, *each) for each in zip(value, *others, strict=True)]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value


def modules_in(value: Any) -> Iterator[nn.Module]:
    """The modules among arguments."""
    return (each for each in value if isinstance(each, nn.Module))


def state_of(modules: Iterable[nn.Module]) -> int:
    """A number for everything in modules that a graph depends on.

    These are the addresses of all tensors, the hooks, replaced methods, and every flag and number: adapters that were
    switched or scaled, another mode of training. It takes about a millisecond for 400 modules.
    """
    known: set[int] = set()
    found: list[Any] = []
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if id(module) not in known:
            known.add(id(module))
            found.append(id(module))
            for name, value in vars(module).items():
                _note(name, value, found, waiting)
    return hash(tuple(found))


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))


def _note(name: Any, value: Any, found: list[Any], waiting: list[nn.Module], levels: int = 2) -> None:
    if isinstance(value, nn.Module):
        waiting.append(value)
    elif isinstance(value, Tensor):
        found.append(value.data_ptr() if value.device.type != "meta" else id(value))
    elif isinstance(value, _PLAIN):
        found.append((name, value))
    elif isinstance(value, dict) and levels:
        for key, each in value.items():
            _note(key, each, found, waiting, levels - 1)
    elif isinstance(value, list | tuple | set) and levels:
        found.append(len(value))
        for each in value:
            _note(name, each, found, waiting, levels - 1)
    elif callable(value) and not _is_indifferent(value):
        found.append(id(value))


_INDIFFERENT = ("hf_speculate", "transformers.utils.output_capturing")


def _is_indifferent(hook: Any) -> bool:
    """Whether a hook is one of this package, or of transformers for collecting outputs. They come and go with requests,
    and graphs do without them, or name what is collected in their key."""
    return (getattr(hook, "__module__", None) or "").startswith(_INDIFFERENT)
