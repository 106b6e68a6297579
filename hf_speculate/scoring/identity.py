"""The identity of a target, from a few of its weights: it is recognised in another dtype or quantised.

A sample is 16 values of some tensors: the embeddings, one norm of each kind, one linear layer of each kind. Their names
alone decide which layers are taken. A matrix that is packed, quantised or adapted is computed from unit vectors. This
takes a few milliseconds for a model of any size.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..models import GenerativeModel
from .adapters import active_adapters


# Modules that look up rows or multiply by `functional.linear`, whose row counts are tested separately.
_VOUCHED = (nn.Linear, nn.Embedding)


def structure_key(model: GenerativeModel) -> int:
    """A number that changes with everything that a trial depends on.

    That is: module classes and replaced forwards; shapes, dtypes and devices of tensors; the configuration with its
    attention; adapters, training mode and threads.
    """
    modules = [(name, type(module), vars(module).get("forward")) for name, module in model.named_modules()]
    # RoPE with scaling replaces vectors of frequencies while it runs, so only matrices among the buffers count.
    weights = [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.dim() > 1)]
    tensors = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in weights]
    config = repr(model.config.to_dict()), model.config._attn_implementation
    settings = active_adapters(model), model.training, torch.get_num_threads()
    return hash((tuple(modules), tuple(tensors), config, settings))


def unvouched_modules(model: GenerativeModel) -> list[str]:
    """Classes of modules that may multiply by other means than `functional.linear`: experts, convolutions, …

    If the model class is not transformers' own, it is in the list too.
    """
    names = {type(module).__name__ for module in model.modules() if any(_matrices(module))}
    if not type(model).__module__.startswith("transformers."):
        names.add(type(model).__name__)
    return sorted(names)


def _matrices(module: nn.Module) -> Iterator[bool]:
    """True for every tensor of a module that its forward may multiply by."""
    if type(module) not in _VOUCHED:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            yield tensor is not None and tensor.dim() > 1 and tensor.dtype is not torch.bool


# Number of sampled rows and columns of a matrix, and of sampled values of a vector.
_SIDE, _LENGTH = 4, 16
_MAX_KINDS = 8
_DENSE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# A tensor counts as changed if a smaller share of its values is equal: casts may move some by one step.
_EQUAL_SHARE = 0.75
# Allowed relative differences: a cast to bfloat16, and other kernels on the same blocks.
_CAST_STEP, _KERNEL_STEP = 2.0**-8, 2.0**-5


@dataclass(frozen=True)
class WeightSample:
    """Some values of a tensor.

    Attributes:
        held: dtype ("bfloat16", "float32", …) or quantisation of the model, without spaces.
        values: float32 on the CPU, [rows, columns] of a matrix or [n] of a vector.
    """

    held: str
    values: Float[Tensor, "*n"]

    @property
    def text(self) -> str:
        """The sample as text: `held`, the shape, and each value as eight hexadecimal digits."""
        bits = self.values.view(torch.int32).flatten().tolist()
        shape = "x".join(map(str, self.values.shape))
        return " ".join([self.held, shape, *(f"{value & 0xFFFFFFFF:08x}" for value in bits)])

    @classmethod
    def parse(cls, text: str) -> WeightSample:
        """The sample from its `text`; raises `ValueError` for anything else."""
        try:
            held, shape, *words = text.split(" ")
            values = torch.tensor([int(word, 16) for word in words], dtype=torch.int64)
            values = (values - (values >> 31 << 32)).to(torch.int32).view(torch.float32)
            return cls(held, values.view([int(size) for size in shape.split("x")]))
        except (ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"no sample of weights: {text[:80]!r}") from error


@dataclass(frozen=True)
class Likeness:
    """The similarity of two models by their samples.

    Attributes:
        compared: names of tensors that both have.
        changed: names of compared tensors with the same dtype or quantisation but other values.
        similarity: mean cosine of the matrices: 1 for equal ones, 0.99 for 4 bits, about 0 for unrelated ones. None
            without matrices.
    """

    compared: tuple[str, ...]
    changed: tuple[str, ...]
    similarity: float | None


@torch.no_grad()
def sample_weights(model: GenerativeModel, num_tokens: int | None = None) -> dict[str, WeightSample]:
    """Samples by name below the decoder, without offloaded and sharded tensors.

    Args:
        num_tokens: number of the embeddings' first rows to sample from; None for all.
    """
    found: dict[str, WeightSample] = {}
    quantized = quantization_label(model).replace(" ", "") or "otherwise"
    for name, module in _chosen(model.get_decoder(), model.get_input_embeddings()):
        sample = _sample(module, model.dtype, quantized, num_tokens)
        if sample is not None:
            found[f"{name}.weight"] = sample
    return found


def quantization_label(model: GenerativeModel) -> str:
    """Quantisation of a model's weights in words: "GGUF (Q4_1, Q8_0)", "bitsandbytes (nf4)"; "" if there is none."""
    if types := sorted({str(module.block_type) for module in model.modules() if hasattr(module, "block_type")}):
        return f"GGUF ({', '.join(types)})"
    config: Any = getattr(model.config, "quantization_config", None)
    if config is None:
        return ""
    values = config if isinstance(config, Mapping) else config.to_dict()
    method = str(getattr(values.get("quant_method"), "value", values.get("quant_method")))
    if values.get("load_in_4bit"):
        return f"{method} ({values.get('bnb_4bit_quant_type', '4 bit')})"
    if values.get("load_in_8bit"):
        return f"{method} (int8)"
    return f"{method} ({values['bits']} bit)" if values.get("bits") else method


def compare_weights(ours: Mapping[str, WeightSample], theirs: Mapping[str, WeightSample]) -> Likeness:
    """Compares the weights of two models of the same architecture."""
    pairs = {name: (ours[name], theirs[name]) for name in ours if name in theirs}
    pairs = {name: pair for name, pair in pairs.items() if pair[0].values.shape == pair[1].values.shape}
    changed = [name for name, pair in pairs.items() if _is_changed(*pair)]
    cosines = [_cosine(a.values, b.values) for a, b in pairs.values() if a.values.ndim == 2]
    return Likeness(tuple(pairs), tuple(changed), sum(cosines) / len(cosines) if cosines else None)


def _chosen(decoder: nn.Module, embeddings: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules by name: the embeddings, and one linear layer and one norm of each kind."""
    linear: dict[str, list[tuple[str, nn.Module]]] = {}
    norms: dict[str, list[tuple[str, nn.Module]]] = {}
    merged: list[str] = []
    for path, module in decoder.named_modules():
        if "lora_" in path or any(path.startswith(adapted) for adapted in merged):
            continue
        if getattr(module, "merged_adapters", None):  # the weights below are no longer the model's own
            merged.append(f"{path}.")
        name = re.sub(r"\.(base_layer|original_module)\b", "", path)
        if module is embeddings or _within(embeddings) is module:
            yield name, module
        elif isinstance(module, nn.Linear) and not hasattr(module, "base_layer"):
            linear.setdefault(re.sub(r"\d+", "#", name), []).append((name, module))
        elif getattr(getattr(module, "weight", None), "ndim", 0) == 1:
            norms.setdefault(re.sub(r"\d+", "#", name), []).append((name, module))
    for kinds in (linear, norms):
        for kind in sorted(kinds)[:_MAX_KINDS]:
            yield kinds[kind][zlib.crc32(kind.encode()) % len(kinds[kind])]


def _within(module: Any) -> Any:
    """The module inside an adapter's wrapper."""
    return getattr(module, "base_layer", getattr(module, "original_module", None))


def _sample(module: Any, dtype: torch.dtype, quantized: str, num_tokens: int | None) -> WeightSample | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.device.type == "meta" or hasattr(weight, "placements"):
        return None
    if type(weight) in (Tensor, nn.Parameter) and weight.dtype in _DENSE:
        # Select the values first: a conversion would copy the whole tensor.
        num_rows = num_tokens if num_tokens and isinstance(module, nn.Embedding) else weight.shape[0]
        values = weight.detach()[_places(num_rows, _SIDE if weight.ndim == 2 else _LENGTH)]
        if weight.ndim == 2:
            values = values[:, _places(weight.shape[1], _SIDE)]
        return WeightSample(str(weight.dtype).removeprefix("torch."), values.float().cpu())
    try:
        values = _asked(module, weight.device, dtype, num_tokens)
    except Exception:  # kernels of quantised weights refuse such inputs with errors of their own
        return None
    return WeightSample(quantized, values.float().cpu())


def _asked(module: Any, device: torch.device, dtype: torch.dtype, num_tokens: int | None) -> Tensor:
    """The same values of a module that is not plain: rows of an embedding, or results for unit vectors."""
    if isinstance(module, nn.Embedding):
        rows = module(_places(num_tokens or module.num_embeddings, _SIDE).to(device))
        return rows[:, _places(module.embedding_dim, _SIDE)]
    units = torch.zeros(_SIDE + 1, module.in_features, dtype=dtype, device=device)
    units[range(_SIDE), _places(module.in_features, _SIDE)] = 1
    answers = module(units)
    return (answers[:_SIDE] - answers[_SIDE])[:, _places(module.out_features, _SIDE)].T


def _places(size: int, count: int) -> Tensor:
    return torch.linspace(0, size - 1, min(count, size), dtype=torch.float64).long()


def _is_changed(ours: WeightSample, theirs: WeightSample) -> bool:
    """Whether comparable tensors differ: dense ones in any dtype, quantised ones of the same kind."""
    a, b, dense = ours.values, theirs.values, [str(dtype).removeprefix("torch.") for dtype in _DENSE]
    if ours.held in dense and theirs.held in dense:
        allowed = 0 if ours.held == theirs.held else _CAST_STEP * a.abs() + 1e-7
    elif ours.held == theirs.held:
        allowed = _KERNEL_STEP * a.abs().max()
    else:
        return False
    return float(((a - b).abs() <= allowed).float().mean()) < _EQUAL_SHARE


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0, eps=1e-12))
