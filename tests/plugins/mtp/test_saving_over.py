"""A model saved over what is there: in place, in any order of calls, half way, as a variant, by other processes."""

from __future__ import annotations

import copy
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_speculate
from hf_speculate.errors import CheckpointError
from hf_speculate_plugins.mtp import MtpDrafter, Source, keep
from hf_speculate_plugins.mtp.saving import INDEX, WEIGHTS
from hf_speculate_plugins.mtp.source import SHARD

from ...support.mtp import DEPTH, FAMILIES, build, draft_tensors, load_target, write_target
from ...support.tiers import quick_quarter


FAMILY = "glm4_moe"
IN_SHARDS = {"max_shard_size": "20KB"}


def published(folder: Path, family: str) -> Path:
    """A checkpoint as its makers publish it, with the draft layers among the weights."""
    build(family).save_pretrained(folder)
    save_file(load_file(folder / WEIGHTS) | draft_tensors(family), folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def published_in_shards(folder: Path, family: str) -> Path:
    """The same in shards, of which the last one holds draft layers and other weights."""
    build(family).save_pretrained(folder, **IN_SHARDS)
    index = json.loads((folder / INDEX).read_text())
    last = folder / max(index["weight_map"].values())
    save_file(load_file(last) | draft_tensors(family), last, metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(draft_tensors(family), last.name)
    (folder / INDEX).write_text(json.dumps(index))
    return folder


STARTS: dict[str, Callable[[Path, str], Path]] = {
    "published": published,
    "published-in-shards": published_in_shards,
    "ours": write_target,
}


@pytest.fixture(params=STARTS)
def folder(request, tmp_path) -> Path:
    return STARTS[request.param](tmp_path / "model", FAMILY)


of_ours = pytest.mark.parametrize("folder", ["ours"], indirect=True)


def content(folder: Path) -> dict[str, bytes]:
    """All files, those of scratch folders included."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fine_tuned(model, number: int = 1):
    model = copy.deepcopy(model)
    with torch.no_grad():
        next(model.model.layers[0].mlp.parameters()).add_(0.01 * number)
    return model


def drafts_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path, names in Source.find(folder, DEPTH).paths().items():
        held = load_file(path)
        found |= {name: held[name] for name in names}
    return found


def check(folder: Path, model, family: str = FAMILY, **options) -> None:
    """The folder holds exactly this model, and exactly the family's draft layers."""
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    expected, found = draft_tensors(family), drafts_of(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("case", quick_quarter(itertools.product(FAMILIES, STARTS)), ids="-".join)
def test_draft_layers_stay_when_a_model_is_saved_where_it_is_from(tmp_path, case):
    family, start = case
    folder = STARTS[start](tmp_path / "model", family)
    model = load_target(folder)
    for number, options in enumerate(({}, IN_SHARDS, {"max_shard_size": "40KB"}, {}), start=1):
        model = fine_tuned(model, number)
        assert hf_speculate.save_pretrained(model, folder, **options) == sorted(draft_tensors(family))
        check(folder, model, family)
        model = load_target(folder)
    assert MtpDrafter.for_target(model).spec.num_stored == 1


@pytest.mark.parametrize("size", ["20KB", "5GB"])
def test_weights_of_an_earlier_save_are_not_left_beside_the_new_ones(folder, size):
    """transformers takes model.safetensors where it is, and leaves it there when it saves shards."""
    hf_speculate.save_pretrained(load_target(folder), folder, max_shard_size=size)
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    assert {path.name for path in folder.glob("*.safetensors")} == set(index.values())


def test_draft_layers_that_stock_left_out_of_the_index_are_found(tmp_path):
    folder = write_target(tmp_path / "model", FAMILY)
    load_target(folder).save_pretrained(folder, **IN_SHARDS)
    (folder / WEIGHTS).unlink()
    assert SHARD not in json.loads((folder / INDEX).read_text())["weight_map"].values()
    model = fine_tuned(load_target(folder))
    hf_speculate.save_pretrained(model, folder, **IN_SHARDS)
    check(folder, model)
    assert SHARD in json.loads((folder / INDEX).read_text())["weight_map"].values()


def test_a_model_without_draft_layers_keeps_those_of_the_folder(tmp_path, folder):
    load_target(folder).save_pretrained(tmp_path / "lost")
    model = fine_tuned(load_target(tmp_path / "lost"))
    assert hf_speculate.save_pretrained(model, folder, **IN_SHARDS) == sorted(draft_tensors(FAMILY))
    check(folder, model)


def test_draft_layers_of_another_shape_do_not_become_those_of_a_model(tmp_path):
    folder = write_target(tmp_path / "model", FAMILY)
    model = copy.deepcopy(build("llama"))
    assert hf_speculate.save_pretrained(model, folder) == []
    assert not (folder / INDEX).exists()
    assert (folder / SHARD).exists()
    AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("options", [{}, IN_SHARDS], ids=["whole", "in-shards"])
def test_a_variant_has_its_own_files_and_leaves_the_others(folder, tmp_path, options):
    plain, model = load_target(folder), fine_tuned(load_target(folder))
    before = content(folder)
    names = hf_speculate.save_pretrained(model, folder, variant="bf16", **options)
    assert names == sorted(draft_tensors(FAMILY))
    kept = {name: data for name, data in content(folder).items() if ".bf16" not in name}
    assert kept.keys() - {"generation_config.json"} == before.keys() - {"generation_config.json"}
    assert all(kept[name] == data for name, data in before.items() if not name.endswith("config.json"))
    check(folder, plain)
    check(folder, model, variant="bf16")
    hf_speculate.save_pretrained(model, tmp_path / "new", variant="bf16", **options)
    check(tmp_path / "new", model, variant="bf16")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "new", variant="bf16", dtype=torch.float32)
    hf_speculate.save_pretrained(again, tmp_path / "new")
    check(tmp_path / "new", model)


def test_plain_weights_leave_the_shards_of_a_variant(tmp_path):
    folder = write_target(tmp_path / "model", FAMILY)
    model = load_target(folder)
    hf_speculate.save_pretrained(model, folder, variant="bf16", **IN_SHARDS)
    hf_speculate.save_pretrained(fine_tuned(model), folder, **IN_SHARDS)
    check(folder, model, variant="bf16")
    check(folder, fine_tuned(model))


@of_ours
def test_other_processes_write_nothing(folder, tmp_path):
    model, before = fine_tuned(load_target(folder)), content(folder)
    for place in (folder, tmp_path / "new"):
        assert hf_speculate.save_pretrained(model, place, is_main_process=False) == []
    assert content(folder) == before
    assert not content(tmp_path / "new")


@of_ours
def test_a_state_that_is_given_is_saved(folder):
    model, other = load_target(folder), fine_tuned(load_target(folder), 3)
    state = other.state_dict()
    hf_speculate.save_pretrained(model, str(folder), state_dict=state, save_original_format=True, token=False)
    check(folder, other)


@of_ours
def test_an_adapter_lies_beside_its_base(folder):
    (folder / "README.md").write_text("---\ntags: [mine]\n---\nMy words.\n")
    before = content(folder)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = peft.get_peft_model(load_target(folder), config, adapter_name="mine")
    assert hf_speculate.save_pretrained(model, folder) == []
    after = content(folder)
    assert {name for name in after if name not in before} == {
        "mine/adapter_config.json",
        "mine/adapter_model.safetensors",
    }
    assert b"My words." in after["README.md"]
    assert all(after[name] == data for name, data in before.items() if name != "README.md")


@of_ours
@pytest.mark.parametrize("option", ["push_to_hub", "distributed_checkpoint"])
def test_options_that_cannot_be_followed_are_refused_before_anything_is_written(tmp_path, folder, option):
    before = content(folder)
    for place in (folder, tmp_path / "new"):
        with pytest.raises(ValueError, match=rf"^{option}=True (uploads before|writes the parts)"):
            hf_speculate.save_pretrained(load_target(folder), place, **{option: True})
    assert content(folder) == before
    assert not (tmp_path / "new").exists()


@of_ours
def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path, folder):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(CheckpointError, match=r"cannot write to .*file: .*Nothing that was there before is lost"):
        hf_speculate.save_pretrained(load_target(folder), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


STOCK, OURS = "transformers.modeling_utils.safe_save_file", "hf_speculate_plugins.mtp.saving.save_file"
FULL = OSError(28, "No space left on device")
# Writer, its call that fails, what it raises, what the user sees.
FAILURES = {
    "stock-interrupted": (STOCK, 2, KeyboardInterrupt(), KeyboardInterrupt),
    "stock-broken": (STOCK, 2, RuntimeError("broken"), RuntimeError),
    "stock-full": (STOCK, 2, FULL, CheckpointError),
    "stock-full-in-rust": (STOCK, 1, SafetensorError("No space left on device"), CheckpointError),
    "ours-interrupted": (OURS, 1, KeyboardInterrupt(), KeyboardInterrupt),
    "ours-full": (OURS, 1, FULL, CheckpointError),
    "ours-full-in-rust": (OURS, 1, SafetensorError("No space left on device"), CheckpointError),
    "names-interrupted": ("os.replace", 3, KeyboardInterrupt(), KeyboardInterrupt),
    "names-refused": ("os.replace", 4, PermissionError(13, "Permission denied"), CheckpointError),
    "flush-full": ("os.fsync", 2, FULL, CheckpointError),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_save_that_ends_half_way_leaves_the_folder_as_it_was(folder, tmp_path, monkeypatch, failure):
    place, number, error, seen = FAILURES[failure]
    module, _, name = place.rpartition(".")
    original, left = getattr(sys.modules[module], name), [0]

    def failing(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            if name.endswith("save_file"):
                Path(args[1]).write_bytes(b"half")
            raise error
        return original(*args, **kwargs)

    model, before = fine_tuned(load_target(folder)), content(folder)
    monkeypatch.setattr(place, failing)
    for target in (folder, tmp_path / "new"):
        left[0] = number
        with pytest.raises(seen) as caught:
            hf_speculate.save_pretrained(model, target, **IN_SHARDS)
        if seen is CheckpointError:
            assert re.search(r"is lost\.$", str(caught.value))
            assert str(target) in str(caught.value)
    monkeypatch.undo()
    assert content(folder) == before
    assert not (tmp_path / "new").exists()
    hf_speculate.save_pretrained(model, folder, **IN_SHARDS)
    check(folder, model)


def test_a_disk_that_is_full_leaves_the_folder_as_it_was(folder, small_disk):
    model, before = fine_tuned(load_target(folder)), content(folder)
    small_disk()
    with pytest.raises(CheckpointError, match=r"cannot write the model to .*model: .*Nothing .* is lost"):
        hf_speculate.save_pretrained(model, folder)
    assert content(folder) == before


def test_draft_layers_that_cannot_be_read_are_not_overwritten(tmp_path):
    folder = write_target(tmp_path / "model", FAMILY)
    model = load_target(folder)
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-100])
    before = content(folder)
    with pytest.raises(CheckpointError, match=r"cannot read .*model-mtp\.safetensors.*save it to another folder"):
        hf_speculate.save_pretrained(model, folder)
    assert content(folder) == before
    with pytest.raises(CheckpointError, match=r"the model is saved in .*new, without its draft layers: cannot read"):
        hf_speculate.save_pretrained(model, tmp_path / "new")
    AutoModelForCausalLM.from_pretrained(tmp_path / "new")


def test_weights_that_are_mapped_from_the_folder_stay_as_they_are(folder):
    mapped = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    copies = {name: {key: each.clone() for key, each in held.items()} for name, held in mapped.items()}
    hf_speculate.save_pretrained(fine_tuned(load_target(folder)), folder)
    for name, held in mapped.items():
        assert all(torch.equal(tensor, copies[name][key]) for key, tensor in held.items())


@pytest.mark.parametrize("variant", [None, "bf16"])
def test_keep_adds_everything_or_nothing(folder, tmp_path, monkeypatch, variant):
    saved, source = tmp_path / "saved", Source.find(folder, DEPTH)
    model = load_target(folder)
    model.config.num_mtp_layers = 3
    model.save_pretrained(saved, variant=variant)
    before = content(saved)
    with monkeypatch.context() as patched:
        patched.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(FULL))
        with pytest.raises(CheckpointError, match="nothing is lost"):
            keep(source, saved)
    assert content(saved) == before
    assert keep(source, saved) == sorted(draft_tensors(FAMILY))
    check(saved, model, variant=variant)
    assert json.loads((saved / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_a_draft_layer_alone_can_be_saved_where_it_was_read(tmp_path):
    target = load_target(write_target(tmp_path / "model", "llama"))
    speculator = hf_speculate.AutoSpeculator.from_name("mtp", target)
    speculator.save_pretrained(tmp_path / "head")
    again = hf_speculate.AutoSpeculator.from_name("mtp", target, head=str(tmp_path / "head"))
    with torch.no_grad():
        again.drafter.head.fc.weight.add_(1)
    again.save_pretrained(tmp_path / "head")
    last = hf_speculate.AutoSpeculator.from_name("mtp", target, head=str(tmp_path / "head"))
    assert torch.equal(last.drafter.head.fc.weight, again.drafter.head.fc.weight)
