"""The reader of the `speculators` package takes what `convert --for vllm` writes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_speculate_tools.heads.convert import convert_checkpoint

from ..support.paths import REPOSITORY
from ..support.speculators_peer import PYTHON, assert_peer_agrees


TARGET = REPOSITORY / "examples" / "pycoder"


@pytest.mark.skipif(not PYTHON, reason="SPECULATORS_PYTHON names no interpreter (make scale)")
def test_speculators_reads_what_was_converted(tmp_path):
    folder = tmp_path / "head"
    convert_checkpoint(REPOSITORY / "examples" / "pycoder-eagle3", folder, "speculators", TARGET)
    assert_peer_agrees(folder, AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval(), tmp_path)
