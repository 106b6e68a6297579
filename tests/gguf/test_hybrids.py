"""Files of Qwen3.5: delta nets, gated attention, and the draft layers behind them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from hf_speculate import AutoSpeculator
from hf_speculate.errors import CheckpointError
from hf_speculate_gguf import load_model, plan_model, read_header
from hf_speculate_gguf.native import FusedLinear, PackedLinear, Projection, has_kernel
from hf_speculate_gguf.native.modules import ReorderedLinear
from hf_speculate_plugins.mtp import Source, keep, load_head

from ..support.hybrid_gguf import EVERY, TILED, UNTILED, write_drafts_only, write_hybrid
from ..support.packed import SMALLEST, available, dequantised, ids, padded, relative_error, write_model
from ..support.requests import assert_same, run
from ..support.tiers import quick, quick_quarter


@pytest.fixture
def write(tmp_path):
    return partial(write_hybrid, tmp_path / "model.gguf")


@pytest.mark.parametrize("shape", [TILED, UNTILED], ids=["tiled", "untiled"])
@pytest.mark.parametrize("kind", quick_quarter(["Q4_K", "Q8_0", "Q5_K", "Q6_K", "IQ4_XS", "F16"]))
def test_logits_are_those_of_transformers(write, shape, kind):
    """Value heads tiled and in order; the file's own draft layer is not one of the model's. Measured: 7e-7, 9e-3."""
    path, text = write(shape, kind), ids(2, 70)
    expected = dequantised(path)(text).logits
    for backend in available("native", "dequantize", "dense"):
        for dtype, allowed in ((torch.float32, 5e-6), (torch.bfloat16, 2e-2)):
            found = load_model(path, dtype=dtype, backend=backend)(text).logits
            assert relative_error(found, expected) < allowed, f"{backend}, {dtype}"


@pytest.mark.usefixtures("needs_kernel")
def test_matrices_stay_packed(write):
    """All projections of one input are one product; columns that tiled heads have elsewhere are not moved."""
    model = load_model(write(TILED, "Q4_K"), backend="native")
    net, attention = model.model.layers[0].linear_attn, model.model.layers[EVERY - 1].self_attn
    inputs = [net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a]
    assert all(type(each) is Projection for each in inputs)
    assert isinstance(inputs[0].fused, FusedLinear)
    assert len({id(each.fused) for each in inputs}) == 1
    assert type(net.out_proj) is ReorderedLinear
    assert type(attention.q_proj) is Projection
    assert type(load_model(write(UNTILED, "Q4_K"), backend="native").model.layers[0].linear_attn.out_proj) is (
        PackedLinear
    )


@pytest.mark.parametrize("backend", quick(available("native", "dequantize")))
@pytest.mark.parametrize("do_sample", quick([False, True]))
def test_texts_with_the_files_own_draft_layer(write, backend, do_sample):
    """Padded batches: the target's text is its own, whatever is drafted."""
    target = load_model(write(TILED, "Q8_0"), dtype=torch.float32, backend=backend)
    inputs = padded((17, 6, 11))
    inputs.pop("position_ids")
    request = {**inputs, "max_new_tokens": 24, "do_sample": do_sample, "eos_token_id": None, "pad_token_id": 0}
    speculator = AutoSpeculator.from_name("mtp", target, adaptive=False)
    assert_same(run(target, speculator, **request), run(target, **request))
    assert speculator.stats.drafted_tokens
    kinds = {type(module) for module in speculator.drafter.head.layers.modules()}
    assert (PackedLinear in kinds) == has_kernel()


def test_mtp_head_loads_from_a_file_of_its_own(write, tmp_path):
    """As some quantisers publish it: the block beside the vocabulary, for a model from anywhere."""
    target = load_model(write(TILED, "Q8_0"), dtype=torch.float32, backend="dense")
    whole = AutoSpeculator.from_name("mtp", target).drafter
    companion = write_drafts_only(tmp_path / "mtp.gguf", target.name_or_path)
    head = AutoSpeculator.from_name("mtp", target, head=str(companion)).drafter.head
    for name, values in head.state_dict().items():
        assert torch.equal(values, whole.head.state_dict()[name]), name


def test_norms_are_stored_with_one_added(write):
    path = write(TILED, "F16")
    head = AutoSpeculator.from_name("mtp", load_model(path, dtype=torch.float32)).drafter.head
    file = read_header(path)
    stored = file.read(file.tensors[f"blk.{EVERY}.nextn.enorm.weight"]).view(torch.float32).flatten()
    assert torch.equal(head.enorm.weight, stored - 1)


@pytest.mark.usefixtures("needs_kernel")
def test_a_packed_draft_layer_is_saved_with_values(write, tmp_path):
    target = load_model(write(TILED, "Q8_0"), dtype=torch.float32, backend="native")
    packed = AutoSpeculator.from_name("mtp", target)
    packed.drafter.save_pretrained(tmp_path / "saved")
    saved = AutoSpeculator.from_name("mtp", target, head=str(tmp_path / "saved"))
    wanted = load_head(Source.of_target(target), target).head.state_dict()
    for name, values in saved.drafter.head.state_dict().items():
        assert torch.equal(values, wanted[name]), name


class TestProblems:
    def test_mtp_refuses_a_file_without_draft_layers(self, write):
        path = write(replace(TILED, num_layers=EVERY, num_draft_layers=0))
        target = load_model(path, dtype=torch.float32, backend="dense")
        with pytest.raises(CheckpointError, match=r"no draft layers \(MTP\) among its .*blk\.N\.nextn\.eh_proj"):
            AutoSpeculator.from_name("mtp", target)

    def test_mtp_refuses_draft_layers_of_another_architecture(self, write, tmp_path):
        other = write_model(tmp_path / "llama.gguf", replace(SMALLEST, architecture="glm4moe"))
        target = load_model(write(), dtype=torch.float32, backend="dense")
        with pytest.raises(CheckpointError, match="holds a model of architecture 'glm4moe'; supported: llama, "):
            AutoSpeculator.from_name("mtp", target, head=str(other))

    def test_mtp_refuses_draft_layers_of_another_depth(self, write):
        with pytest.raises(CheckpointError, match="belongs to a model of 4 layers; the target has 5"):
            Source.find(write(), EVERY + 1)

    def test_quantised_layers_are_not_kept_beside_a_saved_model(self, write, tmp_path):
        with pytest.raises(CheckpointError, match="keep those of the original checkpoint"):
            keep(Source.find(write(), EVERY), tmp_path)

    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            ({".nextn_predict_layers": 5}, "5 of 5 layers are draft layers"),
            ({".nextn_predict_layers": 2}, "tensors of a qwen35 model are missing: .*nextn.eh_proj"),
            ({".nextn_predict_layers": None}, "tensors of a qwen35 model are missing: blk.4.attn_qkv"),
            ({".ssm.time_step_rank": 3}, "as many must share each head of keys"),
            ({".ssm.inner_size": 255}, "heads must be of one size"),
            ({".ssm.conv_kernel": 5}, r"ssm_conv1d.weight' is \[384, 4\]; the metadata give \[384, 5\]"),
            ({".ssm.group_count": None}, "have no 'qwen35.ssm.group_count'"),
            ({".rope.dimension_count": 15}, "RoPE turns 15 of the 64 values of a head"),
            ({".rope.dimension_count": 80}, "RoPE turns 80 of the 64 values of a head"),
            ({".rope.dimension_sections": [8, 0]}, r"in sections \[8, 0\]"),
            ({".full_attention_interval": 3}, "tensors of a qwen35 model are missing: .*attn_q"),
        ],
    )
    def test_plan_model_refuses_metadata_that_fit_no_model(self, write, no_weights, metadata, message):
        with pytest.raises(CheckpointError, match=message):
            plan_model(read_header(write(metadata=metadata)))

    def test_load_model_refuses_decays_above_zero(self, write):
        path = write(extra_tensors={"blk.1.ssm_a": np.array([-1, -2, 0.5, -1], np.float32)})
        with pytest.raises(CheckpointError, match=r"'blk\.1\.ssm_a' holds values that are not finite or not possible"):
            load_model(path)


def test_layers_of_a_hybrid_are_where_the_file_has_them(write):
    config = plan_model(read_header(write(replace(TILED, num_layers=9)))).config
    assert config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert config.rope_parameters["partial_rotary_factor"] == 0.25
    assert config.rope_parameters["mrope_section"] == [3, 3, 2]
    without = {".rope.dimension_sections": None, ".full_attention_interval": None}
    config = plan_model(read_header(write(metadata=without))).config
    assert config.rope_parameters["mrope_section"] == [8, 0, 0]
