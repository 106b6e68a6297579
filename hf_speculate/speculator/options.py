"""The options of the engine: everything that a speculator takes besides its drafter, defined once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

from ..errors import OptionError, first_line
from ..graphs import find_backend
from ..policy import Adaptive, DraftPolicy, Fixed
from ..verification import TypicalAcceptance
from .registry import installed_drafters, load_drafter


Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of the engine around a drafter: the keyword arguments of `Speculator` and of `AutoSpeculator`.

    Attributes:
        acceptance: "match" or "typical". With "match" the target's own sampler chooses every token. "typical" is
            **lossy**: in sampled requests a drafted token is accepted if the target finds it probable enough (Medusa,
            arXiv:2401.10774). If none is, the most probable token is taken; no random numbers are drawn.
        posterior_threshold, posterior_alpha: epsilon and delta of typical acceptance (`TypicalAcceptance`); None takes
            its defaults.
        policy: policy that decides how much every round drafts (`hf_speculate.policy`). None follows `adaptive`. The
            default is `Adaptive()`, which drafts what pays best by measured costs and acceptance, within the drafter's
            options.
        adaptive: False is short for `policy=Fixed()`: every round drafts what the drafter's options give. Then rounds,
            and with them 16-bit ties, do not depend on the clock. None means True, unless the environment variable
            HF_SPECULATE_ADAPTIVE is 0.
        compile: how forwards of the target over trees, and of heads, are run. None (default) records them as CUDA
            graphs on a GPU, which takes tens of milliseconds for each of a few sizes; elsewhere it changes nothing.
            False runs them as they are. True also compiles them with `torch.compile`, which takes seconds to minutes
            for each graph; a string names another of its backends. Graphs are kept as long as the model, as are buffers
            of up to 4 requests. Do not change the model during a call. What cannot be captured or compiled runs as it
            is, and `stats.fallbacks` gives the reason.
        ahead: True makes the drafter draft the next round on a separate thread while the target verifies, from the most
            likely outcome. The text does not depend on it. It pays for requests of one row if the drafter has a device
            of its own. On a CPU it shares cores with the target and is slower. Of the built-in drafters only
            `draft_model` can do it.
        exact: True makes text, scores and cache entries in 16 bit those of plain `generate`, bit for bit. Attention is
            computed node by node, and products with row counts that were tested on this machine (once a model:
            seconds). A request that cannot be exact is refused with the reason; with an attached speculator it runs
            plain. In float32 the text equals plain text anyway.
        constraints: whether a request with a constraint (a grammar of xgrammar or outlines, `prefix_allowed_tokens_fn`,
            a processor with `forced_tokens`) is also drafted for by drafters that query the constraint
            (`Drafter.joins`). A function of the request is then called more often than plain `generate` calls it.

    Raises:
        OptionError: an option has no meaning, or two exclude each other.
    """

    acceptance: Literal["match", "typical"] = "match"
    posterior_threshold: float | None = None
    posterior_alpha: float | None = None
    policy: DraftPolicy | None = None
    adaptive: bool | None = None
    compile: bool | str | None = None
    ahead: bool = False
    exact: bool = False
    constraints: bool = True

    def __post_init__(self) -> None:
        if self.policy is not None and self.adaptive is not None:
            raise OptionError("policy= and adaptive= both control how much is drafted: give one of them.")
        if self.policy is not None and not isinstance(self.policy, DraftPolicy):
            raise OptionError(
                f"policy= takes a DraftPolicy (Adaptive(), Fixed(), …), got {type(self.policy).__name__}."
            )
        if self.ahead not in (True, False):
            raise OptionError(f"ahead must be True or False, got {self.ahead!r}.")
        others = {"compile": self.compile, "acceptance": self.acceptance == "typical", "ahead": self.ahead}
        for name, is_given in others.items():
            # drafting ahead takes threads from the target, which may then round differently
            if self.exact and is_given:
                raise OptionError(
                    f"exact=True is the very text of plain `generate`, which {name}= cannot promise: give one of them."
                )
        self.typical_acceptance()
        self.backend()

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[EngineOptions, dict[str, Any]]:
        """The engine's options among a drafter's, and the remaining ones; raises `OptionError`, see `read_options`."""
        names = {option.name for option in fields(cls)}
        own = {name: value for name, value in options.items() if name in names}
        return _made(cls, own, "the engine"), {name: value for name, value in options.items() if name not in names}

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> EngineOptions:
        """The options from keyword arguments; raises `OptionError` for an unknown one."""
        engine, others = cls.split(options)
        for name in others:
            raise OptionError(_unknown_option(name, "a Speculator", ()))
        return engine

    def typical_acceptance(self) -> TypicalAcceptance | None:
        """The rule of `acceptance="typical"`; None for "match"."""
        given = {"posterior_threshold": self.posterior_threshold, "posterior_alpha": self.posterior_alpha}
        given = {name: value for name, value in given.items() if value is not None}
        if self.acceptance == "typical":
            return TypicalAcceptance(**given)
        if self.acceptance != "match":
            raise OptionError(f"acceptance must be 'match' or 'typical', got {self.acceptance!r}.")
        if given:
            raise OptionError(f"{', '.join(given)} are thresholds of acceptance='typical', which was not asked for.")
        return None

    def draft_policy(self) -> DraftPolicy:
        """The given policy, or a new one."""
        if self.policy is not None:
            return self.policy
        is_adaptive = self.adaptive
        if is_adaptive is None:
            is_adaptive = os.environ.get("HF_SPECULATE_ADAPTIVE", "1") != "0"
        return Adaptive() if is_adaptive else Fixed()

    def backend(self) -> str | None:
        """The backend of `torch.compile`; None if nothing is compiled."""
        return find_backend(self.compile)


def read_options(
    options_class: type[Options], given: Mapping[str, Any], drafter: str, also: Iterable[str] = ()
) -> Options:
    """A drafter's options from keyword arguments.

    Args:
        options_class: dataclass of all options.
        given: options by name.
        drafter: name of the drafter, for messages.
        also: names of further options that the drafter takes, already removed from `given`.

    Raises:
        OptionError: neither the drafter nor the engine has an option, and the message has the nearest name and all
            names; or a value is of another kind than the option takes. Words stand for true, false and none.
    """
    own = [option.name for option in fields(options_class)]  # type: ignore[arg-type]
    for name in given:
        if name not in own:
            raise OptionError(_unknown_option(name, f"the drafter {drafter!r}", [*also, *own]))
    return _made(options_class, given, f"the drafter {drafter!r}")


def takers_of(name: str) -> list[str]:
    """Takers of an option of this name: "" for the engine, else the names of installed drafters.

    A drafter that cannot be imported is left out.
    """
    if name in {option.name for option in fields(EngineOptions)}:
        return [""]
    takers = []
    for drafter in installed_drafters():
        with suppress(Exception):
            classes = load_drafter(drafter).options_classes
            takers += [drafter] if any(option.name == name for kind in classes for option in fields(kind)) else []
    return takers


def check_sizes(drafter: str, options: Any, *names: str) -> None:
    """Raises `OptionError` for sizes of drafts below 1; None stands for a default."""
    for name in names:
        if (value := getattr(options, name)) is not None and value < 1:
            raise OptionError(f"{drafter}: {name} must be at least 1, got {value}.")


_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": None, "null": None}
"""Words for values, in any case: "exact=True" is what people write in the place of "exact=true"."""

_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a whole number", lambda value: isinstance(value, Integral) and not isinstance(value, bool)),
    "float": ("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool)),
    "str": ("a name", lambda value: isinstance(value, str)),
    "None": ("none", lambda value: value is None),
    "Sequence[int]": (
        "a list of whole numbers",
        lambda value: isinstance(value, Sequence) and all(isinstance(item, Integral) for item in value),
    ),
}
"""Kinds of options that are checked: the words for each, and the test for a value."""


def _made(options_class: type[Options], given: Mapping[str, Any], owner: str) -> Options:
    """The options with these values; everything that is wrong with one is an `OptionError`."""
    kinds = {option.name: str(option.type).split(" | ") for option in fields(options_class)}  # type: ignore[arg-type]
    values = {name: _value(name, value, kinds[name]) for name, value in given.items()}
    try:
        return options_class(**values)
    except OptionError:
        raise
    except (TypeError, ValueError) as error:  # of a class that checks its options in its own way
        written = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise OptionError(f"{owner} cannot take {written}: {first_line(error)}") from error


def _value(name: str, value: Any, kinds: Sequence[str]) -> Any:
    """The value of an option that takes these kinds, words read; raises `OptionError` for one of another kind."""
    known = _WORDS.get(value.lower(), value) if isinstance(value, str) else value
    if "bool" in kinds and isinstance(known, int) and known in (0, 1):
        known = bool(known)
    if any(kind in _KINDS and _KINDS[kind][1](known) for kind in kinds):
        return known
    if _KINDS.keys() >= {*kinds} and not any(_KINDS[kind][1](value) for kind in kinds):
        wanted = " or ".join(_KINDS[kind][0] for kind in kinds)
        raise OptionError(f"the option {name} is {value!r}; it takes {wanted}.")
    return value


def _unknown_option(name: str, owner: str, own: Iterable[str]) -> str:
    own, engine = list(own), [option.name for option in fields(EngineOptions)]
    close = difflib.get_close_matches(name, [*own, *engine], n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    possible = f"{owner} takes {', '.join(own)}; " if own else ""
    return f"unknown option {name!r} of {owner}.{hint} Possible: {possible}the engine takes {', '.join(engine)}."
