"""Models that were asked for hidden states or attentions in a request with a speculator can still be saved whole."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from hf_speculate.scoring.hooks import SaveableHook, keep_saveable


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_a_model_is_saved_after_a_call_that_recorded_outputs(tiny_model, prompt, architecture, asked):
    model = copy.deepcopy(tiny_model(architecture))
    model.set_attn_implementation("eager")
    call = {"max_new_tokens": 4, "return_dict_in_generate": True, asked: True}
    output = model.generate(prompt(8), speculator="prompt_lookup", **call)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    for found in (model, again, copy.deepcopy(model)):
        plain = found.generate(prompt(8), **call)
        assert torch.equal(plain.sequences, output.sequences)
        name = asked.removeprefix("output_")
        torch.testing.assert_close(getattr(plain, name)[0], getattr(output, name)[0])


def test_hooks_are_exchanged_once_and_nobody_elses(tiny_model, prompt):
    model = copy.deepcopy(tiny_model())
    layer = model.model.layers[0]
    other = layer.register_forward_hook(lambda *_: None)
    model(prompt(4), output_hidden_states=True)
    before = dict(layer._forward_hooks)
    keep_saveable(model)
    assert list(layer._forward_hooks) == list(before)
    assert layer._forward_hooks[other.id] is before[other.id]
    exchanged = [hook for hook in layer._forward_hooks.values() if isinstance(hook, SaveableHook)]
    assert len(exchanged) == len(before) - 1
    keep_saveable(model)
    assert [hook for hook in layer._forward_hooks.values() if isinstance(hook, SaveableHook)] == exchanged
