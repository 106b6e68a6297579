"""`load_gguf`: a transformers model and its tokenizer from a GGUF file, its weights packed as they are in the file."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights
from transformers.utils import logging

from hf_speculate.compatibility import check_feature
from hf_speculate.errors import CheckpointError
from hf_speculate.messages import get_logger
from hf_speculate.target import GenerativeModel

from .delta_net import CONVOLUTION, DECAY, FROM_VALUES, INPUTS, NORM, TIME_STEP
from .matrices import Matrix, TensorRows, half_split_order, read_values, read_vector
from .model import (
    ATTENTION,
    EMBEDDINGS,
    FINAL_NORM,
    HEAD_NORMS,
    MLP,
    OUTPUT,
    ModelPlan,
    plan_model,
)
from .native import (
    DENSE_TYPES,
    FORMATS,
    NO_KERNEL,
    Backend,
    DequantizeBackend,
    FusedLinear,
    PackedEmbedding,
    PackedLinear,
    PackedMatrix,
    Projection,
    ReorderedLinear,
    ScaledEmbedding,
    choose_backend,
    fuse,
    run_hybrid_layers,
    together,
)
from .report import packing_report
from .rope import plain_frequencies
from .shards import find_file, read_model_file
from .stock_methods import PackedGgufQuantizer, replace_methods
from .tokenizer import read_tokenizer


logger = get_logger(__name__)


def load_gguf(
    path_or_repo: str | os.PathLike[str],
    *,
    gguf_file: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    backend: str = "auto",
    attn_implementation: str | None = None,
    **hub_kwargs: Any,
) -> tuple[GenerativeModel, PreTrainedTokenizerBase]:
    """A causal LM from a GGUF file, its quantised weights kept packed in memory.

    Architectures llama, qwen2, qwen3, qwen35, gemma2, gemma3, smollm3 and granite; types Q4_0, Q4_1, Q5_0, Q5_1, Q8_0,
    Q2_K to Q6_K, IQ4_NL, IQ4_XS, F16, BF16, F32, and mixes. Matrices of other types that the `gguf` package reads are
    dequantised, with a warning. The model is one of transformers' own for inference; it cannot be trained nor saved.
    PEFT's LoRA works on it (`PeftModel.from_pretrained(model, adapter)`), unmerged; DoRA, `modules_to_save` and merging
    need `backend="dense"`.

    Args:
        path_or_repo: a file (the first one of a model in parts); or a folder or Hub repository that holds `gguf_file`;
            or the name of one ("smollm2", "qwen2.5-coder-0.5b", see `hf_speculate_gguf.named`).
        gguf_file: name of the file in a folder or repository.
        dtype: dtype of everything that is not packed, and of products.
        device: device of the weights; None: the CPU.
        tokenizer: a tokenizer to use instead of the one in the file.
        backend: backend for products with packed weights. "auto" takes on a CPU "native", a kernel that is compiled at
            first use and needs a C++ compiler; in bfloat16 "native-int8", which quantises activations to 8 bits as
            llama.cpp does: faster, nearly the same. Without a compiler it takes "dense" (everything dequantised at
            load). On other devices it takes "dequantize" (at every call, small and slow). "triton" multiplies packed
            weights on NVIDIA GPUs; it is not measured yet, so "auto" does not take it.
        attn_implementation: attention of the model, as in `from_pretrained`; None takes its default.
        hub_kwargs: options of the download: `revision`, `token`, `cache_dir`, `local_files_only` ...

    Returns:
        Model (in eval mode) and tokenizer. `hf_speculate_gguf.packing_report(model)` lists the bytes of its weights.

    Raises:
        CheckpointError: there is no such file; it is broken, cut off, of another architecture, or has missing or
            unknown metadata or tensors. Only scales that are not finite are found after weights are read.
        UnsupportedRequestError: the backend does not exist, or does not run on the device.
    """
    path = find_file(path_or_repo, gguf_file, hub_kwargs)
    file = read_model_file(path)
    plan = plan_model(file)
    on = torch.device(device or "cpu")
    chosen = choose_backend(backend, on, dtype)
    tokenizer = tokenizer if tokenizer is not None else read_tokenizer(file, plan.config.vocab_size)
    model = build_model(plan, dtype, on, chosen, attn_implementation, is_auto=backend == "auto")
    logger.info(f"{path}: {packing_report(model)}")
    return model, tokenizer


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
    backend: str = "auto",
    attn_implementation: str | None = None,
) -> GenerativeModel:
    """The model of `load_gguf` without a tokenizer. The arguments and errors are those of `load_gguf`."""
    on = torch.device(device or "cpu")
    plan, chosen = plan_model(read_model_file(path)), choose_backend(backend, on, dtype)
    return build_model(plan, dtype, on, chosen, attn_implementation, is_auto=backend == "auto")


def _problem_without_kernel(chosen: Backend | None, dtype: torch.dtype, device: torch.device) -> str:
    """The reason why `backend="auto"` chose no kernel; "" if it chose one."""
    if chosen is None:
        return NO_KERNEL
    if chosen.name != DequantizeBackend.name:
        return ""
    return f"no kernel for {dtype} on {device.type!r}: weights are dequantised for each product"


def build_model(
    plan: ModelPlan,
    dtype: torch.dtype,
    device: torch.device,
    backend: Backend | None,
    attn_implementation: str | None,
    is_auto: bool,
) -> GenerativeModel:
    """Builds the model of a plan, matrix by matrix. Without a backend, matrices in blocks are dequantised.

    Args:
        is_auto: whether the user left the choice of the backend to us.
    """
    check_feature("a model in a GGUF file", "5.18")
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.device("meta"), no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(plan.config, dtype=dtype, **options)
    if backend is not None:
        _warn_of_dequantising(plan, dtype)
    builder = _Builder(plan, dtype, device, backend)
    with together():
        builder.fill(model)
    plan.file.check_unchanged()
    _hand_back_memory()
    remaining = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if remaining:
        raise CheckpointError(f"{plan.file.path!r} has nothing for {', '.join(remaining)}.")
    model.requires_grad_(False).eval()
    fuse(model)
    run_hybrid_layers(model)
    model.hf_quantizer = PackedGgufQuantizer(_problem_without_kernel(backend, dtype, device) if is_auto else "")
    # Embeddings and output layer are packed apart, so nothing may tie them again.
    model._tied_weights_keys = {}
    model.all_tied_weights_keys = {}
    model.name_or_path = model.config._name_or_path = plan.file.path
    model.generation_config = GenerationConfig(
        bos_token_id=plan.bos_token_id,
        eos_token_id=list(plan.eos_token_ids) or None,
        pad_token_id=plan.pad_token_id,
    )
    if backend is not None:
        replace_methods(model)
    return model


def _warn_of_dequantising(plan: ModelPlan, dtype: torch.dtype) -> None:
    """Logs which matrices do not stay packed although they are quantised."""
    entries = [entry for entry in plan.file.tensors.values() if entry.type not in (*FORMATS, *DENSE_TYPES)]
    if entries:
        kinds, num_weights = sorted({entry.type for entry in entries}), sum(math.prod(entry.shape) for entry in entries)
        logger.warning(
            f"{plan.file.path}: {len(entries)} matrices are of types that cannot stay packed ({', '.join(kinds)}): "
            f"they are dequantised and take {num_weights * dtype.itemsize / 1e6:.0f} MB, not "
            f"{sum(entry.num_bytes for entry in entries) / 1e6:.0f}."
        )


class _Builder:
    """Builds the modules of one model."""

    def __init__(self, plan: ModelPlan, dtype: torch.dtype, device: torch.device, backend: Backend | None):
        self.plan = plan
        self.file = plan.file
        self.dtype = dtype
        self.device = device
        self.backend = backend

    def fill(self, model: Any) -> None:
        decoder = model.model
        # Gemma's own module has its factor in a buffer, which is still on the meta device.
        decoder.embed_tokens = self._embeddings(getattr(decoder.embed_tokens, "scalar_embed_scale", 1.0))
        if self.plan.is_tied:
            model.lm_head = self._tied_output(decoder.embed_tokens)
        else:
            model.lm_head = self._linear(self._matrix([OUTPUT]), None)
        doing = "Dequantising layers" if self.backend is None else "Packing layers"
        for index, layer in enumerate(logging.tqdm(decoder.layers, desc=doing)):
            self._fill_layer(layer, f"blk.{index}.")
        decoder.norm.weight = self._norm(FINAL_NORM)
        self._place_rotary(decoder)

    def _fill_layer(self, layer: Any, prefix: str) -> None:
        for name, module in self.plan.architecture.norms.items():
            getattr(layer, module).weight = self._norm(f"{prefix}{name}.weight")
        self._fill_projections(layer.mlp, prefix, MLP, ("ffn_gate", "ffn_up"))
        if hasattr(layer, "linear_attn"):
            self._fill_delta_net(layer.linear_attn, prefix)
            return
        for name, module in HEAD_NORMS.items():
            if hasattr(layer.self_attn, module):
                getattr(layer.self_attn, module).weight = self._norm(f"{prefix}{name}.weight")
        self._fill_projections(layer.self_attn, prefix, ATTENTION, ("attn_q", "attn_k", "attn_v"))

    def _fill_projections(self, parent: Any, prefix: str, names: Mapping[str, str], fused: Iterable[str]) -> None:
        """Sets the projections of a part of a layer.

        Args:
            names: name of each in the module, by name in the file.
            fused: names in the file of those that have one input, in the order in which they are called.
        """
        for group in self._groups(prefix, fused):
            for name, module in zip(group, self._projections(prefix, group), strict=True):
                setattr(parent, names[name], module)
        for name in names.keys() - set(fused):
            setattr(parent, names[name], self._projections(prefix, [name])[0])

    def _fill_delta_net(self, net: Any, prefix: str) -> None:
        self._fill_projections(net, prefix, INPUTS, INPUTS)
        net.out_proj = self._from_values(f"{prefix}{FROM_VALUES}")
        net.norm.weight = self._vector(f"{prefix}{NORM}")
        net.dt_bias = self._parameter(prefix + TIME_STEP, self._ordered(prefix + TIME_STEP))
        net.A_log = self._parameter(prefix + DECAY, (-self._ordered(prefix + DECAY)).log())
        net.conv1d.weight = self._parameter(prefix + CONVOLUTION, self._ordered(prefix + CONVOLUTION)[:, None])

    def _from_values(self, name: str) -> nn.Module:
        """The projection of a delta net's values, whose columns the file may have in another order."""
        assert self.plan.delta_net is not None
        matrix, order = self._matrix([name]), self.plan.delta_net.value_order
        if order is None:
            return self._linear(matrix, None)
        if self.backend is None or matrix.type not in FORMATS:
            return self._dense_linear(self._dense(matrix)[:, order.to(self.device)].contiguous(), None)
        return self._packed(partial(ReorderedLinear, order=order.argsort()), matrix, None)

    def _groups(self, prefix: str, names: Iterable[str]) -> list[list[str]]:
        """Projections of one input. Packed ones of the same type form a group."""
        groups: dict[Any, list[str]] = {}
        for name in names:
            kind = self.file.tensors[f"{prefix}{name}.weight"].type
            is_packed = self.backend is not None and kind in FORMATS
            has_bias = f"{prefix}{name}.bias" in self.file.tensors
            groups.setdefault((kind, has_bias) if is_packed else name, []).append(name)
        return list(groups.values())

    def _projections(self, prefix: str, names: list[str]) -> list[nn.Module]:
        """One module for each name; the modules of several names share one product."""
        matrix = self._matrix([f"{prefix}{name}.weight" for name in names])
        biases = [self._bias(f"{prefix}{name}.bias") for name in names]
        bias = None if biases[0] is None else torch.cat(biases)  # type: ignore[arg-type]
        if len(names) == 1:
            return [self._linear(matrix, bias)]
        fused = FusedLinear(self._packed(PackedMatrix, matrix, bias), matrix.sizes)
        return [Projection(fused, index) for index in range(len(names))]

    def _matrix(self, names: list[str]) -> Matrix:
        return Matrix(tuple(TensorRows(self.file, self.file.tensors[name], self._order(name)) for name in names))

    def _order(self, name: str) -> Tensor | None:
        """The rows of a tensor in transformers' order; None if they are in order."""
        if self.plan.delta_net is not None:
            return self.plan.delta_net.row_order(name.split(".", 2)[-1])
        if not self.plan.architecture.permutes:
            return None
        config, rows = self.plan.config, self.file.tensors[name].shape[0]
        if ".attn_q." in name:
            return half_split_order(rows, config.num_attention_heads)
        return half_split_order(rows, config.num_key_value_heads) if ".attn_k." in name else None

    def _linear(self, matrix: Matrix, bias: Tensor | None) -> nn.Module:
        """A packed layer if its blocks stay packed, else an ordinary one."""
        if self.backend is None or matrix.type not in FORMATS:
            return self._dense_linear(self._dense(matrix), bias)
        return self._packed(PackedLinear, matrix, bias)

    def _packed(self, kind: Callable[..., PackedMatrix], matrix: Matrix, bias: Tensor | None) -> PackedMatrix:
        assert self.backend is not None
        packed = self.backend.pack(matrix, self.device)
        return kind(matrix.num_columns, matrix.num_rows, matrix.type, self.backend, packed, bias)

    def _dense_linear(self, weight: Tensor, bias: Tensor | None) -> nn.Linear:
        with torch.device("meta"):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        # Tied embeddings pass their own parameter, which must stay the same one.
        linear.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
        return linear

    def _dense(self, matrix: Matrix) -> Tensor:
        weights = matrix.values(self.dtype, self.device)
        if not weights.isfinite().all():
            raise CheckpointError(f"{', '.join(matrix.names)} ({matrix.type}): some weights are not finite.")
        return weights

    def _embeddings(self, scale: float) -> nn.Embedding:
        """The embeddings. Packed ones keep the file's bytes: no kernel's layout gives single rows.

        Args:
            scale: factor of all embeddings.
        """
        matrix = self._matrix([EMBEDDINGS])
        if self.backend is None or matrix.type not in FORMATS:
            weight = self._dense(matrix)
            if scale != 1:
                return ScaledEmbedding(weight, scale)
            return nn.Embedding(matrix.num_rows, matrix.num_columns, _weight=weight, _freeze=True)
        weight = matrix.read(0, matrix.num_rows).to(self.device)
        return PackedEmbedding(weight, matrix.type, self.dtype, scale)

    def _tied_output(self, embeddings: nn.Embedding) -> nn.Module:
        """The output layer of tied embeddings; it shares their memory unless a kernel has a layout of its own."""
        if not isinstance(embeddings, PackedEmbedding):
            return self._dense_linear(embeddings.weight, None)
        output = self._linear(self._matrix([EMBEDDINGS]), None)
        if isinstance(output, PackedLinear) and isinstance(self.backend, DequantizeBackend):
            embeddings.packed = output.packed
        return output

    def _norm(self, name: str) -> nn.Parameter:
        return self._vector(name, self.plan.architecture.norm_shift)

    def _vector(self, name: str, shift: float = 0.0) -> nn.Parameter:
        """A vector of the file, less `shift`."""
        values = read_vector(self.file, self.file.tensors[name])
        return self._parameter(name, values.float() - shift if shift else values)

    def _ordered(self, name: str) -> Tensor:
        """float32: a small tensor of the file, its rows in transformers' order."""
        values, order = read_values(TensorRows(self.file, self.file.tensors[name])).float(), self._order(name)
        return values if order is None else values[order]

    def _parameter(self, name: str, values: Tensor) -> nn.Parameter:
        """Values made of the tensor called `name` as a parameter of the model."""
        values = values.to(self.device, self.dtype)
        if not values.isfinite().all():
            raise CheckpointError(f"{self.file.path!r}: {name!r} holds values that are not finite or not possible.")
        return nn.Parameter(values, requires_grad=False)

    def _bias(self, name: str) -> Tensor | None:
        if name not in self.file.tensors:
            return None
        order, values = self._order(name), self._vector(name).data
        return values if order is None else values[order.to(values.device)]

    def _place_rotary(self, decoder: Any) -> None:
        """Computes RoPE's frequencies, with the factors of the file if it has some."""
        with torch.device("cpu"):
            rotary = type(decoder.rotary_emb)(self.plan.config)
        if self.plan.rope_factors is not None:
            frequencies = plain_frequencies(self.plan.config) / self.plan.rope_factors
            rotary.inv_freq.copy_(frequencies)
            rotary.original_inv_freq = rotary.inv_freq.clone()
        decoder.rotary_emb = rotary.to(self.device)


def _hand_back_memory() -> None:
    """Returns buffers that the C library keeps after packing: a tenth of a small model's size."""
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
