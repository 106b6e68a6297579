"""What is compared: stock's ways to generate, and speculators."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CompileConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..errors import DrafterNotFoundError, SpeculateError
from ..models import GenerativeModel
from ..registry import installed_drafters, unknown_drafter_message
from ..speculator import Speculator, make_speculator
from .environment import find_dtype


Kind = Literal["eager", "stock_compiled", "stock_speculative", "speculator"]

COMPILED = "stock compiled"

BUNDLED = "pycoder"
BUNDLED_DRAFT = "pycoder-draft"
BUNDLED_HEADS = ("pycoder-eagle3", "pycoder-medusa")


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to generate.

    Attributes:
        name: what tables call it.
        kind: all but "speculator" are baselines.
        arguments: of `generate`, beyond those that all methods share.
        spec: the speculator as it was asked for.
        compiles: it warms up with whole passes over the requests, until one of them compiles nothing.
    """

    name: str
    kind: Kind
    arguments: dict[str, Any]
    spec: str | None = None
    compiles: bool = False

    def runs_at(self, batch_size: int) -> bool:
        return self.kind != "stock_speculative" or batch_size == 1


@dataclass(frozen=True)
class SpeculatorSpec:
    """`NAME_OR_PATH[:option=value,...]`, e.g. `draft_model:model=PATH,depth=4,top_k=2`."""

    text: str
    source: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> SpeculatorSpec:
        source, separator, rest = text.partition(":")
        if separator and "=" not in rest:
            raise SpeculateError(
                f"cannot read speculator {text!r}: options are NAME:key=value,key=value, "
                "e.g. draft_model:model=PATH,depth=4."
            )
        options = {}
        for pair in filter(None, rest.split(",")):
            key, equals, value = pair.partition("=")
            if not equals or not key:
                raise SpeculateError(f"cannot read option {pair!r} of speculator {text!r}: it must be key=value.")
            options[key.strip()] = _value(value.strip())
        if source not in installed_drafters() and not os.path.isdir(source) and "/" not in source:
            raise DrafterNotFoundError(unknown_drafter_message(source))
        return cls(text, source, options)

    @property
    def label(self) -> str:
        """The text with paths cut to their last part."""
        options = ",".join(f"{k}={Path(v).name if isinstance(v, str) else v}" for k, v in self.options.items())
        source = self.source if self.source in installed_drafters() else Path(self.source).name
        return f"{source}:{options}" if options else source

    def make(self, target: GenerativeModel, **defaults: Any) -> Speculator:
        """The speculator; every problem is a `SpeculateError` that names the spec. Its own options beat `defaults`."""
        options = defaults | self.options
        try:
            return make_speculator(self.source, target, **options)
        except (TypeError, ValueError, OSError) as error:
            if isinstance(error, SpeculateError):
                raise
            raise SpeculateError(f"cannot make speculator {self.text!r}: {_first_line(error)}") from error


def eager_method() -> Method:
    """Stock `generate` with its dynamic cache."""
    return Method(name="eager", kind="eager", arguments={})


def compiled_method() -> Method:
    """Stock `generate` with a static cache, its decoding forward compiled, also on a CPU."""
    config = CompileConfig()
    config._compile_all_devices = True  # type: ignore[assignment]
    arguments = {"cache_implementation": "static", "compile_config": config}
    return Method(name=COMPILED, kind="stock_compiled", arguments=arguments, compiles=True)


def stock_speculative_methods(assistant: PreTrainedModel | None, num_lookup_tokens: int) -> list[Method]:
    """Stock prompt lookup, and assisted generation where there is a draft model."""
    arguments: dict[str, dict[str, Any]] = {"stock prompt lookup": {"prompt_lookup_num_tokens": num_lookup_tokens}}
    if assistant is not None:
        arguments["stock assisted"] = {"assistant_model": assistant}
    return [Method(name=name, kind="stock_speculative", arguments=given) for name, given in arguments.items()]


def parse_specs(texts: Sequence[str]) -> list[SpeculatorSpec]:
    """Raises `SpeculateError` where two of them would have the same name in tables."""
    specs = [SpeculatorSpec.parse(text) for text in texts]
    names = [spec.label for spec in specs]
    if len(set(names)) != len(names):
        raise SpeculateError(f"two speculators have the same name: {', '.join(names)}.")
    return specs


def speculator_methods(specs: Sequence[SpeculatorSpec], target: GenerativeModel) -> list[Method]:
    """A method for every spec, each with a speculator of its own."""
    methods = []
    for spec in specs:
        speculator = spec.make(target)
        arguments, compiles = {"speculator": speculator}, speculator.backend is not None
        methods.append(
            Method(name=spec.label, kind="speculator", arguments=arguments, spec=spec.text, compiles=compiles)
        )
    return methods


def draft_model_of(methods: Sequence[Method]) -> PreTrainedModel | None:
    """The causal LM that one of the speculators drafts with: what stock assisted generation can use too."""
    for method in methods:
        model = getattr(method.arguments["speculator"].drafter, "model", None)
        if isinstance(model, PreTrainedModel):
            neutralize(model)
            return model
    return None


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
        raise SpeculateError(f"cannot load target {name_or_path!r}: {_first_line(error)}") from error
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


def default_specs(target: str, branches: int = 1) -> list[SpeculatorSpec]:
    """Prompt lookup, and for the bundled target what there is for it: heads and a draft model.

    Args:
        branches: a level of the draft model; 1 is a chain.
    """
    if target != bundled(BUNDLED):
        return parse_specs(["prompt_lookup"])
    heads = [folder for folder in map(bundled, BUNDLED_HEADS) if folder]
    draft = bundled(BUNDLED_DRAFT)
    draft_specs = [f"draft_model:model={draft}" + (f",top_k={branches}" if branches > 1 else "")] if draft else []
    return parse_specs(["prompt_lookup", *heads, *draft_specs])


def table_specs(target: str) -> list[SpeculatorSpec]:
    """Those of `default_specs`, and the bundled EAGLE-3 head beside prompt lookup and compiled."""
    defaults, head = default_specs(target), bundled(BUNDLED_HEADS[0])
    if target != bundled(BUNDLED) or head is None:
        return defaults
    return [*defaults, *parse_specs([f"{head}+prompt_lookup", f"{head}:compile=true"])]


def _value(text: str) -> Any:
    """Numbers and booleans as such, everything else as text."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value if isinstance(value, int | float | bool) else text


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
