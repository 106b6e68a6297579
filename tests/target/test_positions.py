"""Models with a table of positions: drafts never look up what plain `generate` would not have come to."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM

from hf_speculate import Speculator
from hf_speculate.target.positions import takes_position_ids
from hf_speculate.testing import ScriptedDrafter
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions

from ..support.criteria import EndsRows
from ..support.inputs import padded_batch, random_prompt
from ..support.models import SPECIAL_TOKENS, VOCAB_SIZE, build_tiny_gpt2, build_tiny_model, build_tiny_opt, random_model


@cache
def build(kind, size, seed=0):
    if kind in ("gpt2", "opt"):
        return {"gpt2": build_tiny_gpt2, "opt": build_tiny_opt}[kind](num_positions=size, seed=seed)
    common = {"vocab_size": VOCAB_SIZE, "initializer_range": 0.3, **SPECIAL_TOKENS}
    if kind == "bloom":
        return random_model(BloomForCausalLM, BloomConfig(hidden_size=32, n_layer=2, n_head=4, **common), seed)
    sizes = {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": size}
    return random_model(MptForCausalLM, MptConfig(**sizes, use_cache=True, **common), seed)


def run(model, inputs, speculator=None, **request):
    torch.manual_seed(2)
    return model.generate(**inputs, speculator=speculator, **request), torch.get_rng_state()


def assert_same(model, inputs, speculator, **request):
    plain, ours = run(model, inputs, **request), run(model, inputs, speculator, **request)
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])
    return plain[0]


def late_token(text, first, last):
    """One of those between `first` and `last` that the text has not had before."""
    tokens = text.tolist()
    return next(tokens[i] for i in range(last, first, -1) if tokens[i] not in tokens[:i])


DRAFTS = [((1,) * 8, 1.0), ((2, 2, 1), 0.7), ((3, 1, 1, 1, 1, 1), 0.0)]


pytestmark = pytest.mark.usefixtures("unchecked_shapes")


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
class TestTarget:
    @pytest.mark.parametrize(("branching", "accuracy"), DRAFTS)
    @pytest.mark.parametrize("do_sample", [False, True])
    def test_target_drafts_near_the_end_of_its_position_table(self, kind, branching, accuracy, do_sample):
        model, inputs = build(kind, 32), {"input_ids": random_prompt(9)}
        text = run(model, inputs, max_new_tokens=23, do_sample=do_sample)[0]
        request = {"max_new_tokens": 100, "do_sample": do_sample, "eos_token_id": late_token(text[0], 26, 31)}
        drafter = ScriptedDrafter(text[:, 9:], branching, accuracy=accuracy, vocab_size=VOCAB_SIZE)
        speculator = Speculator(drafter)
        assert assert_same(model, inputs, speculator, **request).shape[1] <= 32
        assert speculator.stats.drafted_tokens > 0

    @pytest.mark.parametrize(("lengths", "ends"), [((9, 4, 7), (24, 13, 17)), ((3, 12), (9, 21)), ((12, 3), (9, 21))])
    def test_target_rows_reach_the_end_of_the_table_apart(self, kind, lengths, ends):
        model, inputs, width = build(kind, 32), padded_batch(random_prompt, lengths), max(lengths)
        text = run(model, inputs, max_new_tokens=33 - width)[0]
        drafter = ScriptedDrafter(text[:, width:], (2, 1, 1, 1), accuracy=0.9, vocab_size=VOCAB_SIZE)
        criteria = [EndsRows(inputs["input_ids"], ends)]
        assert_same(model, inputs, Speculator(drafter), max_new_tokens=100, stopping_criteria=criteria)

    def test_target_can_use_its_whole_position_table(self, kind):
        model, inputs = build(kind, 32), {"input_ids": random_prompt(9)}
        # The last token has no position: nothing is computed from it.
        text = run(model, inputs, max_new_tokens=24)[0]
        speculator = Speculator(ScriptedDrafter(text[:, 9:], (1,) * 6, vocab_size=VOCAB_SIZE))
        assert_same(model, inputs, speculator, max_new_tokens=24)
        assert speculator.stats.target_forwards == 4, "7 + 7 + 7 + 2 tokens behind the prompt's"

    @pytest.mark.parametrize("accuracy", [1.0, 0.0])
    def test_target_fails_beyond_its_position_table_as_stock_does(self, kind, accuracy):
        model, inputs, seen = build(kind, 32), {"input_ids": random_prompt(9)}, []

        class Streamer:
            def put(self, value):
                seen[-1].append(value.numel())

            def end(self):
                pass

        drafter, errors = ScriptedDrafter([5] * 30, (1,) * 6, accuracy=accuracy, vocab_size=VOCAB_SIZE), []
        for speculator in (None, Speculator(drafter)):
            seen.append([])
            with pytest.raises(Exception) as info:  # noqa: PT011  (whatever stock raises)
                run(model, inputs, speculator, max_new_tokens=30, streamer=Streamer())
            errors.append(info)
        assert errors[0].type is errors[1].type
        assert str(errors[0].value) == str(errors[1].value)
        assert seen[0] == seen[1]


@pytest.mark.parametrize(("kind", "top_k"), [("gpt2", 1), ("opt", 2)])
class TestDraftModel:
    def speculator(self, target, kind, top_k, size=32, depth=3):
        drafter = DraftModelDrafter(build(kind, size, 1), DraftModelOptions(depth=depth, top_k=top_k))
        return Speculator(drafter)

    @pytest.mark.parametrize(("depth", "do_sample"), [(3, True), (40, False)])
    def test_draft_model_stops_where_its_position_table_ends(self, kind, top_k, depth, do_sample):
        target, inputs = build("gpt2", 128), {"input_ids": random_prompt(9)}
        speculator = self.speculator(target, kind, top_k, depth=depth)
        assert_same(target, inputs, speculator, max_new_tokens=34, do_sample=do_sample)
        assert speculator.stats.drafted_tokens > 0
        assert speculator.stats.rounds_without_draft >= 43 - 33, "behind its table it drafts nothing"

    @pytest.mark.parametrize("length", [31, 32, 33, 60])
    def test_draft_model_takes_prompts_beyond_its_position_table(self, kind, top_k, length):
        target, inputs = build("gpt2", 128), {"input_ids": random_prompt(length)}
        speculator = self.speculator(target, kind, top_k)
        assert_same(target, inputs, speculator, max_new_tokens=12)
        assert speculator.stats.rounds_without_draft >= 9

    @pytest.mark.parametrize("lengths", [(20, 9, 14), (40, 3)])
    @pytest.mark.parametrize("request_", [{"do_sample": True}, {"eos_token_id": [*range(3, 6)]}], ids=str)
    def test_draft_model_with_a_short_position_table_takes_batches(self, kind, top_k, lengths, request_):
        target, inputs = build("gpt2", 128), padded_batch(random_prompt, lengths)
        assert_same(target, inputs, self.speculator(target, kind, top_k), max_new_tokens=30, **request_)


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
class TestNoPositionIds:
    @pytest.mark.parametrize("accuracy", [1.0, 0.5])
    def test_models_without_position_ids_give_plain_text(self, kind, accuracy):
        model = build(kind, 32)
        for inputs, width in (({"input_ids": random_prompt(9)}, 9), (padded_batch(random_prompt, (9, 4, 7)), 9)):
            text = run(model, inputs, max_new_tokens=22)[0]
            drafter = ScriptedDrafter(text[:, width:], accuracy=accuracy, vocab_size=VOCAB_SIZE)
            speculator = Speculator(drafter)
            criteria = [EndsRows(inputs["input_ids"], [21] * len(text))]
            assert_same(model, inputs, speculator, max_new_tokens=100, stopping_criteria=criteria)
            assert speculator.stats.drafted_tokens > 0

    @pytest.mark.parametrize("lengths", [(9,), (25, 3, 14), "all padded"], ids=str)
    def test_models_without_position_ids_can_be_draft_models(self, kind, lengths):
        """They count the padding, and the places of shorter rows behind which the longest goes on."""
        target, inputs = (
            build("gpt2", 128),
            padded_batch(random_prompt, (25, 25) if lengths == "all padded" else lengths),
        )
        if lengths == "all padded":
            inputs["attention_mask"][:, :12] = 0
        speculator = Speculator(DraftModelDrafter(build(kind, 32, 1), DraftModelOptions(depth=3)))
        assert_same(target, inputs, speculator, max_new_tokens=20)
        assert speculator.stats.drafted_tokens > 0


def test_takes_position_ids_follows_a_replaced_forward():
    model = copy.copy(build_tiny_model("llama"))
    assert takes_position_ids(model)
    model.forward = lambda input_ids: None
    assert not takes_position_ids(model)
    del model.forward
    assert takes_position_ids(model)
