"""Targets and speculators by the names that command lines use."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_speculate.errors import SpeculateError, first_line
from hf_speculate.files import check_regular, file_names, user_path
from hf_speculate.speculator.registry import SpeculatorSpec, path_problem  # the package imports torch
from hf_speculate_gguf.named import NAMED_TARGETS, known_target, named_file


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_speculate.speculator import Speculator
    from hf_speculate.target import GenerativeModel


BUNDLED = "pycoder"
_BUNDLED_DRAFT = "pycoder-draft"
_FROM_TEXT = ("prompt_lookup", "suffix")
_BUNDLED_HEADS = ("pycoder-eagle3", "pycoder-medusa")


def target_path(name_or_path: str) -> str:
    """Path of a target with a known name; any other text is a path, whose "~" is expanded, or a Hub id.

    Raises:
        SpeculateError: the target's file is not on this machine.
    """
    return named_file(name_or_path) or user_path(name_or_path)


def load_target(
    name_or_path: str, dtype: str, device: torch.device, gguf_backend: str = "auto", *, neutral: bool = True
) -> tuple[GenerativeModel, PreTrainedTokenizerBase]:
    """Loads model and tokenizer; raises `SpeculateError` with a message of one line.

    The dtype "auto" is the checkpoint's, and bfloat16 for a GGUF file. With `neutral` the checkpoint's generation
    config is replaced (`neutralize`).
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .machine import find_dtype

    if dtype != "auto":
        find_dtype(dtype)
    name_or_path = target_path(name_or_path)
    if name_or_path.endswith(".gguf"):
        from hf_speculate_gguf import load_gguf  # imported here, so that other commands start without it

        torch_dtype = find_dtype("bfloat16" if dtype == "auto" else dtype)
        packed, tokenizer = load_gguf(name_or_path, dtype=torch_dtype, device=device, backend=gguf_backend)
        if neutral:
            neutralize(packed)
        return packed, tokenizer
    check_backend(name_or_path, gguf_backend)
    _check_place(name_or_path)
    files = file_names(name_or_path)
    for name in files:
        if name.endswith((".json", ".safetensors", ".bin")):
            check_regular(Path(name_or_path, name))  # transformers' error names no pointer of Git-LFS
    if os.path.isdir(name_or_path) and {"config.json", "adapter_config.json"}.isdisjoint(files):
        packed = "".join(f" Its file {name!r} is one." for name in files if name.endswith(".gguf"))
        raise SpeculateError(
            f"cannot load target {name_or_path!r}: the folder has no config.json. A target is a folder with config, "
            f"weights and tokenizer, or a GGUF file.{packed}"
        )
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


def check_target(name_or_path: str) -> None:
    """Raises `SpeculateError` for a target that is not there, as far as that is known without loading it."""
    path = target_path(name_or_path)
    if not path.endswith(".gguf"):
        _check_place(path)
    elif path.startswith((".", "/", "~")) and not os.path.exists(path):
        raise SpeculateError(f"cannot load target {name_or_path!r}: no such file.")


def check_backend(name_or_path: str, gguf_backend: str) -> None:
    """Raises `SpeculateError` for a backend of GGUF files that is given for another target."""
    if gguf_backend != "auto" and not target_path(name_or_path).endswith(".gguf"):
        raise SpeculateError(f"--gguf-backend is for GGUF files; {name_or_path} is not one.")


def _check_place(name_or_path: str) -> None:
    """Raises for a name that is neither a folder nor a repository id, before the Hub is asked several times."""
    if os.path.isdir(name_or_path):
        return
    if problem := path_problem(name_or_path):
        raise SpeculateError(f"cannot load target: {name_or_path!r} {problem}")
    from huggingface_hub import try_to_load_from_cache

    if "/" not in name_or_path and not isinstance(try_to_load_from_cache(name_or_path, "config.json"), str):
        near = difflib.get_close_matches(name_or_path, [*NAMED_TARGETS, BUNDLED, *os.listdir()], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise SpeculateError(
            f"cannot load target {name_or_path!r}: no such folder here.{hint} Give a folder, a GGUF file, "
            f"{', '.join(map(repr, NAMED_TARGETS))}, or the id of a repository on the Hub (owner/name)."
        )


def _way_out(name_or_path: str) -> str:
    from huggingface_hub import is_offline_mode

    if os.path.isdir(name_or_path):
        return ""
    absent = f" There is no folder {os.path.abspath(name_or_path)}."
    if is_offline_mode():
        return f"{absent} HF_HUB_OFFLINE is set: unset it, or run `hf download {name_or_path}`, or give a folder."
    return f"{absent} Give a folder, a GGUF file, or the id of a repository on the Hub (owner/name)."


def neutralize(model: PreTrainedModel) -> None:
    """Replaces the checkpoint's generation config, so that it sets no EOS, sampling defaults or penalties."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(bos_token_id=model.generation_config.bos_token_id)


def bundled(name: str) -> str | None:
    """Folder of a model in `examples/`, above the current directory or next to the package; None if it does not
    exist."""
    here = Path.cwd()
    for root in (here, *here.parents, Path(__file__).resolve().parents[2]):
        folder = root / "examples" / name
        if (folder / "config.json").is_file():
            return os.path.relpath(folder) if here in folder.parents else str(folder)
    return None


def default_target() -> str:
    """The bundled target; raises `SpeculateError` if it is missing (a wheel does not contain it)."""
    path = bundled(BUNDLED)
    if path is None:
        raise SpeculateError(
            f"no target was given and the bundled one (examples/{BUNDLED} of a checkout) is not here: pass --target "
            "with a path or Hub id, or run this inside a checkout."
        )
    return path


def make_spec(spec: SpeculatorSpec, target: GenerativeModel, **defaults: Any) -> Speculator:
    """Makes the speculator. Every problem is a `SpeculateError`. Options of the spec win over `defaults`."""
    from hf_speculate.speculator import make_speculator

    try:
        return make_speculator(spec.source, target, **(defaults | spec.options))
    except (TypeError, ValueError, OSError) as error:
        if isinstance(error, SpeculateError):
            raise
        raise SpeculateError(f"cannot make speculator {spec.text!r}: {first_line(error)}") from error


def parse_spec(text: str) -> SpeculatorSpec:
    """The spec in a text. Raises `SpeculateError` for text that cannot be read, and for names that are not
    installed."""
    spec = SpeculatorSpec.parse(text)
    spec.check_source()
    return spec


def parse_specs(texts: Sequence[str]) -> list[SpeculatorSpec]:
    """The specs in several texts. Also raises `SpeculateError` if two would have the same name in tables."""
    specs = [parse_spec(text) for text in texts]
    names = [spec.label for spec in specs]
    if len(set(names)) != len(names):
        raise SpeculateError(f"two speculators have the same name: {', '.join(names)}.")
    return specs


def default_specs(target: str, branches: int = 1) -> list[SpeculatorSpec]:
    """Specs for a target if the user named none: drafters that copy from the text, and those bundled for the target."""
    if known := known_target(target):
        head = bundled(known.head)
        return parse_specs([*_FROM_TEXT, *([head] if head else [])])
    if target != bundled(BUNDLED):
        return parse_specs(list(_FROM_TEXT))
    heads = [folder for folder in map(bundled, _BUNDLED_HEADS) if folder]
    draft = bundled(_BUNDLED_DRAFT)
    draft_specs = [f"draft_model:model={draft}" + (f",top_k={branches}" if branches > 1 else "")] if draft else []
    return parse_specs([*_FROM_TEXT, *heads, *draft_specs])
