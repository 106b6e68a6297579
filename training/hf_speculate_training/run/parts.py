"""What `HeadTrainer` was given, made into what it needs: targets and methods by name, data as people have them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import TrainingArguments, set_seed

from hf_speculate.errors import SpeculateError
from hf_speculate.models import unwrap

from ..data import Collator, DataOptions, PreparedData
from ..methods import TrainingMethod, load_method
from ..target import TargetSection, load_config, load_target, load_tokenizer
from .arguments import HeadTrainingArguments
from .building import adapted_target, build_method
from .defaults import default_arguments
from .evaluation import AcceptanceEvaluation, prompts_of
from .inputs import data_for
from .launch import check_launch
from .recipe import MethodSection


_NUM_PROMPTS = 16


@dataclass
class Parts:
    """All that a trainer is made of, see the arguments of `HeadTrainer`."""

    target: nn.Module
    method: TrainingMethod
    args: TrainingArguments
    data_collator: Any
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    evaluation: AcceptanceEvaluation | None


def resolved(
    target: str | os.PathLike | nn.Module,
    method: str | MethodSection | TrainingMethod,
    args: TrainingArguments | None,
    train_dataset: Any,
    eval_dataset: Any,
    processing_class: Any,
    data_collator: Any,
    evaluation: AcceptanceEvaluation | bool | None,
    data_options: DataOptions | None,
) -> Parts:
    """Loads and prepares what was given by name or raw; everything else stays as it is.

    Raises:
        SpeculateError: no such target or method, data that cannot be used; see `check_launch`.
    """
    args = args or _arguments(target, method)
    check_launch(args)
    set_seed(args.seed)  # fresh heads are drawn at random
    model = target if isinstance(target, nn.Module) else load_target(TargetSection(path=_name_of(target)), args.device)
    needs_tokenizer = any(_is_raw(data) for data in (train_dataset, eval_dataset))
    if processing_class is None and (needs_tokenizer or _is_name(target)):
        processing_class = load_tokenizer(TargetSection(path=_name_of(target)))
    train, held_out = (_prepared(data, processing_class, model, data_options) for data in (train_dataset, eval_dataset))
    if held_out is None and isinstance(train, PreparedData) and train.evaluation is not None:
        held_out = _held_out(train)
    if not isinstance(method, TrainingMethod):
        section = _section(method, model)
        model = adapted_target(section, model)
        method = build_method(section, model, train if isinstance(train, PreparedData) else None)
    if evaluation is None and isinstance(held_out, PreparedData):
        prompts = prompts_of(held_out.train, _NUM_PROMPTS)
        evaluation = AcceptanceEvaluation(prompts) if prompts else None
    if data_collator is None and processing_class is not None:
        data_collator = Collator(processing_class.pad_token_id)
    return Parts(
        target=model,
        method=method,
        args=args,
        data_collator=data_collator,
        train_dataset=train.rows() if isinstance(train, PreparedData) else train,
        eval_dataset=held_out.rows() if isinstance(held_out, PreparedData) else held_out,
        processing_class=processing_class,
        evaluation=evaluation if isinstance(evaluation, AcceptanceEvaluation) else None,
    )


def _is_name(target: Any) -> bool:
    return isinstance(target, str | os.PathLike)


def _name_of(target: Any) -> str:
    if _is_name(target):
        return os.fspath(target)
    name = unwrap(target).name_or_path
    if not name:
        raise SpeculateError(
            f"the {type(target).__name__} does not say where it came from: give processing_class, its tokenizer, and "
            "args with an output_dir."
        )
    return name


def _arguments(target: Any, method: Any) -> HeadTrainingArguments:
    """By the target's size, as `hf-speculate train` has them; a method that is made already brings its own ideas."""
    if isinstance(method, TrainingMethod):
        return HeadTrainingArguments(output_dir=f"{type(method).__name__.lower()}-head")
    name = method if isinstance(method, str) else method.name
    config = load_config(TargetSection(path=_name_of(target))) if _is_name(target) else unwrap(target).config
    chosen = default_arguments(config.get_text_config(decoder=True), load_method(name).trains_target)
    return HeadTrainingArguments(
        output_dir=f"{Path(_name_of(target)).name}-{name}", use_cpu=not torch.accelerator.is_available(), **chosen
    )


def _section(method: str | MethodSection, target: nn.Module) -> MethodSection:
    if isinstance(method, MethodSection):
        return method
    suggested: Any = load_method(method).suggested(unwrap(target).config.get_text_config(decoder=True))
    return MethodSection(name=method, **suggested)


def _is_raw(data: Any) -> bool:
    return isinstance(data, str | os.PathLike | Dataset | IterableDataset)


def _prepared(data: Any, tokenizer: Any, target: nn.Module, options: DataOptions | None) -> Any:
    if not _is_raw(data):
        return data
    return data_for(data, options or DataOptions(chat=bool(tokenizer.chat_template)), tokenizer, target)


def _held_out(data: PreparedData) -> PreparedData:
    """What `DataOptions.eval_fraction` left out of training, as data of its own."""
    assert data.evaluation is not None
    return PreparedData(data.evaluation, None, data.max_length, data.report, data.options)
