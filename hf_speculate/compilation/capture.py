"""CUDA graphs of compiled forwards: all kernels are launched at once.

Every graph that dynamo compiles for a GPU is recorded at its second call and replayed from then on. Once a request
dynamo checks everything that the graph depends on: adapters, hooks and flags of the model (`shortcuts`). Every call
passes the tensors that it reads, weights included. If one of them has another address than when it was recorded, the
graph is recorded again.

Inductor's own graphs (`mode="reduce-overhead"`) belong to the thread that made them. These can be replayed from any
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend

from ..errors import first_line
from ..messages import get_logger
from .shortcuts import GraphFunction


logger = get_logger(__name__)

# Backends whose output launches the same kernels at every call and has no CUDA graphs of its own.
CAPTURABLE = ("inductor", "eager", "aot_eager")
MAX_RECORDINGS = 8
"""Largest number of recordings of one compiled function, each for other addresses. Buffers are reused, so there are
few."""


def is_capturable(device: torch.device, backend: str) -> bool:
    """Whether graphs of `backend` on `device` are recorded."""
    return device.type == "cuda" and backend in CAPTURABLE


def capturing(backend: str) -> Any:
    """A backend of `torch.compile` that compiles as `backend` does and records the result."""
    compile_graph = lookup_backend(backend)

    def compile_and_capture(graph_module: Any, example_inputs: list[Tensor]) -> GraphFunction:
        return Recorder(compile_graph(graph_module, example_inputs))

    return compile_and_capture


class Recorder:
    """A function of tensors that is recorded as a CUDA graph for each set of addresses that it is called with.

    It returns copies, because the next replay overwrites the originals. If recording fails, the function runs as it is.

    Args:
        run: function that launches the same kernels at every call. It may change its inputs in place, but nothing else.

    Class attributes:
        num_recorded: number of graphs recorded so far, by all recorders.
    """

    num_recorded: ClassVar[int] = 0

    def __init__(self, run: GraphFunction):
        self._run = run
        self._is_warm, self._cannot_record = False, False
        self._recordings: dict[tuple[Any, ...], tuple[Callable[[], None], Sequence[Any]]] = {}
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        if not self._is_warm or self._cannot_record:
            self._is_warm = True  # after this call kernels are compiled and libraries have their workspaces
            return self._run(*inputs)
        # Tensors at the same addresses are the same inputs: earlier ones there no longer exist.
        key = tuple(each.data_ptr() if isinstance(each, Tensor) else each for each in inputs)
        with self._lock:
            try:
                replay, outputs = self._recordings.get(key) or self._recorded(key, inputs)
            except RuntimeError as error:
                self._cannot_record = True
                logger.warning(f"no CUDA graphs: {first_line(error)}")
                return self._run(*inputs)
            replay()
            return [each.clone() if isinstance(each, Tensor) else each for each in outputs]

    def _recorded(self, key: tuple[Any, ...], inputs: Sequence[Any]) -> tuple[Callable[[], None], Sequence[Any]]:
        if len(self._recordings) == MAX_RECORDINGS:
            self._recordings.pop(next(iter(self._recordings)))
        self._recordings[key] = record(self._run, inputs)
        Recorder.num_recorded += 1
        return self._recordings[key]


def record(run: GraphFunction, inputs: Sequence[Any]) -> tuple[Callable[[], None], Sequence[Any]]:
    """Records `run(*inputs)` without computing it. Returns the function that replays it, and the outputs that a replay
    writes."""
    graph, device = torch.cuda.CUDAGraph(), next(each.device for each in inputs if isinstance(each, Tensor))
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = run(*inputs)
    return graph.replay, outputs
