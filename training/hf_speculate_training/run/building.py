"""From a recipe and a target to the method that is trained, and the trainer's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from hf_speculate.models import unwrap

from ..data import Collator, PreparedData
from ..methods import TrainingMethod, count_tokens, load_method
from ..sections import RecipeError, field_names, read_section, refuse_unknown, validated
from .arguments import HeadTrainingArguments
from .evaluation import ACCEPTANCE
from .recipe import MethodSection, Recipe


# Types of arguments that pydantic checks; the rest are transformers' own.
_PLAIN = {bool, int, float, str, type(None)}
_COUNTED_BATCHES = 20_000  # a stream may have no end
# Said by other sections of a recipe.
_ELSEWHERE = {
    "output_dir": "output.folder",
    "push_to_hub": "output.push_to_hub",
    "hub_model_id": "output.push_to_hub",
    "hub_private_repo": "output.private",
    "resume_from_checkpoint": "the option --resume",
    "remove_unused_columns": "nothing: it must stay as it is",
}


def training_arguments(recipe: Recipe) -> HeadTrainingArguments:
    """The arguments of a recipe's `training` section.

    With evaluation data, a run evaluates and saves every 500 steps unless told otherwise, and keeps the checkpoint with
    the best mean acceptance length.

    Raises:
        RecipeError: a key that `TrainingArguments` does not have, or that belongs to another section.
    """
    given = {"use_cpu": not torch.accelerator.is_available(), **recipe.training}
    for name, place in _ELSEWHERE.items():
        if name in given:
            raise RecipeError(f"training.{name} is not set in this section but by {place}.")
    refuse_unknown(given, field_names(HeadTrainingArguments), "training")
    given |= _typed(given)
    if has_evaluation(recipe):
        metric = f"eval_{ACCEPTANCE}" if recipe.evaluation.num_prompts else "eval_loss"
        every = given.get("eval_steps", 500)
        defaults = {
            "eval_strategy": "steps",
            "eval_steps": every,
            "save_strategy": given.get("eval_strategy", "steps"),
            "save_steps": every,
            "metric_for_best_model": metric,
            "load_best_model_at_end": given.get("eval_strategy", "steps") != "no",
        }
        given = {**defaults, **given}
    try:
        return HeadTrainingArguments(output_dir=recipe.output.folder, **given)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"the section training cannot be used: {error}") from error


def _typed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers, flags and texts among training arguments; raises `RecipeError` for values of other types, which
    `TrainingArguments` itself takes as they are."""
    hints = get_type_hints(HeadTrainingArguments)
    plain = {name: hints[name] for name in given if set(get_args(hints[name]) or (hints[name],)) <= _PLAIN}
    kind: Any = TypedDict("Training", plain)  # type: ignore[misc]
    return validated(kind, {name: given[name] for name in plain}, "the section training")


def has_evaluation(recipe: Recipe) -> bool:
    return recipe.data.eval is not None or recipe.data.eval_fraction > 0


def adapted_target(section: MethodSection, target: nn.Module) -> nn.Module:
    """The target with the adapter that the method trains, if it trains one.

    Raises:
        RecipeError: `method.adapter` for a method that leaves the target as it is, or none for one that does not.
    """
    return load_method(section.name).adapted(target, section.adapter)


def build_method(section: MethodSection, target: nn.Module, data: PreparedData | None) -> TrainingMethod:
    """The method of a recipe around a fresh head, or around a trained one to go on from.

    Args:
        target: as `adapted_target` gives it.
        data: whose tokens choose a draft vocabulary, where the head is asked to have one.
    Raises:
        RecipeError: options that the method or its head does not have.
    """
    method = load_method(section.name)
    options = read_section(method.options_class, section.options, "method.options")
    if section.start_from is not None:
        if section.head:
            raise RecipeError("method.start_from brings a head with it: leave method.head out.")
        return method.from_folder(section.start_from, target, options)
    head = read_section(method.head_class, section.head, "method.head")
    vocab_size = unwrap(target).config.get_text_config(decoder=True).vocab_size
    return method.for_target(target, head, options, lambda: _token_counts(data, vocab_size))


def _token_counts(data: PreparedData | None, vocab_size: int) -> Tensor:
    """How often the training data have the target emit each token."""
    if data is None:
        raise RecipeError("a draft vocabulary is chosen by the training data, and there are none.")
    rows: Any = data.rows("train")
    batches = DataLoader(rows, batch_size=16, collate_fn=Collator())
    return count_tokens(islice(batches, _COUNTED_BATCHES), vocab_size)
