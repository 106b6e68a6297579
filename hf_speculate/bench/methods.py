"""What is compared: stock's ways to generate, and speculators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import CompileConfig, PreTrainedModel

from ..commands import make_spec, neutralize
from ..models import GenerativeModel
from ..registry import SpeculatorSpec
from ..speculator import Speculator
from .profiles import AcceptanceProfile, Texts


Kind = Literal["eager", "stock_compiled", "stock_speculative", "engine", "speculator"]

COMPILED = "stock compiled"


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to generate.

    Attributes:
        name: what tables call it.
        model: what generates, where it is not the model that all methods share.
        kind: all but "speculator" are baselines.
        arguments: of `generate`, beyond those that all methods share.
        spec: the speculator as it was asked for.
        fresh: arguments that are made anew for every call, before the clock starts.
        compiles: it warms up with whole passes over the requests, until one of them compiles nothing.
    """

    name: str
    kind: Kind
    arguments: dict[str, Any] = field(default_factory=dict)
    spec: str | None = None
    fresh: Callable[[], dict[str, Any]] | None = None
    compiles: bool = False
    model: Any = None

    def forget(self) -> None:
        """Has its drafter drop the texts of earlier requests."""
        if (speculator := self.arguments.get("speculator")) is not None:
            speculator.drafter.forget()

    def runs_at(self, batch_size: int) -> bool:
        return self.kind not in ("stock_speculative", "engine") or batch_size == 1


def eager_method() -> Method:
    """Stock `generate` with its dynamic cache."""
    return Method(name="eager", kind="eager")


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


def speculator_method(name: str, speculator: Speculator, **more: Any) -> Method:
    """`generate` with a speculator."""
    return Method(
        name=name,
        kind="speculator",
        arguments={"speculator": speculator},
        compiles=speculator.backend is not None,
        **more,
    )


def speculator_methods(specs: Sequence[SpeculatorSpec], target: GenerativeModel, **defaults: Any) -> list[Method]:
    """A method for every spec, each with a speculator of its own; `defaults` are options that specs may overrule."""
    return [speculator_method(spec.label, make_spec(spec, target, **defaults), spec=spec.text) for spec in specs]


def scripted_methods(texts: Texts, profile: AcceptanceProfile, vocab_size: int) -> list[Method]:
    """A scripted drafter with automatic trees, and with fixed ones."""
    drafter = profile.drafter(texts, vocab_size=vocab_size)
    names = {"automatic": True, f"fixed {profile.nodes}": False}
    return [
        speculator_method(name, Speculator(drafter, adaptive=adaptive), spec=name) for name, adaptive in names.items()
    ]


def draft_model_of(methods: Sequence[Method]) -> PreTrainedModel | None:
    """The causal LM that one of the speculators drafts with: what stock assisted generation can use too."""
    for method in methods:
        model = getattr(method.arguments["speculator"].drafter, "model", None)
        if isinstance(model, PreTrainedModel):
            neutralize(model)
            return model
    return None
