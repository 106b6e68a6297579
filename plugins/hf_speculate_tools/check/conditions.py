"""Conditions of use that acceptance depends on, in addition to the way a head is read: chat template and context.

The same chains are drafted on texts that the target writes under one condition and under another. The texts differ
then, so prompts are compared instead of positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate.files import read_json, section
from hf_speculate.messages import get_logger
from hf_speculate_plugins.origin import read_provenance

from ..commands import Prompt, chat_ids
from .acceptance import AcceptanceRates


logger = get_logger(__name__)

# Least difference that is reported: in standard errors over prompts, and in tokens per round.
_MIN_SIGMAS, _MIN_GAIN = 3.0, 0.15
_MIN_SPREAD = 0.1  # the same gain on all prompts does not prove certainty
_MIN_PROMPTS = 4
# A position limit from here on is none: no text is as long.
_MAX_LIMIT = 1 << 31

WITH_TEMPLATE, WITHOUT_TEMPLATE = "with the chat template", "without the chat template"


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
        kind: "chat template" or "context".
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


def compare_positions(now: Measured, folder: str) -> Finding | None:
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


def compare_template(now: Measured, other: Measured) -> Finding | None:
    """Compares with the same prompts in another form, see `other_forms`."""
    meaning = f"it was trained on texts {other.name}, or on another template; give prompts as in its training."
    return compare("chat template", now, other, meaning)


def other_forms(
    prompts: Sequence[Prompt], ids: Sequence[Tensor], tokenizer: Any, *, uses_template: bool
) -> dict[str, list[Tensor]]:
    """The prompts as a head may have seen them in training: with or without the chat template, thinking on or off.

    Args:
        prompts: the prompts before tokenisation.
        ids: their tokens as they are used, int64 [S] each.
        tokenizer: the target's.
        uses_template: whether `ids` went through the chat template.
    Returns:
        Name of each form -> token ids; empty without a chat template.
    """
    forms: dict[str, list[Tensor]] = {}
    if not tokenizer.chat_template:
        return forms
    if all(isinstance(prompt.content, str) for prompt in prompts):
        if uses_template:
            texts = [tokenizer(prompt.content, return_tensors="pt").input_ids[0] for prompt in prompts]
            forms[WITHOUT_TEMPLATE] = texts
        else:
            try:
                forms[WITH_TEMPLATE] = [chat_ids(prompt.messages, tokenizer) for prompt in prompts]
            except SpeculateError as error:  # perhaps why the user does without it
                logger.warning(f"not measured {WITH_TEMPLATE}: {error}")
    if uses_template and "enable_thinking" in str(tokenizer.chat_template):
        for switch in (True, False):
            switched = [chat_ids(prompt.messages, tokenizer, enable_thinking=switch) for prompt in prompts]
            if not all(map(torch.equal, switched, ids)):
                forms[f"with enable_thinking={switch}"] = switched
    return forms


def has_other_template(folder: str, tokenizer: Any) -> bool:
    """Whether the head in a folder was trained with another chat template than the target's.

    The head's template came with its files and is a program: it is compared, not run.
    """
    trained = _json(lambda: read_provenance(folder)).get("chat_template")
    return bool(trained) and trained != tokenizer.chat_template


def _json(read: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    try:
        return read() or {}
    except CheckpointError:
        return {}
