"""`Seq2SeqTrainer(predict_with_generate=True)` with an attached head: predictions and metrics are plain's. It passes
the labels of a batch to `generate`, where stock drops them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import pytest
import torch
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

import hf_speculate

from ...support.tiers import quick
from .conftest import QUIET, TARGET, without_timings


pytest.importorskip("accelerate", reason="Trainer needs accelerate")

TEXTS = [
    "class Stack:\n    def __init__(self):",
    "def add(a, b):\n",
    "import os\n\ndef exists(path):\n    return os.path",
    "for i in range(",
    "def f",
]
pytestmark = pytest.mark.usefixtures("unchecked_shapes")


@dataclass
class Results:
    """Results of a run of a trainer.

    Attributes:
        predictions: ids of every evaluation, [texts, tokens].
        metrics: log of the trainer, without timings.
    """

    predictions: list[numpy.ndarray]
    metrics: list[dict[str, float]]


@pytest.fixture
def evaluate(tmp_path):
    """A function that runs a method of a trainer on a model."""

    def run(model, method="evaluate", padding_side="left", batch_size=2, request=None, **arguments) -> Results:
        tokenizer = AutoTokenizer.from_pretrained(TARGET, padding_side=padding_side)
        rows = [{**tokenizer(text), "labels": tokenizer(text)["input_ids"]} for text in TEXTS]
        results = Results([], [])

        def measure(prediction):
            results.predictions.append(prediction.predictions)
            return {"num_zeros": float((prediction.predictions == 0).sum())}

        trainer = Seq2SeqTrainer(
            model=model,
            args=Seq2SeqTrainingArguments(
                output_dir=str(tmp_path),
                predict_with_generate=True,
                per_device_eval_batch_size=batch_size,
                **QUIET,
                **arguments,
            ),
            processing_class=tokenizer,
            data_collator=DataCollatorForSeq2Seq(tokenizer),
            train_dataset=rows,
            eval_dataset=rows,
            compute_metrics=measure,
        )
        torch.manual_seed(0)
        if method == "train":
            trainer.train()
        elif method == "predict":
            trainer.predict(rows, **(request or {}))
        else:
            trainer.evaluate(**(request or {}))
        results.metrics = without_timings(trainer.state.log_history)
        return results

    return run


def generation(tokenizer, **options):
    """Rows end at a line break, so at different lengths."""
    (line_break,) = tokenizer("\n")["input_ids"]
    ends = {"eos_token_id": [tokenizer.eos_token_id, line_break], "pad_token_id": tokenizer.pad_token_id}
    return GenerationConfig(max_new_tokens=32, **{**ends, **options})


LONG = {"generation_max_length": 48}
CASES = {
    "evaluate": lambda tokenizer: LONG,
    "predict": lambda tokenizer: {**LONG, "method": "predict"},
    "row after row": lambda tokenizer: {**LONG, "batch_size": 1},
    "padded on the right": lambda tokenizer: {**LONG, "padding_side": "right", "batch_size": 3},
    "arguments of generate": lambda tokenizer: {"request": {"max_new_tokens": 20, "do_sample": False}},
    "a generation config": lambda tokenizer: {
        "generation_config": generation(tokenizer, do_sample=False, repetition_penalty=1.1),
        "batch_size": 3,
    },
    "a generation config that samples": lambda tokenizer: {
        "generation_config": generation(tokenizer, do_sample=True, top_k=20, eos_token_id=tokenizer.eos_token_id),
        "method": "predict",
    },
    "while it trains": lambda tokenizer: {
        **LONG,
        "method": "train",
        "max_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
    },
}


@pytest.mark.parametrize("case", quick(CASES))
def test_predictions_and_metrics_are_the_same(case, evaluate, load_model, tokenizer, attach_head):
    plain = evaluate(load_model(), **CASES[case](tokenizer))
    model = load_model()
    speculator = attach_head(model)
    attached = evaluate(model, **CASES[case](tokenizer))
    hf_speculate.detach(model)
    assert len(plain.predictions) == (2 if case == "while it trains" else 1)
    for ours, stocks in zip(attached.predictions, plain.predictions, strict=True):
        numpy.testing.assert_array_equal(ours, stocks)
    assert attached.metrics == plain.metrics
    assert speculator.stats.accepted_tokens > 10
    assert not speculator.stats.fallbacks


@pytest.mark.rest
def test_beams_are_predicted_without_the_speculator(evaluate, load_model, attach_head):
    request = {"method": "predict", "generation_max_length": 40, "generation_num_beams": 2}
    (plain,) = evaluate(load_model(), **request).predictions
    model = load_model()
    speculator = attach_head(model)
    (attached,) = evaluate(model, **request).predictions
    hf_speculate.detach(model)
    numpy.testing.assert_array_equal(attached, plain)
    (reason,) = speculator.stats.fallbacks
    assert "beam_search" in reason
