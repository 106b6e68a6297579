"""The reader of the `speculators` package takes what `export --for vllm` writes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_speculate_tools.heads.export import export_head

from ..support.paths import REPOSITORY
from ..support.speculators_peer import PYTHON, assert_peer_agrees


TARGET = str(REPOSITORY / "examples" / "pycoder")


@pytest.mark.skipif(not PYTHON, reason="SPECULATORS_PYTHON names no interpreter (make scale)")
def test_speculators_reads_what_was_exported(tmp_path):
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    prompt, folder = torch.arange(5, 13), tmp_path / "head"
    head = REPOSITORY / "examples" / "pycoder-eagle3"
    export_head(head, folder, "vllm", target, [prompt], target_name=TARGET, max_new_tokens=8)
    assert_peer_agrees(folder, target, tmp_path)
