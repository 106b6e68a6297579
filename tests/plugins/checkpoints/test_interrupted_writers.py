"""Saving a head: whole, or as if nothing had happened; whoever is killed in between never mixes two heads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.errors import CheckpointError
from hf_speculate_plugins.eagle import EagleDrafter
from hf_speculate_plugins.medusa import MedusaDrafter, MedusaHeads

from ...support.tiny_heads import write_eagle_head


HIDDEN, VOCAB = 32, 96
LAYOUTS = ("speculators", "specforge", "safeailab", "fasterdecoding", "vllm")


def make_head(layout: str, target, folder: Path, number: int) -> Speculator:
    """The same head with another seed: number 1 differs in weights and config, number 2 in weights only."""
    if layout in ("fasterdecoding", "vllm"):
        generator = torch.Generator().manual_seed(number)
        rows = torch.randn(1 + number % 2, VOCAB, HIDDEN, generator=generator)
        blocks = torch.randn(1 + number % 2, 1, HIDDEN, HIDDEN, generator=generator)
        return Speculator(MedusaDrafter(MedusaHeads(blocks, None, rows), target))
    source = folder / f"source-{number}"
    write_eagle_head(source, HIDDEN, VOCAB)
    options = {"rope_theta": 1e6} if number % 2 else {}
    drafter = EagleDrafter.from_folder(str(source), target, feature_layers=[0, 1, 2], **options)
    drafter.head.fc.weight.data += number
    drafter.head.spec.__dict__["feature_layers"] = None if layout == "safeailab" else (1, 2, 2)
    return Speculator(drafter)


def content(folder: Path) -> dict[str, bytes]:
    """What readers see."""
    return {
        p.name: p.read_bytes() for p in sorted(folder.iterdir()) if not p.name.startswith(".") and p.suffix != ".md"
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_disk_is_a_clear_error_and_changes_nothing(layout, tmp_path, tiny_model, small_disk):
    first, second = (make_head(layout, tiny_model(), tmp_path, number) for number in (0, 1))
    first.save_pretrained(tmp_path / "head", layout)
    before = content(tmp_path / "head")
    small_disk()
    with pytest.raises(CheckpointError, match=r"cannot write .*config.json to .*Nothing that was there before is lost"):
        second.save_pretrained(tmp_path / "head", layout)
    with pytest.raises(CheckpointError, match="cannot write"):
        second.save_pretrained(tmp_path / "new", layout)
    assert content(tmp_path / "head") == before
    assert not (tmp_path / "new").exists()
    assert [name for name in os.listdir(tmp_path / "head") if name.startswith(".")] == []


class Killed(BaseException):
    """What nobody handles; nothing is cleaned up either."""


@pytest.fixture
def kill_at(monkeypatch):
    """Stops the process, as it were, before its n-th step that changes a folder or a disk."""

    def _kill_at(step: int) -> None:
        left = [step]

        def counted(function):
            def call(*args, **kwargs):
                left[0] -= 1
                if left[0] == 0:
                    raise Killed
                return function(*args, **kwargs)

            return call

        monkeypatch.setattr("hf_speculate.files.writing._put_back", lambda *where: None)
        monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
        for name in ("replace", "fsync", "unlink", "rename"):
            monkeypatch.setattr(os, name, counted(getattr(os, name)))

    return _kill_at


@pytest.mark.parametrize("number", [1, 2], ids=["other-config", "same-config"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kill_at_any_step_leaves_one_head_or_none(layout, number, tmp_path, tiny_model, kill_at, monkeypatch):
    first, second = (make_head(layout, tiny_model(), tmp_path, n) for n in (0, number))
    first.save_pretrained(tmp_path / "a", layout)
    second.save_pretrained(tmp_path / "b", layout)
    old, new = content(tmp_path / "a"), content(tmp_path / "b")
    assert (old["config.json"] == new["config.json"]) == (number == 2)
    seen = []
    for step in range(1, 20):
        folder = tmp_path / str(step)
        first.save_pretrained(folder, layout)
        with monkeypatch.context():
            kill_at(step)
            try:
                second.drafter.save_pretrained(folder, layout)
            except Killed:
                seen.append(content(folder))
        monkeypatch.undo()
        if len(seen) < step:
            break
        found = seen[-1]
        if "config.json" not in found:  # the weights of either, of which nothing says what they mean
            found["config.json"] = (old if found.items() <= old.items() else new)["config.json"]
        assert found in (old, new)
    assert content(folder) == new
    assert len(seen) >= 5
    assert new in seen


@pytest.mark.parametrize("layout", ["speculators", "specforge"])
def test_eagle_weights_without_their_config_are_refused(layout, tmp_path, tiny_model):
    """What a kill may leave: they would be read with RoPE of another base."""
    make_head(layout, tiny_model(), tmp_path, 0).save_pretrained(tmp_path / "head", layout)
    (tmp_path / "head" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        AutoSpeculator.from_pretrained(tmp_path / "head", target=tiny_model())


@pytest.mark.parametrize("layout", ["speculators", "fasterdecoding"])
def test_a_head_can_be_saved_where_it_was_read(layout, tmp_path, tiny_model):
    """Also through the links of a cache, whose files stay as they are."""
    make_head(layout, tiny_model(), tmp_path, 0).save_pretrained(tmp_path / "blobs", layout)
    (tmp_path / "head").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "head" / path.name).symlink_to(path)
    before = content(tmp_path / "blobs")
    loaded = AutoSpeculator.from_pretrained(tmp_path / "head", target=tiny_model())
    for parameter in (loaded.drafter.head if layout == "speculators" else loaded.drafter.heads).parameters():
        parameter.data += 1
    loaded.save_pretrained(tmp_path / "head", layout)
    assert content(tmp_path / "blobs") == before
    again = AutoSpeculator.from_pretrained(tmp_path / "head", target=tiny_model())
    assert content(tmp_path / "head") != before
    prompt = torch.tensor([[5, 6, 7]])
    plain = tiny_model().generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(tiny_model().generate(prompt, max_new_tokens=6, do_sample=False, speculator=again), plain)
