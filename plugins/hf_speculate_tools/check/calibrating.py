"""The calibration table of a drafter, measured before the drafter is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig

from hf_speculate.drafting import Calibration, CalibrationTable, Drafter
from hf_speculate.models import GenerativeModel
from hf_speculate.policy import Acceptance
from hf_speculate.speculator import Speculator
from hf_speculate.streaming import rounds
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


def _rounds(
    target: GenerativeModel, speculator: Speculator, prompts: Sequence[Tensor], config: GenerationConfig
) -> Iterator[Round]:
    for prompt in prompts:
        ids = prompt[None].to(target.device)
        mask = torch.ones_like(ids)
        yield from rounds(target, ids, attention_mask=mask, generation_config=config, speculator=speculator)


def _shares(found: Iterable[Round]) -> tuple[float, ...]:
    calibration = Calibration()
    acceptance = Acceptance(calibration)
    for round in found:
        if round.num_nodes:
            acceptance.count(round.tree.host.rows()[0], round.paths[0], round.tokens[0])
    return tuple(calibration.shares)
