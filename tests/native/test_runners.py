"""Runners of packed models and their heads in statistics, with the reason why a faster one did not run."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache, DynamicLayer

from hf_speculate import Speculator
from hf_speculate.stats import SpeculationStats
from hf_speculate.target import native_runner
from hf_speculate.testing import ScriptedDrafter

from ..support.packed import ids


pytestmark = pytest.mark.usefixtures("needs_kernel", "unchecked_shapes")

PROMPT, NEW_TOKENS = ids(1, 9), 8


def statistics_of(model, context=None, compile=False, **options):
    """Statistics of a request with drafts, whose text is compared with plain `generate`."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0} | options
    with context or nullcontext():
        plain = model.generate(PROMPT, **options)
        drafter = ScriptedDrafter(plain[:, PROMPT.shape[1] :], (2, 2), accuracy=0.7, vocab_size=97)
        speculator = Speculator(drafter, adaptive=False, compile=compile)
        answer = model.generate(PROMPT, **options, speculator=speculator, return_dict_in_generate=True)
    assert torch.equal(answer.sequences, plain)
    return answer.speculation


class OwnLayer(DynamicLayer):
    """A layer of a cache that only its owner knows."""


def of_hook(model):
    return model.model.layers[0].register_forward_hook(lambda *_: None).remove


def of_inner_hook(model):
    return model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: None).remove


def of_training(model):
    model.train()
    return model.eval


def of_replaced_module(model):
    layer, before = model.model.layers[0], model.model.layers[0].mlp
    layer.mlp = copy.deepcopy(before)
    return lambda: setattr(layer, "mlp", before)


def of_replaced_forward(model):
    stock = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: stock(hidden)
    return lambda: delattr(model.model.layers[0].mlp, "forward")


def of_replaced_decoder(model):
    ours = model.model.forward
    model.model.forward = lambda *arguments, **named: ours(*arguments, **named)
    return lambda: setattr(model.model, "forward", ours)


CHANGES = {
    "a hook on a layer": of_hook,
    "a hook inside the model": of_inner_hook,
    "training mode": of_training,
    "a module that was exchanged": of_replaced_module,
    "a module whose forward was replaced": of_replaced_forward,
    "a module whose forward": of_replaced_decoder,
}


@pytest.mark.parametrize("reason", CHANGES)
def test_statistics_name_the_change_that_keeps_the_kernel_away(reason, load):
    model = load(dtype=torch.float32)
    undo = CHANGES[reason](model)
    try:
        stats = statistics_of(model)
    finally:
        undo()
    assert set(stats.target_runners) == {"eager"}
    (found,) = stats.fallbacks
    assert found.startswith(f"not native: {reason}")
    assert stats.fallbacks[found] == 1, "once a request"
    assert stats.dearest_fallback.endswith(f"forwards of the target were eager, {found}.")
    assert stats.dearest_fallback in stats.summary()
    stats = statistics_of(model)
    assert set(stats.target_runners) == {"native"}
    assert not stats.fallbacks
    assert not stats.dearest_fallback


def test_statistics_name_autocast(load):
    stats = statistics_of(load(dtype=torch.float32), torch.autocast("cpu", dtype=torch.bfloat16))
    assert dict(stats.fallbacks) == {"not native: autocast": 1}


def test_statistics_name_a_foreign_cache(load):
    model = load(dtype=torch.float32)
    cache = DynamicCache(config=model.config)
    cache.layers[1] = OwnLayer()
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
    assert native_runner(model).last_problem == "a cache with layers of type DynamicLayer, OwnLayer"


def test_statistics_name_an_active_adapter(load):
    peft = pytest.importorskip("peft")
    model = load(dtype=torch.float32)
    config = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    assert dict(statistics_of(model).fallbacks) == {"not native: an active adapter": 1}
    with adapted.disable_adapter():
        assert set(statistics_of(model).target_runners) == {"native"}


def test_statistics_name_a_copy(load):
    (reason,) = statistics_of(copy.deepcopy(load(dtype=torch.float32))).fallbacks
    assert reason.startswith("not native: a copy of the model")


def test_statistics_name_a_dtype_that_the_kernel_does_not_know(load):
    (reason,) = statistics_of(load(dtype=torch.float64, backend="auto")).fallbacks
    assert reason.startswith("not native: no kernel for torch.float64 on 'cpu'")
    moved = load(dtype=torch.float32).to(torch.float16)
    assert native_runner(moved).problem().startswith("weights in torch.float16")


def test_statistics_name_torch_compile(load, fresh_dynamo):
    model = load(dtype=torch.float32)
    model.compile(backend="eager")
    (reason,) = statistics_of(model).fallbacks
    assert "compiled by torch.compile" in reason


def test_statistics_of_graphs_name_what_keeps_the_kernel_away(load, fresh_dynamo):
    model = load(dtype=torch.float32)
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    try:
        stats = statistics_of(model, compile="eager")
    finally:
        handle.remove()
    assert any(reason.startswith("not native: a hook inside the model") for reason in stats.fallbacks)


def test_dearest_fallback_of_several_reasons_names_the_most_frequent():
    stats = SpeculationStats()
    stats.target_runners.update({"eager": 5, "native": 2})
    stats.fallbacks.update({"not native: autocast": 1, "not native: training mode": 3, "draft not native: autocast": 9})
    assert stats.dearest_fallback == (
        "5 of 7 forwards of the target were eager. The most frequent reason is: not native: training mode."
    )


def test_statistics_name_a_missing_compiler(load, monkeypatch):
    """The weights are dequantised when the file is loaded; the model keeps the reason."""
    from hf_speculate_gguf.native import backends

    monkeypatch.setattr(backends.binding, "native_problem", lambda: "no compiler")
    stats = statistics_of(load(dtype=torch.float32, backend="auto"))
    (reason,) = stats.fallbacks
    assert reason.startswith("not native: no kernel on this machine")
    assert "forwards of the target were eager" in stats.dearest_fallback


def test_a_forward_that_calls_the_decoder_is_native(load):
    """As under accelerate, which replaces the forward of the whole model."""
    model = load(dtype=torch.float32)
    ours = model.forward
    model.forward = lambda *arguments, **named: ours(*arguments, **named)
    assert native_runner(model) is None
    assert set(statistics_of(model).target_runners) == {"native"}


def test_last_problem_belongs_to_the_thread(load):
    from threading import Thread

    model = load(dtype=torch.float32)
    native, seen = native_runner(model), []
    native.last_problem = "of this thread"
    thread = Thread(target=lambda: seen.append((model(PROMPT, use_cache=True), native.last_problem)[1]))
    thread.start()
    thread.join()
    assert seen == [""]
    assert native.last_problem == "of this thread"
