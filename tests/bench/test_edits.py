"""`bench edits`: files with small changes, which a target is made to write."""

from __future__ import annotations

import random

import pytest
import torch

from hf_speculate.bench.edits import WritesText, edited_code

from ..support.bench import bench, last_line


CODE = "\n".join(f"def double_{i}(value):\n    return value * {i}\n" for i in range(3)) + "\n    unused = value\n" * 4


def test_edits_are_small_and_those_of_the_seed():
    found = edited_code(CODE, random.Random(3), 2)
    assert found is not None
    assert found == edited_code(CODE, random.Random(3), 2) != edited_code(CODE, random.Random(4), 2)
    before, after = CODE.splitlines(), found.splitlines()
    assert found != CODE
    assert abs(len(before) - len(after)) <= 2
    renamed = next(line.split("new_")[1].split()[0].strip("():,") for line in after if "new_" in line)
    changed = [line for line in after if line.replace("new_", "") not in before]
    assert len(changed) <= 2
    assert not any(line.split("#")[0].split() == [renamed] for line in after)


@pytest.mark.parametrize("text", ["", "x = 1\n" * 40, "def function(): return function\n"])
def test_text_with_too_little_to_edit(text):
    assert edited_code(text, random.Random(0), 2) is None


def test_the_target_writes_what_is_laid_down(tiny_model, prompt):
    ids, text = prompt(5), torch.tensor([7, 3, 3, 9])
    output = tiny_model().generate(ids, max_new_tokens=4, logits_processor=[WritesText(5, text)], pad_token_id=0)
    assert output[0, 5:].tolist() == text.tolist()


def test_what_was_given_is_drafted_again(bench_folders):
    options = ("--num-files", 2, "--file-tokens", 150, "--nodes", 8, "-s", "prompt_lookup", "-s", "suffix")
    found = last_line(bench("edits", "--target", bench_folders / "target", *options))
    assert [row["speculator"] for row in found["rows"]] == ["prompt_lookup", "suffix"]
    assert found["num_files"] == 2
    for row in found["rows"]:
        assert row["tokens_per_round"] > 3
        assert row["drafted_nodes"] <= 8
