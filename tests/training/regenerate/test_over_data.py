"""`hf-speculate generate --data`: the answers that `generate` gives to each prompt, once each."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hf_speculate.cli import app

from ...support.training import END, PAD


@pytest.fixture
def prompts(write_lines):
    return write_lines([{"prompt": f"question {number} {'x' * (number % 5)}"} for number in range(11)])


def run(data, output, target, *options):
    arguments = ["generate", "--data", str(data), "--output", str(output), "--target", str(target), *options]
    return CliRunner().invoke(app, [*arguments, "--dtype", "float32", "-n", "12", "--batch-size", "4"])


def lines_of(path) -> dict[str, dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["id"]: line for line in lines}


@pytest.mark.parametrize("speculator", ["none", "prompt_lookup"])
def test_answers_are_those_of_generate(saved_target, prompts, tmp_path, speculator):
    result = run(prompts, tmp_path / "out.jsonl", saved_target, "--temperature", "0", "--speculator", speculator)
    assert result.exit_code == 0, result.output
    figures, lines = json.loads(result.stdout.splitlines()[-1]), lines_of(tmp_path / "out.jsonl")
    assert figures["num_written"] == len(lines) == 11
    assert (figures["mean_acceptance_length"] is None) == (speculator == "none")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved_target), AutoTokenizer.from_pretrained(saved_target)
    for line in lines.values():
        question, answer = line["messages"]
        ids = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_tensors="pt").input_ids
        with torch.no_grad():
            text = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=PAD)[0, ids.shape[1] :]
        assert answer["content"] == tokenizer.decode(text, skip_special_tokens=True)
        assert line["finish"] == ("stop" if int(text[-1]) == END else "length")
        assert not {"input_ids", "loss_mask"} & line.keys()


def test_exact(saved_target, prompts, tmp_path):
    result = run(prompts, tmp_path / "out.jsonl", saved_target, "--exact", "-s", "prompt_lookup:compile=true")
    assert result.exit_code == 1
    assert "which compile= cannot promise" in result.stderr


def test_a_run_that_was_stopped_goes_on(saved_target, prompts, tmp_path):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    options = ["--temperature", "1", "--seed", "3"]
    run(prompts, whole, saved_target, *options)
    run(prompts, parts, saved_target, *options)
    lines = parts.read_bytes().splitlines(keepends=True)
    parts.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    result = run(prompts, parts, saved_target, *options)
    figures = json.loads(result.stdout.splitlines()[-1])
    assert (figures["num_found"], figures["num_written"]) == (5, 6)
    assert lines_of(parts) == lines_of(whole)
    assert "made with other settings (seed 3, now 4)" in run(prompts, parts, saved_target, *options[:3], "4").output


def test_texts_are_prompts_as_they_are(saved_target, write_lines, tmp_path):
    data = write_lines([{"text": f"number {number}"} for number in range(3)])
    result = run(data, tmp_path / "out.jsonl", saved_target, "--raw", "--temperature", "0")
    assert result.exit_code == 0, result.output
    lines = lines_of(tmp_path / "out.jsonl")
    assert [lines[str(number)]["prompt"] for number in range(3)] == ["number 0", "number 1", "number 2"]
    assert all("completion" in line for line in lines.values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "x.jsonl"], "--data and --output go together"),
        (["--output", "y.jsonl"], "--data and --output go together"),
        (["a prompt", "--data", "x.jsonl", "--output", "y.jsonl"], "without a prompt"),
        (["--data", "x.jsonl", "--output", "y.jsonl", "--engine", "server", "-t", "x"], "possible are local and ray"),
    ],
)
def test_refusals(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["generate", *arguments])
    assert result.exit_code == 1
    assert said in result.output
    assert not list(tmp_path.glob("y*"))


def test_without_the_trainer(monkeypatch, tmp_path):
    monkeypatch.setattr("hf_speculate.cli.over_data.entry_points", lambda group: [])
    result = CliRunner().invoke(app, ["generate", "--data", "x", "--output", str(tmp_path / "y"), "-t", "z"])
    assert "pip install 'hf-speculate[train]'" in result.output
