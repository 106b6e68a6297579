"""A frozen target whose layers are shared out among the processes that train together (FSDP2, `fully_shard`).

Every process has a part of each layer, and gathers the layer when it is run. Embeddings, the last norm and the output
matrix stay whole: heads and losses read them by rows. All processes have to run the target the same number of times.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_speculate.errors import SpeculateError
from hf_speculate.models import unwrap

from .options import TargetSection


def check_sharding(section: TargetSection) -> None:
    """Raises `SpeculateError` where a target cannot be sharded, or there is nobody to share it with."""
    given = {
        "quantization": section.quantization,
        "gguf_file": section.gguf_file or (section.path.endswith(".gguf") or None),
        "adapter": section.adapter,
        "device_map": section.device_map,
    }
    if others := [name for name, value in given.items() if value is not None]:
        raise SpeculateError(
            f"target.shard does not go with target.{others[0]}: parts of layers are of plain weights. Possible: "
            "shard: false (each process then holds all of the target), or leave the other out."
        )
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        raise SpeculateError(
            "target.shard shares the target out among processes, and there is one. Possible: accelerate launch "
            "--num_processes N -m hf_speculate_training train ..., or target.device_map=auto."
        )


@contextmanager
def in_turn() -> Iterator[None]:
    """One process after the other: only one at a time holds the whole target."""
    rank, count = distributed.get_rank(), distributed.get_world_size()
    for _ in range(rank):
        distributed.barrier()
    try:
        yield
    finally:
        for _ in range(count - rank):
            distributed.barrier()


def shard_layers(target: nn.Module, mesh: Any) -> None:
    """Keeps this process' part of every layer, on the device of `mesh`; the rest of the target goes there whole."""
    model = unwrap(target)
    decoder: Any = model.get_decoder()
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh)
    whole = {parameter for parameter in decoder.parameters() if not isinstance(parameter, DTensor)}
    kind = type(decoder)
    fully_shard(decoder, mesh=mesh, ignored_params=whole)  # one root: the next layer is gathered while one runs
    decoder.__class__ = kind  # transformers finds by it which outputs are hidden states; the root works by hooks
    model.to(mesh.device_type)


def mesh_of_processes(device: torch.device) -> Any:
    """All processes, in one line; a collective call."""
    return init_device_mesh(device.type, (distributed.get_world_size(),))


def is_sharded(target: nn.Module) -> bool:
    """Whether parts of the target are with other processes."""
    return any(isinstance(parameter, DTensor) for parameter in target.parameters())
