"""The options of the engine: everything that a speculator can be told beside its drafter, spelled once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from ..compilation import find_backend
from ..errors import OptionError
from ..policy import Adaptive, DraftPolicy, Fixed
from ..verification import TypicalAcceptance


Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of the engine around a drafter: the keyword arguments of `Speculator` and of `AutoSpeculator`.

    Attributes:
        acceptance: "match": the target's own sampler chooses every token. "typical" is **lossy**: in requests that
            sample, a drafted token is accepted if the target finds it probable enough (Medusa, arXiv:2401.10774), and
            where none is, the most probable token is taken; nothing is drawn.
        posterior_threshold, posterior_alpha: epsilon and delta of typical acceptance, see `TypicalAcceptance`.
        policy: how much every round drafts, see `hf_speculate.policy`. None: `Adaptive()`, which drafts what measured
            costs and acceptance say pays best, at most what the drafter's options allow, and nothing where nothing
            pays; or what `adaptive` says.
        adaptive: False is short for `policy=Fixed()`, always what the drafter's options say: then rounds, and with them
            16-bit ties, do not depend on the clock. None: True unless the environment variable HF_SPECULATE_ADAPTIVE
            is 0.
        compile: forwards of the target over trees, and of heads, go through `torch.compile` with static shapes (see
            `hf_speculate.compilation`), on GPUs as CUDA graphs: each (at most 8 of a function) takes seconds to minutes
            when it is first needed, and is kept as long as the model, as are the buffers of up to 4 requests. Nobody
            may change the model during a call. A string names a backend of `torch.compile`. What cannot be compiled
            runs as always, and `stats.fallbacks` says why.
        ahead: True: while the target verifies a draft, the drafter makes the next one on a thread of its own, on the
            likeliest guess of what is accepted. The text does not depend on it. It pays where the drafter has a device
            of its own, for requests of one row; on a CPU it shares the cores with the target, and loses. Of the
            built-in drafters `draft_model` can do it.
        exact: in 16 bit, too, the very text, scores and cache entries of plain `generate`, bit for bit: attention is
            computed node by node, and products in numbers of rows that this machine was found to multiply as single
            ones (tried once a model: seconds). A request that cannot have that is refused with the reason; with an
            attached speculator it runs plain. In float32 the text is plain's without it.
    Raises:
        ValueError: an option without a meaning, or two that exclude each other.
    """

    acceptance: Literal["match", "typical"] = "match"
    posterior_threshold: float | None = None
    posterior_alpha: float | None = None
    policy: DraftPolicy | None = None
    adaptive: bool | None = None
    compile: bool | str = False
    ahead: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        if self.policy is not None and self.adaptive is not None:
            raise ValueError("policy= and adaptive= both say how much is drafted: give one of them.")
        if self.policy is not None and not isinstance(self.policy, DraftPolicy):
            raise TypeError(f"policy= takes a DraftPolicy (Adaptive(), Fixed(), …), got {type(self.policy).__name__}.")
        if self.ahead not in (True, False):
            raise ValueError(f"ahead must be True or False, got {self.ahead!r}.")
        others = {"compile": self.compile, "acceptance": self.acceptance == "typical", "ahead": self.ahead}
        for name, is_given in others.items():
            if self.exact and is_given:  # drafting ahead takes threads from the target, which may round otherwise then
                raise ValueError(f"exact=True is the very text of plain `generate`, which {name}= cannot promise.")
        self.typical_acceptance()
        self.backend()

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[EngineOptions, dict[str, Any]]:
        """The engine's options among a drafter's, and those that are left."""
        names = {each.name for each in fields(cls)}
        own = {name: value for name, value in options.items() if name in names}
        return cls(**own), {name: value for name, value in options.items() if name not in names}

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> EngineOptions:
        """Reads keyword arguments; raises `OptionError` for one that there is not."""
        engine, others = cls.split(options)
        for name in others:
            raise OptionError(_unknown_option(name, "a Speculator", ()))
        return engine

    def typical_acceptance(self) -> TypicalAcceptance | None:
        """The rule of `acceptance="typical"`, None for "match"."""
        given = {"posterior_threshold": self.posterior_threshold, "posterior_alpha": self.posterior_alpha}
        given = {name: value for name, value in given.items() if value is not None}
        if self.acceptance == "typical":
            return TypicalAcceptance(**given)
        if self.acceptance != "match":
            raise ValueError(f"acceptance must be 'match' or 'typical', got {self.acceptance!r}.")
        if given:
            raise ValueError(f"{', '.join(given)} are thresholds of acceptance='typical', which was not asked for.")
        return None

    def draft_policy(self) -> DraftPolicy:
        """`policy`, or a new one."""
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
        options_class: a dataclass of all options.
        drafter: its name, for messages.
        also: what it takes beside these (a folder, another dataclass' fields), taken out of `given` already.
    Raises:
        OptionError: one that neither the drafter nor the engine has, with the nearest name and all there are.
    """
    own = [each.name for each in fields(options_class)]  # type: ignore[arg-type]
    for name in given:
        if name not in own:
            raise OptionError(_unknown_option(name, f"the drafter {drafter!r}", [*also, *own]))
    return options_class(**given)


def _unknown_option(name: str, owner: str, own: Iterable[str]) -> str:
    own, engine = list(own), [each.name for each in fields(EngineOptions)]
    close = difflib.get_close_matches(name, [*own, *engine], n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    possible = f"{owner} takes {', '.join(own)}; " if own else ""
    return f"unknown option {name!r} of {owner}.{hint} Possible: {possible}the engine takes {', '.join(engine)}."
