"""Plans of a run: options, and prompts of the data in batches of about the same length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tqdm.auto import tqdm
from transformers import PretrainedConfig

from hf_speculate.commands import check_temperatures
from hf_speculate.errors import SpeculateError

from ..data import Encoder, HeldOut, RecordError, Records, context_length
from .answers import Asker, Job


# Number of jobs to sort by length at a time: rows of equal length waste nothing on padding.
_WINDOW = 4096


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions:
    """Options for prompts and answers.

    Attributes:
        temperature: temperature of the sampling; 0 is greedy; None leaves temperature, top_p and top_k to the model's
            generation config.
        top_p, top_k: limits of the sampling with a temperature; 1.0 and 0 are off.
        max_new_tokens: maximum number of tokens of one answer. Prompts that leave less room in the target's context are
            skipped.
        batch_size: rows at a time.
        seed: seed of the sampling. A batch depends on the data, `batch_size` and this alone, and not on interruptions.
        prompt_tokens: number of tokens of a plain text to keep; the target goes on from there.
        pieces: whether to cut plain texts into pieces of `prompt_tokens + max_new_tokens`: the target then goes on from
            the start of each piece, instead of the start of each text only.
        chat: whether a `prompt` that is a mere text is a user's message.
    """

    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 512
    batch_size: int = 16
    seed: int = 0
    prompt_tokens: int = 64
    pieces: bool = False
    chat: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise SpeculateError(f"regenerate: {name} must be at least 1, got {getattr(self, name)}.")
        check_temperatures(self.temperature)
        if not 0 <= self.top_p <= 1:
            raise SpeculateError(f"regenerate: top_p must be between 0 and 1, got {self.top_p}.")


class Planner:
    """Makes batches of jobs of records. It needs the target's tokenizer and configuration, and no weights.

    Args:
        tokenizer, config: the target's.
        options: options for prompts and answers.
        held_out: prompts kept for measuring; records like them are skipped.
    Raises:
        SpeculateError: `max_new_tokens` leaves no room for a prompt.
    """

    def __init__(
        self, tokenizer: Any, config: PretrainedConfig, options: RegenerateOptions, held_out: HeldOut | None = None
    ):
        self.tokenizer, self.options = tokenizer, options
        self._ask = Asker(
            encoder=Encoder(tokenizer=tokenizer),
            prompt_tokens=options.prompt_tokens,
            piece_tokens=options.prompt_tokens + options.max_new_tokens if options.pieces else None,
            chat=options.chat,
            max_prompt=longest_prompt(tokenizer, config, options),
            held_out=held_out,
        )

    def batches(self, records: Records, skipped: Counter[str], bar: tqdm) -> Iterator[list[Job]]:
        """Makes batches of jobs of about the same length; the same records give the same batches."""
        jobs = self._jobs(records, skipped, bar)
        while window := list(islice(jobs, _WINDOW)):
            window.sort(key=lambda job: len(job.prompt_ids))
            for start in range(0, len(window), self.options.batch_size):
                yield window[start : start + self.options.batch_size]

    def _jobs(self, records: Iterable[Any], skipped: Counter[str], bar: tqdm) -> Iterator[Job]:
        for index, record in enumerate(records):
            try:
                yield from self._ask(index, record)
            except RecordError as error:
                skipped[str(error)] += 1
            bar.update()


def longest_prompt(tokenizer: Any, config: PretrainedConfig, options: RegenerateOptions) -> int:
    """Maximum length of a prompt, in tokens, that leaves room for an answer in the target's context."""
    context = context_length(tokenizer, config)
    longest = 10**9 if context is None else context - options.max_new_tokens
    if longest < 1:
        raise SpeculateError(
            f"max_new_tokens={options.max_new_tokens} leaves no room for a prompt in the target's context of "
            f"{context} tokens."
        )
    return longest
