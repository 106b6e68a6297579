"""Ways to generate that are compared: stock's and speculators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from transformers import CompileConfig, PreTrainedModel

from hf_speculate.speculator import Speculator, SpeculatorSpec
from hf_speculate.target import GenerativeModel

from ..commands import make_spec, neutralize


COMPILED = "stock compiled"

Kind = Literal["eager", "stock_compiled", "stock_speculative", "engine", "speculator"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to generate.

    Attributes:
        name: its name in tables.
        kind: all but "speculator" are baselines.
        arguments: arguments of `generate` beyond those that all methods share.
        spec: the speculator as the user named it.
        fresh: maker of further arguments, made again for every call, before the clock starts.
        compiles: whether it warms up with whole passes over the requests, until one of them compiles nothing.
        model: the model that generates, where it is not the one that all methods share.
    """

    name: str
    kind: Kind
    arguments: dict[str, Any] = field(default_factory=dict)
    spec: str | None = None
    fresh: Callable[[], dict[str, Any]] | None = None
    compiles: bool = False
    model: Any = None

    def forget(self) -> None:
        """Makes its drafter drop the texts of earlier requests."""
        if (speculator := self.arguments.get("speculator")) is not None:
            speculator.drafter.forget()

    def runs_at(self, batch_size: int) -> bool:
        return self.kind not in ("stock_speculative", "engine") or batch_size == 1


def eager_method() -> Method:
    """Stock `generate` with its dynamic cache."""
    return Method(name="eager", kind="eager")


def compiled_method() -> Method:
    """Stock `generate` with a static cache, its decoding forward compiled, also on a CPU."""
    return _compiled(eager_method(), COMPILED, "stock_compiled")


def _compiled(method: Method, name: str, kind: Kind) -> Method:
    config = CompileConfig()
    config._compile_all_devices = True  # type: ignore[assignment]
    arguments = {**method.arguments, "cache_implementation": "static", "compile_config": config}
    return Method(name=name, kind=kind, arguments=arguments, compiles=True)


def stock_speculative_methods(
    assistant: PreTrainedModel | None, num_lookup_tokens: int, num_cached: int | None = None
) -> list[Method]:
    """Stock prompt lookup, and assisted generation where there is a draft model.

    Args:
        num_cached: entries of the static cache with which each is compiled, too; None leaves that out. Stock's own size
            has no room for the last drafts of prompt lookup (transformers 5.24).
    """
    arguments: dict[str, dict[str, Any]] = {"stock prompt lookup": {"prompt_lookup_num_tokens": num_lookup_tokens}}
    if assistant is not None:
        arguments["stock assisted"] = {"assistant_model": assistant}
    plain = [Method(name=name, kind="stock_speculative", arguments=given) for name, given in arguments.items()]
    compiled = [_compiled(method, f"{method.name}, compiled", method.kind) for method in plain if num_cached]
    return plain + [replace(method, arguments=method.arguments | {"max_cache_len": num_cached}) for method in compiled]


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
    """A method for every spec, each with a speculator of its own; options of a spec beat `defaults`."""
    return [speculator_method(spec.label, make_spec(spec, target, **defaults), spec=spec.text) for spec in specs]


def draft_model_of(methods: Sequence[Method]) -> PreTrainedModel | None:
    """The causal LM of the target's vocabulary with which one of the speculators drafts: stock can use it too."""
    for method in methods:
        drafter = method.arguments["speculator"].drafter
        model = getattr(drafter, "model", None)
        if isinstance(model, PreTrainedModel) and getattr(drafter, "translation", None) is None:
            neutralize(model)
            return model
    return None
