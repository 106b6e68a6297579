"""Requests for which an attached speculator steps aside, over stock's generation modes: stock's text, and a model that
is left as stock leaves it, however the request ends."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import hf_speculate
from hf_speculate import Speculator
from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.testing import RandomDrafter

from ..support.models import VOCAB_SIZE, build_tiny_model, state_of
from ..support.versions import needs_transformers


def assistant():
    """An assistant that has a speculator of its own attached."""
    model = copy.deepcopy(build_tiny_model(num_layers=1, seed=1))
    hf_speculate.attach(model, drafts())
    return model


def drafts():
    return Speculator(RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=6), adaptive=False)


MODES = {
    "greedy": dict,
    "sampled": lambda: {"do_sample": True, "top_k": 9},
    "beams": lambda: {"num_beams": 3},
    "sampled beams": lambda: {"num_beams": 2, "do_sample": True},
    "assistant": lambda: {"assistant_model": assistant()},
    "sampled, with an assistant": lambda: {"assistant_model": assistant(), "do_sample": True},
    "prompt lookup": lambda: {"prompt_lookup_num_tokens": 3},
    "early exit": lambda: {"assistant_early_exit": 1},
    "guidance": lambda: {"guidance_scale": 1.5},
    "several sequences": lambda: {"num_return_sequences": 2, "do_sample": True},
    "no cache": lambda: {"use_cache": False},
    "labels": lambda: {"labels": torch.zeros(1, 8, dtype=torch.long)},
}


MARKS = {"prompt lookup": needs_transformers("5.15", "stock's prompt lookup fails without an EOS")}


class Ends(StoppingCriteria):
    """Raises at the third token."""

    def __init__(self, error):
        self.error, self.num_calls = error, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.num_calls += 1
        if self.num_calls == 3:
            raise self.error
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.fixture
def model():
    return copy.deepcopy(build_tiny_model(num_layers=3))


def run(model, prompt, mode, error=None):
    torch.manual_seed(3)
    request = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None, **MODES[mode]()}
    if error is not None:
        request["stopping_criteria"] = StoppingCriteriaList([Ends(error)])
    return model.generate(prompt(8), **request)


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=MARKS.get(mode, ())) for mode in MODES])
def test_the_text_is_stocks_and_nothing_of_the_model_has_changed(model, prompt, mode):
    expected = run(model, prompt, mode)
    before = state_of(model)
    hf_speculate.attach(model, drafts())
    found = run(model, prompt, mode)
    assert torch.equal(found, expected)
    assert state_of(model) == before
    hf_speculate.detach(model)
    assert torch.equal(run(model, prompt, mode), expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("of the user's")], ids=["ctrl-c", "error"])
@pytest.mark.parametrize("mode", [pytest.param(mode, marks=MARKS.get(mode, ())) for mode in MODES])
def test_a_request_that_is_broken_off_leaves_the_model_as_it_was(model, prompt, mode, error):
    expected = run(model, prompt, "greedy")
    hf_speculate.attach(model, drafts())
    before = state_of(model)
    with pytest.raises(type(error)):
        run(model, prompt, mode, error)
    assert state_of(model)[:-1] == before[:-1]
    assert torch.equal(run(model, prompt, "greedy"), expected)


def test_nested_generate_calls_of_stock_run_plain(model, prompt):
    """The same model with fewer layers, and an assistant with a speculator of its own."""
    speculator = hf_speculate.attach(model, drafts())
    run(model, prompt, "early exit")
    assert speculator.stats.calls == 0
    helper = assistant()
    model.generate(prompt(8), assistant_model=helper, max_new_tokens=12)
    assert hf_speculate.attached(helper).stats.calls == 0
    helper.generate(prompt(8), max_new_tokens=12)
    assert hf_speculate.attached(helper).stats.calls == 1
    run(model, prompt, "greedy")
    assert speculator.stats.calls == 1


def test_labels_are_dropped_as_stock_drops_them(model, prompt):
    request = {"inputs": prompt(8), "labels": prompt(8), "max_new_tokens": 12}
    assert torch.equal(model.generate(**request, speculator=drafts()), model.generate(**request))


@pytest.mark.parametrize("shape", [(1, 0), (0, 4)])
def test_generate_refuses_an_empty_prompt(model, shape):
    nothing = torch.zeros(shape, dtype=torch.long)
    with pytest.raises(UnsupportedRequestError, match=r"at least one row and one token; this one is \["):
        model.generate(nothing, max_new_tokens=4, speculator=drafts())


def test_a_mask_longer_than_the_text_is_named_as_a_cause(model, prompt):
    mask = torch.ones(1, 12, dtype=torch.long)
    with pytest.raises(hf_speculate.SpeculateError, match="an attention mask that is longer than the text"):
        model.generate(prompt(8), attention_mask=mask, max_new_tokens=4, speculator=drafts())


AGAIN = """
import sys, torch
import hf_speculate
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM
for name in [name for name in sys.modules if name.split(".")[0] in ("hf_speculate", "hf_speculate_plugins")]:
    del sys.modules[name]
import hf_speculate as again
from hf_speculate.request import bridge
assert GenerationMixin.generate.__globals__ is vars(bridge)
config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(config).eval()
ids = torch.arange(1, 9)[None]
plain = model.generate(ids, max_new_tokens=8)
assert torch.equal(model.generate(ids, max_new_tokens=8, speculator="prompt_lookup"), plain)
bridge.uninstall()
assert not hasattr(GenerationMixin.generate, "__hf_speculate__")
"""


def test_the_package_can_be_imported_again():
    """As notebooks and script runners do after an update."""
    done = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
