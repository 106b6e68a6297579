"""Draft heads in llama.cpp's files: one GGUF file holds tensors, sizes, and the tokenizer of the target.

Sources: llama.cpp's converter and loader of the architectures "eagle3" and "dflash" (October 2026, b11434). A file
becomes tensors under the names of our modules and a flat config, and back. Rows of queries and keys that llama.cpp
keeps in pairs are put in order, and `d2t` of target ids becomes `d2t` of offsets. The methods decide which heads
llama.cpp can run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_speculate.errors import CheckpointError
from hf_speculate.files import replace_files
from hf_speculate_gguf import (
    LLAMA_LAYER,
    ROPE_FACTORS,
    GgufFile,
    Matrix,
    Metadata,
    TensorRows,
    check_vocabulary,
    describe_rope,
    half_split_order,
    interleaved,
    read_header,
    read_rope,
    read_values,
    write_gguf,
)
from hf_speculate_gguf.native import FORMATS

from .config import GGUF_ARCHITECTURE


_LAYER = re.compile(r"^(blk|layers)\.(\d+)\.(.+)$")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB = "https://huggingface.co/"


def _weights(names: Mapping[str, str]) -> dict[str, str]:
    return {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in names.items()}


_TOP = {
    **_weights({"fc": "fc", "output_norm": "norm", "output": "lm_head", "token_embd": "embed_tokens"}),
    "d2t": "d2t",
}
_OF_LAYERS = _weights(LLAMA_LAYER)
# Keys of every architecture -> keys of our config.
_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Keys that change what a head computes, in ways that no head here follows. Others have no such effect.
_REFUSED = (
    "attention.scale",
    "attention.value_scale",
    "attention.sliding_window",
    "expert_count",
    "hidden_act",
    "hyper_connection.count",
    "rope.dimension_sections",
    "selector_rank",
)


@dataclass(frozen=True)
class _Architecture:
    """Names in the files of an architecture, in addition to those that all have.

    Attributes:
        model_type: type of decoder layer, as configs name it.
        top, layers: tensors by their names in the file.
        keys: keys of the config by those in the file.
        permutes: whether rows of queries and keys that rotate together are neighbours.
    """

    model_type: str
    top: Mapping[str, str]
    layers: Mapping[str, str]
    keys: Mapping[str, str]
    permutes: bool


_ARCHITECTURES = {
    "eagle3": _Architecture(
        model_type="llama",
        top=_TOP | _weights({"enc.output_norm": "input_norm"}),
        layers=_OF_LAYERS | _weights({"attn_norm_2": "hidden_norm"}),
        keys={
            "target_layers": "eagle_aux_hidden_state_layer_ids",
            "target_hidden_size": "target_hidden_size",
            "norm_before_residual": "norm_before_residual",
            "norm_before_fc": "norm_before_fc",
        },
        permutes=True,
    ),
    "dflash": _Architecture(
        model_type="qwen3",
        top={
            **_TOP,
            **_weights({"enc.output_norm": "hidden_norm", "markov_w1": "markov_head.markov_w1"}),
            **_weights({"markov_w2": "markov_head.markov_w2", "conf_proj": "confidence_head.proj"}),
            "conf_proj.bias": "confidence_head.proj.bias",
        },
        layers=_OF_LAYERS | _weights({"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}),
        keys={
            "target_layers": "aux_hidden_state_layer_ids",
            "block_size": "block_size",
            "sample_from_anchor": "sample_from_anchor",
            "has_confidence_head": "enable_confidence_head",
            "attention.causal": "causal",
            "embedding_scale": "input_embedding_scale",
            "logit_scale": "output_multiplier",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        permutes=False,
    ),
}
_MASK = "tokenizer.ggml.mask_token_id"


def head_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a head; empty for a file of another architecture.

    Raises:
        CheckpointError: no GGUF file, or a broken one.
    """
    file = read_header(path)
    if Metadata(file).get("general.architecture", str) not in _ARCHITECTURES:
        return {}
    shapes = {_ours(file, name): entry.shape for name, entry in file.tensors.items()}
    return {name: shape for name, shape in shapes.items() if name != ROPE_FACTORS}


def read_head(path: str) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Matrix]]:
    """A head: its config, its tensors, and those matrices that the file has in blocks, which may stay packed.

    The config is flat, with the keys that other layouts have for the same facts; indices of target layers are those of
    `hidden_states`. Tensors of blocks are given in float32.

    Raises:
        CheckpointError: another architecture, a broken file, or one with values that no head here follows.
    """
    file = read_header(path)
    name = Metadata(file).get("general.architecture", str)
    if name not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path} holds a model of architecture {name!r}, not a draft head; heads are {', '.join(_ARCHITECTURES)}."
        )
    config = _config(file, name)
    tensors, packed = {}, {}
    for entry in file.tensors.values():
        if entry.name == ROPE_FACTORS:  # in the config
            continue
        ours = _ours(file, entry.name)
        rows = TensorRows(file, entry, _order(name, ours, entry.shape, config))
        tensors[ours] = read_values(rows)
        if entry.type in FORMATS and len(entry.shape) == 2:
            packed[ours] = Matrix((rows,))
    if "d2t" in tensors and not tensors["d2t"].is_floating_point():
        tensors["d2t"] = tensors["d2t"].long() - torch.arange(len(tensors["d2t"]), dtype=torch.long, device="cpu")
    file.check_unchanged()
    return config, tensors, packed


def write_head(
    folder: str | os.PathLike[str],
    file: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    vocabulary: Mapping[str, Any] | None = None,
    out_type: str = "f16",
) -> None:
    """Writes a head into a folder, whole or not at all; the opposite of `read_head`.

    Raises:
        CheckpointError: there is no tokenizer, or the file cannot be written.
    """
    if vocabulary is None:
        raise CheckpointError(
            "llama.cpp's files hold the target's tokenizer, which is not at hand: `hf-speculate convert HEAD OUT "
            "--for llama.cpp --target T` reads it from the target's files."
        )
    name = config[GGUF_ARCHITECTURE]
    architecture = _ARCHITECTURES[name]
    rope, factors = describe_rope(name, config["rope_parameters"], config["head_dim"])
    keys = {**_SIZES, **architecture.keys}
    metadata = {f"{name}.{theirs}": config[ours] for theirs, ours in keys.items() if config.get(ours) is not None}
    metadata |= {f"{name}.attention.value_length": config["head_dim"], f"{name}.vocab_size": config["vocab_size"]}
    metadata |= {f"{name}.rope.dimension_count": config["head_dim"], **rope, **vocabulary}
    if config.get("mask_token_id") is not None:
        metadata[_MASK] = config["mask_token_id"]
    target = config.get("base_model_name_or_path")
    if target and _HUB_ID.fullmatch(target) and not os.path.exists(target):
        metadata |= {"general.base_model.count": 1, "general.base_model.0.repo_url": f"{_HUB}{target}"}
    stored = {
        _theirs(name, ours): _as_stored(name, ours, tensor, config) for ours, tensor in tensors.items() if ours != "t2d"
    }
    if factors is not None:
        stored[ROPE_FACTORS] = factors
    metadata["general.type"] = "model"
    replace_files(folder, {file: lambda path: write_gguf(path, name, metadata, stored, out_type)})


def _config(file: GgufFile, name: str) -> dict[str, Any]:
    reader, architecture = Metadata(file), _ARCHITECTURES[name]
    check_vocabulary(reader)
    for key in _REFUSED:
        if file.metadata.get(f"{name}.{key}"):
            raise CheckpointError(
                f"{file.path}: {name}.{key} is {file.metadata[f'{name}.{key}']!r}, which no head here computes."
            )
    keys = {**_SIZES, **architecture.keys}
    config = {ours: file.metadata.get(f"{name}.{theirs}") for theirs, ours in keys.items()}
    if not config[architecture.keys["target_layers"]]:
        raise CheckpointError(f"{file.path} lacks {name}.target_layers, the target layers that the head reads.")
    heads = config["num_attention_heads"] = reader.size(f"{name}.attention.head_count")
    config["num_key_value_heads"] = reader.size(f"{name}.attention.head_count_kv", heads)
    config["head_dim"] = reader.size(f"{name}.attention.key_length", reader.size(f"{name}.embedding_length") // heads)
    config["rms_norm_eps"] = reader.number(f"{name}.attention.layer_norm_rms_epsilon")
    context = reader.size(f"{name}.context_length")
    tokens = reader.items("tokenizer.ggml.tokens", str)
    url = reader.get("general.base_model.0.repo_url", str, "")
    return {
        **{key: value for key, value in config.items() if value is not None},
        GGUF_ARCHITECTURE: name,
        "model_type": architecture.model_type,
        "rope_parameters": read_rope(file, name, config["head_dim"], context),
        "vocab_size": len(tokens) or None,
        # llama.cpp takes what is not in the file from the target, and what is from the file.
        "own_output": "output.weight" in file.tensors,
        "embed_requires_grad": "token_embd.weight" in file.tensors,
        "mask_token_id": file.metadata.get(_MASK),
        "base_model_name_or_path": url.removeprefix(_HUB) if url.startswith(_HUB) else None,
    }


def _ours(file: GgufFile, name: str) -> str:
    """The name of our module; one that is not known stays, and the account of the load lists it."""
    architecture = _ARCHITECTURES[file.metadata["general.architecture"]]
    if match := _LAYER.match(name):
        known = architecture.layers.get(match[3])
        return name if known is None else f"layers.{match[2]}.{known}"
    return architecture.top.get(name, name)


def _theirs(architecture: str, name: str) -> str:
    known = _ARCHITECTURES[architecture]
    match = _LAYER.match(name)
    names, key, prefix = (known.layers, match[3], f"blk.{match[2]}.") if match else (known.top, name, "")
    their_name = next((theirs for theirs, ours in names.items() if ours == key), None)
    if their_name is None:
        raise CheckpointError(f"llama.cpp's {architecture} files have no place for the tensor {name}.")
    return f"{prefix}{their_name}"


def _heads(architecture: str, name: str, config: Mapping[str, Any]) -> int | None:
    """Number of heads whose rows a matrix has in pairs; None if its rows are in order."""
    if not _ARCHITECTURES[architecture].permutes:
        return None
    if name.endswith("self_attn.q_proj.weight"):
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if name.endswith("self_attn.k_proj.weight") else None


def _order(architecture: str, name: str, shape: Sequence[int], config: Mapping[str, Any]) -> Tensor | None:
    heads = _heads(architecture, name, config)
    if heads is None:
        return None
    if shape[0] % (2 * heads):
        raise CheckpointError(f"{name} has {shape[0]} rows, which {heads} heads of pairs do not divide.")
    return half_split_order(shape[0], heads)


def _as_stored(architecture: str, name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    if name == "d2t":
        return tensor.long() + torch.arange(len(tensor), dtype=torch.long, device="cpu")
    heads = _heads(architecture, name, config)
    return tensor if heads is None else interleaved(tensor, heads)
