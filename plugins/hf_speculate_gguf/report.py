"""The bytes that the weights of a model from a GGUF file take in memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn

from .native import FORMATS, PackedEmbedding, PackedMatrix


@dataclass(frozen=True)
class PackingReport:
    """Bytes of a model's weights by block type and backend.

    Attributes:
        in_file: bytes of packed matrices in the file, by (type, backend); the backend of embeddings is "rows".
        in_memory: bytes of the same matrices in memory.
        dense: bytes of everything else (norms, biases, matrices that are not packed).
    """

    in_file: dict[tuple[str, str], int]
    in_memory: dict[tuple[str, str], int]
    dense: int

    @property
    def resident(self) -> int:
        """Bytes of all weights in memory."""
        return sum(self.in_memory.values()) + self.dense

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(sorted({backend for _, backend in self.in_memory}))

    def __str__(self) -> str:
        lines = [
            f"{kind} ({backend}): {self.in_file[kind, backend] / 1e6:.1f} MB in the file, {size / 1e6:.1f} MB in memory"
            for (kind, backend), size in sorted(self.in_memory.items())
        ]
        total = f"{self.resident / 1e6:.1f} MB of weights in memory"
        return "\n".join([*lines, f"not packed: {self.dense / 1e6:.1f} MB", total])


def packing_report(model: nn.Module) -> PackingReport:
    """The report on a model from `load_gguf`; in any other model everything is dense."""
    in_file: Counter[tuple[str, str]] = Counter()
    in_memory: Counter[tuple[str, str]] = Counter()
    packed: set[int] = set()
    for module in model.modules():
        if not isinstance(module, PackedMatrix | PackedEmbedding):
            continue
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        new = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.data_ptr() not in packed}
        packed |= set(new)
        key = module.block_type, module.backend.name if isinstance(module, PackedMatrix) else "rows"
        block_format = FORMATS[module.block_type]
        in_file[key] += module.num_weights // block_format.block_size * block_format.block_bytes
        in_memory[key] += sum(new.values())
    dense = {
        tensor.data_ptr(): tensor.nbytes
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.data_ptr() not in packed
    }
    return PackingReport(dict(in_file), {key: in_memory[key] for key in in_file}, sum(dense.values()))
