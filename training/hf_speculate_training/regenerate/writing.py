"""Answers written anew by the target itself, so that a head learns what the target says and not what the data say.

Prompts come from the data, in batches of about the same length; `model.generate` writes, with a speculator. Token ids
are kept beside the text, since tokenising a text again may give other tokens than those that were generated.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import GenerationConfig
from transformers.utils import logging

from hf_speculate.errors import SpeculateError
from hf_speculate.models import unwrap
from hf_speculate.speculator import Speculator

from ..data import Encoder, HeldOut, RecordError, Records, context_length
from ..fingerprints import target_fingerprint
from .answers import Asker, Job, line_digest
from .journal import Journal


logger = logging.get_logger(__name__)

# Jobs that are sorted by length at a time: rows of equal length waste nothing on padding.
_WINDOW = 4096


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions:
    """How answers are written.

    Attributes:
        temperature: 0 is greedy; None leaves temperature, top_p and top_k to the model's generation config.
        top_p, top_k: with a temperature; 1.0 and 0 are off.
        max_new_tokens: of one answer. Prompts that leave less room in the target's context are not answered.
        batch_size: rows at a time.
        seed: of the sampling. A batch is a function of the data, `batch_size` and this alone: where a run was
            interrupted changes nothing.
        prompt_tokens: of a plain text, the tokens that are kept; the target goes on from there.
        pieces: cut plain texts into pieces of `prompt_tokens + max_new_tokens` and go on from the start of each,
            instead of the start of each text only.
        chat: a `prompt` that is a mere text is what the user says.
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
        if self.temperature is not None and self.temperature < 0:
            raise SpeculateError(f"regenerate: temperature must not be negative, got {self.temperature}.")


@dataclass
class RegenerateReport:
    """What a run did.

    Attributes:
        num_written, num_found: examples written now, and found from earlier runs.
        num_new_tokens: tokens written now.
        num_cut: examples written now that reached `max_new_tokens`, so that they have no end.
        num_endless: those written now that repeat themselves to no end; no token of theirs will be learnt.
        skipped: records that cannot be answered, by reason.
    """

    num_written: int = 0
    num_found: int = 0
    num_new_tokens: int = 0
    num_cut: int = 0
    num_endless: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


def regenerate(
    target: nn.Module,
    tokenizer: Any,
    records: Records,
    output: str | Path,
    options: RegenerateOptions | None = None,
    *,
    speculator: Speculator | None = None,
    held_out: HeldOut | None = None,
    end_ids: Collection[int] = (),
    show_progress: bool | None = None,
) -> RegenerateReport:
    """Writes answers to all prompts of `records` to a JSON-lines file; goes on where an earlier run was stopped.

    A line holds `id` (the record's number), `messages` or `prompt` and `completion`, and `input_ids` with `loss_mask`,
    which `prepare_data` prefers. An answer that reached `max_new_tokens` has `finish` "length" and no end-of-turn
    token, and ends its conversation; one that repeats itself has `finish` "endless", and its loss mask is empty.

    Args:
        target: the model; a PEFT-wrapped one writes with its adapter.
        tokenizer: the target's.
        records: see `load_records`.
        output: the file; its folder is made if it is absent.
        options: see `RegenerateOptions`.
        speculator: speeds it up; what is written is the same without.
        held_out: prompts kept for measuring; records like them are skipped.
        end_ids: tokens at which a text ends, beside the model's own.
        show_progress: a bar on stderr (None: if that is a terminal).
    Raises:
        SpeculateError: nothing to answer; an output made from other data, by another target or with other options.
    """
    options = options or RegenerateOptions()
    writer = Writer(target, tokenizer, options, speculator, held_out, end_ids)
    num_records = len(records) if hasattr(records, "__len__") else None  # type: ignore[arg-type]
    settings = {"target": target_fingerprint(target), "num_records": num_records, **asdict(options)}
    report = RegenerateReport()
    with (
        Journal(output, settings) as journal,
        tqdm(desc="regenerating", unit=" records", total=num_records, disable=_hidden(show_progress)) as bar,
    ):
        done = {line["id"]: line_digest(line) for line in journal.lines() if line["part"] == 0}
        report.num_found = len(done)
        for batch in writer.batches(records, report.skipped, bar):
            missing = [job for job in batch if not _is_done(job, done, journal)]
            if missing:
                writer.answer(batch)  # rows that are done too: every row draws what it would have drawn
                journal.append([job.lines(tokenizer) for job in missing])
                _count(report, missing)
            bar.set_postfix_str(f"{report.num_found + report.num_written} examples, {report.num_new_tokens} new tokens")
    if not report.num_written and not report.num_found:
        raise SpeculateError(f"nothing can be answered: {_listed(report.skipped)}.")
    if report.skipped:
        logger.warning(f"records that were skipped: {_listed(report.skipped)}.")
    return report


class Writer:
    """Plans batches and has the target answer them."""

    def __init__(
        self,
        target: nn.Module,
        tokenizer: Any,
        options: RegenerateOptions,
        speculator: Speculator | None,
        held_out: HeldOut | None,
        end_ids: Collection[int],
    ):
        self.target, self.tokenizer, self.options = unwrap(target), tokenizer, options
        self.arguments: dict[str, Any] = {"speculator": speculator}
        self.config = _generation_config(self.target.generation_config, tokenizer, options)
        self.end_ids = _end_ids(self.config) | set(end_ids)
        self.config.eos_token_id = sorted(self.end_ids) or None
        context = context_length(tokenizer, self.target.config)
        self.max_prompt = 10**9 if context is None else context - options.max_new_tokens
        if self.max_prompt < 1:
            raise SpeculateError(
                f"max_new_tokens={options.max_new_tokens} leaves no room for a prompt in the target's context of "
                f"{context} tokens."
            )
        self.encoder = Encoder(tokenizer=tokenizer)
        self.ask = Asker(
            encoder=self.encoder,
            prompt_tokens=options.prompt_tokens,
            piece_tokens=options.prompt_tokens + options.max_new_tokens if options.pieces else None,
            chat=options.chat,
            max_prompt=self.max_prompt,
            held_out=held_out,
        )

    def batches(self, records: Records, skipped: Counter[str], bar: tqdm) -> Iterator[list[Job]]:
        """Jobs in batches of about the same length; the same records give the same batches."""
        jobs = self._jobs(records, skipped, bar)
        while window := list(islice(jobs, _WINDOW)):
            window.sort(key=lambda job: len(job.prompt_ids))
            for start in range(0, len(window), self.options.batch_size):
                yield window[start : start + self.options.batch_size]

    def answer(self, batch: list[Job]) -> None:
        """Has the target answer every turn of every job."""
        prompts = [(job, job.start()) for job in batch]
        turn = 0
        while prompts:
            answers = self._generate([ids for _, ids in prompts], seed=self._seed(prompts, turn))
            for (job, _), answer in zip(prompts, answers, strict=True):
                job.take(answer, answer[-1] in self.end_ids, self.encoder)
            asked = [(job, job.ask(self.encoder, self.max_prompt)) for job, _ in prompts if not job.finish]
            prompts = [(job, ids) for job, ids in asked if ids is not None]
            turn += 1

    def _jobs(self, records: Iterable[Any], skipped: Counter[str], bar: tqdm) -> Iterator[Job]:
        for index, record in enumerate(records):
            try:
                yield from self.ask(index, record)
            except RecordError as error:
                skipped[str(error)] += 1
            bar.update()

    def _seed(self, prompts: list[tuple[Job, list[int]]], turn: int) -> int:
        name = f"{self.options.seed} {turn} {' '.join(job.id for job, _ in prompts)}"
        return int(hashlib.sha256(name.encode()).hexdigest()[:15], 16)

    def _generate(self, prompts: list[list[int]], seed: int) -> list[list[int]]:
        """New tokens of each row, up to its end token."""
        width, device = max(map(len, prompts)), self.target.device
        padding = self.config.pad_token_id
        ids = torch.tensor([[padding] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            output = self.target.generate(
                ids.to(device), attention_mask=mask.to(device), generation_config=self.config, **self.arguments
            )
        return [self._until_end(row) for row in output[:, width:].tolist()]

    def _until_end(self, tokens: list[int]) -> list[int]:
        end = next((place for place, token in enumerate(tokens) if token in self.end_ids), len(tokens) - 1)
        return tokens[: end + 1]


def _generation_config(base: GenerationConfig | None, tokenizer: Any, options: RegenerateOptions) -> GenerationConfig:
    """The model's own one, except for what the options say; lengths are ours."""
    config = copy.deepcopy(base) or GenerationConfig()
    config.max_length = config.min_length = config.min_new_tokens = None
    config.return_dict_in_generate = False
    config.max_new_tokens = options.max_new_tokens
    if config.eos_token_id is None:
        config.eos_token_id = tokenizer.eos_token_id
    if config.pad_token_id is None:
        config.pad_token_id = next((i for i in (tokenizer.pad_token_id, *sorted(_end_ids(config))) if i is not None), 0)
    if options.temperature is not None:
        config.do_sample = options.temperature > 0
        config.temperature = options.temperature or None
        config.top_p, config.top_k = (options.top_p, options.top_k) if config.do_sample else (None, None)
    return config


def _end_ids(config: GenerationConfig) -> frozenset[int]:
    ids: Any = config.eos_token_id
    return frozenset(() if ids is None else [ids] if isinstance(ids, int) else ids)


def _is_done(job: Job, done: dict[str, str], journal: Journal) -> bool:
    if job.id not in done:
        return False
    if done[job.id] != job.digest:
        raise SpeculateError(
            f"{journal.path} holds an answer to another prompt as number {job.id}: the data have changed since. Give "
            "another output, or the data that it was made from."
        )
    return True


def _count(report: RegenerateReport, jobs: list[Job]) -> None:
    report.num_written += len(jobs)
    report.num_cut += sum(job.finish == "length" for job in jobs)
    report.num_endless += sum(job.finish == "endless" for job in jobs)
    report.num_new_tokens += sum(sum(document.loss_mask) for job in jobs for document in job.documents)


def _listed(skipped: Counter[str]) -> str:
    return "; ".join(f"{count} x {reason}" for reason, count in skipped.most_common(5)) or "no records"


def _hidden(show_progress: bool | None) -> bool | None:
    return None if show_progress is None else not show_progress
