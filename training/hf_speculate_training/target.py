"""The target of a run, loaded with its tokenizer, and its fingerprint.

A `TargetSection` names a model in any form that heads can draft for: a folder or Hub id, quantised or not, or a GGUF
file, with a PEFT adapter or without. It is loaded frozen, in `eval()` mode.

Processes that train together can share the layers out among themselves (FSDP2, `fully_shard`). Every process keeps a
part of each layer, and gathers the layer while it runs. Embeddings, the last norm and the output matrix stay whole,
because heads and losses read them by rows. All processes have to run the target the same number of times.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PretrainedConfig

from hf_speculate.errors import SpeculateError, TargetMismatchError, first_line
from hf_speculate.target import GenerativeModel, decoder_of, sample_bytes, unwrap
from hf_speculate_gguf import find_file, load_model, plan_model, read_model_file, read_tokenizer
from hf_speculate_tools.commands import target_path

from .names import DtypeName, QuantizationName
from .sections import RecipeError, expand_home


@dataclass(frozen=True, kw_only=True)
class TargetSection:
    """The model that a head is to draft for.

    Attributes:
        path: folder, Hub id or GGUF file; or the name of one (`hf_speculate_gguf.named.NAMED_TARGETS`).
        revision: revision of a Hub id; None for the newest.
        dtype: data type of the weights: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
        quantization: "8bit" or "4bit" (bitsandbytes); None for the weights as they are.
        gguf_file: name of a GGUF file in `path`.
        gguf_backend: backend of `hf_speculate.load_gguf`, which keeps the file packed ("auto": the fastest one there).
            "transformers" takes its own loader, which knows more architectures and dequantises everything.
        adapter: folder or Hub id of a PEFT adapter, put on top.
        tokenizer: folder or Hub id of the tokenizer; None if it is with the model.
        device_map: map that spreads a large target over devices, or "auto"; None for the training's device.
        shard: True shares the layers out among the processes that train together (FSDP2); they are not quantised.
        attn_implementation: attention implementation, as in `from_pretrained`.
    """

    path: str
    revision: str | None = None
    dtype: DtypeName = "auto"
    quantization: QuantizationName | None = None
    gguf_file: str | None = None
    gguf_backend: str = "auto"
    adapter: str | None = None
    tokenizer: str | None = None
    device_map: str | dict[str, Any] | None = None
    shard: bool = False
    attn_implementation: str | None = None

    def __post_init__(self) -> None:
        expand_home(self, "path", "adapter", "tokenizer")


def without_wrappers(target: nn.Module) -> GenerativeModel:
    """The transformers model inside PEFT and `torch.compile` wrappers; the layers of an adapter are in it.

    Raises:
        TargetMismatchError: a prompt-learning adapter, which acts in the wrapper.
        TypeError: there is no transformers model inside.
    """
    if getattr(getattr(target, "active_peft_config", None), "is_prompt_learning", False):
        raise TargetMismatchError("prompt-learning adapters add tokens of their own; LoRA and its kin can be used.")
    return unwrap(target)


def load_target(section: TargetSection, device: torch.device) -> GenerativeModel:
    """The target, frozen, in `eval()` mode, with its adapter; raises `SpeculateError` in one line."""
    section = _located(section)
    with _errors_in_a_line(f"load the target {section.path!r}"):
        model = _packed(section, device) if _is_packed(section) else _from_pretrained(section, device)
        if section.adapter:
            model = _adapted(model, section.adapter)
    return without_wrappers(model.eval().requires_grad_(False))


def load_config(section: TargetSection) -> PretrainedConfig:
    """The target's configuration, without its weights; raises `SpeculateError` in one line."""
    section = _located(section)
    with _errors_in_a_line(f"read the config of the target {section.path!r}"):
        if _is_packed(section):
            return plan_model(read_model_file(_gguf_file(section))).config
        options = {"gguf_file": section.gguf_file} if section.gguf_file else {}
        return AutoConfig.from_pretrained(section.path, revision=section.revision, **options)


def load_tokenizer(section: TargetSection) -> Any:
    """The target's tokenizer; raises `SpeculateError` in one line."""
    section = _located(section)
    name = section.tokenizer or section.path
    with _errors_in_a_line(f"load the tokenizer of {name!r}"):
        if section.tokenizer is not None:
            return AutoTokenizer.from_pretrained(name)
        if _is_packed(section):
            return read_tokenizer(read_model_file(_gguf_file(section)))
        options = {"gguf_file": section.gguf_file} if section.gguf_file else {}
        return AutoTokenizer.from_pretrained(name, revision=section.revision, **options)


def _located(section: TargetSection) -> TargetSection:
    """The section with the path on this machine; raises `SpeculateError` if a local target has a revision."""
    path = target_path(section.path)
    if section.revision and os.path.exists(path):
        raise SpeculateError(f"a revision ({section.revision!r}) needs a target on the Hub; {path} is on this machine.")
    return replace(section, path=path)


@contextmanager
def _errors_in_a_line(what: str) -> Iterator[None]:
    """Whatever goes wrong with files and libraries becomes a `SpeculateError` of one line: "cannot `what`: ..."."""
    try:
        yield
    except SpeculateError:
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise SpeculateError(f"cannot {what}: {first_line(error)}") from error


def _gguf_file(section: TargetSection) -> Any:
    return find_file(section.path, section.gguf_file, {"revision": section.revision})


def _is_packed(section: TargetSection) -> bool:
    is_gguf = section.gguf_file is not None or section.path.endswith(".gguf")
    return is_gguf and section.gguf_backend != "transformers"


def _packed(section: TargetSection, device: torch.device) -> nn.Module:
    """A GGUF file as `load_gguf` reads it, for which the head will draft."""
    given = {"quantization": section.quantization, "device_map": section.device_map}
    if extra := [name for name, value in given.items() if value is not None]:
        raise RecipeError(f"target.{extra[0]} does not go with a GGUF file: it is quantised, and lies on one device.")
    dtype = torch.bfloat16 if section.dtype == "auto" else getattr(torch, section.dtype)
    return load_model(
        _gguf_file(section),
        dtype=dtype,
        device=device,
        backend=section.gguf_backend,
        attn_implementation=section.attn_implementation,
    )


def _from_pretrained(section: TargetSection, device: torch.device) -> nn.Module:
    options: dict[str, Any] = {"dtype": section.dtype, "revision": section.revision}
    if section.gguf_file:
        options["gguf_file"] = section.gguf_file
    if section.attn_implementation:
        options["attn_implementation"] = section.attn_implementation
    if section.quantization:
        options["quantization_config"] = _quantization(section.quantization)
    if section.device_map is not None or section.quantization:
        options["device_map"] = section.device_map if section.device_map is not None else {"": device}
    model: Any = AutoModelForCausalLM.from_pretrained(section.path, **options)
    return model if "device_map" in options else model.to(device)


def _quantization(kind: str) -> BitsAndBytesConfig:
    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def _adapted(model: Any, adapter: str) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, adapter)


def check_sharding(section: TargetSection) -> None:
    """Raises `SpeculateError` where a target cannot be sharded, or there is only one process."""
    given = {
        "quantization": section.quantization,
        "gguf_file": section.gguf_file or (section.path.endswith(".gguf") or None),
        "adapter": section.adapter,
        "device_map": section.device_map,
    }
    if others := [name for name, value in given.items() if value is not None]:
        raise SpeculateError(
            f"target.shard does not go with target.{others[0]}: parts of layers are of plain weights. Possible: "
            "shard: false (each process then holds all of the target), or leave the other out."
        )
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        raise SpeculateError(
            "target.shard shares the target out among processes, and there is one. Possible: accelerate launch "
            "--num_processes N -m hf_speculate_training train ..., or target.device_map=auto."
        )


@contextmanager
def in_turn() -> Iterator[None]:
    """One process after the other: only one at a time holds the whole target."""
    rank, count = distributed.get_rank(), distributed.get_world_size()
    for _ in range(rank):
        distributed.barrier()
    try:
        yield
    finally:
        for _ in range(count - rank):
            distributed.barrier()


def shard_layers(target: GenerativeModel, mesh: Any) -> None:
    """Keeps this process' part of every layer, on the device of `mesh`; the rest of the target goes there whole."""
    decoder: Any = decoder_of(target)
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh)
    whole = {parameter for parameter in decoder.parameters() if not isinstance(parameter, DTensor)}
    kind = type(decoder)
    fully_shard(decoder, mesh=mesh, ignored_params=whole)  # one root: the next layer is gathered while one runs
    decoder.__class__ = kind  # transformers finds by it which outputs are hidden states; the root works by hooks
    target.to(mesh.device_type)


def mesh_of_processes(device: torch.device) -> Any:
    """All processes, in one line; a collective call."""
    return init_device_mesh(device.type, (distributed.get_world_size(),))


def is_sharded(target: nn.Module) -> bool:
    """True if other processes hold parts of the target."""
    return any(isinstance(parameter, DTensor) for parameter in target.parameters())


def target_fingerprint(target: GenerativeModel) -> str:
    """sha256 over a model's configuration and a sample of every tensor of it, adapters included.

    Values are sampled evenly, see `sample_bytes`: any training changes some of them, and reading all of a large model
    would take longer than what the fingerprint protects.
    """
    digest = hashlib.sha256(json.dumps(_shape_of(target), sort_keys=True, default=str).encode())
    for name, tensor in sorted(target.state_dict().items()):
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(sample_bytes(tensor))
    return digest.hexdigest()


def _shape_of(model: Any) -> dict[str, Any]:
    """The part of the configuration that changes the states, so no paths, versions or generation defaults."""
    config = model.config.get_text_config(decoder=True).to_dict()
    unrelated = ("_name_or_path", "transformers_version", "use_cache", "output_attentions", "output_hidden_states")
    return {"class": type(model).__name__} | {key: value for key, value in config.items() if key not in unrelated}
