"""TRL's GRPO with an attached head: its rollouts are plain's, also behind optimizer steps that the head was not trained
for (`make ecosystem`)."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

import hf_speculate


trl = pytest.importorskip("trl", reason="trl is not installed: `make ecosystem` sets it up")

PROMPTS = ["def add(a, b):\n", "class Stack:\n    def", "import os\n\n", "for i in range("]
NUM_STEPS = 4


def train(model, tokenizer, folder):
    """A few steps; returns the completions of every rollout, (loss, reward) of every step, and the weights."""
    rollouts = []

    def spaces(prompts, completions: list[str], **_):
        """Rewards text with many spaces."""
        rollouts.append(list(completions))
        return [text.count(" ") / (len(text) + 1) for text in completions]

    arguments = trl.GRPOConfig(
        output_dir=str(folder),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=24,
        learning_rate=1e-3,
        beta=0.0,
        seed=3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    data = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    trainer = trl.GRPOTrainer(model, spaces, args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    logged = [(entry["loss"], entry["reward"]) for entry in history]
    return rollouts, logged, {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_rollouts_rewards_and_weights_are_the_same(load_model, tokenizer, attach_head, tmp_path):
    plain = train(load_model(), tokenizer, tmp_path / "plain")
    model = load_model()
    before = model.lm_head.weight.detach().clone()
    speculator = attach_head(model)
    attached = train(model, tokenizer, tmp_path / "attached")
    assert len(plain[0]) == NUM_STEPS
    assert attached[:2] == plain[:2]
    assert all(torch.equal(attached[2][name], value) for name, value in plain[2].items())
    assert speculator.stats.accepted_tokens > 10
    assert not speculator.stats.fallbacks

    model.eval()
    assert not torch.equal(model.lm_head.weight, before), "nothing was learnt: nothing is shown"
    inputs = tokenizer("class Stack:\n    def __init__(self):", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=48)
    assert torch.equal(output, model.generate(**inputs, max_new_tokens=48, speculator=None))
    hf_speculate.detach(model)
