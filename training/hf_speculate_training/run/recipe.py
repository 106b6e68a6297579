"""Recipes: everything that a training run depends on, in one YAML file.

    target:      the model that the head is to draft for
    data:        what it is trained on, see `hf_speculate_training.data.DataOptions`
    method:      an installed one (eagle3, medusa, …), the shape of the head and the options of the method
    features:    the target's states computed in the loop, or read from a cache
    training:    anything that `transformers.TrainingArguments` knows
    evaluation:  how acceptance is measured during the run
    output:      folder, layout, Hub

Unknown keys are refused, and so are tokens: a recipe is written beside the head and uploaded with it.
`training/recipes/` holds examples, which are shipped: `find_recipe` knows them by name.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

import yaml

from hf_speculate.errors import CheckpointError
from hf_speculate.files import read_bytes
from hf_speculate.hub import public_recipe
from hf_speculate.messages import find_secret, masked

from ..data import DataOptions
from ..methods import check_method
from ..sections import RecipeError, field_names, refuse_unknown, validated
from ..target import TargetSection
from .evaluation import AcceptanceOptions
from .recipe_yaml import MAX_BYTES, MAX_DEPTH, check_plain, parse_yaml
from .shipped import find_recipe


@dataclass(frozen=True, kw_only=True)
class DataSection(DataOptions):
    """`DataOptions`, and where the data are.

    Attributes:
        train: a file, folder, glob pattern or Hub id.
        eval: the same for evaluation; None: `eval_fraction` of `train`.
    """

    train: str
    eval: str | None = None


@dataclass(frozen=True, kw_only=True)
class MethodSection:
    """What is trained, and how.

    Attributes:
        name: of an installed method (entry-point group `hf_speculate.training_methods`).
        head: shape of a new head, the fields of the method's `head_class`.
        start_from: folder of a trained head to go on from, instead of `head`.
        adapter: of methods that train the target too: the LoRA that learns with the head, fields of `peft.LoraConfig`.
        options: of the method (unrolled steps, weights of the losses, …), the fields of its `options_class`.
    """

    name: str
    head: dict[str, Any] = field(default_factory=dict)
    start_from: str | None = None
    adapter: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FeaturesSection:
    """Where the target's states come from.

    Attributes:
        source: "online": a forward of the target in every step. "cache": written to disk once, then read.
        folder: of the cache; None: beside the output. One with vLLM's files (`hs_0.safetensors`, …) is read as it is.
    """

    source: Literal["online", "cache"] = "online"
    folder: str | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationSection(AcceptanceOptions):
    """`AcceptanceOptions`, and which prompts.

    Attributes:
        prompts: a JSON-lines file as `hf-speculate bench generate --prompts` reads; None: from the evaluation data.
        num_prompts: so many of them; 0 measures no acceptance.
        prompt_tokens: of a plain text this many tokens are the prompt.
        num_rows: rows of the evaluation data for loss and accuracy; None: all.
        patience: stop after so many evaluations without a better one; None: never.
    """

    prompts: str | None = None
    num_prompts: int = 16
    prompt_tokens: int = 64
    num_rows: int | None = 128
    patience: int | None = None


@dataclass(frozen=True, kw_only=True)
class OutputSection:
    """What is written.

    Attributes:
        folder: of the head; checkpoints go into `checkpoint-<step>` folders in it.
        layout: a published one; None: the drafter's default.
        push_to_hub: repository to upload the head to, "owner/name"; None: none.
        private: whether a new repository is private; None: the owner's default.
        notes: Markdown for the model card.
    """

    folder: str
    layout: str | None = None
    push_to_hub: str | None = None
    private: bool | None = None
    notes: str = ""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run. `training` is checked when its `HeadTrainingArguments` are made."""

    target: TargetSection
    data: DataSection
    method: MethodSection
    output: OutputSection
    features: FeaturesSection = field(default_factory=FeaturesSection)
    training: dict[str, Any] = field(default_factory=dict)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)

    def __post_init__(self) -> None:
        _refuse_secrets(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, defaults included."""
        return dataclasses.asdict(self)

    def to_yaml(self, *, publish: bool = False) -> str:
        """The file that `read_recipe` reads, without anything that looks like a token.

        Args:
            publish: cut paths of this machine to their last part.
        """
        content = _plain(self.to_dict())
        shown = public_recipe(content) if publish else masked(content)
        return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


def read_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from a YAML file.

    Args:
        path: of the file, or the name of one that is shipped, see `recipe_names`.
        overrides: `section.key=value`, with values as YAML writes them; they win over the file.
    Raises:
        RecipeError: no such file, no YAML, unknown keys, wrong types.
    """
    try:
        text = read_bytes(find_recipe(path), MAX_BYTES).decode("utf-8")
    except (CheckpointError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from error
    content = parse_yaml(text, str(path))
    if not isinstance(content, dict):
        raise RecipeError(f"{path} is not a recipe: it must have the sections {', '.join(field_names(Recipe))}.")
    return recipe_from(content, overrides)


def recipe_from(content: Mapping[str, Any], overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from plain values; `overrides` as of `read_recipe`; raises `RecipeError`."""
    check_plain(content)
    content = copy.deepcopy(dict(content))
    for override in overrides:
        _override(content, override)
    check_plain(content)
    _refuse_secrets(content)
    _refuse_unknown_keys(content, Recipe, "")
    recipe = validated(Recipe, content, "the recipe")
    check_method(recipe.method.name)
    return recipe


def _refuse_secrets(content: Mapping[str, Any]) -> None:
    if place := find_secret(content):
        raise RecipeError(
            f"{place} holds a token, a key or a password. A recipe is written beside the head and uploaded with it: "
            "leave it out of the recipe and of --set. Possible: `hf auth login`, or the environment (HF_TOKEN, "
            "WANDB_API_KEY, …)."
        )


def _refuse_unknown_keys(content: Mapping[str, Any], kind: Any, where: str) -> None:
    refuse_unknown(content, field_names(kind), where or "the recipe")
    hints = get_type_hints(kind)
    for name, value in content.items():
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, Mapping):
                raise RecipeError(f"{name} must be a section with the keys {', '.join(field_names(hints[name]))}.")
            _refuse_unknown_keys(value, hints[name], name)


def _override(content: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    shown = text if len(text) <= 100 else f"{text[:80]} ..."
    if not equals or not all(keys) or len(keys) > MAX_DEPTH:
        raise RecipeError(f"cannot read --set {shown!r}: it must be section.key=value.")
    place: Any = content
    for key in keys[:-1]:
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            raise RecipeError(f"cannot read --set {shown!r}: {key} is not a section.")
    place[keys[-1]] = parse_yaml(value, f"the value of --set {shown!r}")


def _plain(value: Any) -> Any:
    """Lists for tuples, dicts for mappings: what YAML writes without tags."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
