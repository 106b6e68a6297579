"""lm-eval with an attached speculator: the answers that it scores are the same (`make ecosystem`)."""

from __future__ import annotations

import json

import pytest
import yaml

import hf_speculate


lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: `make ecosystem` sets it up")

ROWS = [
    {"question": "def add(a, b):\n    return", "answer": "a + b"},
    {"question": "class Stack:\n    def __init__(self):", "answer": "self"},
    {"question": "import os\n\ndef exists(path):\n    return os.path", "answer": "exists"},
]


@pytest.fixture
def task(tmp_path):
    """A task of three questions from a local file, scored by exact match."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {
        "task": "tiny_code",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 32, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_and_scores_are_the_same(model, tokenizer, attach_head, task, batch_size, tmp_path):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    (tmp_path / "tiny_code.yaml").write_text(yaml.safe_dump(task))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def evaluated():
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device="cpu")
        found = lm_eval.simple_evaluate(wrapped, tasks=["tiny_code"], task_manager=tasks, bootstrap_iters=0)
        answers = [sample["resps"] for sample in found["samples"]["tiny_code"]]
        return answers, found["results"]["tiny_code"]

    plain = evaluated()
    speculator = attach_head(model)
    attached = evaluated()
    hf_speculate.detach(model)
    assert attached == plain
    assert len(plain[0]) == len(ROWS)
    assert speculator.stats.accepted_tokens > 10
    # Its stopping criteria look across rows.
    lock_step = "rows in lock-step: a stopping criterion that is not known to be row-wise"
    assert list(speculator.stats.fallbacks) == ([lock_step] if batch_size > 1 else [])
