"""An account of every key of a checkpoint: taken, shared or ignored with a reason, or the load fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_speculate.errors import CheckpointError
from hf_speculate.files import listed

from .files import ID_TYPES, WEIGHT_TYPES, Checkpoint


@dataclass(frozen=True)
class LoadReport:
    """Account of every key of a checkpoint.

    Attributes:
        source: folder and layout, for people.
        used: names that became weights of the drafter.
        shared: reasons why the target's own tensor serves instead, by name.
        ignored: reasons why a tensor is not needed, by name.
        missing: replacements of tensors that the layout allows to be absent, by name.
    """

    source: str
    used: tuple[str, ...] = ()
    shared: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.source}: {len(self.used)} tensors used"]
        for title in ("shared", "ignored", "missing"):
            lines += [f"  {title}: {name} ({reason})" for name, reason in getattr(self, title).items()]
        return "\n".join(lines)


class KeyAccount:
    """The account of one load: every tensor is taken, shared or ignored with a reason, or the load fails.

        keys = KeyAccount(checkpoint, "EAGLE-3, SafeAILab layout")
        weight = keys.take("fc.weight", (hidden, None))       # None: any size
        bias = keys.optional("fc.bias", (hidden,))
        keys.share("embed_tokens.weight", "equal to the target's")
        report = keys.finish()

    Problems are collected: `take` of a missing or misshapen tensor returns a placeholder on the meta device and
    `finish` raises one `CheckpointError` that names all of them.
    """

    def __init__(self, checkpoint: Checkpoint, layout: str):
        self._tensors = checkpoint.tensors
        self._source = f"{checkpoint.folder} ({layout})"
        self._used: list[str] = []
        self._shared: dict[str, str] = {}
        self._ignored: dict[str, str] = {}
        self._absent: dict[str, str] = {}
        self._missing: list[str] = []
        self._misshapen: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: Sequence[int | None]) -> Tensor:
        """The weights called `name`, which must be there with this shape (None: any size in that dimension)."""
        return self._take(name, shape, WEIGHT_TYPES)

    def optional(self, name: str, shape: Sequence[int | None]) -> Tensor | None:
        """The result of `take`, or None if the tensor is absent."""
        return self.take(name, shape) if name in self else None

    def optional_ids(self, name: str, shape: Sequence[int | None]) -> Tensor | None:
        """The result of `optional` for integers or truth values."""
        return self._take(name, shape, ID_TYPES) if name in self else None

    def _take(self, name: str, shape: Sequence[int | None], types: Sequence[torch.dtype]) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            self._missing.append(name)
            return _placeholder(shape)
        self._used.append(name)
        if tensor.dtype not in types:
            self._misshapen.append(f"{name} is of {tensor.dtype}, expected {' or '.join(map(str, types))}")
        elif not _fits(tensor, shape):
            wanted = tuple("any" if size is None else size for size in shape)
            self._misshapen.append(f"{name} has shape {tuple(tensor.shape)}, expected {wanted}")
        else:
            return tensor
        return _placeholder(shape)

    def share(self, name: str, reason: str) -> None:
        """Notes that the target's own tensor is used instead of `name`, which may be absent."""
        self._shared[name] = reason

    def ignore(self, name: str, reason: str) -> None:
        """Notes that `name` is known and not needed; nothing happens if it is absent."""
        if name in self:
            self._ignored[name] = reason

    def absent(self, name: str, reason: str) -> None:
        """Notes that `name` is not in the file, and its replacement (an entry of the report, not an error)."""
        self._absent[name] = reason

    def check(self) -> None:
        """Raises `CheckpointError` if anything that was taken is missing or misshapen: call it before computing."""
        self._raise(("missing", self._missing), ("wrong", self._misshapen))

    def finish(self) -> LoadReport:
        """The report; raises `CheckpointError` naming every missing, misshapen and unknown tensor."""
        known = {*self._used, *self._shared, *self._ignored}
        unknown = [name for name in self._tensors if name not in known]
        self._raise(("missing", self._missing), ("wrong", self._misshapen), ("unknown", unknown))
        return LoadReport(self._source, tuple(self._used), self._shared, self._ignored, self._absent)

    def _raise(self, *groups: tuple[str, list[str]]) -> None:
        problems = [f"{title}: {listed(names)}" for title, names in groups if names]
        if problems:
            raise CheckpointError(f"{self._source} does not have the tensors of that layout. {'; '.join(problems)}.")


def num_indexed(where: str, what: str, indices: Iterable[str], limit: int) -> int:
    """One more than the largest index in the names of tensors: a gap is a missing tensor, not a smaller head.

    Raises:
        CheckpointError: an index beyond the limit, before anything is made in that number.
    """
    largest = max(indices, key=lambda digits: (len(digits), digits), default="0")
    if len(largest) > len(str(limit)) or int(largest) >= limit:
        shown = largest if len(largest) < 20 else f"a number of {len(largest)} digits"
        raise CheckpointError(f"{where}: {what} {shown} is named; there can be {limit}, counted from 0.")
    return 1 + int(largest)


def _placeholder(shape: Sequence[int | None]) -> Tensor:
    return torch.empty([size or 0 for size in shape], device="meta", dtype=torch.float32)


def _fits(tensor: Tensor, shape: Sequence[int | None]) -> bool:
    return tensor.dim() == len(shape) and all(w is None or w == s for w, s in zip(shape, tensor.shape, strict=True))
