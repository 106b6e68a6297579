"""Default recipes, derived from target, data and method by the target's size.

There are two kinds of targets, as in the shipped recipes. Heads of small ones (hidden size below 768) are trained on a
CPU or a small GPU, with Muon and short rows, like `pycoder-eagle3`, `qwen2-16m-eagle3` and `smollm2-eagle3`. For larger
targets the settings are those of EAGLE-3's own trainer and SpecForge, as in `qwen2-0.5b-eagle3` and
`llama-3.1-8b-eagle3`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.utils.import_utils import is_torch_bf16_gpu_available

from ..methods import SMALL_HIDDEN_SIZE, load_method
from ..target import TargetSection, load_config, load_tokenizer


_LARGE_HIDDEN_SIZE = 2048  # a row of theirs fills a GPU


@dataclass(frozen=True)
class Choice:
    """One value of a recipe with its reason, which is a comment in the file."""

    place: str  # section.key or section.key.key
    value: Any
    why: str = ""


def default_choices(target: str, data: str, method: str, output: str | None = None) -> list[Choice]:
    """The recipe for a target, in the order in which it is written. Reads the target's configuration and tokenizer."""
    section = TargetSection(path=target)
    load_method(method)
    config = load_config(section).get_text_config(decoder=True)
    has_template = bool(load_tokenizer(section).chat_template)
    folder = output or f"runs/{Path(target).stem if target.endswith('.gguf') else Path(target).name}-{method}"
    small, large = _is_small(config), config.hidden_size >= _LARGE_HIDDEN_SIZE
    length = 512 if small else 2048
    context = getattr(config, "max_position_embeddings", None) or length
    return [
        Choice("target.path", target),
        Choice("data.train", data, "the target's own answers are best: hf-speculate regenerate"),
        Choice("data.eval_fraction", 0.05, "held out for loss and acceptance; or data.eval, a file"),
        Choice("data.max_length", min(length, context), "tokens of a row; longer plain texts are cut into pieces"),
        Choice("data.chat", has_template, "prompt and completion through the chat template, if the target has one"),
        Choice("method.name", method),
        *_method_choices(config, method),
        *_training_choices(config),
        Choice("evaluation.num_prompts", 16, "decoded at every evaluation; the best checkpoint is kept"),
        Choice("evaluation.max_new_tokens", 64),
        Choice("evaluation.nodes", [16 if small else 59 if large else 31], "of a draft tree"),
        Choice("output.folder", folder, "head, card, provenance, checkpoints"),
    ]


def recipe_values(choices: Iterable[Choice]) -> dict[str, Any]:
    """The choices as plain values, for `recipe_from`."""
    content: dict[str, Any] = {}
    for choice in choices:
        *sections, key = choice.place.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = choice.value
    return content


def default_arguments(config: PretrainedConfig) -> dict[str, Any]:
    """Default values for `HeadTrainingArguments`, without those about evaluating and saving."""
    values = recipe_values(_training_choices(config))["training"]
    return {name: value for name, value in values.items() if name not in ("eval_steps", "save_steps")}


def commented_recipe(choices: Iterable[Choice]) -> str:
    """The choices as a YAML file, with reasons as comments."""
    lines = ["# Made by `hf-speculate train --init`. Every key: hf_speculate_training.run.recipe; anything that"]
    lines += ["# transformers.TrainingArguments knows can stand in `training`.", ""]
    open_sections: list[str] = []
    for choice in choices:
        *sections, key = choice.place.split(".")
        for depth, section in enumerate(sections):
            if open_sections[: depth + 1] != sections[: depth + 1]:
                lines.append(f"{'  ' * depth}{section}:")
        open_sections = sections
        comment = f" # {choice.why}" if choice.why else ""
        lines.append(f"{'  ' * len(sections)}{key}: {json.dumps(choice.value, ensure_ascii=False)}{comment}")
    return "\n".join(lines) + "\n"


def _method_choices(config: PretrainedConfig, method: str) -> list[Choice]:
    why = {
        "draft_vocab_size": "the tokens that the data have most; the target's vocabulary is larger",
        "anchors": "blocks that are trained in each row",
        "steps": "unrolled in training: how deep the head learns to draft",
        "soft": "learns the target's distribution, not the text's token",
    }
    suggested = load_method(method).suggested(config)
    return [
        Choice(f"method.{part}.{key}", value, why.get(key, ""))
        for part, values in suggested.items()
        for key, value in values.items()
    ]


def _training_choices(config: PretrainedConfig) -> list[Choice]:
    if _is_small(config):
        choices = [
            Choice("training.num_train_epochs", 4),
            Choice("training.per_device_train_batch_size", 4, "rows of max_length tokens per step"),
            Choice("training.muon", True, "learns from fewer tokens than AdamW"),
            Choice("training.learning_rate", 4e-3, "Muon's, for the layers' matrices"),
            Choice("training.adamw_learning_rate", 2e-3, "of everything else"),
            Choice("training.weight_decay", 0.05),
            Choice("training.max_grad_norm", 1.0),
        ]
    else:
        rows = 1 if config.hidden_size >= _LARGE_HIDDEN_SIZE else 8
        choices = [
            Choice("training.num_train_epochs", 2, "speculators' published runs: 2 to 3"),
            Choice("training.per_device_train_batch_size", rows, "rows in memory at a time"),
            Choice("training.gradient_accumulation_steps", 8 // rows, "8 rows per step, as EAGLE-3's own trainer"),
            Choice("training.learning_rate", 1e-4, "as SpecForge"),
            Choice("training.warmup_steps", 0.015, "a share of all steps"),
            Choice("training.max_grad_norm", 0.5),
        ]
    return [
        *choices,
        Choice("training.bf16", is_torch_bf16_gpu_available(), "needs a GPU, or a CPU with AMX, that has it"),
        Choice("training.eval_steps", 0.1, "a share of all steps: ten evaluations, ten checkpoints"),
        Choice("training.save_steps", 0.1),
    ]


def _is_small(config: PretrainedConfig) -> bool:
    return config.hidden_size < SMALL_HIDDEN_SIZE
