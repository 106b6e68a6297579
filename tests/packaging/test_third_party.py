"""A third party's drafter: installed without network, found, conforming, and gone when it is uninstalled."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hf_speculate import installed_drafters

from ..support.entry_points import assert_comes_and_goes, install_example


USE_IT = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_speculate import AutoSpeculator, installed_drafters
from hf_speculate.testing import check_drafter

assert installed_drafters()["bigram"].value == "my_drafter:BigramDrafter"
torch.manual_seed(0)
torch.set_num_threads(1)
config = LlamaConfig(
    vocab_size=20,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
    initializer_range=0.3,
)
model = LlamaForCausalLM(config).eval()
drafter = AutoSpeculator.from_name("bigram", target=model, depth=3).drafter
check_drafter(drafter, model, [torch.randint(2, 20, (n,)) for n in (9, 4)], max_new_tokens=8)

prompt = torch.tensor([[3, 4, 5] * 4])
output = model.generate(prompt, max_new_tokens=40, speculator="bigram", return_dict_in_generate=True)
assert torch.equal(output.sequences, model.generate(prompt, max_new_tokens=40))
assert output.speculation.accepted_tokens > 0
print("conforming")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return install_example("my_drafter", tmp_path_factory.mktemp("third_party"))


@pytest.mark.rest  # a process of its own
def test_installed_drafter_is_found_and_conforms(site):
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", USE_IT], env=environment, cwd="/", capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "conforming"


def test_installed_drafters_follow_the_metadata(site):
    assert_comes_and_goes(site, installed_drafters, "bigram", "my-drafter")


def test_the_wheel_brings_one_module_only(site):
    names = {path.name for path in site.iterdir() if path.suffix != ".dist-info"} - {"__pycache__"}
    assert names == {"my_drafter.py"}
