"""The parts of a decoder layer that the kernel needs, and whether it can compute the layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_speculate.target import adapter_layers_around, base_module, pass_on

from . import binding
from .backends import NativeBackend
from .modules import PackedMatrix, Projection
from .quantized import QuantizedMatrix
from .quantized_layers import QuantizedForward, QuantizedLinear
from .refusals import ACTIVE_ADAPTER, MIXED_WEIGHTS, Refused
from .weights import parameters_of, unpacked


# Limits of the kernel: columns of a head, and heads that share keys (its MOST_HEAD_DIM and MOST_GROUPS).
_MOST_HEAD_DIM, _MOST_GROUPS = 512, 128

# RMSNorms by names of the kernel's structure, of layers of which everything that they compute is known. Others have
# modules of the same names, and compute more.
_BEFORE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_AROUND = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_LAYERS = {
    "LlamaDecoderLayer": _BEFORE,
    "Qwen2DecoderLayer": _BEFORE,
    "Qwen3DecoderLayer": _BEFORE,
    "Gemma3DecoderLayer": _AROUND,
}

_IS_GELU = {"silu": False, "gelu_pytorch_tanh": True}


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """The parts of a decoder layer of any model class.

    Attributes:
        sizes: hidden, heads, kv_heads, head_dim and inner sizes, by name.
        norms: RMSNorm modules by the names of the kernel's structure; missing ones are left out.
        projections: modules q, k, v, o, gate, up and down.
        joins, norms_residual: options of EAGLE-3's first layer: whether it joins embeddings, and norms its residual.
        norm_shift: number that is added to the weights of norms, as in Gemma.
        gelu: whether the activation is GELU's approximation by tanh, instead of SiLU.
        window: number of entries that a token sees, itself included; None for all.
    """

    sizes: dict[str, int]
    eps: float
    scale: float
    norms: dict[str, Any]
    projections: dict[str, nn.Module]
    joins: bool = False
    norms_residual: bool = False
    norm_shift: float = 0.0
    gelu: bool = False
    window: int | None = None

    @classmethod
    def of(cls, attention: Any, mlp: Any, norms: dict[str, Any], **others: Any) -> LayerParts:
        """The parts of modules with transformers' usual names; `norms` lacks those of queries and keys."""
        of_heads = {name: getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)}
        projections = {name: getattr(attention, f"{name}_proj") for name in "qkvo"}
        projections |= {name: getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")}
        return cls(norms={**norms, **of_heads}, projections=projections, **others)

    @property
    def matrices(self) -> list[PackedMatrix | nn.Linear | None]:
        return [matrix_of(projection) for projection in self.projections.values()]

    @property
    def modules(self) -> list[nn.Module]:
        """The modules whose weights the layer uses, each once."""
        return list(dict.fromkeys([*self.norms.values(), *filter(None, self.matrices)]))

    def quantizes_activations(self) -> bool | None:
        """Whether packed matrices quantise their activations; None if the kernel cannot use all matrices, or packed
        ones differ.

        Dense matrices never do, and can be combined with either kind.
        """
        ways = [(isinstance(matrix, PackedMatrix), quantizes_activations(matrix)) for matrix in self.matrices]
        of_packed = {quantizes for is_packed, quantizes in ways if is_packed} or {False}
        is_known = all(quantizes is not None for _, quantizes in ways)
        return of_packed.pop() if is_known and len(of_packed) == 1 else None

    def quantized(self) -> LayerParts:
        """The same parts with 8-bit matrices where possible, for drafting."""
        projections = {name: quantized(matrix) or matrix for name, matrix in self.projections.items()}
        return replace(self, projections=projections)

    def dtype(self) -> torch.dtype | None:
        """The dtype of all weights that are not packed; None if they differ."""
        dtypes = {weight.dtype for weight in unpacked(parameters_of(self.modules))}
        return dtypes.pop() if len(dtypes) == 1 else None

    def problem(self) -> str:
        """The reason why the kernel cannot compute the layer; "" if it can."""
        if self.quantizes_activations() is None or self.dtype() is None:
            return MIXED_WEIGHTS
        sizes, step = self.sizes, binding.TILE_ROWS
        widths = sizes["hidden"], sizes["heads"] * sizes["head_dim"], sizes["inner"]
        are_whole = (
            all(matrix is not None and matrix.out_features % step == 0 for matrix in self.matrices)
            and all(width % binding.TILE_COLUMNS == 0 for width in widths)
            and sizes["head_dim"] % step == 0
        )
        if not are_whole:
            return f"sizes that are not multiples of {binding.TILE_COLUMNS}"
        if sizes["head_dim"] > _MOST_HEAD_DIM or sizes["heads"] > _MOST_GROUPS * sizes["kv_heads"]:
            return f"heads wider than {_MOST_HEAD_DIM}, or more than {_MOST_GROUPS} of them for each KV head"
        return ""


def quantizes_activations(matrix: PackedMatrix | nn.Linear | None) -> bool | None:
    """Whether a matrix quantises its activations (inputs) to bytes; None if the kernel cannot multiply with it."""
    if isinstance(matrix, PackedMatrix):
        return matrix.backend.quantizes_activations if isinstance(matrix.backend, NativeBackend) else None
    if matrix is None or matrix.weight.dtype not in binding.DENSE_KINDS or not matrix.weight.is_contiguous():
        return None
    return False


def quantized(projection: nn.Module) -> QuantizedMatrix | None:
    """The 8-bit matrix of a projection; None if there is none."""
    if isinstance(forward := vars(projection).get("forward"), QuantizedForward):
        return forward.matrix()
    matrix = matrix_of(projection)
    return QuantizedMatrix.of(matrix) if matrix is not None and matrix is projection else None


def matrix_of(projection: nn.Module) -> PackedMatrix | nn.Linear | None:
    """The matrix that computes a projection; None for other modules."""
    if isinstance(projection, QuantizedLinear):
        return matrix_of(projection.layer)
    if type(projection) is Projection:
        return projection.fused.linear
    return projection if isinstance(projection, PackedMatrix) or type(projection) is nn.Linear else None


def parts_of(layer: Any) -> LayerParts:
    """The parts of a layer that the kernel needs. Raises `Refused` if it cannot compute the layer."""
    norms = _LAYERS.get(type(layer).__name__)
    if norms is None:
        raise Refused(f"layers of type {type(layer).__name__}")
    attention, config = layer.self_attn, layer.self_attn.config
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if activation not in _IS_GELU:
        raise Refused(f"the activation {activation!r}")
    children = [child for module in (layer, attention, layer.mlp) for child in module.children()]
    if not all(pass_on(adapter_layers_around(child)) for child in children):
        raise Refused(ACTIVE_ADAPTER)
    of_norms: dict[str, Any] = {name: base_module(getattr(layer, module)) for name, module in norms.items()}
    parts = LayerParts.of(
        attention,
        layer.mlp,
        of_norms,
        sizes={
            "hidden": config.hidden_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": attention.head_dim,
            "inner": config.intermediate_size,
        },
        eps=epsilon_of(of_norms["attention_norm"]),
        scale=attention.scaling,
        norm_shift=shift_of(of_norms["attention_norm"]),
        gelu=_IS_GELU[activation],
        window=getattr(attention, "sliding_window", None),
    )
    parts = replace(
        parts,
        norms={name: base_module(norm) for name, norm in parts.norms.items()},
        projections={name: base_module(projection) for name, projection in parts.projections.items()},
    )
    if not any(isinstance(matrix, PackedMatrix) for matrix in parts.matrices):
        raise Refused("weights that are not packed")
    if not all(epsilon_of(norm) == parts.eps for norm in parts.norms.values()):
        raise Refused("norms that differ in epsilon")
    if problem := parts.problem():
        raise Refused(problem)
    return parts


def epsilon_of(norm: Any) -> float:
    """The epsilon of an RMSNorm of Llama's kind or of Gemma's."""
    return norm.eps if shift_of(norm) else norm.variance_epsilon


def shift_of(norm: Any) -> float:
    """The number that an RMSNorm adds to its weights: 1 in Gemma's kind."""
    return 1.0 if type(norm).__name__.startswith("Gemma") else 0.0
