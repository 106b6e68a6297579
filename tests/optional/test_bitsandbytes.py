"""Targets that bitsandbytes quantised: nf4, fp4 with double quantisation, int8; drafted for, and trained on.

They run on its CPU backend. Without the package: `pip install 'hf-speculate[bitsandbytes]'`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Qwen2Config, Qwen2ForCausalLM

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.testing import RandomDrafter, ScriptedDrafter, check_lossless
from hf_speculate_plugins.medusa import MedusaDrafter, MedusaHeads
from hf_speculate_training.run import recipe_from, train_head

from ..support.inputs import character_tokenizer
from ..support.tiny_heads import write_eagle_head


pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'hf-speculate[bitsandbytes]'")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "fp4 double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.float32,
    },
    "int8": {"load_in_8bit": True},
}


def tolerance(kind: str) -> dict[str, Any]:
    """LLM.int8() rounds states to 8 bit before every product: where float32 rounding moves one across a step, logits of
    a random model differ by up to 4 % of the largest. In 4 bit products are those of float32."""
    return {"tolerance": 0.1} if kind == "int8" else {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Qwen2 with a character tokenizer, as it was saved."""
    path, tokenizer = tmp_path_factory.mktemp("target"), character_tokenizer(pad_token="~")
    config = Qwen2Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def quantised(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **more: Any):
    config = KINDS[kind] | ({} if kind == "int8" else {"bnb_4bit_compute_dtype": dtype})
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**config, **more), dtype=dtype, device_map={"": "cpu"}
    ).eval()


def speculators(model, prompt, folder):
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24)[:, prompt.shape[1] :]
    heads = MedusaHeads(torch.randn(3, 1, 64, 64) * 0.1, None, None)
    yield "scripted", Speculator(ScriptedDrafter(text, (3, 2, 1), accuracy=0.8, vocab_size=96))
    yield "random", Speculator(RandomDrafter(vocab_size=96, max_nodes=24))
    yield "prompt lookup", AutoSpeculator.from_name("prompt_lookup", target=model, min_ngram=1)
    yield (
        "eagle",
        AutoSpeculator.from_pretrained(write_eagle_head(folder, 64, 96), target=model, feature_layers=(1, 2, 3)),
    )
    yield "medusa", Speculator(MedusaDrafter.for_target(model, heads=heads))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantises_output", [False, True])
def test_text_is_the_quantised_targets_own(folder, kind, quantises_output, prompt, tmp_path):
    """Heads have the target's embeddings and output matrix, also where bitsandbytes is told to quantise the latter."""
    model = quantised(folder, kind, **({"llm_int8_skip_modules": ["none"]} if quantises_output else {}))
    assert (type(model.lm_head) is torch.nn.Linear) == (not quantises_output)
    ids = prompt(9)
    for name, speculator in speculators(model, ids, tmp_path / "head"):
        greedy = check_lossless(model, speculator, [ids], max_new_tokens=24, **tolerance(kind))
        sampled = {"seeds": (3,), "do_sample": True, "max_new_tokens": 24}
        seeded = check_lossless(model, speculator, [ids], **sampled, **tolerance(kind))
        assert greedy.num_cases + seeded.num_cases == 2, name
        assert speculator.stats.rounds, name
        if name == "scripted":
            assert speculator.stats.accepted_tokens > 5


def test_heads_of_the_unquantised_target_draft_for_the_bundled_one_in_bfloat16():
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "pycoder")
    ids = tokenizer("class Stack:\n    def __init__(self):", return_tensors="pt").input_ids
    model = quantised(EXAMPLES / "pycoder", "nf4", torch.bfloat16)
    speculator = AutoSpeculator.from_pretrained(EXAMPLES / "pycoder-eagle3", target=model)
    report = check_lossless(model, speculator, [ids], max_new_tokens=24)
    assert report.num_cases == 1
    assert (speculator.stats.mean_acceptance_length or 0) > 2


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_a_head_is_trained_on_a_4_bit_target(folder, method, prompt, tmp_path):
    rows = [{"input_ids": prompt(40, seed=i)[0].tolist()} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "target": {"path": str(folder), "quantization": "4bit", "dtype": "float32"},
        "data": {"train": str(tmp_path / "data.jsonl"), "max_length": 40},
        "method": {"name": method},
        "training": {"max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True, "disable_tqdm": True},
        "output": {"folder": str(tmp_path / "out")},
    }
    head = train_head(recipe_from(values))
    found = json.loads((head / "provenance.json").read_text())["target"]["quantization"]
    assert found["quant_method"] == "bitsandbytes"
    assert found["load_in_4bit"]
    model = quantised(folder, "nf4")
    speculator = AutoSpeculator.from_pretrained(head, target=model)
    report = check_lossless(model, speculator, [prompt(9)], max_new_tokens=16)
    assert report.num_cases == 1
    assert speculator.stats.rounds
