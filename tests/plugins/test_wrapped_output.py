"""Targets whose output layer or embeddings lie in a wrapper, as recipes that want float32 logits make them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hf_speculate import AutoSpeculator
from hf_speculate.errors import TargetMismatchError
from hf_speculate.target import embedding_layer, output_layer
from hf_speculate_plugins.checkpoints import LoadedTarget

from ..support.block_heads import random_block
from ..support.heads import target, write_head, write_medusa_heads


pytestmark = pytest.mark.usefixtures("unchecked_shapes")


HEADS = {
    "eagle1": lambda folder: write_head(folder, "eagle1"),
    "eagle3": lambda folder: write_head(folder, "safeailab"),
    "dflash": lambda folder: random_block("dflash", target()).save_pretrained(folder),
    "dspark": lambda folder: random_block("dspark", target()).save_pretrained(folder, "speculators"),
    "medusa": lambda folder: write_medusa_heads(folder, "v2"),
}


class ToFloat(nn.Sequential):
    """Casts what a layer gives."""

    def forward(self, inputs):
        return super().forward(inputs).float()


class Inner(nn.Module):
    """Holds the layer deeper, beside a norm."""

    def __init__(self, layer):
        super().__init__()
        self.norm, self.parts = nn.LayerNorm(2), nn.ModuleDict({"layer": layer})

    def forward(self, inputs):
        return self.parts["layer"](inputs)


@pytest.fixture(params=[ToFloat, Inner])
def wrapped(request):
    """A copy of the target, both layers in a wrapper."""
    model = copy.deepcopy(target())
    model.lm_head = request.param(model.lm_head)
    model.model.embed_tokens = request.param(model.model.embed_tokens)
    return model


@pytest.mark.parametrize("name", HEADS)
def test_heads_draft_as_for_the_plain_target(tmp_path, wrapped, name):
    HEADS[name](tmp_path / "head")
    inputs = {"input_ids": torch.tensor([[5, 9, 2, 7]]), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = wrapped.generate(**inputs)
    rounds = []
    for model in (target(), wrapped):
        speculator = AutoSpeculator.from_pretrained(tmp_path / "head", target=model, adaptive=False)
        assert torch.equal(model.generate(**inputs, speculator=speculator), plain)
        rounds.append(speculator.stats.mean_acceptance_length)
    assert rounds[0] == rounds[1]


def test_output_and_embedding_layers_are_found_in_wrappers(wrapped):
    assert type(output_layer(wrapped)) is nn.Linear
    assert type(embedding_layer(wrapped)) is nn.Embedding
    assert LoadedTarget(wrapped, "target").output_embeddings() is output_layer(wrapped)
    assert output_layer(target()) is target().lm_head


def test_from_pretrained_refuses_a_decoder_without_output_layer(tmp_path):
    with pytest.raises(TargetMismatchError, match=r"LlamaModel has no output layer.*Give the whole model"):
        AutoSpeculator.from_pretrained(write_head(tmp_path / "head"), target=target().model)


def test_an_output_layer_of_several_matrices(tmp_path):
    model = copy.deepcopy(target())
    rows, width = model.lm_head.weight.shape
    model.lm_head = nn.Sequential(nn.Linear(width, 4), nn.Linear(4, rows))
    with pytest.raises(TargetMismatchError, match=r"output layer of LlamaForCausalLM \(Sequential\) holds 2 matrices"):
        AutoSpeculator.from_pretrained(write_head(tmp_path / "head"), target=model)
