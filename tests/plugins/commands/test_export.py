"""Heads for serving engines: what is written, what is measured, and what is refused before anything is written."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hf_speculate import AutoSpeculator, SpeculateError, load_gguf
from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate_gguf import read_header
from hf_speculate_tools import cli
from hf_speculate_tools.heads.engines import EngineDrafts, engine_warnings, refuse_quantized
from hf_speculate_tools.heads.export import SCRIPT, export_head
from hf_speculate_training.methods.eagle import Eagle3Method, Eagle3Shape, new_eagle3

from ...support.llamacpp import write_target
from ...support.models import build_tiny_model
from ...support.paths import REPOSITORY


EXAMPLES = REPOSITORY / "examples"
TARGET = str(EXAMPLES / "pycoder")


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts():
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    return [tokenizer(text, return_tensors="pt").input_ids[0] for text in ("import os\n", "class Stack:\n")]


def exported(head, folder, engine, target, prompts, **options):
    options = {"target_name": TARGET, "max_new_tokens": 24, **options}
    return export_head(EXAMPLES / head, folder, engine, target, prompts, **options)


@pytest.mark.parametrize(
    ("head", "engine", "layout", "options", "drafting"),
    [
        ("pycoder-eagle3", "vllm", "speculators", {}, EngineDrafts(5)),
        ("pycoder-eagle3", "vllm", "speculators", {"depth": 3}, EngineDrafts(3)),
        ("pycoder-eagle3", "sglang", "specforge", {}, EngineDrafts(5, 4, 7)),
        (
            "pycoder-eagle3",
            "sglang",
            "specforge",
            {"depth": 4, "top_k": 2, "num_draft_tokens": 12},
            EngineDrafts(4, 2, 11),
        ),
        ("pycoder-eagle3", "sglang", "specforge", {"depth": 3, "top_k": 1}, EngineDrafts(3, 1, 3)),
    ],
)
def test_heads(target, prompts, tmp_path, head, engine, layout, options, drafting):
    """An exported head, loaded again, is accepted as often as the one that was measured."""
    found = exported(head, tmp_path / "out", engine, target, prompts, **options)
    assert (found["layout"], found["drafting"]) == (layout, asdict(drafting))
    assert max(found["acceptance_rate_by_depth"]) <= drafting.depth
    assert 1 < found["mean_acceptance_length"] <= drafting.depth + 1
    if drafting.top_k == 1:
        rates = sum(found["acceptance_rate_by_depth"].values())
        assert found["mean_acceptance_length"] == pytest.approx(1 + rates, abs=0.2)  # the last rounds are cut short
    again = AutoSpeculator.from_pretrained(tmp_path / "out", target=target, adaptive=False, **asdict(drafting))
    for prompt in prompts:
        target.generate(prompt[None], max_new_tokens=24, do_sample=False, speculator=again)
    assert again.stats.mean_acceptance_length == pytest.approx(found["mean_acceptance_length"])


def test_what_a_compact_head_leaves_out_comes_from_the_target(target, prompts, tmp_path):
    """Also where the engine is to load it from the Hub: there is no folder to read then."""
    ids = torch.arange(0, target.config.vocab_size, 2)
    method = Eagle3Method(new_eagle3(target, Eagle3Shape(own_output=False), ids), target, ids)
    method.save(tmp_path / "head", target, "compact")
    found = exported(tmp_path / "head", tmp_path / "out", "sglang", target, prompts, target_name="org/coder")
    assert found["layout"] == "specforge"
    weight = load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(weight, target.get_output_embeddings().weight[ids])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_script_hands_the_engine_the_head_beside_it(target, prompts, tmp_path, engine):
    """Run with stand-ins for the engines, from another folder, with a flag of the user's."""
    folder = tmp_path / "it's a folder"
    exported("pycoder-eagle3", folder, engine, target, prompts)
    program = tmp_path / ("vllm" if engine == "vllm" else "python")
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    told = subprocess.run(
        [folder / SCRIPT, "--port", "8001"],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    ).stdout.splitlines()
    assert told[-2:] == ["--port", "8001"]
    assert TARGET in told
    if engine == "vllm":
        config = json.loads(told[told.index("--speculative-config") + 1])
        assert config == {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 5}
    else:
        flags = dict(zip(told[4::2], told[5::2], strict=False))
        assert flags["--speculative-draft-model-path"] == str(folder)
        assert flags["--speculative-num-draft-tokens"] == "8"  # the root is one of them


@pytest.mark.parametrize(
    ("head", "engine", "options", "said"),
    [
        (
            "pycoder-medusa",
            "sglang",
            {},
            "SGLang takes heads of eagle3, eagle, not of medusa; export for no engine does",
        ),
        ("pycoder-dspark", "vllm", {}, "not of dspark; export for llama.cpp does"),
        ("pycoder-eagle3", "vllm", {"top_k": 4}, "vLLM drafts chains"),
        ("pycoder-eagle3", "sglang", {"depth": 9}, r"cannot be 9 deep: at least 10"),
        ("pycoder-eagle3", "llama.cpp", {"top_k": 4}, "llama.cpp drafts chains"),
        ("pycoder-eagle3", "llama.cpp", {}, r"hands no states of 'qwen2' models to heads.*llama, mistral, qwen3"),
        ("pycoder-medusa", "vllm", {}, "export for vLLM takes heads of eagle3, eagle, dflash, not of medusa"),
        ("pycoder-eagle3", "vllm", {"out_type": "q8_0"}, "'speculators' keeps the head's"),
    ],
)
def test_refusals(target, prompts, tmp_path, head, engine, options, said):
    with pytest.raises(SpeculateError, match=said):
        exported(head, tmp_path / "out", engine, target, prompts, **options)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def as_llama(target, tmp_path_factory):
    """pycoder as llama.cpp's architecture "llama": the file, and the model that we load from it."""
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    write_target(path, target, AutoTokenizer.from_pretrained(TARGET), "q8_0")
    return str(path), load_gguf(path, dtype=torch.float32)[0]


def test_a_folder_for_llamacpp(as_llama, prompts, tmp_path):
    """Its head is the one that was measured, and the script hands both files to the server."""
    path, model = as_llama
    folder = tmp_path / "it's a folder"
    found = exported("pycoder-eagle3", folder, "llama.cpp", model, prompts, target_name=path)
    assert (found["layout"], found["drafting"]) == ("llama.cpp", asdict(EngineDrafts(5)))
    (tmp_path / "llama-server").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "llama-server").chmod(0o755)
    given = {"capture_output": True, "text": True, "check": True, "cwd": "/"}
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    told = subprocess.run([folder / SCRIPT, "-ngl", "0"], env=environment, **given).stdout.splitlines()
    flags = dict(zip(told[::2], told[1::2], strict=True))
    assert flags["-m"] == path
    assert flags["-md"] == str(folder / "draft.gguf")
    assert (flags["--spec-type"], flags["--spec-draft-n-max"], flags["-ngl"]) == ("draft-eagle3", "5", "0")
    again = AutoSpeculator.from_pretrained(folder, target=model, adaptive=False, **found["drafting"])
    for prompt in prompts:
        model.generate(prompt[None], max_new_tokens=24, do_sample=False, speculator=again)
    assert again.stats.mean_acceptance_length == pytest.approx(found["mean_acceptance_length"], rel=0.1)


def test_a_file_for_llamacpp(as_llama, prompts, tmp_path):
    path, model = as_llama
    head = tmp_path / "new" / "head.gguf"
    given = {"target_name": path, "out_type": "q8_0", "depth": 2}
    found = exported("pycoder-dspark", head, "llama.cpp", model, prompts, **given)
    assert found["script"].startswith(
        f"llama-server -m {path} -md {head} --spec-type draft-dspark --spec-draft-n-max 2"
    )
    assert [each.name for each in head.parent.iterdir()] == ["head.gguf"]
    assert read_header(head).tensors["fc.weight"].type == "Q8_0"
    with pytest.raises(CheckpointError, match=r"head\.gguf exists"):
        exported("pycoder-dspark", head, "llama.cpp", model, prompts, **given)


def test_another_target_and_a_folder_in_use(target, prompts, tmp_path):
    with pytest.raises(TargetMismatchError):
        exported("pycoder-eagle3", tmp_path / "out", "vllm", build_tiny_model(), prompts)
    assert not (tmp_path / "out").exists()
    extended = copy.deepcopy(target)
    extended.resize_token_embeddings(target.config.vocab_size + 3, mean_resizing=False)
    with pytest.raises(TargetMismatchError, match=r"vLLM may read rows that the head does not have"):
        exported("pycoder-eagle3", tmp_path / "out", "vllm", extended, prompts)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(CheckpointError, match="not an empty folder"):
        exported("pycoder-eagle3", tmp_path / "out", "vllm", target, prompts)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_quantised_targets_and_what_may_go_otherwise():
    refuse_quantized("vllm", "")
    refuse_quantized("llama.cpp", "GGUF (Q4_0)")
    with pytest.raises(SpeculateError, match=r"llama\.cpp would serve other ones"):
        refuse_quantized("llama.cpp", "bitsandbytes (nf4)")
    with pytest.raises(SpeculateError, match=r"quantised \(GGUF \(Q4_0\)\), and vLLM would serve other ones"):
        refuse_quantized("vllm", "GGUF (Q4_0)")
    known, unknown = build_tiny_model().config, build_tiny_model("mistral").config
    assert engine_warnings("vllm", known, "eagle3", "bfloat16") == []
    (one,) = engine_warnings("vllm", unknown, "eagle3", "bfloat16")
    assert "'mistral' was not in it" in one
    assert "float32" in engine_warnings("vllm", known, "eagle3", "float32")[0]


def test_command(tmp_path):
    arguments = ["export", str(EXAMPLES / "pycoder-eagle3"), str(tmp_path / "out"), "--for", "vllm", "--target", TARGET]
    result = CliRunner().invoke(cli.app, [*arguments, "--limit", "2", "--max-new-tokens", "16", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["num_prompts"] == 2
    assert (tmp_path / "out" / SCRIPT).read_text() == found["script"]
    assert os.access(tmp_path / "out" / SCRIPT, os.X_OK)
