"""The place of a target's draft layers: its own folder, the Hub's snapshot of the same revision, or another folder.

They are found by the names of tensors, not by the config: configs do not always count them, and still count them after
they were lost. Only the files that hold them are opened, and of a repository only these are downloaded.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils.hub import cached_file

from hf_speculate.errors import CheckpointError, first_line
from hf_speculate.files import read_json, user_path
from hf_speculate.target import GenerativeModel, unwrap

from ..checkpoints import (
    Checkpoint,
    read_config,
    read_named,
    read_weight_map,
    shapes_in,
    variant_name,
    weight_variants,
)
from .layouts import LAYOUTS, Layout, Place, expert_of, layout_of


if TYPE_CHECKING:
    from hf_speculate_gguf import GgufFile


# File that a saved model's draft layers are added in.
SHARD = "model-mtp.safetensors"
# Keys of configs that count draft layers.
COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")


@dataclass(frozen=True)
class Source:
    """The draft layers of a checkpoint, found but not read.

    Attributes:
        name: folder, Hub id or GGUF file.
        layout: naming of their tensors.
        files: path of the file that holds each of their tensors, by name.
        places: place of each tensor, by name.
        num_layers: number of draft layers.
        num_target_layers: number of decoder layers of the target.
        hub: options of the download, with `huggingface_hub`'s meaning.
        gguf: header of a GGUF file.
    """

    name: str
    layout: Layout
    files: Mapping[str, str]
    places: Mapping[str, Place]
    num_layers: int
    num_target_layers: int
    hub: Mapping[str, Any] = field(default_factory=dict)
    gguf: GgufFile | None = None

    @classmethod
    def of_target(cls, target: GenerativeModel) -> Source:
        """The draft layers of a loaded target, from where it was loaded; an adapter's target is its base model.

        Raises:
            CheckpointError: the target does not know where it is from, or that place has no draft layers.
        """
        target = unwrap(target)
        name = getattr(target, "name_or_path", "") or getattr(target.config, "_name_or_path", "")
        if not name:
            raise CheckpointError(
                f"this {type(target).__name__} does not know where it was loaded from, so its draft layers cannot be "
                "found: give their folder or Hub id, mtp:head=FOLDER."
            )
        return cls.find(name, num_layers_of(target), revision=getattr(target.config, "_commit_hash", None))

    @classmethod
    def find(cls, name_or_path: str | os.PathLike, num_target_layers: int, **hub: Any) -> Source:
        """The draft layers in a folder, Hub repository or GGUF file.

        Args:
            num_target_layers: number of decoder layers of the target.
            hub: options of the download, with `huggingface_hub`'s meaning.
        Raises:
            CheckpointError: it cannot be read, or has no draft layers.
        """
        name, gguf, num_tensors = user_path(name_or_path), None, 0
        try:
            if name.endswith(".gguf"):
                from .gguf_files import opened  # and the package for packed targets

                gguf = opened(name, num_target_layers)
            for files in _weight_maps(name, hub) if gguf is None else [dict.fromkeys(gguf.tensors, name)]:
                if (naming := layout_of(files, num_target_layers)) is not None:
                    break
                num_tensors = num_tensors or len(files)
            else:
                config = None if gguf else _file(name, "config.json", hub)
                raise CheckpointError(_without_layers(name, num_tensors, config))
        except OSError as error:
            where = repr(name) if os.path.exists(name) else f"{name!r}, which is not in {os.getcwd()}"
            raise CheckpointError(f"cannot look for draft layers in {where}: {first_line(error)}") from error
        layout, places = naming
        numbers = {place.layer for place in places.values() if place.layer is not None}
        if numbers != set(range(len(numbers))):
            raise CheckpointError(f"{name}: draft layers {sorted(numbers)} of {layout.name} names: some are missing.")
        of_layers = {tensor_name: files[tensor_name] for tensor_name in places}
        return cls(name, layout, of_layers, places, len(numbers), num_target_layers, hub, gguf)

    def paths(self) -> dict[str, list[str]]:
        """The names of tensors to read, by the path of the file that holds them."""
        names_by_path: defaultdict[str, list[str]] = defaultdict(list)
        for name, file in self.files.items():
            path = _file(self.name, file, self.hub)
            if path is None:
                raise CheckpointError(f"{self.name}: its index names the file {file!r}, which is not there.")
            names_by_path[path].append(name)
        return dict(names_by_path)

    def read(self, layer: int = 0) -> tuple[Checkpoint, Sequence[str]]:
        """The tensors of one draft layer under the names of this package, experts stacked, and those left out.

        Matrices that a GGUF file has in blocks are in `Checkpoint.packed`, too.

        Raises:
            CheckpointError: unreadable files, NaN, or experts that are missing.
        """
        wanted = [name for name in self.files if self._is_wanted(name, layer)]
        stored, in_blocks = self._read(wanted)
        tensors = {self.places[name].name: tensor for name, tensor in stored.items()}
        packed = {self.places[name].name: matrix for name, matrix in in_blocks.items()}
        config = read_config(self.name) if os.path.isdir(self.name) else {}
        files = sorted(set(self.files.values()))
        left_out = [name for name in self.files if name not in wanted]
        return Checkpoint(self.name, config, _stacked(tensors, self.name), files, packed), left_out

    def _read(self, names: Collection[str]) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
        """Tensors by their names in the files, and those matrices that a GGUF file has in blocks."""
        if self.gguf is not None:
            from .gguf_files import read_tensors  # and the package for packed targets

            return read_tensors(self.gguf, names)
        tensors: dict[str, Tensor] = {}
        for path, held in self.paths().items():  # other files may have tensors of the same names
            tensors |= read_named(path, [name for name in held if name in names])
        return tensors, {}

    def _is_wanted(self, name: str, layer: int) -> bool:
        place = self.places[name]
        return not place.is_copy and place.layer in (None, layer)


def num_layers_of(target: GenerativeModel) -> int:
    """Number of decoder layers of a target."""
    return target.config.get_text_config(decoder=True).num_hidden_layers


def counted(text: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of draft layers that a text model's config states, by key."""
    return {key: text[key] for key in COUNTS if text.get(key)}


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a `config.json` that describes the text model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _without_layers(name: str, num_tensors: int, config: str | None) -> str:
    """The message for a checkpoint without draft layers: what its config states, and where they would be."""
    text = text_config(read_json(config) if config else {})
    stated = ", ".join(f"{key}={number}" for key, number in counted(text).items())
    lost = f", though its config.json states {stated}: they were lost when it was saved" if stated else ""
    examples = ", ".join(f"{layout.example} ({layout.name})" for layout in LAYOUTS)
    return (
        f"{name} holds no draft layers (MTP) among its {num_tensors} tensors{lost}. Their names would be {examples}. "
        "If another checkpoint of this model has them: mtp:head=FOLDER_OR_HUB_ID."
    )


def _weight_maps(name: str, hub: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """The file of each tensor, by name: of the model, then of its variants, then of files of draft layers alone.

    The latter lie where stock saved a model again, with an index that does not list them.
    """
    variants = weight_variants(name) or [None]
    for variant in variants:
        yield read_weight_map(lambda file: _file(name, file, hub), name, variant)
    for file in (variant_name(SHARD, variant) for variant in variants):
        path = os.path.join(name, file)
        if os.path.isfile(path):
            yield dict.fromkeys(shapes_in(path), file)


def _file(place: str, file: str, hub: Mapping[str, Any]) -> str | None:
    return cached_file(place, file, _raise_exceptions_for_missing_entries=False, **hub)


def _stacked(tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """The tensors with one tensor for all experts, as transformers' modules have them: `gate_up_proj` [E, 2I, H] and
    `down_proj` [E, H, I]."""
    experts: defaultdict[str, dict[tuple[int, str], Tensor]] = defaultdict(dict)
    stacked = {}
    for name, tensor in tensors.items():
        if (expert := expert_of(name)) is None:
            stacked[name] = tensor
        else:
            experts[expert[0]][expert[1:]] = tensor
    for module, parts in experts.items():
        count = -(-len(parts) // 3)
        missing = [f"{n}.{p}_proj" for n in range(count) for p in ("gate", "up", "down") if (n, p) not in parts]
        if missing or len(parts) != 3 * count:
            raise CheckpointError(f"{where}: {module} lacks {', '.join(missing[:4]) or 'parts of an expert'}.")
        both = [torch.cat([parts[number, "gate"], parts[number, "up"]]) for number in range(count)]
        stacked[f"{module}.gate_up_proj"] = torch.stack(both)
        stacked[f"{module}.down_proj"] = torch.stack([parts[number, "down"] for number in range(count)])
    return stacked
