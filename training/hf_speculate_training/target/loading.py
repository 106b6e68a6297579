"""The target and its tokenizer, loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PretrainedConfig

from hf_speculate.commands import target_path
from hf_speculate.errors import SpeculateError, first_line
from hf_speculate.gguf import find_file, load_model, plan_model, read_model_file, read_tokenizer

from ..sections import RecipeError
from .options import TargetSection


def load_target(section: TargetSection, device: torch.device) -> nn.Module:
    """The target, frozen, in `eval()` mode, with its adapter.

    Raises:
        SpeculateError: it cannot be had; in one line.
    """
    section = replace(section, path=target_path(section.path))
    try:
        model = _packed(section, device) if _is_packed(section) else _from_pretrained(section, device)
        if section.adapter:
            model = _adapted(model, section.adapter)
    except SpeculateError:
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise SpeculateError(f"cannot load the target {section.path!r}: {first_line(error)}") from error
    return model.eval().requires_grad_(False)


def load_config(section: TargetSection) -> PretrainedConfig:
    """The target's configuration, without its weights; raises `SpeculateError` in one line."""
    section = replace(section, path=target_path(section.path))
    try:
        if _is_packed(section):
            return plan_model(
                read_model_file(find_file(section.path, section.gguf_file, {"revision": section.revision}))
            ).config
        options = {"gguf_file": section.gguf_file} if section.gguf_file else {}
        return AutoConfig.from_pretrained(section.path, revision=section.revision, **options)
    except SpeculateError:
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise SpeculateError(f"cannot read the config of the target {section.path!r}: {first_line(error)}") from error


def load_tokenizer(section: TargetSection) -> Any:
    """The target's tokenizer."""
    section = replace(section, path=target_path(section.path))
    name = section.tokenizer or section.path
    options: dict[str, Any] = {"revision": section.revision} if section.tokenizer is None else {}
    try:
        if section.tokenizer is None and _is_packed(section):
            return read_tokenizer(read_model_file(find_file(section.path, section.gguf_file, options)))
        if section.tokenizer is None and section.gguf_file:
            options["gguf_file"] = section.gguf_file
        return AutoTokenizer.from_pretrained(name, **options)
    except SpeculateError:
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise SpeculateError(f"cannot load the tokenizer of {name!r}: {first_line(error)}") from error


def _is_packed(section: TargetSection) -> bool:
    is_gguf = section.gguf_file is not None or section.path.endswith(".gguf")
    return is_gguf and section.gguf_backend != "transformers"


def _packed(section: TargetSection, device: torch.device) -> nn.Module:
    """A GGUF file as `load_gguf` has it: what the head drafts for later."""
    given = {"quantization": section.quantization, "device_map": section.device_map}
    if extra := [name for name, value in given.items() if value is not None]:
        raise RecipeError(f"target.{extra[0]} does not go with a GGUF file: it is quantised, and lies on one device.")
    path = find_file(section.path, section.gguf_file, {"revision": section.revision})
    dtype = torch.bfloat16 if section.dtype == "auto" else getattr(torch, section.dtype)
    return load_model(
        path,
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
