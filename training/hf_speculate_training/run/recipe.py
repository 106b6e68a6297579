"""Recipes: everything that a training run depends on, in one YAML file.

    target:      the model that the head is to draft for
    data:        the training data, see `hf_speculate_training.data.DataOptions`
    method:      an installed method (eagle3, medusa, …), its options, and the shape of the head
    features:    source of the target's states: computed in the loop, or read from a cache
    training:    any field of `transformers.TrainingArguments`
    evaluation:  measurement of acceptance during the run
    output:      folder, layout, Hub

Unknown keys are refused, and so are tokens: a recipe is saved with the head and uploaded with it. The recipes in
`training/recipes/` are shipped: `find_recipe` knows them by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

import yaml

from hf_speculate.messages import find_secret
from hf_speculate_tools.hub import public_recipe

from ..data import DataOptions
from ..names import check_method, recipe_content
from ..sections import (
    RecipeError,
    expand_home,
    field_names,
    parse_yaml,
    plain_values,
    refuse_unknown,
    validated,
)
from ..target import TargetSection
from .evaluation import AcceptanceOptions


@dataclass(frozen=True, kw_only=True)
class DataSection(DataOptions):
    """`DataOptions` and the places of the data.

    Attributes:
        train: training data: a file, folder, glob pattern or Hub id.
        eval: evaluation data; None for `eval_fraction` of `train`.
    """

    train: str
    eval: str | None = None


@dataclass(frozen=True, kw_only=True)
class MethodSection:
    """The training method and its head.

    Attributes:
        name: name of an installed method (entry-point group `hf_speculate.training_methods`).
        head: shape of a new head, the fields of the method's `head_class`.
        start_from: folder of a trained head to continue from, instead of `head`.
        options: options of the method (unrolled steps, weights of the losses, …), the fields of its `options_class`.
    """

    name: str
    head: dict[str, Any] = field(default_factory=dict)
    start_from: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FeaturesSection:
    """The source of the target's states.

    Attributes:
        source: "online" runs the target in every step; "cache" writes its states to disk once, then reads them.
        folder: folder of the cache; None for one next to the output.
    """

    source: Literal["online", "cache"] = "online"
    folder: str | None = None

    def __post_init__(self) -> None:
        expand_home(self, "folder")


@dataclass(frozen=True, kw_only=True)
class EvaluationSection(AcceptanceOptions):
    """`AcceptanceOptions` and the prompts.

    Attributes:
        prompts: a JSON-lines file as `hf-speculate bench generate --prompts` reads; None takes the evaluation data.
        num_prompts: number of prompts; 0 measures no acceptance.
        prompt_tokens: number of tokens of a plain text that are its prompt.
        num_rows: rows of the evaluation data for loss and accuracy; None for all.
        patience: number of evaluations without a better one after which the run stops; None for no limit.
    """

    prompts: str | None = None
    num_prompts: int = 16
    prompt_tokens: int = 64
    num_rows: int | None = 128
    patience: int | None = None


@dataclass(frozen=True, kw_only=True)
class OutputSection:
    """The output of a run.

    Attributes:
        folder: folder of the head; checkpoints go into `checkpoint-<step>` folders in it.
        layout: a published layout; None for the drafter's default.
        push_to_hub: repository "owner/name" to which the head is uploaded; None for no upload.
        private: True makes a new repository private; None for the owner's default.
        notes: Markdown for the model card.
    """

    folder: str
    layout: str | None = None
    push_to_hub: str | None = None
    private: bool | None = None
    notes: str = ""

    def __post_init__(self) -> None:
        expand_home(self, "folder")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run, by sections. `training` is checked when its `HeadTrainingArguments` are made."""

    target: TargetSection
    data: DataSection
    method: MethodSection
    output: OutputSection
    features: FeaturesSection = field(default_factory=FeaturesSection)
    training: dict[str, Any] = field(default_factory=dict)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)

    def __post_init__(self) -> None:
        _refuse_secrets(self.to_dict())

    @property
    def evaluates(self) -> bool:
        """True if the run has evaluation data."""
        return self.data.eval is not None or self.data.eval_fraction > 0

    @property
    def feature_folder(self) -> str:
        """Folder of the feature cache."""
        return self.features.folder or f"{self.output.folder}-features"

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain values, defaults included."""
        return dataclasses.asdict(self)

    def to_yaml(self, *, publish: bool = False) -> str:
        """The recipe as a file that `read_recipe` reads; `publish` cuts paths of this machine to their last part."""
        content = plain_values(self.to_dict())
        shown = public_recipe(content) if publish else content
        return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


def read_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe in a YAML file.

    Args:
        path: path of the file, or the name of a shipped recipe.
        overrides: texts `section.key=value`, with values as in YAML, which win over the file.
    Raises:
        RecipeError: there is no such file, it is not YAML, a key is unknown, or a value has the wrong type.
    """
    content = recipe_content(path)
    if not isinstance(content, dict):
        raise RecipeError(f"{path} is not a recipe: it must have the sections {', '.join(field_names(Recipe))}.")
    return recipe_from(content, overrides)


def recipe_from(content: Mapping[str, Any], overrides: Iterable[str] = ()) -> Recipe:
    """The recipe of plain values; `overrides` and errors are those of `read_recipe`."""
    content = plain_values(content)
    for override in overrides:
        _override(content, override)
    content = plain_values(content)
    _refuse_secrets(content)
    _refuse_unknown_keys(content, Recipe, "")
    recipe = validated(Recipe, content, "the recipe")
    check_method(recipe.method.name)
    return recipe


def _refuse_secrets(content: Mapping[str, Any]) -> None:
    if place := find_secret(content):
        raise RecipeError(
            f"{place} holds a token, a key or a password. A recipe is saved with the head and uploaded with it: "
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
    if not equals or not all(keys):
        raise RecipeError(f"cannot read --set {shown!r}: it must be section.key=value.")
    place: Any = content
    for key in keys[:-1]:
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            raise RecipeError(f"cannot read --set {shown!r}: {key} is not a section.")
    place[keys[-1]] = parse_yaml(value, f"the value of --set {shown!r}")
