"""The trainer: what it learns, logs, keeps, and when it stops; and as people know it from TRL, with names alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainingArguments

from hf_speculate import AutoSpeculator
from hf_speculate.target import unwrap
from hf_speculate_tools.hub import uploads
from hf_speculate_training import DataOptions, HeadTrainer, HeadTrainingArguments, MethodSection
from hf_speculate_training.data import Collator, RowDataset, prepare_data
from hf_speculate_training.methods import StepOutput
from hf_speculate_training.methods.eagle import Eagle3Method, Eagle3TrainingOptions, new_eagle3
from hf_speculate_training.methods.medusa import MedusaMethod, MedusaShape, new_medusa
from hf_speculate_training.run import (
    AcceptanceEvaluation,
    AcceptanceOptions,
    last_checkpoint,
    prompts_of,
    recipe_from,
    train_head,
)
from hf_speculate_training.run.guards import DivergedError
from hf_speculate_training.sections import RecipeError
from tests.support.hub import FakeHub
from tests.support.training import END


@pytest.fixture
def target(saved_target):
    return AutoModelForCausalLM.from_pretrained(saved_target).eval().requires_grad_(False)


@pytest.fixture
def data(own_texts, byte_tokenizer):
    return prepare_data(str(own_texts), byte_tokenizer, DataOptions(max_length=48))  # 12 rows of a document


@pytest.fixture
def make_trainer(target, data, tmp_path):
    """Factory: `make_trainer(method, target=, evaluation=, **training arguments)`."""

    def make(method=None, *, target=target, evaluation=None, **arguments) -> HeadTrainer:
        torch.manual_seed(0)
        method = method or eagle3(unwrap(target), steps=3)
        defaults = {
            "output_dir": str(tmp_path / "out"),
            "max_steps": 3,
            "per_device_train_batch_size": 4,
            "logging_steps": 1,
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            "learning_rate": 3e-3,
        }
        args = HeadTrainingArguments(**(defaults | arguments))
        return HeadTrainer(
            target,
            method,
            args,
            data_collator=Collator(),
            train_dataset=data.rows(),
            eval_dataset=data.rows(),
            evaluation=evaluation,
        )

    return make


def eagle3(target, steps: int) -> Eagle3Method:
    return Eagle3Method(new_eagle3(target), target, options=Eagle3TrainingOptions(steps=steps))


def history_of(trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_thirty_steps_raise_acceptance(make_trainer, target, data, kind):
    """On the texts that it learns: more than the untrained head, through the decoding loop."""
    if kind == "eagle3":
        method, drafting = eagle3(target, steps=3), {"depth": 3}
    else:
        method, drafting = MedusaMethod(new_medusa(target, MedusaShape(num_heads=3, shared_lm_head=False)), target), {}
    options = AcceptanceOptions(nodes=[6], max_new_tokens=20, options=drafting)
    evaluation = AcceptanceEvaluation(prompts_of(data.train, 6), options)
    before = evaluation.measure(target, method)["mean_acceptance_length"]
    schedule = {"max_steps": 30, "per_device_train_batch_size": 12, "learning_rate": 1e-2, "warmup_steps": 2}
    trainer = make_trainer(method, evaluation=evaluation, **schedule)
    trainer.train()
    after = trainer.evaluate()["eval_mean_acceptance_length"]
    assert after > before + 0.15, (before, after)
    assert after == evaluation.measure(target, method)["mean_acceptance_length"]
    losses = history_of(trainer, "loss")
    assert losses[-1] < losses[0]


def test_checkpoints_hold_the_head_alone(make_trainer, target):
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    trainer = make_trainer(save_strategy="steps", save_steps=2, max_steps=2)
    trainer.train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    folder = Path(last_checkpoint(trainer.args.output_dir) or "")
    weights = load_file(folder / "model.safetensors")
    assert set(weights) == {f"head.{name}" for name, _ in trainer.method.head.named_parameters()}
    assert sum(w.numel() for w in weights.values()) < sum(p.numel() for p in target.parameters())
    size = (folder / "optimizer.pt").stat().st_size
    assert size < 3 * (folder / "model.safetensors").stat().st_size


def test_metrics_are_means_since_the_last_entry(make_trainer):
    each = make_trainer(max_steps=4, logging_steps=1)
    each.train()
    pairs = make_trainer(max_steps=4, logging_steps=2)
    pairs.train()
    for name in ("loss", "loss_0", "accuracy_2"):
        single, mean = history_of(each, name), history_of(pairs, name)
        assert mean == pytest.approx([(single[0] + single[1]) / 2, (single[2] + single[3]) / 2], rel=1e-5), name


def test_evaluation_logs_loss_and_accuracy_of_every_step(make_trainer):
    trainer = make_trainer(per_device_eval_batch_size=3)
    metrics = trainer.evaluate()
    assert {"eval_loss", "eval_loss_0", "eval_accuracy_0", "eval_accuracy_2"} <= set(metrics)
    batches = list(trainer.get_eval_dataloader())
    with torch.no_grad():
        outputs = [trainer.method.eval()(batch, trainer.reader(batch)) for batch in batches]
    assert metrics["eval_loss_1"] == pytest.approx(sum(float(o.metrics["loss_1"]) for o in outputs) / len(outputs))
    assert "eval_mean_acceptance_length" not in metrics


def test_accumulated_gradients_are_those_of_the_whole_batch(make_trainer):
    """All rows of the data are as long, so two halves of a batch have the gradient of the whole."""
    weights = []
    for size, accumulated in ((4, 1), (2, 2)):
        # Clipped gradients would not show a wrong scale.
        trainer = make_trainer(
            max_steps=2,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulated,
            optim="sgd",
            learning_rate=0.1,
            max_grad_norm=0.0,
        )
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.method.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)


def test_bf16_autocast_trains_float32_weights(make_trainer):
    trainer = make_trainer(bf16=True)
    seen = []
    trainer.method.head.fc.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    trainer.train()
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in trainer.method.parameters()} == {torch.float32}
    assert all(loss == loss for loss in history_of(trainer, "loss"))


def test_muon_trains_the_matrices_and_resumes(make_trainer, tmp_path):
    """Stopped after two of four steps and resumed: the same losses as in one go."""
    muon = {"muon": True, "adamw_learning_rate": 1e-3, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(**muon)
    whole.train()
    assert [type(part).__name__ for part in whole.optimizer.optimizer._parts] == ["Muon", "AdamW"]
    resumed = make_trainer(**muon, output_dir=str(tmp_path / "other"))
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-2"))
    assert history_of(resumed, "loss") == history_of(whole, "loss")
    states = zip(whole.method.state_dict().values(), resumed.method.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in states)


class Broken(Eagle3Method):
    """Turns bad at a step: its loss, or only its gradient."""

    bad_step, what, step = 2, "loss", -1

    def forward(self, batch, states):
        output = super().forward(batch, states)
        loss = output.loss
        self.step += self.training
        if self.training and self.step == self.bad_step:
            first = next(self.parameters())
            # The square root's derivative at 0 is infinite; times the 0 in front it is not a number.
            loss = loss * float("nan") if self.what == "loss" else loss + 0 * (first * 0).sum().abs().sqrt()
        return StepOutput(loss, output.metrics)


@pytest.mark.parametrize(("what", "words"), [("loss", "the loss became nan"), ("gradient", "the gradient became nan")])
def test_a_loss_that_is_not_a_number_stops_the_run(make_trainer, target, what, words):
    method = Broken(new_eagle3(target), target, options=Eagle3TrainingOptions(steps=2))
    method.what = what
    trainer = make_trainer(method, max_steps=5, save_strategy="steps", save_steps=1)
    with pytest.raises(DivergedError, match=f"{words} at step 3.*last good checkpoint is .*checkpoint-2") as raised:
        trainer.train()
    assert "lower learning rate" in str(raised.value)
    assert all(torch.isfinite(p).all() for p in method.parameters())
    checkpoint = last_checkpoint(trainer.args.output_dir)
    assert checkpoint is not None
    assert checkpoint.endswith("checkpoint-2")
    weights = load_file(Path(checkpoint) / "model.safetensors")
    for name, parameter in method.named_parameters():
        assert torch.equal(weights[name], parameter.detach()), name


def test_plain_training_arguments_will_do(make_trainer, target, data, tmp_path):
    args = TrainingArguments(
        output_dir=str(tmp_path / "plain"), max_steps=1, use_cpu=True, remove_unused_columns=False, disable_tqdm=True
    )
    method = eagle3(target, steps=1)
    HeadTrainer(target, method, args, Collator(), data.rows()).train()
    state = json.loads((tmp_path / "plain" / "checkpoint-1" / "trainer_state.json").read_text())
    assert state["global_step"] == 1


def test_early_stopping_and_the_best_checkpoint(recipe_values):
    """A rate of 0 cannot improve: the second evaluation is the last."""
    recipe_values["training"] |= {"learning_rate": 0.0, "max_steps": 12, "eval_steps": 1, "save_total_limit": 1}
    recipe_values["evaluation"]["patience"] = 1
    folder = train_head(recipe_from(recipe_values))
    found = json.loads((folder / "provenance.json").read_text())["training"]
    assert found["steps"] == 2
    assert found["best_step"] == 1


CHATS = Dataset.from_list(
    [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i} is {i * i}."}]}
        for i in range(8)
    ]
)


@pytest.fixture
def args(tmp_path):
    return HeadTrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )


def test_names_and_a_data_set_are_enough(saved_target, args):
    trainer = HeadTrainer(str(saved_target), method="eagle3", train_dataset=CHATS, args=args)
    trainer.train()
    assert trainer.state.global_step == 2
    assert isinstance(trainer.method, Eagle3Method)
    assert trainer.method.options.steps == 5  # by the target's size
    trainer.save_model()
    target = AutoModelForCausalLM.from_pretrained(saved_target)
    assert AutoSpeculator.from_pretrained(args.output_dir, target=target).drafter.name == "eagle"
    found = json.loads((Path(args.output_dir) / "provenance.json").read_text())
    assert found["training"]["steps"] == 2
    assert len(found["target"]["fingerprint"]) == 64


def test_the_same_head_from_names_and_from_parts_of_ones_own(saved_target, args, byte_tokenizer):
    named = HeadTrainer(str(saved_target), method=MethodSection(name="medusa"), train_dataset=CHATS, args=args)
    named.train()
    model = AutoModelForCausalLM.from_pretrained(saved_target).eval().requires_grad_(False)
    data = prepare_data(CHATS, byte_tokenizer, target_config=model.config, end_ids=[END])
    own = HeadTrainer(
        model, "medusa", args, data_collator=Collator(0), train_dataset=data.rows(), processing_class=byte_tokenizer
    )
    assert own.target is model
    assert own.method.options.soft  # suggested; a section says what it says
    assert not named.method.options.soft
    method = MethodSection(name="eagle3", head={"draft_vocab_size": 40})
    with pytest.raises(RecipeError, match="chosen by the training data, and there are none"):
        HeadTrainer(model, method, args, train_dataset=data.rows(), processing_class=byte_tokenizer)
    assert len(HeadTrainer(model, method, args, train_dataset=CHATS).method.draft_vocabulary) == 40
    own = HeadTrainer(model, named.method, args, train_dataset=CHATS)
    assert own.method is named.method
    assert own.processing_class.chat_template == byte_tokenizer.chat_template


def test_data_that_are_held_out_measure_acceptance(saved_target, args):
    args.eval_strategy = "steps"
    trainer = HeadTrainer(
        str(saved_target),
        train_dataset=CHATS,
        args=args,
        data_options=DataOptions(eval_fraction=0.4, chat=True, packing=False),
    )
    assert isinstance(trainer.train_dataset, RowDataset)
    assert len(trainer.train_dataset) + len(trainer.eval_dataset) == 8
    assert "eval_mean_acceptance_length" in trainer.evaluate()
    trainer.save_model()
    assert "mean acceptance length" in (Path(args.output_dir) / "README.md").read_text()
    for evaluation in (False, AcceptanceEvaluation(trainer.evaluation.prompts[:1])):
        other = HeadTrainer(
            trainer.target, trainer.method, args, train_dataset=CHATS, eval_dataset=CHATS, evaluation=evaluation
        )
        assert other.evaluation is (evaluation or None)


def test_default_arguments_follow_the_targets_size(saved_target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = HeadTrainer(str(saved_target), train_dataset=CHATS)
    assert Path(trainer.args.output_dir).name == f"{saved_target.name}-eagle3"
    assert (trainer.args.muon, trainer.args.learning_rate, trainer.args.num_train_epochs) == (True, 4e-3, 4)


def test_push_to_hub_uploads_the_head(saved_target, args, tmp_path, monkeypatch):
    hub = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(uploads, "HfApi", hub)
    args.hub_model_id = "me/head"
    trainer = HeadTrainer(str(saved_target), train_dataset=CHATS, args=args)
    trainer.push_to_hub(private=True, token="t")
    assert hub.calls[0] == ("create_repo", "me/head", True)
    uploaded = hub.folder("me/head")
    assert sorted(path.name for path in uploaded.iterdir()) == [
        "README.md", "config.json", "model.safetensors", "provenance.json"
    ]  # fmt: skip
    target = AutoModelForCausalLM.from_pretrained(saved_target)
    assert AutoSpeculator.from_pretrained(uploaded, target=target).drafter.name == "eagle"
