"""What a recipe names beside the target, loaded: the data, the prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datasets import IterableDataset
from torch import nn
from torch.utils.data import Subset

from hf_speculate.commands import read_prompts, tokenize
from hf_speculate.errors import SpeculateError
from hf_speculate.models import unwrap

from ..data import DataOptions, PreparedData, RowDataset, Source, StreamedRows, prepare_data
from .evaluation import Prompt, evenly_spaced, prompts_of
from .recipe import DataSection, EvaluationSection


@dataclass(frozen=True)
class RunData:
    """Training and evaluation data.

    Attributes:
        train: the training data.
        evaluation: documents for evaluation, None where a recipe has none.
        report: what became of the records, for provenance.
    """

    train: PreparedData
    evaluation: Any
    report: Mapping[str, Any]

    def evaluation_rows(self, limit: int | None = None) -> RowDataset | StreamedRows | Subset:
        """Rows for `Collator`, `limit` evenly spaced ones; of a stream the rows of its first `limit` documents."""
        documents = self.evaluation
        if limit is not None and isinstance(documents, IterableDataset):
            documents = documents.take(limit)
        rows = dataclasses.replace(self.train, evaluation=documents).rows("evaluation")
        if limit is None or not isinstance(rows, RowDataset):
            return rows
        return Subset(rows, evenly_spaced(len(rows), limit))


def load_data(section: DataSection, tokenizer: Any, target: nn.Module) -> RunData:
    """Training data, and evaluation data from their own source or held out of the training data."""
    if section.eval is None:
        train = data_for(section.train, section, tokenizer, target)
        return RunData(train, train.evaluation, {"train": train.report.to_dict()})
    train = data_for(section.train, dataclasses.replace(section, eval_fraction=0.0), tokenizer, target)
    held_out_options = dataclasses.replace(section, eval_fraction=0.0, limit=None)
    held_out = data_for(section.eval, held_out_options, tokenizer, target)
    report = {"train": train.report.to_dict(), "eval": held_out.report.to_dict()}
    return RunData(train, held_out.train, report)


def data_for(source: Source, options: DataOptions, tokenizer: Any, target: nn.Module) -> PreparedData:
    """Data as `prepare_data` makes them for a target: its context, its vocabulary, the tokens at which it stops."""
    model = unwrap(target)
    end_ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = None if end_ids is None else [end_ids] if isinstance(end_ids, int) else end_ids
    return prepare_data(source, tokenizer, options, target_config=model.config, end_ids=ends)


def load_prompts(section: EvaluationSection, data: RunData, tokenizer: Any, max_length: int) -> list[Prompt]:
    """The prompts on which acceptance is measured; those too long to be answered are left out."""
    if not section.num_prompts:
        return []
    if section.prompts is not None:
        read = read_prompts(section.prompts, section.num_prompts)
        prompts = [ids for _, ids in tokenize(read, tokenizer, use_chat_template=bool(tokenizer.chat_template))]
    elif data.evaluation is not None:
        prompts = prompts_of(data.evaluation, section.num_prompts, section.prompt_tokens)
    else:
        return []
    fitting = [prompt for prompt in prompts if len(prompt) + section.max_new_tokens <= max_length]
    if prompts and not fitting:
        raise SpeculateError(
            f"none of the {len(prompts)} evaluation prompts leaves room for {section.max_new_tokens} new tokens in the "
            f"target's context of {max_length}: take shorter ones, or fewer new tokens."
        )
    return fitting
