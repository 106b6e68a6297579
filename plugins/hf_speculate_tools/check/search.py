"""The check of a head: its acceptance, the conventions that it was trained with, and the conditions that lower it.

Acceptance is measured as the head's files state, then under known alternatives. A change that makes a clear difference
is adopted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from hf_speculate.errors import SpeculateError
from hf_speculate.speculator import head_folder, local_folder
from hf_speculate.stats import HeadRecord
from hf_speculate.target import GenerativeModel, unwrap
from hf_speculate_plugins.origin import head_record

from .acceptance import AcceptanceRates, HeadReader, ReadingOptions, Text, write_texts
from .conditions import WITH_TEMPLATE, WITHOUT_TEMPLATE, Finding, Measured, compare_positions, compare_template
from .conventions import Alternative, alternatives


Verdict = Literal["plausible", "mislabelled", "better", "untrained", "explained", "unexplained"]

# Least gain of a change that is adopted: in standard errors, and in tokens per round. Errors are paired over positions,
# which are not quite independent, so many are asked for.
_MIN_SIGMAS, _MIN_GAIN = 4.0, 0.05
_MIN_SPREAD = 0.1  # the same gain at every position does not prove certainty
_MAX_CHANGES = 3

_MORE_TRAINING = "Train it for more steps, on more of the target's own answers: other prompts or templates do not help."


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
        "better": `fix` helps, but acceptance stays low, or was plausible before. "untrained": it was low at the end
        of the training already. "explained": no convention helps, and `findings` list what acceptance depends on.
        "unexplained": nothing that was tried helps.
        """
        if not self.fix or self.best is None:
            if self.record.is_untrained:
                return "untrained"
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
            "untrained": f"The head was trained too little ({first}{self._steps}). {_MORE_TRAINING}",
            "explained": f"Acceptance is low ({first}) and no convention helps. It depends on this:",
            "unexplained": f"Acceptance is low ({first}) and no convention helps. {self._question}",
        }[self.verdict]
        return "\n".join([verdict, *(f"- {finding.kind}: {finding.message}" for finding in self.findings)])

    @property
    def _steps(self) -> str:
        return "" if self.record.steps is None else f", {self.record.steps} steps"

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
    head: str | os.PathLike,
    target: nn.Module,
    prompts: Sequence[Tensor],
    *,
    depth: int = 5,
    max_new_tokens: int = 64,
    try_alternatives: bool | None = None,
    other_forms: Mapping[str, Sequence[Tensor]] | None = None,
    try_forms: bool | None = None,
    uses_template: bool = False,
) -> HeadCheck:
    """Measures the acceptance of a head on texts that the target writes, as stated and under other conditions.

    Args:
        head: folder, Hub id or GGUF file.
        target: the model that the head was trained for.
        prompts: token ids, int64 [S] each.
        depth: tokens of the chain that is drafted at every position.
        max_new_tokens: tokens that the target writes after each prompt.
        try_alternatives: whether to read the head by other conventions; None: only if acceptance is low.
        other_forms: the same prompts in other forms, see `conditions.other_forms`.
        try_forms: whether to measure with these; None: only if acceptance stays low.
        uses_template: whether `prompts` went through the chat template.
    Raises:
        CheckpointError: the head is broken, or of a method that cannot be checked.
        DrafterNotFoundError: there is no such head.
        SpeculateError: the texts are too short.
        TargetMismatchError: the head belongs to another target.
    """
    model = unwrap(target)
    folder = head_folder(head, local_folder(head), model)
    reader = HeadReader(folder, model)  # a broken head fails before the target writes anything
    record, depth = head_record(folder, model), reader.deepest(depth)
    texts = write_texts(model, prompts, max_new_tokens=max_new_tokens)
    if not any(text.roots(depth) for text in texts):
        raise SpeculateError(
            f"the target wrote too little to check chains of {depth} tokens on: more tokens (--max-new-tokens) or "
            "other prompts are needed."
        )
    accepted = reader.accepted({}, texts, depth)
    stated = AcceptanceRates.of(torch.cat(accepted), depth)
    check = HeadCheck(os.fspath(head), reader.name, stated, record=record)
    if check.is_low if try_alternatives is None else try_alternatives:
        check, accepted = _search(check, reader, model, texts, accepted)

    def measured(name: str, texts: Sequence[Text], accepted: Sequence[Tensor]) -> Measured:
        return Measured(name, accepted, [text.num_prompt for text in texts], depth)

    now = measured(WITH_TEMPLATE if uses_template else WITHOUT_TEMPLATE, texts, accepted)
    findings = [compare_positions(now, folder)]
    if check.is_low if try_forms is None else try_forms:
        for name, ids in (other_forms or {}).items():
            written = write_texts(model, ids, max_new_tokens=max_new_tokens)
            findings.append(compare_template(now, measured(name, written, reader.accepted(check.fix, written, depth))))
    strongest = sorted((finding for finding in findings if finding is not None), key=lambda finding: -finding.gain)
    return replace(check, findings=tuple(strongest))


def _search(
    check: HeadCheck, reader: HeadReader, target: GenerativeModel, texts: Sequence[Text], accepted: list[Tensor]
) -> tuple[HeadCheck, list[Tensor]]:
    """Adopts the best change that helps, then tries the others on top of it: a file may be wrong in two places.

    Returns:
        The outcome, and the accepted tokens with its `fix`.
    """
    trials: list[Trial] = []
    adopted, depth = Trial({}, "", check.stated), len(check.stated.by_depth)
    for _ in range(_MAX_CHANGES):
        others = alternatives(reader.load(adopted.options, depth), target, adopted.options)
        tried = [_try(reader, other, adopted, texts, accepted) for other in others]
        trials += [trial for trial, _ in tried]
        helpful = [pair for pair in tried if pair[0].helps]
        if not helpful:
            break
        adopted, accepted = max(helpful, key=lambda pair: pair[0].gain or 0.0)
    return replace(check, trials=tuple(trials), fix=adopted.options, best=adopted.acceptance), accepted


def _try(
    reader: HeadReader, change: Alternative, before: Trial, texts: Sequence[Text], accepted: list[Tensor]
) -> tuple[Trial, list[Tensor]]:
    """The result of one more change, paired over positions with those accepted before it."""
    assert before.acceptance is not None
    depth, options = len(before.acceptance.by_depth), before.options | change.options
    meaning = f"{before.meaning} and {change.meaning}" if before.meaning else change.meaning
    try:
        changed = reader.accepted(options, texts, depth)
    except SpeculateError as error:
        return Trial(options, meaning, problem=str(error)), accepted
    difference = (torch.cat(changed) - torch.cat(accepted)).double()
    gain = float(difference.mean())
    error = max(float(difference.std(correction=0)), _MIN_SPREAD) / math.sqrt(len(difference))
    return Trial(options, meaning, AcceptanceRates.of(torch.cat(changed), depth), gain, gain / error), changed
