"""CUDA graphs without a GPU: captures that compute.

    replays = stand_in(monkeypatch)                     # on the CPU
    replays = stand_in(monkeypatch, pretended_device)   # there, where everything that CUDA forbids raises

As on a GPU, capturing computes nothing: arguments keep their contents, and results are poisoned until the first replay.
A replay reads what the arguments hold, and overwrites the results of the replay before. All graphs share the memory
in which they compute: a replay poisons what others have left there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hf_speculate.forward import graph
from hf_speculate.graphs import cuda_graphs, graph_runner
from hf_speculate.graphs.cuda_graphs import CudaGraph, tensors_in
from hf_speculate.verification import Sampler

from .pretended_device import TYPE, PretendedDevice


class Replays:
    """The graphs of one test.

    Args:
        device: device that checks what is captured; None is the CPU.

    Attributes:
        names: name of every function that was captured, in order.
        num_replayed: number of replays.
    """

    def __init__(self, device: PretendedDevice | None):
        self._device = device
        self.names: list[str] = []
        self._pool: list[tuple[Any, list[torch.Tensor]]] = []  # results of graphs that lie where they computed
        self.num_replayed = 0

    def capture(
        self, function: Callable[..., Any], arguments: Sequence[Any], _device: torch.device, outputs: Any
    ) -> CudaGraph:
        self.names.append(getattr(function, "__name__", "?"))
        contents = [tensor.clone() for tensor in tensors_in(arguments)]
        with self._capturing():
            results = cuda_graphs.kept(function(*arguments), outputs)
        for tensor, before in zip(tensors_in(arguments), contents, strict=True):
            tensor.copy_(before)
        _poison(tensors_in(results))
        own = {tensor.data_ptr() for tensor in tensors_in(outputs)}
        self._pool.append((results, [tensor for tensor in tensors_in(results) if tensor.data_ptr() not in own]))
        return CudaGraph(lambda: self._replay(function, arguments, results), results)

    def _replay(self, function: Callable[..., Any], arguments: Sequence[Any], results: Any) -> None:
        self.num_replayed += 1
        with nullcontext() if self._device is None else self._device.replaying():
            found = function(*arguments)
            for others, left in self._pool:
                if others is not results:
                    _poison(left)
            for tensor, new in zip(tensors_in(results), tensors_in(found), strict=True):
                tensor.copy_(new)

    def _capturing(self) -> AbstractContextManager[None]:
        return nullcontext() if self._device is None else self._device.capturing()


def _poison(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else -(1 << 30))


def stand_in(monkeypatch: Any, device: PretendedDevice | None = None) -> Replays:
    """Makes functions on the device recordable until the test ends; on a CPU tokens are then chosen as on a GPU."""
    replays, wanted = Replays(device), "cpu" if device is None else TYPE
    monkeypatch.setattr(cuda_graphs, "capture", replays.capture)
    for module in (cuda_graphs, graph_runner, graph):
        monkeypatch.setattr(module, "can_capture", lambda found: found.type == wanted)
    if device is None:
        monkeypatch.setattr(Sampler, "tier", lambda self, _device: self.required_tier)
    return replays
