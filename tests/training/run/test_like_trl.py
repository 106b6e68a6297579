"""`HeadTrainer` as people know it from TRL: names and a data set are enough, and each part can be one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM

from hf_speculate import AutoSpeculator
from hf_speculate.hub import repositories
from hf_speculate_training import DataOptions, HeadTrainer, HeadTrainingArguments, MethodSection
from hf_speculate_training.data import Collator, RowDataset, prepare_data
from hf_speculate_training.methods.eagle import Eagle3Method
from hf_speculate_training.run import AcceptanceEvaluation
from hf_speculate_training.sections import RecipeError
from tests.support.hub import FakeHub
from tests.support.training import END, build_byte_tokenizer


CHATS = Dataset.from_list(
    [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i} is {i * i}."}]}
        for i in range(8)
    ]
)
FORMS = {
    "messages": CHATS,
    "text": Dataset.from_list([{"text": f"{i} squared is {i * i}."} for i in range(8)]),
    "prompt + completion": Dataset.from_list([{"prompt": f"{i}?", "completion": f" It is {i * i}."} for i in range(8)]),
}


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


@pytest.mark.parametrize("form", FORMS)
def test_names_and_a_data_set_are_enough(saved_target, args, form):
    trainer = HeadTrainer(str(saved_target), method="eagle3", train_dataset=FORMS[form], args=args)
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
    assert set(found["files"]) == {"README.md", "config.json", "model.safetensors"}


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


def test_without_arguments_they_go_by_the_targets_size(saved_target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = HeadTrainer(str(saved_target), train_dataset=CHATS)
    assert Path(trainer.args.output_dir).name == f"{saved_target.name}-eagle3"
    assert (trainer.args.muon, trainer.args.learning_rate, trainer.args.num_train_epochs) == (True, 4e-3, 4)


def test_a_draft_vocabulary_is_chosen_by_the_data(saved_target, args):
    method = MethodSection(name="eagle3", head={"draft_vocab_size": 40})
    trainer = HeadTrainer(str(saved_target), method=method, train_dataset=CHATS, args=args)
    assert len(trainer.method.draft_vocabulary) == 40
    rows = trainer.train_dataset
    with pytest.raises(RecipeError, match="chosen by the training data, and there are none"):
        HeadTrainer(trainer.target, method, args, train_dataset=rows, processing_class=build_byte_tokenizer())


def test_push_to_hub_uploads_the_head(saved_target, args, tmp_path, monkeypatch):
    hub = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(repositories, "HfApi", hub)
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
