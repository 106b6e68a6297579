"""Folders of causal LMs: which of them are draft models, and what they announce before they are made."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_speculate.errors import CheckpointError
from hf_speculate.hub import local_folder

from ..checkpoints import ConfigValues, listed, read_config, tensor_shapes


# Beside the weights of a model that can be used alone.
TOKENIZER_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


_SIZES = ("num_hidden_layers", "vocab_size", "intermediate_size", "hidden_size")
_MAX_PACKED = 32
_HEAD_TENSORS = ("fc.", "fusion_fc.", "midlayer.", "medusa_head.", "hidden_norm.")


def holds_model(folder: str) -> bool:
    """Whether the config in `folder` names a causal LM, and its tensors are no heads of another method."""
    config = read_config(folder)
    names = ConfigValues(folder, config).texts("architectures")
    is_head = any(key in config for key in ("draft_vocab_size", "medusa_num_heads", "speculators_model_type"))
    if is_head or "model_type" not in config or not any(n.endswith("ForCausalLM") for n in names):
        return False
    # EAGLE-1 heads have the config of a Llama of one layer: only their tensors tell.
    return not any(name.startswith(_HEAD_TENSORS) for name in tensor_shapes(folder))


def load_beside(place: str, target: PreTrainedModel) -> PreTrainedModel:
    """The causal LM of a folder, Hub id or GGUF file (its weights stay packed) beside the target, see `load_model`."""
    if place.endswith(".gguf"):
        from hf_speculate.gguf import load_model as load_packed  # nothing else needs what it imports

        return load_packed(place, dtype=target.dtype, device=target.device)
    return load_model(local_folder(place), target)


def load_model(folder: str, target: PreTrainedModel) -> PreTrainedModel:
    """The causal LM in `folder` beside the target: same dtype, same device.

    Raises:
        CheckpointError: unreadable, or a config that announces far more than the files hold.
    """
    _check_sizes(folder)
    try:
        _check_shapes(folder)
        loading: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=target.dtype, trust_remote_code=False, output_loading_info=True
        )
        loaded, found = loading
    except CheckpointError:
        raise
    except Exception as error:  # configs and files of models are wrong in more ways than transformers has errors
        raise CheckpointError(f"cannot load a draft model from {folder}: {error}") from error
    if missing := sorted(found["missing_keys"]):  # transformers would draft with random ones
        raise CheckpointError(f"{folder}: config.json announces weights that the files lack: {listed(missing, 4)}.")
    return loaded.to(target.device)


def _check_shapes(folder: str) -> None:
    """Raises `CheckpointError` where weights have other shapes than the config gives them; packed ones aside."""
    if "quantization_config" in read_config(folder):
        return
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        announced = AutoModelForCausalLM.from_config(config, trust_remote_code=False).state_dict()
    for name, shape in tensor_shapes(folder, strip=()).items():
        if name in announced and (wanted := tuple(announced[name].shape)) != shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {shape}, by config.json it has {wanted}: they do not belong together, or "
                "one of them was changed."
            )


def _check_sizes(folder: str) -> None:
    """Raises `CheckpointError` for a config that announces far more than the files hold: it would be made first."""
    shapes, config = tensor_shapes(folder), read_config(folder)
    nested = config.get("text_config")
    values = nested if isinstance(nested, dict) else config
    sizes = {name: size for name in _SIZES if isinstance(size := values.get(name), int)}
    # Weights of a few bits are packed, several in one value.
    most = _MAX_PACKED * sum(math.prod(shape) for shape in shapes.values())
    products = [("num_hidden_layers", sizes.get("num_hidden_layers", 0), len(shapes))]
    products += [(name, sizes.get(name, 0) * sizes.get("hidden_size", 1), most) for name in _SIZES[1:3]]
    for name, announced, stored in products:
        if shapes and announced > stored:
            raise CheckpointError(
                f"{folder}: {name} in config.json is {sizes[name]}, of which the {len(shapes)} tensors there do not "
                "hold the weights."
            )
