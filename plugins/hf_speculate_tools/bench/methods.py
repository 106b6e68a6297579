"""Ways to generate that are compared: stock's, speculators, and scripted drafters whose acceptance is set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from transformers import CompileConfig, PreTrainedModel

from hf_speculate.drafting import Drafter
from hf_speculate.errors import SpeculateError
from hf_speculate.models import GenerativeModel
from hf_speculate.speculator import Speculator, SpeculatorSpec
from hf_speculate.testing import ScriptedDrafter

from ..commands import make_spec, neutralize


# Every level is right in 0.7 of the rounds where the level above was.
DEFAULT_RATES = "0.7,0.49,0.343,0.24,0.168"

COMPILED = "stock compiled"

Kind = Literal["eager", "stock_compiled", "stock_speculative", "engine", "speculator"]
Texts = Mapping[tuple[int, ...], Sequence[int]]
"""Prompt -> the tokens that plain `generate` writes after it."""


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
    return plain + [replace(each, arguments=each.arguments | {"max_cache_len": num_cached}) for each in compiled]


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


def scripted_methods(texts: Texts, profile: AcceptanceProfile, vocab_size: int) -> list[Method]:
    """A scripted drafter with automatic trees, and with fixed ones."""
    drafter = profile.drafter(texts, vocab_size=vocab_size)
    names = {"automatic": True, f"fixed {profile.nodes}": False}
    return [
        speculator_method(name, Speculator(drafter, adaptive=adaptive), spec=name) for name, adaptive in names.items()
    ]


def draft_model_of(methods: Sequence[Method]) -> PreTrainedModel | None:
    """The causal LM that one of the speculators drafts with: stock assisted generation can use it too."""
    for method in methods:
        model = getattr(method.arguments["speculator"].drafter, "model", None)
        if isinstance(model, PreTrainedModel):
            neutralize(model)
            return model
    return None


@dataclass(frozen=True)
class AcceptanceProfile:
    """Set acceptance of a scripted drafter, and the shape of its trees.

    Attributes:
        rates: share of the rounds that are accepted to depth 1, 2, … (unconditional, as `SpeculationStats` has them).
        widths: draft nodes at each depth.
    """

    rates: tuple[float, ...]
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        rates = self.rates
        is_falling = all(deeper <= rate for rate, deeper in pairwise(rates))
        if not rates or not is_falling or rates[0] > 1 or rates[-1] < 0:
            raise SpeculateError(
                "acceptance by depth is the share of rounds that get at least so deep: between 0 and 1, never rising; "
                f"got {list(rates)}."
            )

    @classmethod
    def of_nodes(cls, rates: Sequence[float], nodes: int) -> AcceptanceProfile:
        """Profile with `nodes` where most rounds get; a rank is taken to be right as often as 1 / (rank + 1)²."""
        if nodes < 1:
            raise SpeculateError(f"a tree needs at least one node, got {nodes}.")
        values = [
            (share / (rank + 1) ** 2, -depth) for depth, share in enumerate((1.0, *rates[:-1])) for rank in range(nodes)
        ]
        depths = [-negative for _, negative in sorted(values, reverse=True)[:nodes]]
        return cls(tuple(rates), tuple(depths.count(depth) for depth in range(max(depths) + 1)))

    @property
    def nodes(self) -> int:
        return sum(self.widths)

    @property
    def conditional(self) -> tuple[float, ...]:
        """Probability that a level is right where the one above it is."""
        above = (1.0, *self.rates[:-1])
        return tuple(rate / before if before else 0.0 for rate, before in zip(self.rates, above, strict=True))

    @property
    def mean_length(self) -> float:
        """Expected tokens of a round, bonus token included."""
        return 1 + sum(self.rates[: len(self.widths)])

    def drafter(self, texts: Texts, *, vocab_size: int, paid: Drafter | None = None) -> ScriptedDrafter:
        """A drafter of such trees.

        Args:
            texts: prompt -> the tokens that plain `generate` writes after it.
            vocab_size: range from which wrong tokens are drawn.
            paid: a drafter that does its own work each round, for its cost.
        """
        return ScriptedDrafter(
            texts, self.widths, accuracy=self.conditional, vocab_size=vocab_size, ranked=True, paid=paid
        )


def read_profile(text: str, nodes: int) -> AcceptanceProfile:
    """Rates by depth, as `0.8,0.6,0.4`; raises `SpeculateError` for other text and for rising rates."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise SpeculateError(f"acceptance must be rates by depth as 0.8,0.6,0.4; got {text!r}.") from error
    return AcceptanceProfile.of_nodes(rates, nodes)
