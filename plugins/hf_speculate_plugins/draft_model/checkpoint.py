"""Folders of causal LMs: which of them are draft models, and what they announce before they are made."""

from __future__ import annotations

import math
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_speculate.errors import CheckpointError

from ..checkpoints import ConfigValues, read_config, tensor_shapes


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
    """The causal LM of a folder, Hub id or GGUF file (its weights stay packed): same dtype, same device."""
    if place.endswith(".gguf"):
        from hf_speculate.gguf import load_model as load_packed  # nothing else needs what it imports

        return load_packed(place, dtype=target.dtype, device=target.device)
    loaded: Any = AutoModelForCausalLM.from_pretrained(place, dtype=target.dtype)
    return loaded.to(target.device)


def load_model(folder: str, target: PreTrainedModel) -> PreTrainedModel:
    """The causal LM in `folder` beside the target: same dtype, same device.

    Raises:
        CheckpointError: unreadable, or a config that announces far more than the files hold.
    """
    _check_sizes(folder)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype, trust_remote_code=False)
    except Exception as error:  # configs and files of models are wrong in more ways than transformers has errors
        raise CheckpointError(f"cannot load a draft model from {folder}: {error}") from error
    return loaded.to(target.device)


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
