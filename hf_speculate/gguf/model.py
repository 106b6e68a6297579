"""The model in a file: its configuration and its tensors, checked before any tensor is read.

Names of keys and tensors: `gguf-py/gguf/constants.py` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import CheckpointError
from ..native import DENSE_TYPES, dense_values
from .architectures import Architecture, find_architecture
from .metadata import Metadata, check_vocabulary, end_tokens, token_id
from .reading import GgufFile, TensorEntry
from .values import known_types


# Projections of a layer: name in the file -> name in transformers.
ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
MLP = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
HEAD_NORMS = {"attn_q_norm": "q_norm", "attn_k_norm": "k_norm"}

EMBEDDINGS, OUTPUT, FINAL_NORM, ROPE_FACTORS = (
    "token_embd.weight",
    "output.weight",
    "output_norm.weight",
    "rope_freqs.weight",
)

# Yarn's parameters: name in transformers -> name in the file.
_YARN = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}

# Keys of RoPE's scaling: those that are read or do not matter, and values of others that have no effect.
_SCALING = ("type", "factor", "original_context_length", "finetuned", *_YARN.values())
_NEUTRAL = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0, "alpha": 0.0}


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


# Types of RoPE that `describe_rope` writes.
WRITTEN_ROPE = ("default", "linear", "llama3")


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
    factors = _rope_factors(file, sizes["head_dim"])
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
                f"{file.path!r}: tensor {name!r} is {list(entry.shape)}; the metadata say {list(expected[name][0])}."
            )
        allowed = known_types() if len(entry.shape) == 2 else DENSE_TYPES
        if entry.type not in allowed:
            raise CheckpointError(
                f"{file.path!r}: tensor {name!r} is of type {entry.type}; supported here: {', '.join(allowed)}. "
                "(llama.cpp's llama-quantize --allow-requantize writes the file in one of these.)"
            )


def read_vector(file: GgufFile, entry: TensorEntry) -> Tensor:
    """Reads a tensor of plain values (a norm, a bias) in the type of the file."""
    return dense_values(file.read(entry), entry.type).view(entry.shape)


def _rope_factors(file: GgufFile, head_dim: int) -> Tensor | None:
    entry = file.tensors.get(ROPE_FACTORS)
    if entry is None:
        return None
    factors = read_vector(file, entry).float()
    if not (factors.isfinite().all() and factors.min() > 0):
        raise CheckpointError(f"{file.path!r}: {ROPE_FACTORS!r} holds factors that are not positive numbers.")
    return factors


def _config(
    reader: Metadata, architecture: Architecture, sizes: dict[str, int], factors: Tensor | None
) -> PreTrainedConfig:
    tensors, name = reader.file.tensors, architecture.name
    options: dict[str, Any] = {
        **sizes,
        "rms_norm_eps": reader.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": OUTPUT not in tensors,
        "rope_parameters": _all_rope_parameters(reader, architecture, sizes),
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
    _check_angles(reader, config)
    if factors is not None:
        _name_factors(config, factors)
    return config


def read_rope(file: GgufFile, architecture: str, head_dim: int, context_length: int) -> dict[str, Any]:
    """`rope_parameters` of transformers for a file of any architecture, its factors among them.

    Raises:
        CheckpointError: a scaling that is not supported, or factors that are not Llama 3's.
    """
    sizes = {"head_dim": head_dim, "max_position_embeddings": context_length}
    parameters, factors = _rope_parameters(Metadata(file), architecture, sizes), _rope_factors(file, head_dim)
    if factors is None or torch.equal(factors, torch.ones_like(factors)):
        return parameters
    config: Any = LlamaConfig(head_dim=head_dim, max_position_embeddings=context_length, rope_parameters=parameters)
    _name_factors(config, factors)
    if config.rope_parameters["rope_type"] == parameters["rope_type"]:
        raise CheckpointError(
            f"{file.path!r}: the factors in {ROPE_FACTORS!r} are not those of Llama 3's scaling with its usual "
            "parameters (low_freq_factor 1, high_freq_factor 4, 8192 tokens), the only one that is read here."
        )
    return config.rope_parameters


def describe_rope(architecture: str, rope: Mapping[str, Any], head_dim: int) -> tuple[dict[str, Any], Tensor | None]:
    """The metadata of RoPE for an architecture, and the divisors of its frequencies; the opposite of `read_rope`.

    Raises:
        CheckpointError: a scaling that is not written, see `WRITTEN_ROPE`.
    """
    kind, found = rope["rope_type"], {f"{architecture}.rope.freq_base": float(rope["rope_theta"])}
    if kind not in WRITTEN_ROPE:
        raise CheckpointError(
            f"RoPE scaling {kind!r} is not written to GGUF files; possible: {', '.join(WRITTEN_ROPE)}."
        )
    if kind == "linear":
        scaling = {
            f"{architecture}.rope.scaling.type": kind,
            f"{architecture}.rope.scaling.factor": float(rope["factor"]),
        }
        return found | scaling, None
    if kind == "default":
        return found, None
    config = LlamaConfig(head_dim=head_dim, rope_parameters=dict(rope))
    return found, plain_frequencies(config) / ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]


def _check_angles(reader: Metadata, config: Any) -> None:
    """Raises `CheckpointError` if RoPE's parameters, each valid, give no frequencies together."""
    parameters = config.rope_parameters
    of_types = {None: parameters} if "rope_type" in parameters else parameters
    for layer_type, found in of_types.items():
        kind, named = found["rope_type"], {} if layer_type is None else {"layer_type": layer_type}
        try:
            plain = kind == "default"
            frequencies = (
                _frequencies(found["rope_theta"], config.head_dim)
                if plain
                else ROPE_INIT_FUNCTIONS[kind](config, "cpu", **named)[0]
            )
        except (ArithmeticError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{reader.file.path!r}: RoPE cannot be computed: {error}") from error
        if not (frequencies.isfinite().all() and frequencies.shape == (config.head_dim // 2,)):
            raise CheckpointError(f"{reader.file.path!r}: RoPE with {found} gives no angles.")


def _all_rope_parameters(reader: Metadata, architecture: Architecture, sizes: dict[str, int]) -> dict[str, Any]:
    """RoPE's parameters by transformers' names, by layer type if those with a window have their own."""
    parameters = _rope_parameters(reader, architecture.name, sizes)
    if architecture.window_base is None:
        return parameters
    base = reader.number(f"{architecture.name}.rope.freq_base_swa", architecture.window_base)
    return {"full_attention": parameters, "sliding_attention": {"rope_type": "default", "rope_theta": base}}


def _rope_parameters(reader: Metadata, architecture: str, sizes: dict[str, int]) -> dict[str, Any]:
    """RoPE's parameters by transformers' names. As in llama.cpp, a factor without a type is linear."""
    prefix = f"{architecture}.rope"
    parameters = {"rope_type": "default", "rope_theta": reader.number(f"{prefix}.freq_base", 10000.0)}
    _check_scaling(reader, f"{prefix}.scaling.")
    kind = reader.get(f"{prefix}.scaling.type", str, "linear")
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(
            f"{reader.file.path!r}: RoPE scaling {kind!r} is not supported; supported: none, linear, yarn, and factors "
            f"in {ROPE_FACTORS!r}."
        )
    if kind == "none":
        return parameters
    old = reader.number(f"{prefix}.scale_linear", 1.0)  # the key of files before 2023-09
    factor = reader.number(f"{prefix}.scaling.factor", old if kind == "linear" else None)
    if kind == "linear" and factor == 1.0:
        return parameters
    parameters |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = reader.size(f"{prefix}.scaling.original_context_length", sizes["max_position_embeddings"])
        parameters["original_max_position_embeddings"] = original
        for ours, theirs in _YARN.items():
            if f"{prefix}.scaling.{theirs}" in reader.file.metadata:
                parameters[ours] = reader.number(f"{prefix}.scaling.{theirs}")
    return parameters


def _check_scaling(reader: Metadata, prefix: str) -> None:
    """Raises `CheckpointError` for an unknown key of scaling, unless its value has no effect."""
    for key in reader.file.metadata:
        name = key.removeprefix(prefix)
        if name == key or name in _SCALING:
            continue
        if name not in _NEUTRAL or reader.get(key, float) != _NEUTRAL[name]:
            raise CheckpointError(f"{reader.file.path!r}: RoPE with {key!r} of its own is not supported.")


def _name_factors(config: Any, factors: Tensor) -> None:
    """Names Llama 3's scaling in `config` if its usual parameters give the file's factors.

    The model uses the factors themselves, with or without the name.
    """
    plain = config.rope_parameters
    if plain["rope_type"] != "default" or torch.equal(factors, torch.ones_like(factors)):
        return
    config.rope_parameters = plain | {
        "rope_type": "llama3",
        "factor": factors.max().item(),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    if not torch.allclose(scaled, plain_frequencies(config) / factors, rtol=1e-4, atol=0):
        config.rope_parameters = plain


def plain_frequencies(config: Any) -> Tensor:
    """float32 [head_dim / 2]: RoPE's frequencies without any scaling."""
    return _frequencies(config.rope_parameters["rope_theta"], config.head_dim)


def _frequencies(base: float, head_dim: int) -> Tensor:
    return 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
