"""From a recipe and a target to the method that is trained, and the trainer's arguments."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hf_speculate.speculator import unwrap
from hf_speculate_plugins.eagle import EagleSpec

from ..data import Collator, PreparedData
from ..methods.contract import HeadMethod
from ..methods.eagle.eagle1 import Eagle1Method
from ..methods.eagle.eagle3 import Eagle3Method
from ..methods.eagle.new_head import new_eagle1, new_eagle3, new_medusa, warm_eagle, warm_medusa
from ..methods.medusa.medusa import MedusaMethod
from ..methods.medusa.medusa2 import Medusa2Method
from ..methods.vocabulary import count_tokens, draft_vocabulary
from .evaluation import ACCEPTANCE
from .recipe import MethodSection, Recipe, RecipeError, refuse_unknown
from .trainer import HeadTrainingArguments


DRAFT_VOCAB_SIZE = "draft_vocab_size"
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
    known = [field.name for field in dataclasses.fields(HeadTrainingArguments) if field.init]
    refuse_unknown(given, known, "training")
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


def has_evaluation(recipe: Recipe) -> bool:
    return recipe.data.eval is not None or recipe.data.eval_fraction > 0


def adapted_target(section: MethodSection, target: nn.Module) -> nn.Module:
    """The target with the adapter that the method trains, if it trains one.

    Raises:
        RecipeError: `method.adapter` for a method that leaves the target as it is, or none for one that does not.
    """
    if section.name != "medusa2":
        if section.adapter:
            raise RecipeError(f"method.adapter is for medusa2; {section.name} leaves the target as it is.")
        return target
    from peft import LoraConfig, get_peft_model

    if not section.adapter:
        raise RecipeError("medusa2 trains an adapter of the target: give method.adapter, e.g. {r: 16, lora_alpha: 32}.")
    known = [field.name for field in dataclasses.fields(LoraConfig) if field.init]
    refuse_unknown(section.adapter, known, "method.adapter")
    return get_peft_model(target, LoraConfig(task_type="CAUSAL_LM", **section.adapter))  # type: ignore[arg-type]


def build_method(section: MethodSection, target: nn.Module, data: PreparedData) -> HeadMethod:
    """The method of a recipe around a fresh head, or around a trained one to go on from.

    Args:
        target: as `adapted_target` gives it.
        data: whose tokens choose a draft vocabulary, where `head.draft_vocab_size` asks for one.
    Raises:
        RecipeError: options that the method or its head does not have.
    """
    if section.start_from is not None and section.head:
        raise RecipeError("method.start_from brings a head with it: leave method.head out.")
    eagle = section.name in ("eagle1", "eagle3")
    return _eagle(section, unwrap(target), data) if eagle else _medusa(section, target, data)


def _eagle(section: MethodSection, target: Any, data: PreparedData) -> HeadMethod:
    method, new = (Eagle3Method, new_eagle3) if section.name == "eagle3" else (Eagle1Method, new_eagle1)
    options = _checked(section.options, "method.options", method, Eagle3Method)
    if section.start_from is not None:
        head, target_ids = warm_eagle(section.start_from, target)
        return method(head, target, target_ids, **options)
    shape = _checked(section.head, "method.head", new, EagleSpec, more=(DRAFT_VOCAB_SIZE,))
    if section.name == "eagle1":
        return Eagle1Method(new_eagle1(target, **shape), target, **options)
    target_ids = _draft_vocabulary(shape.pop(DRAFT_VOCAB_SIZE, None), target, data)
    return Eagle3Method(new_eagle3(target, target_ids, **shape), target, target_ids, **options)


def _medusa(section: MethodSection, target: Any, data: PreparedData) -> HeadMethod:
    method, model = (MedusaMethod if section.name == "medusa" else Medusa2Method), unwrap(target)
    options = _checked(section.options, "method.options", method, MedusaMethod)
    if section.start_from is not None:
        heads = warm_medusa(section.start_from, model)
    else:
        shape = _checked(section.head, "method.head", new_medusa, more=(DRAFT_VOCAB_SIZE,))
        target_ids = _draft_vocabulary(shape.pop(DRAFT_VOCAB_SIZE, None), model, data)
        heads = new_medusa(model, target_ids=target_ids, **shape)
    return MedusaMethod(heads, model, **options) if method is MedusaMethod else Medusa2Method(heads, target, **options)


# Not for a recipe to say.
_GIVEN = ("target", "target_ids", "head", "heads")


def _checked(options: Mapping[str, Any], where: str, *functions: Any, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """A copy of `options`, all of which one of the functions takes by name; raises `RecipeError`."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for function in functions for p in inspect.signature(function).parameters.values()]
    names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    refuse_unknown(options, [name for name in dict.fromkeys((*names, *more)) if name not in _GIVEN], where)
    return dict(options)


def _draft_vocabulary(size: int | None, target: Any, data: PreparedData) -> Tensor | None:
    """The most frequent tokens of the training data; None for the whole vocabulary."""
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    if size is None or size == vocab_size:
        return None
    if not 1 <= size < vocab_size:
        raise RecipeError(f"method.head.{DRAFT_VOCAB_SIZE} must be from 1 to the target's {vocab_size}, got {size}.")
    batches = DataLoader(data.rows("train"), batch_size=16, collate_fn=Collator())  # type: ignore[arg-type]
    return draft_vocabulary(count_tokens(islice(batches, _COUNTED_BATCHES), vocab_size), size)
