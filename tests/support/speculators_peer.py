"""The `speculators` package beside us: it wants another transformers, so it runs in an environment of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hf_speculate import AutoSpeculator

from .eagle_chains import chain_logits
from .paths import TESTS


PYTHON = os.environ.get("SPECULATORS_PYTHON")
"""The interpreter of that environment (`make peers`); None: there is none."""

_SCRIPT = TESTS / "optional" / "read_with_speculators.py"
_COUNT, _STEPS = 12, 3


def assert_peer_agrees(folder: Path, model: Any, tmp_path: Path) -> None:
    """Their forward of the EAGLE-3 head in `folder` gives our logits, teacher-forced and unrolled.

    Args:
        model: the head's target.
    """
    drafter = AutoSpeculator.from_pretrained(folder, target=model).drafter
    token_ids = torch.randint(3, model.config.vocab_size, (_COUNT + 1,))
    with torch.no_grad():
        hidden = model(token_ids[None], output_hidden_states=True).hidden_states
        features = [hidden[layer] for layer in drafter.entry_layers]
        entries = range(_COUNT - _STEPS + 1)  # their chains stay within the text
        logits = chain_logits(drafter.head, token_ids, drafter.head.fuse(features), entries, _STEPS)
    inputs = {"states": torch.cat(features, dim=-1)[:, :-1].contiguous(), "token_ids": token_ids[None, 1:].clone()}
    save_file(inputs, tmp_path / "inputs.safetensors")
    arguments = [PYTHON, _SCRIPT, folder, tmp_path / "inputs.safetensors", tmp_path / "outputs.safetensors"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    found = load_file(tmp_path / "outputs.safetensors")
    theirs = found["logits"][:, : len(entries)].transpose(0, 1)
    torch.testing.assert_close(theirs, logits, atol=1e-4, rtol=1e-4)
    if drafter.target_ids is not None:
        assert torch.equal(found["d2t"] + torch.arange(len(drafter.target_ids)), drafter.target_ids)
