"""Attention backends in training: cuDNN's is off in forwards and backwards, and as it was afterwards."""

from __future__ import annotations

from collections import defaultdict

import pytest
from torch.backends import cuda
from transformers import AutoModelForCausalLM

from hf_speculate.attention import backends
from hf_speculate_training import DataOptions, HeadTrainer, HeadTrainingArguments
from hf_speculate_training.data import Collator, prepare_data
from hf_speculate_training.methods.eagle import Eagle3Method, Eagle3TrainingOptions, new_eagle3, unrolled


@pytest.fixture
def seen(monkeypatch):
    """Whether cuDNN was on, by place: "head", "backward of the head", "target"."""
    monkeypatch.setattr(backends, "CHOOSING", frozenset({"cpu"}))
    seen, attend = defaultdict(set), unrolled.scaled_dot_product_attention

    def note(*arguments, **keywords):
        seen["head"].add(cuda.cudnn_sdp_enabled())
        mixed = attend(*arguments, **keywords)
        if mixed.requires_grad:
            mixed.register_hook(lambda _gradient: seen["backward of the head"].add(cuda.cudnn_sdp_enabled()))
        return mixed

    monkeypatch.setattr(unrolled, "scaled_dot_product_attention", note)
    yield seen
    is_on = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(True)
    assert is_on, "restored"


def watch(target, seen) -> None:
    attention = target.model.layers[0].self_attn
    attention.register_forward_pre_hook(lambda *_: seen["target"].add(cuda.cudnn_sdp_enabled()))


def test_trainer_turns_cudnn_attention_off(saved_target, own_texts, byte_tokenizer, tmp_path, seen):
    target = AutoModelForCausalLM.from_pretrained(saved_target).eval().requires_grad_(False)
    data = prepare_data(str(own_texts), byte_tokenizer, DataOptions(max_length=48))
    arguments = HeadTrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, save_strategy="no", use_cpu=True
    )
    method = Eagle3Method(new_eagle3(target), target, options=Eagle3TrainingOptions(steps=2))
    rows = {"train_dataset": data.rows(), "eval_dataset": data.rows()}
    trainer = HeadTrainer(target, method, arguments, data_collator=Collator(), evaluation=False, **rows)
    watch(target, seen)
    trainer.train()
    assert seen == {"head": {False}, "backward of the head": {False}, "target": {False}}
    seen.clear()
    trainer.evaluate()
    assert seen == {"head": {False}, "target": {False}}
