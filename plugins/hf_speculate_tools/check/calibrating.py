"""The calibration table of a drafter, measured before the drafter is used."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import GenerationConfig

from hf_speculate import rounds
from hf_speculate.drafting import Calibration, CalibrationTable, Drafter
from hf_speculate.errors import CheckpointError
from hf_speculate.files import user_path
from hf_speculate.policy import Acceptance
from hf_speculate.speculator import Speculator, drafter_class_for
from hf_speculate.target import GenerativeModel, unwrap
from hf_speculate.tree import Round


def measure_calibration(
    target: GenerativeModel,
    drafter: Drafter,
    prompts: Sequence[Int[Tensor, " S"]],
    *,
    max_new_tokens: int = 64,
    seed: int = 0,
) -> CalibrationTable:
    """Counts how often nodes of each value are right, in greedy texts and in texts at temperature 1.

    The drafter drafts as much as its options allow. The global random state stays as it is.
    """
    speculator, shares = Speculator(drafter, adaptive=False), []
    devices = [] if target.device.type == "cpu" else [target.device]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 0}):
            config = GenerationConfig(max_new_tokens=max_new_tokens, pad_token_id=0, **sampling)
            config.eos_token_id = target.generation_config.eos_token_id
            shares.append(_shares(_rounds(target, speculator, prompts, config)))
    return CalibrationTable(*shares)


def write_calibration(
    head: str | os.PathLike, target: nn.Module, prompts: Sequence[Tensor], *, max_new_tokens: int = 64, **options: Any
) -> None:
    """Writes a head's calibration table (`calibration.json`) into its folder.

    With it the policy of a new process begins with what was measured here.

    Args:
        head: a local folder.
        target: the model that the head drafts for.
        prompts: token ids, int64 [S] each.
        max_new_tokens: tokens that the target writes after each prompt.
        options: conventions that the head is read with.
    Raises:
        CheckpointError: `head` is not a local folder, or cannot be written to.
    """
    model, folder = unwrap(target), writable_folder(head)
    drafter = drafter_class_for(folder).from_folder(folder, model, **options)
    measure_calibration(model, drafter, prompts, max_new_tokens=max_new_tokens).save(folder)


def writable_folder(head: str | os.PathLike) -> str:
    """The folder of a head, if a table can be written there."""
    folder = user_path(head)
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} is not a local folder: calibration.json is written next to a head's files.")
    if not os.access(folder, os.W_OK):
        raise CheckpointError(f"calibration.json cannot be written to {folder}: permission denied.")
    return folder


def _rounds(
    target: GenerativeModel, speculator: Speculator, prompts: Sequence[Tensor], config: GenerationConfig
) -> Iterator[Round]:
    for prompt in prompts:
        ids = prompt[None].to(target.device)
        mask = torch.ones_like(ids)
        yield from rounds(target, ids, attention_mask=mask, generation_config=config, speculator=speculator)


def _shares(request_rounds: Iterable[Round]) -> tuple[float, ...]:
    calibration = Calibration()
    acceptance = Acceptance(calibration)
    for round in request_rounds:
        if round.num_nodes:
            acceptance.count(round.tree.host.rows()[0], round.paths[0], round.tokens[0])
    return tuple(calibration.shares)
