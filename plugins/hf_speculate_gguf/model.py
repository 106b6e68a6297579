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
from .delta_net import DeltaNet
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

# Further modules of a block that drafts (MTP): three norms, a projection of two states, and copies of the model's own.
DRAFT_NORMS = ("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
DRAFT_PROJECTION, DRAFT_COPIES = "nextn.eh_proj", ("nextn.embed_tokens", "nextn.shared_head_head")

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
        delta_net: sizes of its recurrent layers; None if it has none.
    """

    file: GgufFile
    config: PreTrainedConfig
    rope_factors: Tensor | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    architecture: Architecture
    delta_net: DeltaNet | None

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
    sizes = _sizes(reader, architecture)
    delta_net = DeltaNet.read(reader, architecture.name) if architecture.is_hybrid else None
    expected = dict(_expected(architecture, sizes, _blocks(reader, architecture, sizes), delta_net))
    _check_tensors(file, architecture, expected)
    check_vocabulary(reader)
    factors = rope_factors(file, sizes["head_dim"])
    config = _config(reader, architecture, sizes, factors, delta_net)
    return ModelPlan(
        file=file,
        config=config,
        rope_factors=factors,
        eos_token_ids=end_tokens(reader, config.vocab_size),
        bos_token_id=token_id(reader, "bos", config.vocab_size),
        pad_token_id=token_id(reader, "padding", config.vocab_size),
        architecture=architecture,
        delta_net=delta_net,
    )


def _sizes(reader: Metadata, architecture: Architecture) -> dict[str, int]:
    """Sizes of the model, by the names of transformers' configurations."""
    name = architecture.name
    if reader.get(f"{name}.expert_count", int, 0):
        raise CheckpointError(f"{reader.file.path!r} holds a mixture of experts, which is not supported.")
    hidden_size = reader.size(f"{name}.embedding_length")
    num_heads = reader.size(f"{name}.attention.head_count")
    num_kv_heads = reader.size(f"{name}.attention.head_count_kv", num_heads)
    head_dim = reader.size(f"{name}.attention.key_length", max(hidden_size // num_heads, 1))
    for key in (f"{name}.rope.dimension_count", f"{name}.attention.value_length"):
        may_differ = architecture.is_hybrid and key.endswith("dimension_count")
        if not may_differ and reader.size(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{reader.file.path!r}: {key!r} is {reader.size(key)} in heads of {head_dim}: rotating or keeping a "
                "part of a head is not supported."
            )
    if num_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{reader.file.path!r}: {num_heads} attention heads of {head_dim} values, {num_kv_heads} of keys: as many "
            "heads must share each head of keys, and RoPE turns pairs of values."
        )
    num_blocks, num_tensors = reader.size(f"{name}.block_count"), len(reader.file.tensors)
    if num_blocks > num_tensors:  # a bound, before the names of all layers are made
        raise CheckpointError(f"{reader.file.path!r}: {num_blocks} layers are announced, but {num_tensors} tensors.")
    embeddings = reader.file.tensors.get(EMBEDDINGS)
    if embeddings is None:
        raise CheckpointError(f"{reader.file.path!r}: tensor {EMBEDDINGS!r} is missing.")
    return {
        "vocab_size": embeddings.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": reader.size(f"{name}.feed_forward_length"),
        "num_hidden_layers": count_layers(reader, name)[0],
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": reader.size(f"{name}.context_length"),
    }


def count_layers(reader: Metadata, architecture: str) -> tuple[int, int]:
    """The number of decoder layers, and of blocks after them that draft; raises `CheckpointError` if they cannot be."""
    num_blocks = reader.size(f"{architecture}.block_count")
    num_drafts = reader.get(f"{architecture}.nextn_predict_layers", int, 0)
    if not 0 <= num_drafts < num_blocks:
        raise CheckpointError(f"{reader.file.path!r}: {num_drafts} of {num_blocks} layers are draft layers.")
    return num_blocks - num_drafts, num_drafts


def _blocks(reader: Metadata, architecture: Architecture, sizes: dict[str, int]) -> list[str]:
    """The kind of each block of the file: that of a layer, or "draft"."""
    num_layers, num_drafts = count_layers(reader, architecture.name)
    kinds = architecture.options(reader, sizes).get("layer_types") or ["full_attention"] * num_layers
    return kinds + ["draft"] * num_drafts


Expected = Iterator[tuple[str, tuple[tuple[int, ...], bool]]]
"""Name, shape and necessity of tensors."""


def _expected(
    architecture: Architecture, sizes: dict[str, int], blocks: list[str], delta_net: DeltaNet | None
) -> Expected:
    """Every tensor of the architecture."""
    hidden = sizes["hidden_size"]
    yield EMBEDDINGS, ((sizes["vocab_size"], hidden), True)
    yield OUTPUT, ((sizes["vocab_size"], hidden), False)
    yield FINAL_NORM, ((hidden,), True)
    if architecture.window_base is None and not architecture.is_hybrid:
        yield ROPE_FACTORS, ((sizes["head_dim"] // 2,), False)
    for index, kind in enumerate(blocks):
        prefix, inner = f"blk.{index}.", sizes["intermediate_size"]
        for name in architecture.norms:
            yield f"{prefix}{name}.weight", ((hidden,), True)
        matrices = {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
        yield from _of_matrices(prefix, architecture, matrices)
        if kind == "linear_attention" and delta_net is not None:
            yield from ((f"{prefix}{name}", (shape, True)) for name, shape in delta_net.shapes(hidden).items())
        else:
            yield from _of_attention(prefix, architecture, sizes)
        if kind == "draft":
            yield from _of_draft(prefix, sizes)


def _of_attention(prefix: str, architecture: Architecture, sizes: dict[str, int]) -> Expected:
    hidden, head_dim = sizes["hidden_size"], sizes["head_dim"]
    q_size, kv_size = (sizes[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    gates = q_size if architecture.is_hybrid else 0  # after the queries of each head
    for name in HEAD_NORMS if architecture.has_head_norms else ():
        yield f"{prefix}{name}.weight", ((head_dim,), True)
    matrices = {"attn_q": (q_size + gates, hidden), "attn_k": (kv_size, hidden), "attn_v": (kv_size, hidden)}
    yield from _of_matrices(prefix, architecture, {**matrices, "attn_output": (hidden, q_size)})


def _of_matrices(prefix: str, architecture: Architecture, matrices: dict[str, tuple[int, ...]]) -> Expected:
    for name, shape in matrices.items():
        yield f"{prefix}{name}.weight", (shape, True)
        if not architecture.is_hybrid:
            yield f"{prefix}{name}.bias", (shape[:1], name in architecture.biased)


def _of_draft(prefix: str, sizes: dict[str, int]) -> Expected:
    hidden = sizes["hidden_size"]
    yield f"{prefix}{DRAFT_PROJECTION}.weight", ((hidden, 2 * hidden), True)
    for name in DRAFT_NORMS:
        yield f"{prefix}{name}.weight", ((hidden,), True)
    for name in DRAFT_COPIES:
        yield f"{prefix}{name}.weight", ((sizes["vocab_size"], hidden), False)


def _check_tensors(
    file: GgufFile, architecture: Architecture, expected: dict[str, tuple[tuple[int, ...], bool]]
) -> None:
    """Raises `CheckpointError` for a tensor that is missing, unknown, misshapen, or of an unsupported type.

    Args:
        expected: shape of each tensor, and whether it is needed.
    """
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
    reader: Metadata,
    architecture: Architecture,
    sizes: dict[str, int],
    factors: Tensor | None,
    delta_net: DeltaNet | None,
) -> PreTrainedConfig:
    tensors, name = reader.file.tensors, architecture.name
    options: dict[str, Any] = {
        **sizes,
        "rms_norm_eps": reader.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": OUTPUT not in tensors,
        "rope_parameters": rope_parameters(reader, architecture, sizes),
        "pad_token_id": token_id(reader, "padding", sizes["vocab_size"]),  # some defaults are beyond the vocabulary
        **architecture.options(reader, sizes),
        **({} if delta_net is None else delta_net.config),
    }
    if name not in ("qwen2", "qwen35"):
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
