"""`exact=True`: text, scores, cache entries and RNG of plain `generate` in 16 bit, bit for bit; or a refusal."""

from __future__ import annotations

import copy
import random
from functools import partial

import pytest
import torch
from transformers import (
    AttentionInterface,
    DynamicCache,
    MistralConfig,
    MistralForCausalLM,
)

import hf_speculate
from hf_speculate import Speculator
from hf_speculate.attention.per_node import PerNodeAttention
from hf_speculate.cache import cache_of
from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.forward import MAX_NATIVE_ROWS, exact_sizes
from hf_speculate.forward.exact import first_difference, product_sizes
from hf_speculate.testing import RandomDrafter, ScriptedDrafter
from hf_speculate_gguf import load_model
from hf_speculate_gguf.native.layers import MOST_ROWS
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions

from ..support.inputs import padded_batch, random_prompt
from ..support.models import VOCAB_SIZE, Experts, build_tiny_opt, random_model
from ..support.random_gguf import FileShape, one_type, q4_k_m, write_random_file
from ..support.tiers import quick
from ..support.tiny_heads import HIDDEN, random_eagle, random_medusa


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CHOICES = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))


def generate(model, inputs, speculator, seed, **request):
    torch.manual_seed(seed)
    told = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "pad_token_id": 0}
    return model.generate(**inputs, **told, **request, speculator=speculator), torch.get_rng_state()


def assert_equal_bits(model, inputs, drafter, seed=0, **request):
    plain, rng = generate(model, inputs, None, seed, **request)
    speculator = Speculator(drafter, adaptive=False, exact=True)
    ours, our_rng = generate(model, inputs, speculator, seed, **request)
    assert torch.equal(ours.sequences, plain.sequences)
    assert torch.equal(our_rng, rng)
    for name in ("scores", "logits"):
        for step, (mine, its) in enumerate(zip(ours[name], plain[name], strict=True)):
            rows = [row for row in range(len(its)) if not is_over(plain.sequences[row], inputs, step, request)]
            assert torch.equal(mine[rows], its[rows]), f"{name} of step {step}"
    if inputs["input_ids"].shape[0] == 1:
        for mine, its in zip(cache_of(ours).layers, cache_of(plain).layers, strict=True):
            assert torch.equal(mine.keys, its.keys)
            assert torch.equal(mine.values, its.values)
    return speculator.stats


def is_over(row, inputs, step, request):
    """What a row shows of its padding is its own affair."""
    ends = request.get("eos_token_id")
    new = row[inputs["input_ids"].shape[1] :][:step].tolist()
    return ends is not None and any(token in ends for token in new)


def drafters(model, inputs, choose):
    """One of the kinds that there are."""
    heads = ["eagle", "medusa"] if model.config.hidden_size == HIDDEN else []
    kind = choose.choice(["scripted", "random", "draft model", *heads])
    if kind == "scripted":
        text = model.generate(**inputs, max_new_tokens=40, pad_token_id=0, speculator=None)
        branching = choose.choice([(1, 1, 1, 1), (3, 2, 1), (2, 2, 2)])
        script = text[:, inputs["input_ids"].shape[1] :]
        return ScriptedDrafter(script, branching, accuracy=0.8, vocab_size=VOCAB_SIZE)
    if kind == "random":
        return RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=choose.choice([4, 12, 40]), seed=choose.randrange(99))
    if kind == "draft model":
        return DraftModelDrafter(model, DraftModelOptions(depth=choose.randint(1, 5), top_k=choose.randint(1, 3)))
    return random_eagle(3, 3, 10, model, False) if kind == "eagle" else random_medusa(CHOICES, model)


def run(num_cases, make_model, choose):
    """Bits of this machine: a batch whose products are not those of single rows is refused, as it must be."""
    accepted = drafted = 0
    for case in range(num_cases):
        model = make_model(choose)
        lengths = choose.choice([(choose.randint(1, 40),), (choose.randint(1, 40),), (9, 5), (4, 4, 4)])
        inputs = padded_batch(partial(random_prompt, seed=choose.randrange(50)), lengths)
        request = choose.choice([{}, {"do_sample": True}, {"do_sample": True, "temperature": 0.7, "top_k": 20}])
        request = request | choose.choice([{}, {}, {"repetition_penalty": 1.2}, {"eos_token_id": [3, 30, 60, 90]}])
        request["max_new_tokens"] = choose.randint(1, 30)
        try:
            stats = assert_equal_bits(model, inputs, drafters(model, inputs, choose), seed=case, **request)
        except UnsupportedRequestError as error:
            if len(lengths) == 1 or "otherwise than each alone" not in str(error):
                raise
            continue
        accepted, drafted = accepted + stats.accepted_tokens, drafted + stats.drafted_tokens
    assert 0 < accepted < drafted


# Windows of all layers, of some, and none; texts of 2 to 70 tokens cross them.
SHAPES = (
    {"architecture": "llama"},
    {"architecture": "qwen2"},
    {"architecture": "mistral", "sliding_window": 8},
    {"architecture": "mistral", "sliding_window": 30},
    {"architecture": "qwen2", "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
)


def dense(tiny_model, dtype, choose):
    tied, attention = choose.random() < 0.5, choose.choice(["sdpa", "sdpa", "eager"])
    shape = choose.choice(SHAPES)
    return tiny_model(dtype=dtype, attention=attention, seed=choose.randrange(4), tied=tied, **shape)


@pytest.mark.parametrize("dtype", quick(DTYPES.values()), ids=DTYPES)
@pytest.mark.parametrize("part", quick(range(4)))
def test_random_requests_are_exact(tiny_model, dtype, part):
    run(12, partial(dense, tiny_model, dtype), random.Random(part))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_thousand_random_requests_are_exact(tiny_model, dtype):
    run(1000, partial(dense, tiny_model, dtype), random.Random(99))


@pytest.mark.parametrize(("attention", "window"), [("sdpa", 8), pytest.param("eager", 24, marks=pytest.mark.rest)])
def test_padded_batches_past_a_window_are_exact(attention, window):
    """Rows of different lengths cross the ends of windows at different rounds; products of these shapes are those of
    single rows, wherever this was tried."""
    config = MistralConfig(
        vocab_size=192,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        sliding_window=window,
        initializer_range=0.1,
        eos_token_id=None,
        attn_implementation=attention,
    )
    model = random_model(MistralForCausalLM, config).to(torch.bfloat16)
    batch = padded_batch(random_prompt, (16, 3, 9))
    reason = exact_sizes(model, DynamicCache(config=config), 3, True)
    if "otherwise than each alone" in reason:
        pytest.skip(reason)
    for request in ({}, {"do_sample": True}):
        drafter = DraftModelDrafter(model, DraftModelOptions(depth=4, top_k=2))
        stats = assert_equal_bits(model, batch, drafter, max_new_tokens=24, **request)
        assert stats.accepted_tokens > 20


RECIPES = {"Q4_0": one_type("Q4_0"), "Q8_0": one_type("Q8_0"), "Q4_K_M": q4_k_m(2)}


def packed(tmp_path, kind):
    write_random_file(tmp_path / "a.gguf", FileShape("llama", VOCAB_SIZE, 256, 256, 2, 4, 2, 512), RECIPES[kind])
    model = load_model(str(tmp_path / "a.gguf"), dtype=torch.bfloat16)
    model.generation_config.pad_token_id = 0
    return model


@pytest.mark.slow
@pytest.mark.usefixtures("needs_kernel")
@pytest.mark.parametrize("kind", RECIPES)
def test_many_random_requests_of_packed_targets_are_exact(tmp_path, kind):
    model = packed(tmp_path, kind)
    run(300, lambda choose: model, random.Random(5))


@pytest.mark.usefixtures("needs_kernel")
@pytest.mark.parametrize("kind", quick(RECIPES, "Q4_0", "Q4_K_M"))
def test_random_requests_of_packed_targets_are_exact(tmp_path, kind):
    """The kernel computes every row by itself; trees are cut to the rows that it takes."""
    model = packed(tmp_path, kind)
    run(12, lambda choose: model, random.Random(1))
    wide = RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=200)
    batch = padded_batch(random_prompt, (9, 5, 7))
    assert_equal_bits(model, batch, wide, max_new_tokens=20)
    speculator = Speculator(wide, adaptive=False, exact=True)
    rounds = hf_speculate.rounds(model, **batch, max_new_tokens=12, speculator=speculator)
    widest = max(round.tree.num_nodes for round in rounds)
    assert widest == MAX_NATIVE_ROWS
    assert MAX_NATIVE_ROWS == MOST_ROWS


def test_model_with_few_positions_is_exact():
    """The model's table of positions is shorter than most prefixes of the trial."""
    model = copy.deepcopy(build_tiny_opt(64)).to(torch.bfloat16)
    drafter = RandomDrafter(vocab_size=VOCAB_SIZE)
    stats = assert_equal_bits(model, {"input_ids": random_prompt(9)}, drafter, max_new_tokens=20)
    assert stats.target_forwards


class TestRefusals:
    def refused(self, model, reason, inputs=None, drafter=None):
        inputs = inputs or {"input_ids": random_prompt(9)}
        speculator = Speculator(drafter or RandomDrafter(vocab_size=VOCAB_SIZE), exact=True)
        with pytest.raises(UnsupportedRequestError, match=reason):
            model.generate(**inputs, max_new_tokens=8, speculator=speculator)
        plain = model.generate(**inputs, max_new_tokens=8, speculator=None)
        hf_speculate.attach(model, speculator)
        assert torch.equal(model.generate(**inputs, max_new_tokens=8), plain)
        hf_speculate.detach(model)
        assert speculator.stats.target_forwards == 0
        assert len(speculator.stats.fallbacks) == 1

    @pytest.mark.rest  # flex attention takes seconds to load
    def test_exact_refuses_other_attention(self, tiny_model):
        model = tiny_model(attention="flex_attention", dtype=torch.bfloat16)
        self.refused(model, "attn_implementation='sdpa' or 'eager', .* has 'flex_attention'")

    def test_exact_refuses_autocast(self, tiny_model):
        with torch.autocast("cpu", torch.bfloat16):
            self.refused(tiny_model(seed=14), "autocast is on")

    def test_exact_names_the_layer_that_mixes_positions(self, tiny_model, monkeypatch):
        model = tiny_model(dtype=torch.bfloat16, seed=11)
        norm = model.model.layers[1].input_layernorm
        forward = norm.forward
        monkeypatch.setattr(norm, "forward", lambda states: forward(states) + 1e-2 * (states.shape[1] > 1))
        self.refused(model, "a tree differs from single steps in layer 2, after 9 tokens")

    def test_exact_refuses_batches_whose_products_round_differently(self, tiny_model, monkeypatch):
        model = tiny_model(dtype=torch.bfloat16, seed=12)
        monkeypatch.setattr("hf_speculate.forward.exact.COUNTS", (2, 4))
        batch = padded_batch(random_prompt, (9, 5, 7))
        self.refused(model, r"a product of \[.*\] rounds 3 rows otherwise than each alone", batch)

    def test_exact_refuses_attention_weights(self, tiny_model):
        model = tiny_model(dtype=torch.bfloat16, attention="eager")
        speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE), exact=True)
        request = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_attentions": True}
        with pytest.raises(UnsupportedRequestError, match="output_attentions=True cannot be had with it"):
            model.generate(random_prompt(9), **request, speculator=speculator)
        plain = model.generate(random_prompt(9), **request)
        hf_speculate.attach(model, speculator)
        ours = model.generate(random_prompt(9), **request)
        hf_speculate.detach(model)
        assert torch.equal(ours.sequences, plain.sequences)
        assert len(ours.attentions) == len(plain.attentions)

    def test_products_of_other_kinds_are_tried_with_many_rows(self, tiny_model):
        """Experts and their like: here a product that rounds 24 rows and more otherwise, which no tree of 8 shows."""
        model = tiny_model(dtype=torch.bfloat16, seed=15)
        model.model.layers[1].mlp = Experts(model.model.layers[1].mlp.down_proj.weight.shape[0])
        assert not first_difference(model, product_sizes(model))
        self.refused(model, "layer 2, with 24 tokens at once, where Experts may multiply by other means than nn.Linear")

    @pytest.mark.parametrize(("name", "value"), [("compile", True), ("acceptance", "typical"), ("ahead", True)])
    def test_exact_refuses_options_that_cannot_promise_it(self, name, value):
        with pytest.raises(ValueError, match=f"which {name}= cannot promise"):
            Speculator(RandomDrafter(vocab_size=VOCAB_SIZE), exact=True, **{name: value})


def test_exact_leaves_the_attention_table_unchanged(tiny_model, monkeypatch):
    """The table of attentions is changed only while an exact forward of an eager model runs."""
    stock, seen, drafter = AttentionInterface.get_interface, set(), RandomDrafter(vocab_size=VOCAB_SIZE)
    own = PerNodeAttention.attend

    def attend(walk, *args, **kwargs):
        seen.add(AttentionInterface.get_interface is stock)
        return own(walk, *args, **kwargs)

    monkeypatch.setattr(PerNodeAttention, "attend", attend)
    for attention, is_left_alone in (("eager", False), ("sdpa", True)):
        model = tiny_model("llama", dtype=torch.bfloat16, attention=attention)
        assert_equal_bits(model, {"input_ids": torch.tensor([[3, 4, 5, 3, 4]])}, drafter, max_new_tokens=8)
        assert seen == {is_left_alone}
        assert AttentionInterface.get_interface is stock
        seen.clear()
