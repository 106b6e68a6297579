"""A transformers whose methods have changed: one error at installation, and nothing is half-wrapped."""

from __future__ import annotations

import functools
import inspect

import pytest
from transformers import AttentionInterface, GenerationMixin

import hf_speculate
from hf_speculate.attention import uninstall_attention
from hf_speculate.attention.grouped import TreeAttention
from hf_speculate.compatibility import WORKING
from hf_speculate.errors import IncompatibleTransformersError
from hf_speculate.request import bridge
from hf_speculate.request.upstream import check_transformers


WRAPPED = ("generate", "_validate_generation_mode", "_sample")
GONE = object()


def sample_with_more(
    self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, streamer=None,
    tracer=None, **model_kwargs,
):  # fmt: skip
    raise AssertionError


# Method, what is in its place, and what the error says.
CHANGES = {
    "no generate": ("generate", GONE, "GenerationMixin has no `generate`"),
    "generate without keywords": ("generate", lambda self, inputs=None: None, r"takes \(self, inputs\) instead of"),
    "a speculator= of stock": ("generate", lambda self, speculator=None, **kwargs: None, "`speculator` of its own"),
    "_sample of a rework": (
        "_sample",
        lambda self, state, **kwargs: None,
        r"takes \(self, state, \*\*kwargs\)",
    ),
    "_sample with more": ("_sample", sample_with_more, r"streamer, tracer, \*\*model_kwargs\) instead of"),
    "other validation": ("_validate_generation_mode", lambda self, mode: None, "instead of .*generation_mode_kwargs"),
    "no _prefill": ("_prefill", GONE, "has no `_prefill`"),
    "_prefill in another order": ("_prefill", lambda self, config, input_ids, kwargs: None, "_prefill takes"),
    "no preparation": ("prepare_inputs_for_generation", GONE, "has no `prepare_inputs_for_generation`"),
    "no update": ("_update_model_kwargs_for_generation", GONE, "has no `_update_model_kwargs_for_generation`"),
    "no context for decoding": ("_optimize_model_for_decode", GONE, "has no `_optimize_model_for_decode`"),
}


@pytest.fixture
def stock():
    """`GenerationMixin` as transformers has it; afterwards we are installed again."""
    hf_speculate.uninstall()
    with pytest.MonkeyPatch.context() as patch:
        yield patch
    hf_speculate.install()


@pytest.mark.parametrize("case", CHANGES)
def test_install_names_changed_methods_and_wraps_nothing(stock, case):
    name, value, message = CHANGES[case]
    if value is GONE:
        stock.delattr(GenerationMixin, name)
    else:
        stock.setattr(GenerationMixin, name, value)
    before, attention = dict(vars(GenerationMixin)), AttentionInterface._global_mapping["sdpa"]
    with pytest.raises(IncompatibleTransformersError, match=message) as caught:
        hf_speculate.install()
    assert f"works with transformers {WORKING}, but 5." in str(caught.value)
    assert dict(vars(GenerationMixin)) == before
    assert AttentionInterface._global_mapping["sdpa"] is attention
    assert not bridge._originals


def test_tree_attention_refuses_a_missing_attention_table(stock, tiny_model, prompt):
    model = tiny_model("llama")
    uninstall_attention()
    stock.delattr(AttentionInterface, "_global_mapping")
    with pytest.raises(IncompatibleTransformersError, match="no table with 'sdpa'"):
        TreeAttention(model, model.device)


def test_check_transformers_takes_further_optional_arguments(stock):
    def prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration=True, *, plan=None):
        raise AssertionError

    stock.setattr(GenerationMixin, "_prefill", prefill)
    check_transformers()


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("keeps_signature", [True, False])
def test_install_wraps_methods_that_others_have_wrapped(stock, name, keeps_signature, tiny_model, prompt):
    original, calls = getattr(GenerationMixin, name), []

    def outer(self, *args, **kwargs):
        calls.append(name)
        return original(self, *args, **kwargs)

    stock.setattr(GenerationMixin, name, functools.wraps(original)(outer) if keeps_signature else outer)
    hf_speculate.install()
    assert "speculator" in inspect.signature(GenerationMixin.generate).parameters
    tiny_model().generate(prompt(4), max_new_tokens=2)
    assert calls == [name]
    hf_speculate.uninstall()
