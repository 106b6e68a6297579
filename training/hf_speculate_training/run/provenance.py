"""The record of a head's making: `provenance.json` next to it, written when a run starts and again when it ends.

It is uploaded with the head, so it holds neither tokens nor paths of the machine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from hf_speculate.errors import SpeculateError
from hf_speculate.files import json_writer, replace_files, text_writer
from hf_speculate.target import GenerativeModel
from hf_speculate_gguf import packing_report
from hf_speculate_plugins.origin import PROVENANCE_FILE, describe_identity
from hf_speculate_tools.commands import environment
from hf_speculate_tools.hub import LOCAL_RECIPE_FILE, RECIPE_FILE, public_provenance

from ..target import target_fingerprint
from .recipe import Recipe


_FORMAT = 1


def describe_use(target: GenerativeModel, tokenizer: Any) -> dict[str, Any]:
    """The target, its identity for users of the head, and the training texts' chat template; JSON-serialisable."""
    template = getattr(tokenizer, "chat_template", None)
    return {
        "target": _target(target),
        "identity": describe_identity(target),
        "chat_template": template if isinstance(template, str) else None,
    }


def _target(target: GenerativeModel) -> dict[str, Any]:
    """Name, revision, dtype, quantisation, adapters and a fingerprint of the weights."""
    config = target.config
    return {
        "name": target.name_or_path or None,
        "revision": getattr(config, "_commit_hash", None),
        "architecture": type(target).__name__,
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": config._attn_implementation,
        "quantization": _quantization(target),
        "adapters": _adapters(target),
        "parameters": target.num_parameters(),
        "fingerprint": target_fingerprint(target),
    }


def check_same(kind: str, before: Mapping[str, Any], now: Mapping[str, Any], folder: str | os.PathLike) -> None:
    """Raises `SpeculateError` if a run is resumed with another target, data set, head or batch than at its start."""
    # In the form of the file, which has no paths: fingerprints identify more.
    before, now = (public_provenance({kind: each})[kind] for each in (before, now))
    different = {key: (before.get(key), now.get(key)) for key in before.keys() | now.keys()}
    different = {key: pair for key, pair in different.items() if pair[0] != pair[1]}
    if different:
        listed = "; ".join(f"{key}: {old!r} then, {new!r} now" for key, (old, new) in sorted(different.items()))
        raise SpeculateError(
            f"cannot resume in {os.fspath(folder)}: the {kind} is not the one that the run was started with "
            f"({listed}). Resume with that one, or start a new run in another folder."
        )


def write_provenance(folder: str | os.PathLike, content: Mapping[str, Any]) -> None:
    """Writes the allowed fields to `provenance.json`, with format, time and environment, completely or not at all."""
    written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    plain = json.loads(json.dumps(content, default=str))
    stated = {"format": _FORMAT, "written": written, **plain, "environment": environment()}
    replace_files(folder, {PROVENANCE_FILE: json_writer(public_provenance(stated))})


def write_recipe(folder: str | os.PathLike, recipe: Recipe) -> None:
    """Writes `recipe.yaml` for uploading, and a copy that can be run again if paths of this machine are in it."""
    public, local = recipe.to_yaml(publish=True), recipe.to_yaml()
    if public == local:
        replace_files(folder, {RECIPE_FILE: text_writer(public)}, stale=[LOCAL_RECIPE_FILE])
        return
    public = f"# Paths of the machine that it ran on are cut; {LOCAL_RECIPE_FILE} there has them.\n{public}"
    replace_files(folder, {LOCAL_RECIPE_FILE: text_writer(local), RECIPE_FILE: text_writer(public)})


def _quantization(model: GenerativeModel) -> Any:
    """The configuration of a quantised model; for packed GGUF files the types of blocks and their backends."""
    if packed := packing_report(model).in_memory:
        types, backends = zip(*packed, strict=True)
        return {"quant_method": "gguf", "types": sorted(set(types)), "backends": sorted(set(backends))}
    config = getattr(model.config, "quantization_config", None)
    to_dict = getattr(config, "to_dict", None)
    return to_dict() if to_dict else config


def _adapters(target: GenerativeModel) -> dict[str, Any] | None:
    configs = getattr(target, "peft_config", None)
    if not configs:
        return None
    return {
        name: {"type": str(config.peft_type), "base": config.base_model_name_or_path}
        for name, config in configs.items()
    }
