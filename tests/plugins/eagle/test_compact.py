"""Heads whose output matrix is the target's rows for their draft vocabulary: files without it, and files of others."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file

from hf_speculate import AutoSpeculator
from hf_speculate.errors import CheckpointError
from hf_speculate_plugins.checkpoints import vocabulary_output
from hf_speculate_plugins.eagle import EagleDrafter
from hf_speculate_tools.heads.convert import convert_checkpoint

from ...support.heads import HIDDEN, PLAIN, target


OUTPUT = "lm_head.weight"


def without_output(config, tensors):
    config["own_output"] = False
    del tensors[OUTPUT]


def with_the_targets_rows(config, tensors):
    ids = tensors["t2d"].nonzero().flatten()
    tensors[OUTPUT] = target().lm_head.weight[ids].clone()


@pytest.fixture
def compact(head):
    return head("specforge", change=without_output)


def test_drafts_as_the_head_that_stores_the_rows(head, compact, prompt):
    whole = head("specforge", change=with_the_targets_rows)
    model, ids = target(), prompt(9)
    found = []
    for folder in (whole, compact):
        speculator = AutoSpeculator.from_pretrained(folder, target=model, depth=3)
        output = model.generate(ids, speculator=speculator, return_dict_in_generate=True, **PLAIN)
        found.append((output.sequences.tolist(), output.speculation.mean_acceptance_length))
    assert found[0] == found[1]
    assert found[0][0] == model.generate(ids, **PLAIN).tolist()
    drafter = EagleDrafter.from_folder(compact, model)
    assert OUTPUT not in drafter.head.state_dict()
    assert not drafter.head.output.weight.requires_grad
    assert "draft vocabulary" in drafter.report.shared[OUTPUT]


def test_rows_of_a_matrix_that_can_only_be_called():
    """As packed ones: the kernel, which ranks what a head says, takes none but contiguous matrices."""

    class Called(torch.nn.Linear):
        pass

    matrix, ids = Called(HIDDEN, 96), torch.tensor([3, 7, 50])
    layer = vocabulary_output(matrix, HIDDEN, ids, torch.float32)
    torch.testing.assert_close(layer.weight, matrix.weight[ids])
    assert layer.weight.is_contiguous()


def test_a_file_that_lost_its_matrix_is_not_taken_for_one(head):
    folder = head("specforge", change=lambda config, tensors: tensors.pop(OUTPUT))
    with pytest.raises(CheckpointError, match=OUTPUT):
        EagleDrafter.from_folder(folder, target())


def test_saved_compact_and_whole(compact, tmp_path):
    drafter = EagleDrafter.from_folder(compact, target())
    rows = target().lm_head.weight[drafter.target_ids]
    assert drafter.save_pretrained(tmp_path / "again", "compact").layout == "compact"
    assert OUTPUT not in load_file(tmp_path / "again" / "model.safetensors")
    assert drafter.save_pretrained(tmp_path / "whole", "sglang").layout == "specforge"
    assert torch.equal(load_file(tmp_path / "whole" / "model.safetensors")[OUTPUT], rows)
    assert torch.equal(EagleDrafter.from_folder(str(tmp_path / "again"), target()).head.output.weight, rows)
    assert EagleDrafter.describe(str(tmp_path / "again")).layout == "compact"
    with pytest.raises(CheckpointError, match="an output matrix of its own"):
        EagleDrafter.from_folder(str(tmp_path / "whole"), target()).save_pretrained(tmp_path / "no", "compact")
    assert not os.path.exists(tmp_path / "no")


@pytest.mark.parametrize("layout", ["specforge", "compact"])
def test_compact_head_is_converted_with_the_targets_rows(compact, tmp_path, layout):
    target().save_pretrained(tmp_path / "target")
    if layout == "specforge":
        with pytest.raises(CheckpointError, match=r"lm_head\.weight.*give the target"):
            convert_checkpoint(compact, tmp_path / "out", layout)
    saved, _ = convert_checkpoint(
        compact, tmp_path / "out", layout, None if layout == "compact" else tmp_path / "target"
    )
    assert saved.layout == layout
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert (OUTPUT in tensors) == (layout == "specforge")
    if layout == "specforge":
        assert tensors[OUTPUT].shape == (48, HIDDEN)
        assert EagleDrafter.from_folder(str(tmp_path / "out"), target()).spec.own_output
