"""Draft layers kept when a model is saved: transformers writes none of them, and its config still counts them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_speculate.errors import CheckpointError
from hf_speculate.files import json_writer, replace_files, user_path
from hf_speculate.messages import get_logger
from hf_speculate.models import GenerativeModel

from ..checkpoints import read_config, read_weight_map, speculators_section, write_checkpoint
from ..heads import dense_state
from .head import MtpHead
from .layouts import layout_of, speculators_name
from .source import COUNTS, Source, counted, text_config


logger = get_logger(__name__)

SHARD, WEIGHTS, INDEX = "model-mtp.safetensors", "model.safetensors", "model.safetensors.index.json"


def save_pretrained(model: GenerativeModel, folder: str | os.PathLike, **options: Any) -> list[str]:
    """Saves a model as `model.save_pretrained` does, with the draft layers (MTP) of the checkpoint that it is from.

    The draft layers are copied with their own names and types: a fine-tuned or merged model keeps those of its base. If
    the checkpoint has none, only the model is saved, and a warning names the config that counts some.

    Args:
        folder: folder to write.
        options: options of `model.save_pretrained`.

    Returns:
        Names of the tensors that were added.

    Raises:
        ValueError: `push_to_hub`, which would upload the folder before the draft layers are there.
        CheckpointError: the draft layers do not fit the folder. The model has been saved then.
    """
    if options.get("push_to_hub"):
        raise ValueError(
            "push_to_hub uploads before the draft layers are there: save first, then `hf upload` the folder."
        )
    model.save_pretrained(user_path(folder), **options)
    if getattr(model, "peft_config", None) is not None and not (Path(user_path(folder)) / "config.json").exists():
        logger.info(f"{folder} holds an adapter: its base model keeps the draft layers.")
        return []
    try:
        source = Source.of_target(model)
    except CheckpointError as problem:
        if counted(model.config.get_text_config(decoder=True).to_dict()):
            logger.warning(f"the model in {folder} has no draft layers, though its config counts some: {problem}")
        return []
    return keep(source, folder)


def keep(source: Source, folder: str | os.PathLike) -> list[str]:
    """Adds the draft layers of `source` to the saved model in `folder`: one more file of weights, and an index.

    Returns:
        Names of the tensors that were added; empty if the folder has them.

    Raises:
        CheckpointError: the folder has no model in safetensors, or one of another depth or width; or the source is a
            GGUF file.
    """
    if source.gguf is not None:
        raise CheckpointError(
            f"the draft layers in {source.name} are quantised as llama.cpp does: keep those of the original checkpoint."
        )
    path = Path(user_path(folder))
    config = read_config(str(path))
    text = text_config(config)
    depth = text.get("num_hidden_layers")
    if depth != source.num_target_layers:
        raise CheckpointError(
            f"{path} has a config of {depth} layers; the draft layers in {source.name} belong to a model of "
            f"{source.num_target_layers}."
        )
    files = read_weight_map(lambda name: str(path / name) if (path / name).exists() else None)
    if layout_of(files, source.num_target_layers) is not None:
        return []
    add_tensors(path, _copied(source), files)
    stated = {name: source.num_layers for name in COUNTS if text.get(name, source.num_layers) != source.num_layers}
    if stated:
        text |= stated
        replace_files(path, {"config.json": json_writer(config)})
    return sorted(source.files)


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


def add_tensors(folder: Path, tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> None:
    """Writes tensors next to the weights of a model, and the index of all of them.

    Args:
        files: file of each of the model's tensors, by name.
    """
    weights = dict(tensors)
    size = sum(tensor.nbytes for tensor in weights.values())
    size += sum((folder / name).stat().st_size for name in set(files.values()))
    index = {"metadata": {"total_size": size}, "weight_map": {**files, **dict.fromkeys(weights, SHARD)}}

    def write(path: str) -> None:
        save_file(weights, path, metadata={"format": "pt"})

    replace_files(folder, {SHARD: write, INDEX: json_writer(index)})


def _copied(source: Source) -> dict[str, Tensor]:
    """All tensors of the draft layers as they are, copies of the target's own included, whatever their type."""
    found = {}
    for path, names in source.paths().items():
        with safe_open(path, framework="pt") as file:
            opened: Any = file
            found |= {name: opened.get_tensor(name) for name in names}
    return found
