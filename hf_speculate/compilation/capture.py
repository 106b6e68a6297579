"""CUDA graphs of compiled forwards: launched as one, not kernel by kernel.

Every graph that dynamo compiles for a GPU is recorded at its second call and replayed from then on. Once a request
dynamo checks all that the graph depends on, adapters, hooks and flags of the model (`shortcuts`), and every call hands
over the tensors that it reads, weights included: where one of them lies elsewhere than when it was recorded, the graph
is recorded anew.
Unlike the graphs of inductor (`mode="reduce-overhead"`), which belong to the thread that made them, these can be
replayed from any thread.
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


logger = get_logger(__name__)

# What these make launches the same kernels at every call, and holds no CUDA graphs of its own.
CAPTURABLE = ("inductor", "eager", "aot_eager")
MAX_RECORDINGS = 8
"""Of one compiled function, each for other addresses; buffers go from request to request, so there are few."""

Run = Callable[..., Sequence[Any]]


def is_capturable(device: torch.device, backend: str) -> bool:
    """Whether what `backend` makes for `device` is recorded."""
    return device.type == "cuda" and backend in CAPTURABLE


def capturing(backend: str) -> Any:
    """A backend of `torch.compile` that does what `backend` does, and records it."""
    compile_graph = lookup_backend(backend)

    def compile_and_capture(graph_module: Any, example_inputs: list[Tensor]) -> Run:
        return Recorder(compile_graph(graph_module, example_inputs))

    return compile_and_capture


class Recorder:
    """A function of tensors that is recorded as a CUDA graph for every set of addresses that it is called with.

    What it returns are copies: the next replay overwrites the originals. Where recording fails, it runs as it is.

    Args:
        run: launches the same kernels at every call, and modifies its inputs in place at most.

    Class attributes:
        num_recorded: graphs recorded so far, by all.
    """

    num_recorded: ClassVar[int] = 0

    def __init__(self, run: Run):
        self._run = run
        self._is_warm, self._cannot_record = False, False
        self._recordings: dict[tuple[Any, ...], tuple[Callable[[], None], Sequence[Any]]] = {}
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        if not self._is_warm or self._cannot_record:
            self._is_warm = True  # kernels are compiled and libraries have their workspaces
            return self._run(*inputs)
        # Inputs of the same addresses are the same inputs: whatever else there was before is gone.
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


def record(run: Run, inputs: Sequence[Any]) -> tuple[Callable[[], None], Sequence[Any]]:
    """Records `run(*inputs)`, computing nothing yet; returns what replays it, and the outputs that replays write."""
    graph, device = torch.cuda.CUDAGraph(), next(each.device for each in inputs if isinstance(each, Tensor))
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = run(*inputs)
    return graph.replay, outputs
