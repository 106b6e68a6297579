"""Runs of `regenerate`: an engine answers the prompts of the data, batch by batch, into a file that only grows.

Lines hold token ids in addition to the text, since tokenising a text again may give other tokens than the generated
ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import nn
from tqdm.auto import tqdm

from hf_speculate.errors import SpeculateError
from hf_speculate.messages import get_logger
from hf_speculate.speculator import Speculator
from hf_speculate.target import unwrap

from ..data import HeldOut
from .answers import Job, prompt_digest
from .engine import Engine, LocalEngine
from .journal import Journal, read_lines
from .planning import Planner, RegenerateOptions


logger = get_logger(__name__)


@dataclass
class RegenerateReport:
    """Numbers of examples and tokens; all but `num_found` are of those that were written now."""

    num_written: int = 0
    num_found: int = 0  # from earlier runs
    num_new_tokens: int = 0
    num_cut: int = 0  # reached `max_new_tokens`, so they have no end
    num_endless: int = 0  # repeat themselves to no end; no head learns their tokens
    num_reencoded: int = 0  # have token ids from the text of the answers
    skipped: Counter[str] = field(default_factory=Counter)  # records that cannot be answered, by reason

    def add(self, jobs: list[Job]) -> None:
        """Counts jobs that were answered."""
        self.num_written += len(jobs)
        self.num_cut += sum(job.finish == "length" for job in jobs)
        self.num_endless += sum(job.finish == "endless" for job in jobs)
        self.num_reencoded += sum(job.is_reencoded for job in jobs)
        self.num_new_tokens += sum(sum(document.loss_mask) for job in jobs for document in job.documents)

    def advice(self, options: RegenerateOptions) -> str:
        """A line about answers that teach nothing, and what helps; empty if there are none."""
        if not self.num_endless:
            return ""
        sampled = options.temperature
        helps = f"a temperature above {sampled:g}" if sampled else "a temperature (--temperature 0.7)"
        return (
            f"{self.num_endless} of {self.num_written} answers repeated themselves without end and teach nothing: give "
            f"{helps}, or other prompts. `train` leaves these answers out."
        )


def regenerate(
    target: nn.Module,
    tokenizer: Any,
    records: Dataset,
    output: str | Path,
    options: RegenerateOptions | None = None,
    *,
    speculator: Speculator | None = None,
    held_out: HeldOut | None = None,
    end_ids: Collection[int] = (),
    show_progress: bool | None = None,
) -> RegenerateReport:
    """Writes answers to all prompts of `records` to a JSON-lines file; resumes a run that was stopped.

    A line holds `id` (the record's number), `messages` or `prompt` and `completion`, and `input_ids` with `loss_mask`,
    which `prepare_data` prefers. An answer that reached `max_new_tokens` has `finish` "length" and no end-of-turn
    token, and ends its conversation; one that repeats itself has `finish` "endless", and its loss mask is empty.

    Args:
        target: the model; a PEFT-wrapped one writes with its adapter.
        tokenizer: the target's.
        records: records as `load_records` returns them.
        output: the file; its folder is made if it is absent.
        options: options for prompts and answers; None for the defaults.
        speculator: speculator that makes it faster; the text is the same without.
        held_out: prompts kept for measuring; records like them are skipped.
        end_ids: tokens that end a text, in addition to the model's own.
        show_progress: a bar on stderr (None: if that is a terminal).
    Raises:
        SpeculateError: nothing to answer; an output made from other data, by another target or with other options.
    """
    options = options or RegenerateOptions()
    model = unwrap(target)
    engine = LocalEngine(model, tokenizer, options, speculator, end_ids)
    planner = Planner(tokenizer, model.config, options, held_out)
    return write_answers(engine, planner, records, output, show_progress=show_progress)


def write_answers(
    engine: Engine,
    planner: Planner,
    records: Dataset,
    output: str | Path,
    *,
    show_progress: bool | None = None,
) -> RegenerateReport:
    """Does the work of `regenerate` with any engine; raises as it does, and as the engine does."""
    settings = {**engine.settings(), "num_records": len(records), **asdict(planner.options)}
    report = RegenerateReport()
    is_hidden = None if show_progress is None else not show_progress
    with (
        Journal(output, settings) as journal,
        tqdm(desc="answering", unit=" records", total=len(records), disable=is_hidden) as bar,
    ):
        firsts = (line for line in read_lines(journal.path) if line["part"] == 0)
        done = {line["id"]: prompt_digest(line["input_ids"][: line["num_prompt_tokens"]]) for line in firsts}
        report.num_found = len(done)
        batches = planner.batches(records, report.skipped, bar)
        for answered in engine.answered(_missing(batches, dict(done), journal, engine.answers_whole_batches)):
            fresh = [job for job in answered if job.id not in done]
            journal.append([job.lines(planner.tokenizer) for job in fresh])
            done |= {job.id: prompt_digest(job.prompt_ids) for job in fresh}
            report.add(fresh)
            bar.set_postfix_str(f"{report.num_found + report.num_written} examples, {report.num_new_tokens} new tokens")
    if not report.num_written and not report.num_found:
        raise SpeculateError(f"nothing can be answered: {_listed(report.skipped)}.")
    if report.skipped:
        logger.warning(f"records that were skipped: {_listed(report.skipped)}.")
    return report


def _missing(
    batches: Iterable[list[Job]], done: Mapping[str, str], journal: Journal, as_whole: bool
) -> Iterator[list[Job]]:
    """Batches that have jobs to do: as a whole, or without the jobs that are done."""
    for batch in batches:
        for job in batch:
            if job.id in done and done[job.id] != prompt_digest(job.prompt_ids):
                raise SpeculateError(
                    f"{journal.path} holds an answer to another prompt as number {job.id}: the data have changed "
                    "since. Give another output, or the data that it was made from."
                )
        missing = [job for job in batch if job.id not in done]
        if missing:
            yield batch if as_whole else missing


def _listed(skipped: Counter[str]) -> str:
    return "; ".join(f"{count} x {reason}" for reason, count in skipped.most_common(5)) or "no records"
