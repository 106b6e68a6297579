"""Conditions of use that acceptance depends on, in addition to the way a head is read.

These are the chat template, thinking, the adapter, quantisation and the context. The same chains are drafted on texts
that the target writes under one condition and under another. The texts differ then, so prompts are compared instead of
positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hf_speculate.errors import CheckpointError, SpeculateError, first_line
from hf_speculate.files import read_json, section
from hf_speculate.messages import get_logger
from hf_speculate.models import GenerativeModel
from hf_speculate.scoring import quantization_label
from hf_speculate.speculator import read_provenance

from ..commands import Prompt, chat_ids
from .acceptance import AcceptanceRates, HeadReader, ReadingOptions, write_texts


logger = get_logger(__name__)

# Least difference that is reported: in standard errors over prompts, and in tokens per round.
_MIN_SIGMAS, _MIN_GAIN = 3.0, 0.15
_MIN_SPREAD = 0.1  # the same gain on all prompts does not prove certainty
_MIN_PROMPTS = 4
# Prompts for the dequantised copy of the target, which is larger and slower.
_FEW = 8
# A position limit from here on is none: no text is as long.
_MAX_LIMIT = 1 << 31


@dataclass(frozen=True)
class Measured:
    """Acceptance of a head's chains on texts that were written under one condition.

    Attributes:
        name: the condition in words.
        accepted: int64 [P] for every prompt, accepted tokens of its chains; empty if the target wrote too little.
        starts: position of the first chain of every prompt.
        depth: tokens of a chain.
    """

    name: str
    accepted: Sequence[Int[Tensor, " P"]]
    starts: Sequence[int]
    depth: int

    @property
    def rates(self) -> AcceptanceRates:
        """Acceptance over all chains, of which there must be one."""
        return AcceptanceRates.of(torch.cat(tuple(self.accepted)), self.depth)

    def means(self) -> Tensor:
        """float64 [prompts]: accepted tokens of a chain on average; NaN for a prompt without chains."""
        return torch.stack([accepted.double().mean() for accepted in self.accepted])

    def part(self, name: str, start: int, stop: int | None) -> Measured:
        """The chains that begin at a position from `start` on and before `stop`."""
        parts = []
        for accepted, first in zip(self.accepted, self.starts, strict=True):
            parts.append(accepted[max(start - first, 0) : None if stop is None else max(stop - first, 0)])
        return Measured(name, parts, [max(first, start) for first in self.starts], self.depth)


@dataclass(frozen=True)
class Finding:
    """A condition that clearly lowers acceptance.

    Attributes:
        kind: "chat template", "thinking", "quantisation", "adapter" or "context".
        message: the figures, and what they may mean.
        acceptance: acceptance by the name of the condition.
        gain: difference between the two, in tokens per round.
        sigmas: the gain in standard errors over prompts.
    """

    kind: str
    message: str
    acceptance: Mapping[str, AcceptanceRates]
    gain: float
    sigmas: float


def compare(kind: str, now: Measured, other: Measured, meaning: str, *, paired: bool = True) -> Finding | None:
    """Compares acceptance under two conditions; None unless it is clearly lower now.

    Args:
        meaning: text for the user on the meaning of a lower acceptance.
        paired: whether both have the same prompts.
    """
    groups = [other.means() - now.means()] if paired else [other.means(), now.means()]
    groups = [group[~group.isnan()] for group in groups]
    if min(map(len, groups)) < _MIN_PROMPTS:
        return None
    gain = float(groups[0].mean()) - (0.0 if paired else float(groups[1].mean()))
    errors = [max(float(group.std(correction=0)), _MIN_SPREAD) / math.sqrt(len(group)) for group in groups]
    sigmas = gain / math.hypot(*errors)
    if gain < _MIN_GAIN or sigmas < _MIN_SIGMAS:
        return None
    first, second = now.rates, other.rates
    figures = f"{first.mean_length:.2f} tokens per round {now.name}, {second.mean_length:.2f} {other.name}"
    message = f"{figures} ({gain:.2f} apart, {sigmas:.0f} sigma): {meaning}"
    return Finding(kind, message, {now.name: first, other.name: second}, gain, sigmas)


@dataclass(frozen=True, kw_only=True)
class HeadInUse:
    """A head and its target as they are used.

    Attributes:
        folder: folder of the head.
        options: conventions that the head is read with.
        depth: tokens of a chain.
        max_new_tokens: tokens that the target writes after a prompt.
        target: the transformers model itself, see `unwrap`.
        tokenizer: its tokenizer, with or without a chat template.
        prompts: the prompts before tokenisation.
        ids: the prompts' tokens, int64 [S] each.
        uses_template: whether the chat template was applied.
        load_dense: loads the target dequantised.
        without_adapter: switches the target's adapter off; None if there is none.
    """

    folder: str
    options: ReadingOptions = field(default_factory=dict)
    depth: int
    max_new_tokens: int
    target: GenerativeModel
    tokenizer: Any
    prompts: Sequence[Prompt]
    ids: Sequence[Tensor]
    uses_template: bool
    load_dense: Callable[[], GenerativeModel]
    without_adapter: Callable[[], AbstractContextManager[Any]] | None = None

    def measure(self, name: str, ids: Sequence[Tensor], target: GenerativeModel | None = None) -> Measured:
        """Acceptance on continuations of `ids`, under the condition `name`; by another target if one is given."""
        target = target or self.target
        reader = HeadReader(self.folder, target)
        depth, texts = reader.deepest(self.depth), write_texts(target, ids, max_new_tokens=self.max_new_tokens)
        return Measured(name, reader.accepted(self.options, texts, depth), [text.num_prompt for text in texts], depth)


def find_conditions(use: HeadInUse, *, others: bool) -> tuple[Finding, ...]:
    """Finds the conditions that clearly lower acceptance, the largest gain first.

    Args:
        use: head, target and prompts.
        others: whether the target writes under other conditions, too; else its texts are only compared by position.
    """
    now = use.measure("as it is used", use.ids)
    if not any(map(len, now.accepted)):
        return ()
    findings = [_by_position(now, use.folder)]
    if others:
        for look in (_template, _thinking, _adapter, _quantisation):
            findings += look(now, use)
    found = [finding for finding in findings if finding is not None]
    return tuple(sorted(found, key=lambda finding: -finding.gain))


def _by_position(now: Measured, folder: str) -> Finding | None:
    """Compares beyond the first limit that is stated: that of the training, else that of the head's config."""
    head = _json(lambda: read_json(Path(folder) / "config.json"))
    stated = {**head, **section(head, "transformer_layer_config")}.get("max_position_embeddings")
    trained = section(_json(lambda: read_provenance(folder)), "recipe", "data").get("max_length")
    for limit, what in (
        (trained, "the length that it was trained with"),
        (stated, "the head's max_position_embeddings"),
    ):
        if isinstance(limit, int) and 0 < limit < _MAX_LIMIT:
            before = now.part(f"before position {limit}", 0, limit)
            after = now.part(f"from position {limit} on", limit, None)
            if finding := compare("context", after, before, f"{limit} is {what}.", paired=False):
                return finding
    return None


def _json(read: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    try:
        return read() or {}
    except CheckpointError:
        return {}


def _template(now: Measured, use: HeadInUse) -> Iterator[Finding | None]:
    template = use.tokenizer.chat_template
    if not template or any(not isinstance(prompt.content, str) for prompt in use.prompts):
        return
    if use.uses_template:
        trained = _json(lambda: read_provenance(use.folder)).get("chat_template")
        if trained and trained != template:  # it came with the head, and is a program: it is not run
            logger.warning("the target's chat template is not the one that the head was trained with.")
        ids = [use.tokenizer(prompt.content, return_tensors="pt").input_ids[0] for prompt in use.prompts]
    else:
        ids = [chat_ids(prompt.messages, use.tokenizer) for prompt in use.prompts]
    here, there = ("with", "without") if use.uses_template else ("without", "with")
    name = f"{there} the chat template"
    meaning = f"it was trained on texts {name}, or on another template; prompts should be given as it was trained."
    yield compare("chat template", replace(now, name=f"{here} the chat template"), use.measure(name, ids), meaning)


def _thinking(now: Measured, use: HeadInUse) -> Iterator[Finding | None]:
    if not use.uses_template or "enable_thinking" not in str(use.tokenizer.chat_template):
        return
    for switch in (True, False):
        ids = [chat_ids(prompt.messages, use.tokenizer, enable_thinking=switch) for prompt in use.prompts]
        if not all(map(torch.equal, ids, use.ids)):
            name = f"with enable_thinking={switch}"
            yield compare("thinking", now, use.measure(name, ids), f"it was trained on answers {name}.")


def _adapter(now: Measured, use: HeadInUse) -> Iterator[Finding | None]:
    if use.without_adapter is not None:
        with use.without_adapter():
            other = use.measure("without it", use.ids)
        meaning = "the head was trained for the target without this adapter: train one for it."
        yield compare("adapter", replace(now, name="with the adapter"), other, meaning)


def _quantisation(now: Measured, use: HeadInUse) -> Iterator[Finding | None]:
    label = quantization_label(use.target)
    if not label or use.without_adapter is not None:  # an adapter belongs to the loaded copy of the target
        return
    try:
        dense = use.load_dense()
    except (SpeculateError, MemoryError, RuntimeError, ValueError) as error:  # backends fail in many ways
        logger.warning(f"the dequantised target was not measured: {first_line(error)}")
        return
    few = Measured(f"as {label}", now.accepted[:_FEW], now.starts[:_FEW], now.depth)
    meaning = "packed weights round otherwise than those that the head was trained with."
    yield compare("quantisation", few, use.measure("dequantised", use.ids[:_FEW], dense), meaning)
