"""Packed models answer transformers' methods as other models do, or refuse them by name and stay as they are."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_speculate.errors import UnsupportedRequestError
from hf_speculate_gguf import load_model

from ..support.packed import available, shape_of
from ..support.packed import ids as token_ids


PACKED = available("native", "native-int8", "dequantize")
KINDS = ["Q4_0", "Q8_0", "Q6_K", "F16"]
REQUEST = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", [*PACKED, "dense"])
def test_packed_embeddings_refuse_ids_outside_the_vocabulary(backend, kind, write):
    model = load_model(write(shape_of("llama"), kind), dtype=torch.float32, backend=backend)
    size = model.config.vocab_size
    for bad in (-1, -100, -size, -size - 1, size):
        for ids in (torch.tensor([[bad, 3, 5]]), torch.tensor([[3, 5, bad], [1, 2, 3]]), torch.tensor([[bad]])):
            with pytest.raises(IndexError, match="index out of range"):
                model(ids)
            for options in ({}, {"speculator": "prompt_lookup"}):
                with pytest.raises(IndexError, match="index out of range"):
                    model.generate(ids, **REQUEST, **options)
    assert model.generate(token_ids(1, 5), **REQUEST).shape == (1, 9)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("backend", PACKED)
def test_resize_token_embeddings_refuses_another_size(backend, is_tied, write):
    model = load_model(write(shape_of("llama", tied=is_tied)), dtype=torch.float32, backend=backend)
    size, ids = model.config.vocab_size, token_ids(1, 5)
    plain = model.generate(ids, **REQUEST)
    for part in (model, model.model):
        for arguments in ((size + 8,), (size - 1,), (None, 128)):
            with pytest.raises(UnsupportedRequestError, match=r"token embeddings, packed .* cannot have .*'dense'"):
                part.resize_token_embeddings(*arguments)
        for arguments in ((size,), (None,), (size, 1)):
            assert part.resize_token_embeddings(*arguments) is model.model.embed_tokens
    assert (model.config.vocab_size, model.model.embed_tokens.num_embeddings) == (size, size)
    assert torch.equal(model.generate(ids, **REQUEST), plain)


@pytest.mark.parametrize("backend", PACKED)
def test_packed_weights_take_no_gradients(backend, write):
    model = load_model(write(shape_of("llama")), dtype=torch.float32, backend=backend)
    matrix = model.model.layers[0].mlp.down_proj
    for ask in (
        lambda: model.requires_grad_(True),
        lambda: model.model.requires_grad_(),
        lambda: matrix.requires_grad_(True),
        lambda: setattr(matrix.packed, "requires_grad", True),
        lambda: copy.deepcopy(matrix).requires_grad_(True),
    ):
        with pytest.raises(UnsupportedRequestError, match="are packed and take no gradients"):
            ask()
    assert not any(parameter.requires_grad for parameter in model.requires_grad_(False).parameters())


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", PACKED)
def test_weights_are_counted_not_bytes(backend, kind, is_tied, write):
    model = load_model(write(shape_of("qwen2", tied=is_tied), kind), dtype=torch.float32, backend=backend)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(model.config)
    for options in ({}, {"exclude_embeddings": True}):
        assert model.num_parameters(**options) == plain.num_parameters(**options)
    assert model.num_parameters(only_trainable=True) == 0
    model.model.norm.requires_grad_(True)
    assert model.num_parameters(True) == model.config.hidden_size


def test_copies_have_methods_of_their_own_and_nothing_keeps_a_model_alive(write):
    model = load_model(write(shape_of("llama")), backend=PACKED[-1])
    count = model.num_parameters()
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for each in copies:
        assert each.resize_token_embeddings() is each.model.embed_tokens
    gc.disable()
    try:
        kept = weakref.ref(model)
        del model
        assert kept() is None
    finally:
        gc.enable()
    assert [each.num_parameters() for each in copies] == [count, count]
