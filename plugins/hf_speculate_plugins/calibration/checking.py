"""The search for the conventions that a head was trained with.

A head drafts a greedy chain at every position of texts that the target wrote greedily, all positions at once, and what
the target wrote says how much of it would have been accepted. The same is done under the known alternatives, and a
change is adopted if it makes a clear difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from jaxtyping import Int
from torch import Tensor

from hf_speculate.errors import SpeculateError
from hf_speculate.stats import HeadRecord

from .conditions import Finding
from .rates import AcceptanceRates
from .texts import Text


Verdict = Literal["plausible", "mislabelled", "better", "explained", "unexplained"]
Options = dict[str, Any]

# A change must gain this many standard errors (paired over positions, which are not quite independent, hence many) and
# this many tokens a round.
_MIN_SIGMAS, _MIN_GAIN = 4.0, 0.05
_MIN_SPREAD = 0.1  # a gain that is the same at every position is not infinitely sure
_MAX_CHANGES = 3


@dataclass(frozen=True)
class Alternative:
    """Another way to read a head: options of `AutoSpeculator.from_pretrained`, and what they mean."""

    options: Options
    meaning: str


@dataclass(frozen=True)
class Trial:
    """What an alternative did.

    Attributes:
        options: all that differs from what the file says.
        meaning: the change in words.
        acceptance: None if the head cannot be read like this, see `problem`.
        gain: tokens a round more than before the change; None without acceptance.
        sigmas: the gain in standard errors, paired over positions.
        problem: why the head cannot be read like this.
    """

    options: Options
    meaning: str
    acceptance: AcceptanceRates | None = None
    gain: float | None = None
    sigmas: float | None = None
    problem: str | None = None

    @property
    def helps(self) -> bool:
        return bool(self.gain and self.sigmas and self.gain >= _MIN_GAIN and self.sigmas >= _MIN_SIGMAS)


@dataclass(frozen=True)
class HeadCheck:
    """Outcome of `check_head`.

    Attributes:
        head: folder or Hub id.
        drafter: name of the drafter that reads it.
        stated: acceptance as the files say.
        trials: the alternatives that were tried, in order; empty where nothing was suspicious.
        fix: options that make it better, empty if none does.
        best: acceptance with them.
        verdict: "plausible": as expected of a trained head. "mislabelled": low as stated, plausible with `fix`.
            "better": `fix` helps and it is still low, or it was plausible without. "explained": low, no convention
            helps, and `findings` say what it is. "unexplained": low, and nothing that was tried helps.
        record: of the head's folder: acceptance in training, which "low" is measured by, and whose target it is.
        findings: conditions that change its acceptance clearly, the strongest first, see `conditions`.
    """

    head: str
    drafter: str
    stated: AcceptanceRates
    trials: tuple[Trial, ...] = ()
    fix: Options = field(default_factory=dict)
    best: AcceptanceRates | None = None
    findings: tuple[Finding, ...] = ()
    record: HeadRecord = field(default_factory=HeadRecord)

    @property
    def is_low(self) -> bool:
        """Whether acceptance stays low with the best way to read it."""
        return (self.best or self.stated).is_low(self.record)

    @property
    def verdict(self) -> Verdict:
        if not self.fix or self.best is None:
            low = "explained" if self.findings else "unexplained"
            return low if self.is_low else "plausible"
        return "mislabelled" if self.stated.is_low(self.record) and not self.is_low else "better"

    @property
    def code(self) -> str:
        """The line that loads the head as it should be read."""
        options = "".join(f", {name}={_literal(value)}" for name, value in self.fix.items())
        return f'speculator = AutoSpeculator.from_pretrained("{self.head}", target=model{options})'

    @property
    def message(self) -> str:
        """The verdict in words."""
        changes = " and ".join(trial.meaning for trial in self.trials if trial.options == self.fix) or "nothing"
        verdict = {
            "plausible": f"Acceptance is as expected ({self._first}): nothing to fix.",
            "mislabelled": f"The head is mis-labelled. What it was trained with: {changes}.",
            "better": f"The head drafts better with: {changes}.",
            "explained": f"Acceptance is low ({self._first}) and no convention helps; what it depends on is below.",
            "unexplained": f"Acceptance is low ({self._first}) and no convention helps. {self._question}",
        }[self.verdict]
        return "\n".join([verdict, *(f"- {finding.kind}: {finding.message}" for finding in self.findings)])

    @property
    def _first(self) -> str:
        return f"{self.stated.by_depth[0]:.2f} at depth 1; {self.record.recorded}"

    @property
    def _question(self) -> str:
        form = "in the form that it was trained on (chat template, system prompt)"
        if self.record.is_own_target:
            return (
                "The target is the one that the head was trained for. Are the prompts of the kind of its training "
                f"texts, and {form}?"
            )
        return f"Is this the target that the head was trained for, are the prompts {form}, was it trained at all?"


class Reader(Protocol):
    """A head that can be read in several ways."""

    name: str

    def accepted(self, options: Options, texts: Sequence[Text], depth: int) -> Int[Tensor, " P"]:
        """Accepted tokens of a greedy chain of `depth` tokens at every root of every text.

        Raises:
            SpeculateError: the head cannot be read with these options.
        """
        ...

    def alternatives(self, options: Options) -> list[Alternative]:
        """Other ways to read a head that is read with `options` now: one change each."""
        ...

    def depth(self, depth: int) -> int:
        """The deepest chain that it drafts, at most `depth`."""
        ...


def check_head(
    reader: Reader,
    head: str,
    texts: Sequence[Text],
    *,
    depth: int = 5,
    try_alternatives: bool | None = None,
    record: HeadRecord | None = None,
) -> HeadCheck:
    """Measures a head as stated and, where that looks wrong, as its neighbours in convention would have it.

    Args:
        reader: the head.
        head: what to call it.
        texts: from `write_texts`.
        depth: of the chains.
        try_alternatives: None: if the acceptance is low.
        record: of the head's folder; None: it has none.
    Raises:
        SpeculateError: the head cannot be read as stated, or the texts are too short.
    """
    depth, record = reader.depth(depth), record or HeadRecord()
    if not any(text.roots(depth) for text in texts):
        raise SpeculateError(
            f"the target wrote too little to check chains of {depth} tokens on: more tokens (--max-new-tokens) or "
            "other prompts are needed."
        )
    accepted = reader.accepted({}, texts, depth)
    stated = AcceptanceRates.of(accepted, depth)
    if not (stated.is_low(record) if try_alternatives is None else try_alternatives):
        return HeadCheck(head, reader.name, stated, record=record)
    trials, fix, best = _search(reader, texts, depth, accepted)
    return HeadCheck(head, reader.name, stated, tuple(trials), fix, best, record=record)


def _search(
    reader: Reader, texts: Sequence[Text], depth: int, accepted: Tensor
) -> tuple[list[Trial], Options, AcceptanceRates]:
    """Adopts the best change that helps, then tries the others on top of it; a file may be wrong in two places."""
    trials: list[Trial] = []
    adopted = Trial({}, "", AcceptanceRates.of(accepted, depth))
    for _ in range(_MAX_CHANGES):
        found = [
            _try(reader, change, adopted, accepted, texts, depth) for change in reader.alternatives(adopted.options)
        ]
        trials += [trial for trial, _ in found]
        helpful = [pair for pair in found if pair[0].helps]
        if not helpful:
            break
        adopted, accepted = max(helpful, key=lambda pair: pair[0].gain or 0.0)
    assert adopted.acceptance is not None
    return trials, adopted.options, adopted.acceptance


def _try(
    reader: Reader, change: Alternative, before: Trial, accepted: Tensor, texts: Sequence[Text], depth: int
) -> tuple[Trial, Tensor]:
    options = before.options | change.options
    meaning = f"{before.meaning} and {change.meaning}" if before.meaning else change.meaning
    try:
        now = reader.accepted(options, texts, depth)
    except SpeculateError as error:
        return Trial(options, meaning, problem=str(error)), accepted
    difference = (now - accepted).double()
    gain = float(difference.mean())
    error = max(float(difference.std(correction=0)), _MIN_SPREAD) / math.sqrt(len(difference))
    return Trial(options, meaning, AcceptanceRates.of(now, depth), gain, gain / error), now


def _literal(value: Any) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)
