"""The one way to the parts of a run: a section of a recipe is loaded, an object in its place is taken as it is.

`train_head` brings the sections of its recipe. `HeadTrainer` brings what the caller gave: names become sections first.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from transformers import TrainingArguments, set_seed

from hf_speculate.errors import SpeculateError
from hf_speculate.request import check_drafting
from hf_speculate.target import GenerativeModel
from hf_speculate_tools.commands import read_prompts, tokenize

from ..data import Collator, DataOptions, PreparedData, RowDataset, Source, prepare_data
from ..methods import TrainingMethod, count_tokens, load_method
from ..sections import RecipeError, read_section
from ..target import (
    TargetSection,
    check_sharding,
    in_turn,
    is_sharded,
    load_config,
    load_target,
    load_tokenizer,
    mesh_of_processes,
    shard_layers,
)
from .arguments import HeadTrainingArguments, check_launch
from .defaults import default_arguments
from .evaluation import AcceptanceEvaluation, PromptIds, evenly_spaced, prompts_of
from .provenance import describe_use
from .recipe import EvaluationSection, MethodSection, Recipe


@dataclass
class Parts:
    """Everything that a run trains with; `train` and `held_out` are `PreparedData`, or rows of the caller's."""

    target: GenerativeModel
    tokenizer: Any
    method: TrainingMethod
    train: Any
    held_out: Any
    evaluation: AcceptanceEvaluation | None
    use: Mapping[str, Any] | None = None  # of `describe_use`, before layers were shared out among processes

    def train_rows(self) -> Any:
        return self.train.rows() if isinstance(self.train, PreparedData) else self.train

    def evaluation_rows(self, limit: int | None = None) -> RowDataset | Subset | Any:
        """Rows for an evaluation, `limit` of them, evenly spaced; None without evaluation data."""
        data = self.held_out
        if not isinstance(data, PreparedData):
            return data
        rows = data.rows()
        return rows if limit is None else Subset(rows, evenly_spaced(len(rows), limit))


@dataclass(kw_only=True)
class TrainingRun(Parts):
    """The parts of a recipe's run, loaded; nothing is trained or written yet."""

    recipe: Recipe
    args: HeadTrainingArguments
    resume: str | None = None  # a checkpoint

    @property
    def folder(self) -> Path:
        return Path(self.recipe.output.folder)

    @property
    def prompts(self) -> list[PromptIds]:
        """The prompts on which acceptance is measured."""
        return self.evaluation.prompts if self.evaluation is not None else []


def build(
    args: TrainingArguments,
    target: TargetSection | GenerativeModel,
    method: str | MethodSection | TrainingMethod,
    train: Any,
    held_out: Any = None,
    *,
    options: DataOptions | None = None,
    evaluation: EvaluationSection | AcceptanceEvaluation | None = None,
    tokenizer: Any = None,
) -> Parts:
    """The parts of a run.

    A method that is only named gets the shape that suits the target's size. Data are a source for `prepare_data`,
    or rows. Without `held_out` a share of the training data is held out, if the options ask for it.

    Raises:
        SpeculateError: there is no such target or method, the target takes no drafts, the data cannot be used; see also
            `check_launch`.
    """
    check_launch(args)
    set_seed(args.seed)  # fresh heads are drawn at random
    use = None
    if isinstance(target, TargetSection):
        target, tokenizer, use = _loaded(target, tokenizer, args.device)
    elif tokenizer is None and (_is_source(train) or _is_source(held_out)):
        tokenizer = load_tokenizer(TargetSection(path=name_of(target)))
    if not is_sharded(target):
        check_drafting(target)
    with args.main_process_first(desc="data"):  # the others find them converted and tokenised
        train, held_out = _data(train, held_out, options, tokenizer, target)
    if isinstance(evaluation, EvaluationSection):
        prompts = _prompts(evaluation, held_out, tokenizer, target)
        evaluation = AcceptanceEvaluation(prompts, evaluation) if prompts else None
    if isinstance(method, str):
        suggested: Any = load_method(method).suggested(target.config.get_text_config(decoder=True))
        method = MethodSection(name=method, **suggested)
    if isinstance(method, MethodSection):
        method = build_method(method, target, train if isinstance(train, PreparedData) else None)
    return Parts(target, tokenizer, method, train, held_out, evaluation, use)


def arguments_for(
    target: TargetSection | GenerativeModel, method: str | MethodSection | TrainingMethod
) -> TrainingArguments:
    """Arguments by the target's size, as `hf-speculate train` has them; the plain defaults for a method object."""
    if isinstance(method, TrainingMethod):
        return HeadTrainingArguments(output_dir=f"{type(method).__name__.lower()}-head")
    name = method if isinstance(method, str) else method.name
    config = load_config(target) if isinstance(target, TargetSection) else target.config
    chosen = default_arguments(config.get_text_config(decoder=True))
    return HeadTrainingArguments(
        output_dir=f"{Path(name_of(target)).name}-{name}", use_cpu=not torch.accelerator.is_available(), **chosen
    )


def name_of(target: TargetSection | GenerativeModel) -> str:
    """Path or Hub id of a target; raises `SpeculateError` for a model that has none."""
    name = target.path if isinstance(target, TargetSection) else target.name_or_path
    if not name:
        raise SpeculateError(
            f"the {type(target).__name__} has no name_or_path: give processing_class, its tokenizer, and "
            "args with an output_dir."
        )
    return name


def build_method(section: MethodSection, target: GenerativeModel, data: PreparedData | None) -> TrainingMethod:
    """The method of a recipe around a fresh head, or around a trained one.

    The tokens of `data` choose a draft vocabulary if the head is to have one.
    """
    method = load_method(section.name)
    options = read_section(method.options_class, section.options, "method.options")
    if section.start_from is not None:
        if section.head:
            raise RecipeError("method.start_from brings a head with it: leave method.head out.")
        return method.from_folder(section.start_from, target, options)
    head = read_section(method.head_class, section.head, "method.head")
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    return method.for_target(target, head, options, lambda: _token_counts(data, vocab_size))


def _token_counts(data: PreparedData | None, vocab_size: int) -> Tensor:
    """Number of times that the training data have the target emit each token, int64 [V]."""
    if data is None:
        raise RecipeError("a draft vocabulary is chosen by the training data, and there are none.")
    rows: Any = data.rows()
    return count_tokens(DataLoader(rows, batch_size=16, collate_fn=Collator()), vocab_size)


def _loaded(
    section: TargetSection, tokenizer: Any, device: torch.device
) -> tuple[GenerativeModel, Any, Mapping[str, Any] | None]:
    """Target, tokenizer, and the `use` of `Parts`."""
    if not section.shard:
        target = load_target(section, device)
        return target, load_tokenizer(section) if tokenizer is None else tokenizer, None
    check_sharding(section)
    mesh = mesh_of_processes(device)
    with in_turn():
        target = load_target(section, torch.device("cpu"))
        tokenizer = load_tokenizer(section) if tokenizer is None else tokenizer
        use = describe_use(target, tokenizer)
        shard_layers(target, mesh)
    return target, tokenizer, use


def _is_source(data: Any) -> bool:
    return isinstance(data, str | os.PathLike | Dataset | IterableDataset)


def _data(
    train: Any, held_out: Any, options: DataOptions | None, tokenizer: Any, target: GenerativeModel
) -> tuple[Any, Any]:
    """Training and evaluation data; sources become `PreparedData`."""
    options = options or DataOptions(chat=bool(getattr(tokenizer, "chat_template", None)))
    if held_out is None:
        train = _prepared(train, options, tokenizer, target)
        if isinstance(train, PreparedData) and train.evaluation is not None:
            held_out = replace(train, train=train.evaluation, evaluation=None)
        return train, held_out
    options = replace(options, eval_fraction=0.0)
    train = _prepared(train, options, tokenizer, target)
    return train, _prepared(held_out, replace(options, limit=None), tokenizer, target)


def _prepared(source: Source | Any, options: DataOptions, tokenizer: Any, target: GenerativeModel) -> Any:
    """A source as `prepare_data` makes it for a target: its context, its vocabulary, the tokens at which it stops."""
    if not _is_source(source):
        return source
    end_ids = target.generation_config.eos_token_id if target.generation_config is not None else None
    ends = None if end_ids is None else [end_ids] if isinstance(end_ids, int) else end_ids
    return prepare_data(source, tokenizer, options, target_config=target.config, end_ids=ends)


def _prompts(section: EvaluationSection, held_out: Any, tokenizer: Any, target: GenerativeModel) -> list[PromptIds]:
    """The prompts on which acceptance is measured, without those that leave no space for an answer."""
    if not section.num_prompts:
        return []
    if section.prompts is not None:
        read = read_prompts(section.prompts, section.num_prompts)
        prompts = [ids for _, ids in tokenize(read, tokenizer, use_chat_template=bool(tokenizer.chat_template))]
    elif isinstance(held_out, PreparedData):
        prompts = prompts_of(held_out.train, section.num_prompts, section.prompt_tokens)
    else:
        return []
    context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = math.inf if context is None else context - section.max_new_tokens
    fitting = [prompt for prompt in prompts if len(prompt) <= longest]
    if prompts and not fitting:
        raise SpeculateError(
            f"none of the {len(prompts)} evaluation prompts leaves room for {section.max_new_tokens} new tokens in the "
            f"target's context of {context}: take shorter ones, or fewer new tokens."
        )
    return fitting
