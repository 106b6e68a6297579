"""TRL's trainers with an attached head: rollouts, logs and weights are plain's, also after optimizer steps that the
head was not trained for (`make ecosystem`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import GenerationConfig

import hf_speculate

from ...benchmarks.rollouts import RolloutSettings, bench_rollouts
from .conftest import HEAD, QUIET, without_timings


pytestmark = pytest.mark.usefixtures("unchecked_shapes")
trl = pytest.importorskip("trl", reason="trl is not installed: `make ecosystem` sets it up")

PROMPTS = ["def add(a, b):\n", "class Stack:\n    def", "import os\n\n", "for i in range("]
NUM_STEPS = 4
# The bundled tokenizer has no template, and GKD takes only conversations.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def arguments(kind, folder, **more):
    """Arguments of a trainer, of the class `kind`."""
    return kind(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=2,
        logging_steps=1,
        bf16=False,
        **{**QUIET, "max_steps": 2, **more},
    )


def spaces(prompts, completions: list[str], **_):
    """Rewards text with many spaces."""
    return [text.count(" ") / (len(text) + 1) for text in completions]


def prompts():
    return Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])


def examples():
    return Dataset.from_list([{"prompt": prompt, "completion": "    pass\n"} for prompt in PROMPTS])


def rewarded(name, **more):
    """A function that makes a trainer of rewarded rollouts, which generates in its evaluation as well."""

    def make(model, tokenizer, folder, load_model):
        evaluated = {"eval_strategy": "steps", "eval_steps": 2, "num_generations": 2, "max_completion_length": 24}
        options = {key: value for key, value in more.items() if key != "peft_config"}
        return getattr(trl, f"{name}Trainer")(
            model,
            spaces,
            args=arguments(getattr(trl, f"{name}Config"), folder, **(evaluated | options)),
            train_dataset=prompts(),
            eval_dataset=prompts(),
            processing_class=tokenizer,
            peft_config=more.get("peft_config"),
        )

    return make


def distillation(model, tokenizer, folder, load_model):
    return trl.DistillationTrainer(
        model,
        teacher_model=load_model(),
        args=arguments(trl.DistillationConfig, folder, max_completion_length=24),
        train_dataset=prompts(),
        processing_class=tokenizer,
    )


def online_dpo(model, tokenizer, folder, load_model, **more):
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    return OnlineDPOTrainer(
        model,
        ref_model=load_model(),
        reward_funcs=spaces,
        args=arguments(OnlineDPOConfig, folder, max_new_tokens=24, **{"gradient_checkpointing": False, **more}),
        train_dataset=prompts(),
        processing_class=tokenizer,
    )


def gkd(model, tokenizer, folder, load_model):
    """Rollouts of a model in training mode, as a dict."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    tokenizer.chat_template = TEMPLATE
    answer = {"role": "assistant", "content": "pass"}
    conversations = [{"messages": [{"role": "user", "content": prompt}, answer]} for prompt in PROMPTS]
    return GKDTrainer(
        model,
        teacher_model=load_model(),
        args=arguments(GKDConfig, folder, max_new_tokens=24, lmbda=1.0, max_length=64, gradient_checkpointing=False),
        train_dataset=Dataset.from_list(conversations),
        processing_class=tokenizer,
    )


def logged_completions(**generation):
    """A function that makes a trainer that only evaluates by losses, and a callback that logs completions."""

    def make(model, tokenizer, folder, load_model):
        trainer = trl.SFTTrainer(
            model,
            args=arguments(trl.SFTConfig, folder, max_length=64),
            train_dataset=examples(),
            eval_dataset=examples(),
            processing_class=tokenizer,
        )
        config = GenerationConfig(max_new_tokens=24, pad_token_id=0, eos_token_id=0, **generation)
        callback = trl.LogCompletionsCallback(trainer, generation_config=config, freq=1)
        callback.eval_dataset = prompts()
        trainer.add_callback(callback)
        return trainer

    return make


TRAINERS: dict[str, Callable] = {
    "GRPO": rewarded("GRPO", max_steps=NUM_STEPS, beta=0.0),
    "GRPO, an adapter": rewarded(
        "GRPO", peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    ),
    "GRPO, processors": rewarded(
        "GRPO", top_k=20, repetition_penalty=1.1, generation_kwargs={"min_new_tokens": 3, "no_repeat_ngram_size": 4}
    ),
    "GRPO, a static cache": rewarded("GRPO", cache_implementation="static"),
    "RLOO": rewarded("RLOO"),
    "online DPO": online_dpo,
    "GKD": gkd,
    "distillation": distillation,
    "completions in the log": logged_completions(do_sample=False),
    "sampled completions in the log": logged_completions(do_sample=True, top_k=20),
}


@pytest.fixture
def train(load_model, tokenizer, tmp_path, monkeypatch):
    """A function that trains a model; returns the ids of every rollout, the log, and the weights."""

    def run(model, make, folder):
        rollouts = []
        generate = type(model).generate

        def recorded(self, *args, **kwargs):
            output = generate(self, *args, **kwargs)
            if self is model:  # a trial of hf_speculate's runs on a copy
                rollouts.append(getattr(output, "sequences", output).tolist())
            return output

        with monkeypatch.context() as patch:
            patch.setattr(type(model), "generate", recorded)
            torch.manual_seed(0)
            trainer = make(model, tokenizer, tmp_path / folder, load_model)
            trainer.train()
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        return rollouts, without_timings(trainer.state.log_history), weights

    return run


@pytest.mark.parametrize("name", TRAINERS)
def test_rollouts_logs_and_weights_are_the_same(name, train, load_model, attach_head):
    plain = train(load_model(), TRAINERS[name], "plain")
    model = load_model()
    speculator = attach_head(model)
    attached = train(model, TRAINERS[name], "attached")
    hf_speculate.detach(model)
    assert len(plain[0]) >= 2
    assert attached[:2] == plain[:2]
    assert attached[2].keys() == plain[2].keys()
    assert all(torch.equal(attached[2][key], value) for key, value in plain[2].items())
    assert speculator.stats.calls == len(plain[0])
    assert speculator.stats.accepted_tokens > 10
    assert not speculator.stats.fallbacks


def test_text_after_training_is_plains(train, load_model, tokenizer, attach_head):
    model = load_model()
    before = model.lm_head.weight.detach().clone()
    attach_head(model)
    train(model, TRAINERS["GRPO"], "attached")
    model.eval()
    assert not torch.equal(model.lm_head.weight, before), "nothing was learnt: nothing is shown"
    inputs = tokenizer("class Stack:\n    def __init__(self):", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=48)
    assert torch.equal(output, model.generate(**inputs, max_new_tokens=48, speculator=None))
    hf_speculate.detach(model)


def test_rollouts_that_draft_from_earlier_answers_are_plain(train, load_model):
    """With the policy, and with fixed trees, whose acceptance depends on no clock: a store raises it."""
    steps = {"num_train_epochs": 3, "max_steps": -1, "eval_strategy": "no", "learning_rate": 1e-5}
    make = rewarded("GRPO", num_generations=4, **steps)
    plain = train(load_model(), make, "plain")
    assert len(plain[0]) == 3 * len(PROMPTS)
    yields = []
    for options in ("store=true", "store=true,adaptive=false", "store=false,adaptive=false"):
        model = load_model()
        speculator = hf_speculate.attach(model, f"suffix:{options}")
        result = train(model, make, options)
        hf_speculate.detach(model)
        assert result[:2] == plain[:2]
        assert all(torch.equal(result[2][key], value) for key, value in plain[2].items())
        assert not speculator.stats.fallbacks
        yields.append(speculator.stats.tokens_per_round)
    _, with_store, without = yields
    assert with_store > 1.05 * without


def test_the_benchmark_of_rollouts_gives_each_methods_figures():
    settings = RolloutSettings(speculators=["suffix:store=true", str(HEAD)], **RolloutSettings.QUICK)
    result = bench_rollouts(settings)
    assert [row["same"] for row in result["rows"]] == [result["num_rollouts"]] * 3 == [4] * 3
    plain, ours, head = result["rows"]
    assert plain["speedup"] == 1.0
    assert not plain["tokens_per_round"]
    assert all(1.0 <= rate <= 9.0 for row in (ours, head) for rate in row["tokens_per_round"])
    assert len(head["tokens_per_round"]) == 2


def test_rollouts_without_a_cache_are_plain(train, load_model, attach_head):
    """Some trainers switch the cache off while gradients are checkpointed."""

    def make(*given):
        return online_dpo(*given, gradient_checkpointing=True)

    plain = train(load_model(), make, "plain")
    model = load_model()
    speculator = attach_head(model)
    attached = train(model, make, "attached")
    hf_speculate.detach(model)
    assert attached[:2] == plain[:2]
    assert dict(speculator.stats.fallbacks) == {"speculator= needs the KV cache, but use_cache=False.": len(plain[0])}
