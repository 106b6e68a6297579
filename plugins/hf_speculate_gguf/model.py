"""The model in a file: its configuration and its tensors, checked before any tensor is read.

Names of keys and tensors: `gguf-py/gguf/constants.py` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from hf_speculate.errors import CheckpointError

from .architectures import PRE_NORMS, Architecture, find_architecture
from .matrices import known_types
from .metadata import Metadata, check_vocabulary, end_tokens, token_id
from .native import DENSE_TYPES
from .reading import GgufFile
from .rope import ROPE_FACTORS, check_angles, name_factors, rope_factors, rope_parameters


# Projections of a layer: name in the file -> name in transformers.
ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
MLP = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
HEAD_NORMS = {"attn_q_norm": "q_norm", "attn_k_norm": "k_norm"}

# All modules of a layer of Llama.
LLAMA_LAYER = {
    **PRE_NORMS,
    **{theirs: f"self_attn.{ours}" for theirs, ours in ATTENTION.items()},
    **{theirs: f"mlp.{ours}" for theirs, ours in MLP.items()},
}

EMBEDDINGS, OUTPUT, FINAL_NORM = "token_embd.weight", "output.weight", "output_norm.weight"


@dataclass(frozen=True)
class ModelPlan:
    """A model that can be built from a file.

    Attributes:
        file: the header of the file.
        config: config of the transformers model, without a dtype.
        rope_factors: float32 [head_dim / 2], divisor of each RoPE frequency; None: there are none.
        eos_token_ids: all tokens that end a text.
        bos_token_id, pad_token_id: special tokens; None if the file names none.
        architecture: architecture of the model.
    """

    file: GgufFile
    config: PreTrainedConfig
    rope_factors: Tensor | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    architecture: Architecture

    @property
    def is_tied(self) -> bool:
        return OUTPUT not in self.file.tensors


def plan_model(file: GgufFile) -> ModelPlan:
    """Plans the model of a file without reading its weights.

    Raises:
        CheckpointError: the architecture is not supported; metadata or tensors are missing, unknown, misshapen or of
            an unsupported type.
    """
    reader = Metadata(file)
    architecture = find_architecture(reader)
    sizes = _sizes(reader, architecture.name)
    _check_tensors(file, architecture, sizes)
    check_vocabulary(reader)
    factors = rope_factors(file, sizes["head_dim"])
    config = _config(reader, architecture, sizes, factors)
    return ModelPlan(
        file=file,
        config=config,
        rope_factors=factors,
        eos_token_ids=end_tokens(reader, config.vocab_size),
        bos_token_id=token_id(reader, "bos", config.vocab_size),
        pad_token_id=token_id(reader, "padding", config.vocab_size),
        architecture=architecture,
    )


def _sizes(reader: Metadata, architecture: str) -> dict[str, int]:
    """Sizes of the model, by the names of transformers' configurations."""
    if reader.get(f"{architecture}.expert_count", int, 0):
        raise CheckpointError(f"{reader.file.path!r} holds a mixture of experts, which is not supported.")
    hidden_size = reader.size(f"{architecture}.embedding_length")
    num_heads = reader.size(f"{architecture}.attention.head_count")
    num_kv_heads = reader.size(f"{architecture}.attention.head_count_kv", num_heads)
    head_dim = reader.size(f"{architecture}.attention.key_length", max(hidden_size // num_heads, 1))
    for key in (f"{architecture}.rope.dimension_count", f"{architecture}.attention.value_length"):
        if reader.size(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{reader.file.path!r}: {key!r} is {reader.size(key)} in heads of {head_dim}: rotating or keeping a "
                "part of a head is not supported."
            )
    if num_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{reader.file.path!r}: {num_heads} attention heads of {head_dim} values, {num_kv_heads} of keys: as many "
            "heads must share each head of keys, and RoPE turns pairs of values."
        )
    num_layers, num_tensors = reader.size(f"{architecture}.block_count"), len(reader.file.tensors)
    if num_layers > num_tensors:  # a bound, before the names of all layers are made
        raise CheckpointError(f"{reader.file.path!r}: {num_layers} layers are announced, but {num_tensors} tensors.")
    embeddings = reader.file.tensors.get(EMBEDDINGS)
    if embeddings is None:
        raise CheckpointError(f"{reader.file.path!r}: tensor {EMBEDDINGS!r} is missing.")
    return {
        "vocab_size": embeddings.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": reader.size(f"{architecture}.feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": reader.size(f"{architecture}.context_length"),
    }


def _expected(architecture: Architecture, sizes: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Name, shape and necessity of every tensor of the architecture."""
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    q_size = sizes["num_attention_heads"] * sizes["head_dim"]
    kv_size = sizes["num_key_value_heads"] * sizes["head_dim"]
    yield EMBEDDINGS, (sizes["vocab_size"], hidden), True
    yield OUTPUT, (sizes["vocab_size"], hidden), False
    yield FINAL_NORM, (hidden,), True
    if architecture.window_base is None:
        yield ROPE_FACTORS, (sizes["head_dim"] // 2,), False
    matrices = {
        "attn_q": (q_size, hidden),
        "attn_k": (kv_size, hidden),
        "attn_v": (kv_size, hidden),
        "attn_output": (hidden, q_size),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    for layer in range(sizes["num_hidden_layers"]):
        for name in architecture.norms:
            yield f"blk.{layer}.{name}.weight", (hidden,), True
        for name in HEAD_NORMS if architecture.has_head_norms else ():
            yield f"blk.{layer}.{name}.weight", (sizes["head_dim"],), True
        for name, shape in matrices.items():
            yield f"blk.{layer}.{name}.weight", shape, True
            yield f"blk.{layer}.{name}.bias", shape[:1], name in architecture.biased


def _check_tensors(file: GgufFile, architecture: Architecture, sizes: dict[str, int]) -> None:
    """Raises `CheckpointError` for a tensor that is missing, unknown, misshapen, or of an unsupported type."""
    expected = {name: (shape, needed) for name, shape, needed in _expected(architecture, sizes)}
    missing = [name for name, (_, needed) in expected.items() if needed and name not in file.tensors]
    unknown = [name for name in file.tensors if name not in expected]
    for problem, names in (("are missing", missing), ("are not known", unknown)):
        if names:
            raise CheckpointError(
                f"{file.path!r}: {len(names)} tensors of a {architecture.name} model {problem}: {', '.join(names[:8])}."
            )
    for name, entry in file.tensors.items():
        if entry.shape != expected[name][0]:
            raise CheckpointError(
                f"{file.path!r}: tensor {name!r} is {list(entry.shape)}; the metadata give {list(expected[name][0])}."
            )
        allowed = known_types() if len(entry.shape) == 2 else DENSE_TYPES
        if entry.type not in allowed:
            raise CheckpointError(
                f"{file.path!r}: tensor {name!r} is of type {entry.type}; supported here: {', '.join(allowed)}. "
                "(llama.cpp's llama-quantize --allow-requantize writes the file in one of these.)"
            )


def _config(
    reader: Metadata, architecture: Architecture, sizes: dict[str, int], factors: Tensor | None
) -> PreTrainedConfig:
    tensors, name = reader.file.tensors, architecture.name
    options: dict[str, Any] = {
        **sizes,
        "rms_norm_eps": reader.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": OUTPUT not in tensors,
        "rope_parameters": rope_parameters(reader, architecture, sizes),
        "pad_token_id": token_id(reader, "padding", sizes["vocab_size"]),  # some defaults are beyond the vocabulary
        **architecture.options(reader, sizes),
    }
    if name != "qwen2":
        options["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if name == "llama":
        options["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    try:
        config = architecture.config(**options)
    except Exception as error:  # transformers validates in several ways
        raise CheckpointError(f"{reader.file.path!r}: its metadata make no {name} model: {error}") from error
    config.architectures = [architecture.model_class]
    check_angles(reader, config)
    if factors is not None:
        name_factors(config, factors)
    return config
