"""Adapters around packed modules that are off: the kernel computes as if they were not there, until they are on."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from transformers import LogitsProcessorList

from hf_speculate import Speculator
from hf_speculate.testing import ScriptedDrafter, lossless
from hf_speculate_gguf.native.forwards import fuse

from ..support.packed import ids, modules_only
from ..support.tiers import quick


peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("needs_kernel", "unchecked_shapes")

PROMPT, NEW_TOKENS, VOCAB_SIZE = ids(1, 9), 12, 97


def adapted(model, targets: str | list[str] = "all-linear", layers=None, name="default"):
    """The model with an adapter that changes its text."""
    options = {"task_type": "CAUSAL_LM", "r": 4, "init_lora_weights": False, "lora_alpha": 16}
    config = peft.LoraConfig(target_modules=targets, layers_to_transform=layers, **options)
    return peft.get_peft_model(model, config, adapter_name=name).eval()


def text_of(model, speculator=None, **options):
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(input_ids=PROMPT, speculator=speculator, **options)


@torch.no_grad()
def logits_of(model):
    return model(input_ids=PROMPT, use_cache=True).logits


def speculator_for(text, exact=False):
    """Drafts most of this text, in trees."""
    drafter = ScriptedDrafter(text[:, PROMPT.shape[1] :], (3, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE)
    return Speculator(drafter, exact=exact, adaptive=False)


WAYS_OUT = {
    "a context": lambda target: target.disable_adapter(),
    "a switch": lambda target: target.base_model.disable_adapter_layers() or nullcontext(),
    "no active one": lambda target: target.base_model.set_adapter([]) or nullcontext(),
}


@pytest.mark.parametrize("way", WAYS_OUT)
@pytest.mark.parametrize("backend", quick(["native-int8", "native"]))
def test_idle_adapter_leaves_texts_and_kernel_as_without_it(backend, way, load, calls):
    model = load(backend=backend)
    expected = text_of(model)
    target = adapted(model)
    with_it = text_of(target)
    assert not torch.equal(with_it, expected), "the adapter does nothing"
    calls.clear()
    with WAYS_OUT[way](target):
        for _ in range(2):
            assert torch.equal(text_of(target), expected)
            for exact in (False, True):
                assert torch.equal(text_of(target, speculator_for(expected, exact)), expected)
        assert set(calls) == {1}
        calls.clear()
    target.base_model.enable_adapter_layers()
    target.set_adapter("default")
    assert torch.equal(text_of(target), with_it)
    assert torch.equal(text_of(target, speculator_for(with_it, exact=True)), with_it)
    assert not calls, "the adapter is on: modules compute"
    with WAYS_OUT[way](target):
        assert torch.equal(text_of(target), expected)


@pytest.mark.parametrize(
    "targets", ["embed_tokens", "lm_head", ["norm", "input_layernorm", "post_attention_layernorm"]]
)
def test_idle_adapter_on_norms_embeddings_or_output_leaves_the_kernel(targets, load, calls):
    model = load()
    expected = text_of(model)
    if isinstance(targets, list):
        config = peft.LNTuningConfig(target_modules=targets, task_type="CAUSAL_LM")
        target = peft.get_peft_model(model, config).eval()
        target.base_model.model.model.norm.ln_tuning_layers["default"].weight.data *= torch.rand(256) * 2
    else:
        target = adapted(model, [targets])
    with_it = text_of(target)
    assert not torch.equal(with_it, expected), "the adapter does nothing"
    calls.clear()
    with target.disable_adapter():
        assert torch.equal(text_of(target, speculator_for(expected, exact=True)), expected)
    assert set(calls) == {1}
    assert torch.equal(text_of(target), with_it)


def test_adapters_on_other_layers_can_be_switched(load, calls):
    """Modules compute all layers while one of them is adapted, and the text is exact."""
    target = adapted(load(), ["q_proj", "v_proj"], [1], name="first")
    target.add_adapter("second", peft.LoraConfig(target_modules=["down_proj"], layers_to_transform=[0, 2]))
    for name in ("first", "second", "first"):
        target.set_adapter(name)
        text = text_of(target)
        assert torch.equal(text_of(target, speculator_for(text, exact=True)), text)
        assert not calls
    with target.disable_adapter():
        logits_of(target)
    assert calls == [1]


def test_adapter_of_one_layer_can_be_enabled_again(load, calls):
    """Whatever PEFT's own switch says of the others."""
    model = load(dtype=torch.float32)
    target, twin = (adapted(each, ["v_proj"]) for each in (model, modules_only(model)))
    twin.load_state_dict(target.state_dict(), strict=False)
    with target.disable_adapter(), twin.disable_adapter():
        logits_of(target)
        for each in (target, twin):
            each.get_base_model().model.layers[2].self_attn.v_proj.enable_adapters(True)
        calls.clear()
        torch.testing.assert_close(logits_of(target), logits_of(twin), rtol=1e-4, atol=2e-5)
        assert not calls


class SwitchesOn:
    """A processor that switches the adapter on before the fifth token."""

    def __init__(self, target):
        self._target = target

    def __call__(self, token_ids, scores):
        if token_ids.shape[1] == PROMPT.shape[1] + 4:
            self._target.base_model.enable_adapter_layers()
        return scores


def test_adapter_can_be_enabled_within_a_request(load):
    model = load(dtype=torch.float32)
    target, twin = (adapted(each) for each in (model, modules_only(model)))
    twin.load_state_dict(target.state_dict(), strict=False)
    texts = []
    for each in (target, twin):
        with each.disable_adapter():
            off = text_of(each)
            texts.append(text_of(each, logits_processor=LogitsProcessorList([SwitchesOn(each)])))
    assert torch.equal(*texts)
    assert not torch.equal(texts[0], off), "the adapter came on"


CHANGES = {
    "a hook on PEFT's layer": lambda layer: layer.register_forward_hook(lambda *_: None),
    "another forward": lambda layer: setattr(layer, "forward", layer.base_layer.forward),
    "another module inside": lambda layer: setattr(layer, "base_layer", copy.deepcopy(layer.base_layer)),
    "a merged adapter": lambda layer: setattr(layer, "unmerge", layer.merged_adapters.append("default") or list),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_peft_layers_are_left_to_the_modules(change, load, calls):
    target = adapted(load(), ["down_proj"])
    layer = target.get_base_model().model.layers[1].mlp.down_proj
    with target.disable_adapter():
        logits_of(target)
        CHANGES[change](layer)
        calls.clear()
        logits_of(target)
        assert not calls


def test_copies_notice_enabled_adapters(load, calls):
    """The state of a copy is noted while its adapter is off, or on."""
    target = adapted(load(dtype=torch.float32))
    on = logits_of(target)
    with target.disable_adapter():
        off = logits_of(target)
    for is_off in (True, False):
        for fuses in (False, True):
            other = copy.deepcopy(target)
            with other.disable_adapter() if is_off else nullcontext():
                if fuses:
                    fuse(other.get_base_model())
                logits_of(other)
            for _ in range(2):
                torch.testing.assert_close(logits_of(other), on)
                with other.disable_adapter():
                    calls.clear()
                    torch.testing.assert_close(logits_of(other), off)
                    assert calls == ([1] if fuses and is_off else [])


def test_removed_adapters_are_freed(load, calls):
    target = adapted(load())
    with target.disable_adapter():
        logits_of(target)
    layer = weakref.ref(target.get_base_model().model.layers[0].mlp.down_proj)
    model = target.unload()
    del target
    calls.clear()
    logits_of(model)
    gc.collect()
    assert calls == [1]
    assert layer() is None


def test_check_lossless_uses_the_dtype_of_the_packed_model(load, monkeypatch):
    """An adapter's float32 weights come first among the parameters; the model still computes in bfloat16."""
    target, tolerances = adapted(load()), []
    assert target.get_base_model().dtype is torch.float32
    monkeypatch.setattr(lossless._Case, "check", lambda case, *_: tolerances.append(case.tolerance))
    lossless.check_lossless(target, speculator_for(PROMPT), [PROMPT])
    assert tolerances == [lossless.TOLERANCE[torch.bfloat16]]
