"""Statistics in a notebook: a notebook is executed and its HTML looked at."""

from __future__ import annotations

import pytest


nbformat = pytest.importorskip("nbformat", reason="make ecosystem")
nbclient = pytest.importorskip("nbclient", reason="make ecosystem")
pytest.importorskip("ipykernel", reason="make ecosystem")

CELL = """
import torch
from hf_speculate import AutoSpeculator
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None, pad_token_id=0))
speculator = AutoSpeculator.from_name("prompt_lookup", target=model, max_ngram=2)
model.generate(torch.arange(6)[None].repeat(1, 3), speculator=speculator, max_new_tokens=30, do_sample=False)
speculator.stats
"""


def test_statistics_are_shown_as_a_table():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    (result,) = [output for output in notebook.cells[0].outputs if output.output_type == "execute_result"]
    html = result.data["text/html"]
    assert html.startswith("<table><caption>prompt_lookup: 1 call, 30 tokens")
    assert "tokens per round" in html
    assert "verdict" in html
    assert "SpeculationStats(prompt_lookup, calls: 1" in result.data["text/plain"]
