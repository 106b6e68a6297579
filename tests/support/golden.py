"""Golden folders: published heads, and outputs that reference implementations computed of them
(`../shared/golden/README.md`)."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_speculate import Speculator
from hf_speculate.drafting import DraftState

from .paths import SHARED


GOLDEN = SHARED / "golden"
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@cache
def meta_of(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "meta.json").read_text())


@cache
def target_of(name: str):
    return AutoModelForCausalLM.from_pretrained(GOLDEN / meta_of(name)["target"], dtype=torch.float32).eval()


@cache
def vectors_of(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / name / "vectors.safetensors")


def state_for(root: int | torch.Tensor, chains_only: bool = False) -> DraftState:
    roots = torch.tensor([int(root)])
    return DraftState(root_ids=roots, active=(True,), max_depth=99, chains_only=chains_only, num_emitted=(1,))


def unpadded(rows: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(token for token in row if token >= 0) for row in rows.tolist()]


def run_of(target, drafter, run: dict[str, Any], num_more: int) -> list[int]:
    """The text that a reference's run wrote, and `num_more` tokens: it stops by rounds, none of which may be cut."""
    prompt = torch.tensor([run["prompt"]])
    output = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        speculator=Speculator(drafter),
        do_sample=False,
        max_new_tokens=len(run["output"]) + num_more,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, prompt.shape[1] :][: len(run["output"])].tolist()
