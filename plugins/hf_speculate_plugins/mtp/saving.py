"""Draft layers kept when a model is saved: transformers writes none of them, and its config still counts them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_speculate.errors import CheckpointError, first_line
from hf_speculate.files import Writer, file_names, json_writer, replace_files, replacing, user_path
from hf_speculate.messages import get_logger
from hf_speculate.target import GenerativeModel

from ..checkpoints import (
    read_config,
    read_weight_map,
    speculators_section,
    variant_name,
    weight_variants,
    write_checkpoint,
)
from ..heads import dense_state
from .head import MtpHead
from .layouts import layout_of, speculators_name
from .source import COUNTS, SHARD, Source, counted, text_config


logger = get_logger(__name__)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_CARD = "README.md"
# Keys of text models' configs that are equal where draft layers of one fit the other.
_SHAPE = ("model_type", "hidden_size", "num_hidden_layers")
# Options of transformers that cannot be followed -> the reason, and what to do.
_REFUSED = {
    "push_to_hub": "uploads before the draft layers are there: save first, then `hf upload` the folder.",
    "distributed_checkpoint": "writes the parts of all processes, to resume training: call model.save_pretrained.",
}


def save_pretrained(model: GenerativeModel, folder: str | os.PathLike, **options: Any) -> list[str]:
    """Saves a model as `model.save_pretrained` does, with the draft layers (MTP) of the checkpoint that it is from.

    The draft layers are copied with their own names and types: a fine-tuned or merged model keeps those of its base. If
    the checkpoint has none, the model keeps those that `folder` held for a model of the same shape. If there are none
    either, only the model is saved, and a warning names the config that counts some.

    The folder may be the one that the model is from. New files replace old ones when all of them are on the disk, so
    there must be room for both. If saving fails or is interrupted, the folder is as it was.

    Args:
        folder: folder to write.
        options: options of `model.save_pretrained`, but for `push_to_hub` and `distributed_checkpoint`. A process that
            writes nothing, such as one with `is_main_process=False`, may return before the files have their names.

    Returns:
        Names of the tensors that were added.

    Raises:
        ValueError: an option that cannot be followed. Nothing was written.
        CheckpointError: the folder cannot be written, and is as it was; or the draft layers cannot be read. Then the
            model has been saved without them, unless `folder` holds them.
    """
    for option, advice in _REFUSED.items():
        if options.get(option):
            raise ValueError(f"{option}={options[option]!r} {advice}")
    place, problem = Path(user_path(folder)), None
    added: list[str] = []
    with replacing(place, "config.json") as new:
        _save(model, place, new.scratch, options)
        if weight_variants(new.scratch):  # else an adapter, or a process that writes nothing
            new.stale.extend(_stale(place, new.scratch))
            added, problem = _add_layers(model, place, new.scratch)
    if problem is not None:
        raise CheckpointError(f"the model is saved in {place}, without its draft layers: {problem}") from problem
    return added


def keep(source: Source, folder: str | os.PathLike) -> list[str]:
    """Adds the draft layers of `source` to the saved model in `folder`: one more file of weights, and an index.

    Returns:
        Names of the tensors that were added; empty if the folder has them.

    Raises:
        CheckpointError: the folder has no model in safetensors, or one of another depth; or the source is a GGUF file.
            Nothing was written.
    """
    _check_copyable(source)
    path = Path(user_path(folder))
    depth = text_config(read_config(str(path))).get("num_hidden_layers")
    if depth != source.num_target_layers:
        raise CheckpointError(
            f"{path} has a config of {depth} layers; the draft layers in {source.name} belong to a model of "
            f"{source.num_target_layers}."
        )
    if _has_layers(path, source):
        return []
    tensors = _copied(source)
    replace_files(path, _additions(path, source, tensors))
    return sorted(tensors)


def _save(model: GenerativeModel, folder: Path, scratch: Path, options: Mapping[str, Any]) -> None:
    """Saves a model as transformers does, to a scratch folder."""
    with _reported(folder):
        if (folder / _CARD).is_file():  # PEFT adds to it
            shutil.copyfile(folder / _CARD, scratch / _CARD)
        model.save_pretrained(str(scratch), **options)
    if getattr(model, "peft_config", None) is not None and not weight_variants(scratch):
        logger.info(f"{folder} holds an adapter: its base model keeps the draft layers.")


def _add_layers(model: GenerativeModel, folder: Path, scratch: Path) -> tuple[list[str], CheckpointError | None]:
    """Adds draft layers to the model in a scratch folder.

    Returns:
        Names of the added tensors, and the error if draft layers were found but cannot be read.
    Raises:
        CheckpointError: they cannot be written; or they cannot be read, and the model would overwrite them.
    """
    source = _source_of(model, folder)
    if source is None or _has_layers(scratch, source):
        return [], None
    try:
        tensors = _copied(source)
    except CheckpointError as error:
        if os.path.realpath(source.name) == os.path.realpath(folder):
            raise CheckpointError(f"{error} The model would overwrite them: save it to another folder.") from error
        return [], error
    with _reported(folder):
        for name, write in _additions(scratch, source, tensors).items():
            write(str(scratch / name))
    return sorted(tensors), None


def _source_of(model: GenerativeModel, folder: Path) -> Source | None:
    """The draft layers of a model's checkpoint, else those that a folder has for a model of the same shape."""
    try:
        return Source.of_target(model)
    except CheckpointError as problem:
        config = model.config.get_text_config(decoder=True).to_dict()
        with suppress(CheckpointError):
            there = text_config(read_config(str(folder)))
            if there and all(there.get(key) == config.get(key) for key in _SHAPE):
                return Source.find(folder, config["num_hidden_layers"])
        if counted(config):
            logger.warning(f"the model in {folder} has no draft layers, though its config counts some: {problem}")
        return None


@contextmanager
def _reported(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the model to {folder}: {first_line(error)}. Nothing that was there before is lost."
        ) from error


def _stale(folder: Path, scratch: Path) -> list[str]:
    """Files of an earlier save that readers would take instead of the new ones: the same weights in other shards."""
    stale_names = []
    for variant in weight_variants(scratch):
        weights, index = variant_name(WEIGHTS, variant), variant_name(INDEX, variant)
        shard = re.compile(re.escape(weights.removesuffix(".safetensors")) + r"-\d{5}-of-\d{5}\.safetensors")
        stale_names += [name for name in file_names(folder) if name in (weights, index) or shard.fullmatch(name)]
    return stale_names


def write_head(
    folder: str | os.PathLike, head: MtpHead, target_config: Any, target_name: str | None, architectures: list[str]
) -> None:
    """Writes a draft layer alone, in the layout of vllm-project/speculators, which vLLM serves.

    Args:
        target_config: config of the target's text model, which describes the layer.

    Raises:
        CheckpointError: the layout cannot express the head.
    """
    if head.spec.hidden_first or head.spec.zeroes_first:
        raise CheckpointError(f"the speculators layout cannot express {head.spec.dialect}'s order of inputs.")
    state = dense_state(head, head.dtype)
    tensors = {speculators_name(name): tensor for name, tensor in state.items()}
    config = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": "0.9.0",
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "transformer_layer_config": target_config.to_dict(),
        "speculators_config": speculators_section("mtp", 3, target_name, architectures),
    }
    write_checkpoint(folder, WEIGHTS, tensors, config)


def _has_layers(folder: Path, source: Source) -> bool:
    return layout_of(_weight_map(folder)[1], source.num_target_layers) is not None


def _weight_map(folder: Path) -> tuple[str | None, dict[str, str]]:
    """The variant of a saved model's weights, and the file of each of its tensors."""
    variant, *_ = weight_variants(folder) or [None]
    return variant, read_weight_map(
        lambda name: str(folder / name) if (folder / name).exists() else None, folder, variant
    )


def _additions(folder: Path, source: Source, tensors: Mapping[str, Tensor]) -> dict[str, Writer]:
    """Writers of what makes draft layers part of a saved model: their file, the index, a config that counts them."""
    variant, files = _weight_map(folder)
    config = read_config(str(folder))
    text = text_config(config)
    stated = {name: source.num_layers for name in COUNTS if text.get(name, source.num_layers) != source.num_layers}
    text |= stated
    counting = {"config.json": json_writer(config)} if stated else {}
    return indexed(folder, tensors, files, variant) | counting


def indexed(
    folder: Path, tensors: Mapping[str, Tensor], files: Mapping[str, str], variant: str | None = None
) -> dict[str, Writer]:
    """Writers of tensors next to the weights of a model, and of the index of all of them.

    Args:
        folder: folder of the model.
        files: file of each of the model's tensors, by name.
        variant: variant of the weights, as transformers names it.
    """
    weights, shard = dict(tensors), variant_name(SHARD, variant)
    size = sum(tensor.nbytes for tensor in weights.values())
    size += sum((folder / name).stat().st_size for name in set(files.values()))
    index = {"metadata": {"total_size": size}, "weight_map": {**files, **dict.fromkeys(weights, shard)}}

    def write(path: str) -> None:
        save_file(weights, path, metadata={"format": "pt"})

    return {shard: write, variant_name(INDEX, variant): json_writer(index)}


def _check_copyable(source: Source) -> None:
    """Raises `CheckpointError` for the draft layers of a GGUF file."""
    if source.gguf is not None:
        raise CheckpointError(
            f"the draft layers in {source.name} are quantised as llama.cpp does: keep those of the original checkpoint."
        )


def _copied(source: Source) -> dict[str, Tensor]:
    """All tensors of the draft layers as they are, copies of the target's own included, whatever their type.

    They may be mapped from their files.

    Raises:
        CheckpointError: the source is a GGUF file, or cannot be read.
    """
    _check_copyable(source)
    tensors = {}
    for path, names in source.paths().items():
        try:
            with safe_open(path, framework="pt") as file:
                opened: Any = file
                tensors |= {name: opened.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {path}, it may be truncated: {first_line(error)}.") from error
    return tensors
