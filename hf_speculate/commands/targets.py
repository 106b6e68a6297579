"""Targets by name or path, and the bundled one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..errors import SpeculateError
from ..models import GenerativeModel
from .machine import find_dtype


BUNDLED = "pycoder"


def load_target(name_or_path: str, dtype: str, device: torch.device) -> tuple[GenerativeModel, PreTrainedTokenizerBase]:
    """Model and tokenizer, ready to be measured; raises `SpeculateError` in one line."""
    if dtype != "auto":
        find_dtype(dtype)
    if name_or_path.startswith((".", "/", "~")) and not os.path.isdir(name_or_path):
        raise SpeculateError(f"cannot load target {name_or_path!r}: no such folder.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
        model: Any = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype)
    except (OSError, ValueError) as error:
        raise SpeculateError(f"cannot load target {name_or_path!r}: {first_line(error)}") from error
    neutralize(model)
    return model.eval().to(device), tokenizer


def neutralize(model: PreTrainedModel) -> None:
    """Replaces the checkpoint's generation config: no EOS, no sampling defaults or penalties of its own."""
    model.generation_config = GenerationConfig(bos_token_id=model.generation_config.bos_token_id)


def bundled(name: str) -> str | None:
    """The folder of a model of `examples/`, looked for upwards of the current directory and beside the package."""
    here = Path.cwd()
    for root in (here, *here.parents, Path(__file__).resolve().parents[2]):
        folder = root / "examples" / name
        if (folder / "config.json").is_file():
            return os.path.relpath(folder) if here in folder.parents else str(folder)
    return None


def default_target() -> str:
    """The bundled target; raises `SpeculateError` where it is absent (a wheel does not carry it)."""
    found = bundled(BUNDLED)
    if found is None:
        raise SpeculateError(
            f"no target was given and the bundled one (examples/{BUNDLED} of a checkout) is not here: pass --target "
            "with a path or Hub id, or run this inside a checkout."
        )
    return found


def first_line(error: BaseException) -> str:
    """Of its message, for errors of one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
