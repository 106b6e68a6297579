"""A target of random weights with prompts, and synthetic drafters for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..commands.environment import find_device, find_dtype
from ..commands.methods import Method, eager_method
from ..commands.shapes import find_shape, random_prompt
from ..models import GenerativeModel
from ..speculator import Speculator
from ..testing import unpadded
from .profiles import AcceptanceProfile, Texts
from .runs import Request, batches, fixed_length, generate_once
from .workload import Workload


PROMPT_LENGTH = 256
_NUM_PROMPTS = 2


def shape_workload(name: str, layers: int | None, num_prompts: int | None, dtype: str, device: str | None) -> Workload:
    """Random weights of a shape, and random prompts of `PROMPT_LENGTH` tokens.

    Args:
        layers: fewer than the shape has.
        dtype: "auto" is bfloat16.
    """
    shape = find_shape(name).with_layers(layers)
    model = shape.build(find_dtype("bfloat16" if dtype == "auto" else dtype), find_device(device))
    count = num_prompts or _NUM_PROMPTS
    prompts = [("random", random_prompt(PROMPT_LENGTH, shape.vocab_size, seed)[0]) for seed in range(count)]
    return Workload(
        name=f"{name} shape of {shape.num_hidden_layers} layers, random weights",
        model=model,
        prompts=prompts,
        num_skipped=0,
        prompt_sets=["random"],
        uses_chat_template=False,
    )


def plain_texts(
    model: GenerativeModel, requests: Sequence[Request], arguments: dict[str, Any]
) -> dict[tuple[int, ...], list[int]]:
    """What plain `generate` writes after each prompt, as a `ScriptedDrafter` wants it."""
    texts: dict[tuple[int, ...], list[int]] = {}
    for request in requests:
        run = generate_once(model, eager_method(), request, arguments)
        for prompt, tokens in zip(unpadded(request.input_ids, request.attention_mask), run.rows, strict=True):
            texts[tuple(prompt)] = tokens
    return texts


def synthetic_speculators(workload: Workload, profile: AcceptanceProfile, max_new_tokens: int) -> list[Method]:
    """Synthetic drafters that know what plain `generate` writes after the prompts of a workload."""
    requests = batches(workload.prompts, 1, workload.model.device)
    texts = plain_texts(workload.model, requests, fixed_length(max_new_tokens))
    return synthetic_methods(texts, profile, workload.model.config.vocab_size)


def synthetic_methods(texts: Texts, profile: AcceptanceProfile, vocab_size: int) -> list[Method]:
    """One with automatic trees and one with fixed ones."""
    drafter = profile.drafter(texts, vocab_size=vocab_size)
    return [
        Method(
            name=name, kind="speculator", arguments={"speculator": Speculator(drafter, adaptive=adaptive)}, spec=name
        )
        for name, adaptive in zip(synthetic_names(profile), (True, False), strict=True)
    ]


def synthetic_names(profile: AcceptanceProfile) -> tuple[str, str]:
    return "automatic", f"fixed {profile.nodes}"
