"""The search for the conventions that a head was trained with.

Acceptance is measured as the head's files state, then under known alternatives. A change that makes a clear difference
is adopted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from hf_speculate.errors import SpeculateError
from hf_speculate.models import GenerativeModel
from hf_speculate.stats import HeadRecord

from .acceptance import AcceptanceRates, HeadReader, ReadingOptions, Text
from .conditions import Finding
from .conventions import Alternative, alternatives


Verdict = Literal["plausible", "mislabelled", "better", "explained", "unexplained"]

# Least gain of a change that is adopted: in standard errors, and in tokens per round. Errors are paired over positions,
# which are not quite independent, so many are asked for.
_MIN_SIGMAS, _MIN_GAIN = 4.0, 0.05
_MIN_SPREAD = 0.1  # the same gain at every position does not prove certainty
_MAX_CHANGES = 3


@dataclass(frozen=True)
class Trial:
    """The result of an alternative.

    Attributes:
        options: everything that differs from the head's files.
        meaning: the change in words.
        acceptance: acceptance with these options; None if the head cannot be read so.
        gain: additional tokens per round, compared with before the change; None without acceptance.
        sigmas: the gain in standard errors, paired over positions.
        problem: reason why the head cannot be read so.
    """

    options: ReadingOptions
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
    """The outcome of `check_head`.

    Attributes:
        head: folder or Hub id.
        drafter: name of the drafter that reads the head.
        stated: acceptance with the conventions in the files.
        trials: the alternatives that were tried, in order; empty if nothing was suspicious.
        fix: options that improve acceptance; empty if none does.
        best: acceptance with `fix`.
        record: acceptance in training (the measure of "low") and the target, as the head's folder has them.
        findings: conditions that clearly change acceptance, the strongest first.
    """

    head: str
    drafter: str
    stated: AcceptanceRates
    trials: tuple[Trial, ...] = ()
    fix: ReadingOptions = field(default_factory=dict)
    best: AcceptanceRates | None = None
    findings: tuple[Finding, ...] = ()
    record: HeadRecord = field(default_factory=HeadRecord)

    @property
    def is_low(self) -> bool:
        """Whether acceptance stays low even with `fix`."""
        return (self.best or self.stated).is_low(self.record)

    @property
    def verdict(self) -> Verdict:
        """The outcome in a word.

        "plausible": acceptance is that of a trained head. "mislabelled": it is low as stated, plausible with `fix`.
        "better": `fix` helps, but acceptance stays low, or was plausible before. "explained": no convention helps, and
        `findings` list what acceptance depends on. "unexplained": nothing that was tried helps.
        """
        if not self.fix or self.best is None:
            low = "explained" if self.findings else "unexplained"
            return low if self.is_low else "plausible"
        return "mislabelled" if self.stated.is_low(self.record) and not self.is_low else "better"

    @property
    def code(self) -> str:
        """The line that loads the head as it should be read."""
        shown = {name: list(value) if isinstance(value, tuple) else value for name, value in self.fix.items()}
        options = "".join(f", {name}={value!r}" for name, value in shown.items())
        return f'speculator = AutoSpeculator.from_pretrained("{self.head}", target=model{options})'

    @property
    def message(self) -> str:
        """The verdict in sentences, and the findings."""
        changes = " and ".join(trial.meaning for trial in self.trials if trial.options == self.fix) or "nothing"
        first = f"{self.stated.by_depth[0]:.2f} at depth 1; {self.record.recorded}"
        verdict = {
            "plausible": f"Acceptance is as expected ({first}): nothing to fix.",
            "mislabelled": f"The head is labelled wrongly. It was trained with: {changes}.",
            "better": f"The head drafts better with: {changes}.",
            "explained": f"Acceptance is low ({first}) and no convention helps. It depends on this:",
            "unexplained": f"Acceptance is low ({first}) and no convention helps. {self._question}",
        }[self.verdict]
        return "\n".join([verdict, *(f"- {finding.kind}: {finding.message}" for finding in self.findings)])

    @property
    def _question(self) -> str:
        form = "in the form that it was trained on (chat template, system prompt)"
        if self.record.is_own_target:
            return (
                "The target is the one that the head was trained for. Are the prompts of the kind of its training "
                f"texts, and {form}?"
            )
        return f"Is this the target that the head was trained for, are the prompts {form}, was it trained at all?"


def check_head(
    reader: HeadReader,
    head: str,
    target: GenerativeModel,
    texts: Sequence[Text],
    *,
    depth: int = 5,
    try_alternatives: bool | None = None,
    record: HeadRecord | None = None,
) -> HeadCheck:
    """Measures a head as its files state and, if that looks wrong, under other conventions.

    Args:
        reader: reads the head.
        head: name of the head in messages.
        target: the head's target.
        texts: texts from `write_texts`.
        depth: tokens of a chain.
        try_alternatives: whether to try other conventions; None: only if acceptance is low.
        record: the figures in the head's folder; None: there are none.
    Raises:
        SpeculateError: the head cannot be read as stated, or the texts are too short.
    """
    record, depth = record or HeadRecord(), reader.deepest(depth)
    if not any(text.roots(depth) for text in texts):
        raise SpeculateError(
            f"the target wrote too little to check chains of {depth} tokens on: more tokens (--max-new-tokens) or "
            "other prompts are needed."
        )

    def tried(change: Alternative, before: Trial, accepted: Tensor) -> tuple[Trial, Tensor]:
        options = before.options | change.options
        meaning = f"{before.meaning} and {change.meaning}" if before.meaning else change.meaning
        try:
            now = torch.cat(reader.accepted(options, texts, depth))
        except SpeculateError as error:
            return Trial(options, meaning, problem=str(error)), accepted
        difference = (now - accepted).double()
        gain = float(difference.mean())
        error = max(float(difference.std(correction=0)), _MIN_SPREAD) / math.sqrt(len(difference))
        return Trial(options, meaning, AcceptanceRates.of(now, depth), gain, gain / error), now

    accepted = torch.cat(reader.accepted({}, texts, depth))
    stated = AcceptanceRates.of(accepted, depth)
    if not (stated.is_low(record) if try_alternatives is None else try_alternatives):
        return HeadCheck(head, reader.name, stated, record=record)
    trials: list[Trial] = []
    adopted, best = Trial({}, ""), stated
    # The best change that helps is adopted, and the others are tried on top of it: a file may be wrong in two places.
    for _ in range(_MAX_CHANGES):
        others = alternatives(reader.load(adopted.options, depth), target, adopted.options)
        found = [tried(other, adopted, accepted) for other in others]
        trials += [trial for trial, _ in found]
        helpful = [pair for pair in found if pair[0].helps]
        if not helpful:
            break
        adopted, accepted = max(helpful, key=lambda pair: pair[0].gain or 0.0)
        best = adopted.acceptance or best
    return HeadCheck(head, reader.name, stated, tuple(trials), adopted.options, best, record=record)
