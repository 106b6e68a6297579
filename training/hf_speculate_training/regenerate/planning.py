"""Plans of a run: options, and prompts of the data in batches of about the same length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PretrainedConfig

from hf_speculate.errors import SpeculateError
from hf_speculate_tools.commands import check_temperatures

from ..data import (
    Chat,
    Completion,
    Encoder,
    Example,
    HeldOut,
    Message,
    Plain,
    RecordError,
    Tokens,
    context_length,
    read_record,
)
from .answers import Job


# Number of jobs to sort by length at a time: rows of equal length waste nothing on padding.
_WINDOW = 4096


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions:
    """Options for prompts and answers.

    Attributes:
        temperature: temperature of the sampling; 0 is greedy; None leaves temperature, top_p and top_k to the model's
            generation config.
        top_p, top_k: limits of the sampling with a temperature; 1.0 and 0 are off.
        max_new_tokens: maximum number of tokens of one answer. Prompts that leave less space in the target's context
            are skipped.
        batch_size: rows at a time.
        seed: seed of the sampling. A batch depends on the data, `batch_size` and this alone, and not on interruptions.
        prompt_tokens: number of tokens of a plain text to keep; the target continues from there.
        pieces: whether to cut plain texts into pieces of `prompt_tokens + max_new_tokens`: the target then continues
            from the start of each piece, instead of the start of each text only.
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
    """Makes batches of jobs of records, but of those like `held_out`. It needs no weights of the target.

    Raises:
        SpeculateError: `max_new_tokens` leaves no space for a prompt.
    """

    def __init__(
        self, tokenizer: Any, config: PretrainedConfig, options: RegenerateOptions, held_out: HeldOut | None = None
    ):
        self.tokenizer, self.options = tokenizer, options
        self._encoder, self._held_out = Encoder(tokenizer=tokenizer), held_out
        self._max_prompt = longest_prompt(tokenizer, config, options)

    def batches(self, records: Dataset, skipped: Counter[str], bar: tqdm) -> Iterator[list[Job]]:
        """Makes batches of jobs of about the same length; the same records give the same batches."""
        jobs = self._all_jobs(records, skipped, bar)
        while window := list(islice(jobs, _WINDOW)):
            window.sort(key=lambda job: len(job.prompt_ids))
            for start in range(0, len(window), self.options.batch_size):
                yield window[start : start + self.options.batch_size]

    def _all_jobs(self, records: Iterable[Any], skipped: Counter[str], bar: tqdm) -> Iterator[Job]:
        for index, record in enumerate(records):
            try:
                yield from self._asked(index, record)
            except RecordError as error:
                skipped[str(error)] += 1
            bar.update()

    def _asked(self, index: int, record: Mapping[str, Any]) -> list[Job]:
        """Makes the jobs of record `index`; raises `RecordError` if it cannot be answered."""
        example = read_record(record, self.options.chat)
        if self._held_out is not None and self._held_out.is_like(example):
            raise RecordError("like a prompt that is held out")
        jobs = list(self._jobs(str(index), example))
        if any(len(job.prompt_ids) > self._max_prompt for job in jobs):
            raise RecordError("the prompt and max_new_tokens do not fit into the target's context")
        return jobs

    def _jobs(self, name: str, example: Example) -> Iterator[Job]:
        if isinstance(example, Chat):
            yield self._chat_job(name, example.messages, list(example.tools))
        elif isinstance(example, Completion):
            yield Job(name, _not_empty(self._encoder.text_prompt_ids(example.prompt)))
        elif isinstance(example, Tokens) and True in example.loss_mask[1:]:
            start = example.loss_mask.index(True, 1)
            all_written = all(example.loss_mask[1:])
            yield from (
                self._text_jobs(name, list(example.input_ids))
                if all_written
                else [Job(name, list(example.input_ids[:start]))]
            )
        elif isinstance(example, Plain):
            yield from self._text_jobs(name, self._encoder.text_prompt_ids(example.text))
        else:
            raise RecordError("no token that the target is to emit")

    def _text_jobs(self, name: str, ids: list[int]) -> Iterator[Job]:
        keep = self.options.prompt_tokens
        if len(ids) <= keep:
            raise RecordError(f"a text of no more than prompt_tokens={keep} tokens")
        if not self.options.pieces:
            yield Job(name, ids[:keep])
            return
        for piece, start in enumerate(range(0, len(ids) - keep, keep + self.options.max_new_tokens)):
            yield Job(f"{name}.{piece}", ids[start : start + keep])

    def _chat_job(self, name: str, messages: Sequence[Message], tools: list[Any]) -> Job:
        groups: list[list[Message]] = [[]]
        for message in messages:
            if message["role"] == "assistant":
                groups.append([])
            else:
                groups[-1].append(message)
        if not groups[-1]:
            groups.pop()
        if not groups or not groups[0]:
            raise RecordError("a conversation that the assistant begins")
        first = groups.pop(0)
        prompt = self._encoder.chat_prompt_ids(first, tools)
        return Job(name, prompt, questions=groups, messages=list(first), tools=tools)


def longest_prompt(tokenizer: Any, config: PretrainedConfig, options: RegenerateOptions) -> int:
    """Maximum length of a prompt, in tokens, that leaves space for an answer in the target's context."""
    context = context_length(tokenizer, config)
    longest = 10**9 if context is None else context - options.max_new_tokens
    if longest < 1:
        raise SpeculateError(
            f"max_new_tokens={options.max_new_tokens} leaves no room for a prompt in the target's context of "
            f"{context} tokens."
        )
    return longest


def _not_empty(ids: list[int]) -> list[int]:
    if not ids:
        raise RecordError("an empty prompt")
    return ids
