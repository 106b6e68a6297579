"""Batches and stops of the `generate` contract: whatever plain `generate` does with them, so do we."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from hf_speculate import Speculator
from hf_speculate.cache import CACHE_NAME, as_cache, cache_of
from hf_speculate.testing import RandomDrafter, ScriptedDrafter
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions
from hf_speculate_plugins.prompt_lookup import PromptLookupDrafter

from ..support.inputs import padded_batch
from ..support.models import VOCAB_SIZE
from ..support.tiers import quick, quick_quarter


NEW_TOKENS = 30
# Drafters for requests whose padding or positions are unusual: a script, and one that computes positions itself.
PADDED = ("mixed tree", "draft model")


def drafters(model, script):
    return {
        "mixed tree": ScriptedDrafter(script, (2, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE),
        "perfect chain": ScriptedDrafter(script, (1,) * 6, vocab_size=VOCAB_SIZE),
        "random": RandomDrafter(vocab_size=VOCAB_SIZE),
        "prompt lookup": PromptLookupDrafter.for_target(model, min_ngram=1),
        "draft model": DraftModelDrafter(model, DraftModelOptions(depth=3, top_k=2)),
    }


def generate(model, inputs, speculator, seed=4, **request):
    torch.manual_seed(seed)
    return model.generate(**inputs, **{"max_new_tokens": NEW_TOKENS, **request}, speculator=speculator)


def assert_equals_plain(model, inputs, make_request=dict, script=None, kinds=None, do_samples=(False, True)):
    """Greedy and sampled; `make_request` makes a fresh request for every call (criteria may have a state)."""
    for do_sample in do_samples:
        plain = generate(model, inputs, None, do_sample=do_sample, **make_request())
        longer = generate(model, inputs, None, do_sample=do_sample) if script is None else script
        script_of = longer[:, inputs["input_ids"].shape[1] :]
        for name, drafter in drafters(model, script_of).items():
            if kinds is None or name in kinds:
                speculator = Speculator(drafter)
                ours = generate(model, inputs, speculator, do_sample=do_sample, **make_request())
                assert torch.equal(ours, plain), f"{name}, do_sample={do_sample}"
    return plain


class TestBatch:
    @pytest.mark.parametrize("architecture", ["llama", "qwen2"])
    def test_eight_ragged_rows_are_each_the_row_alone(self, tiny_model, prompt, architecture):
        model, lengths = tiny_model(architecture), (3, 17, 1, 8, 12, 5, 17, 2)
        inputs, width = padded_batch(prompt, lengths), 17
        alone = [model.generate(prompt(n, seed=i), max_new_tokens=NEW_TOKENS)[0, n:] for i, n in enumerate(lengths)]
        eos = sorted({int(row[4 + 2 * i]) for i, row in enumerate(alone)})
        for stops in ([], eos):
            for name, drafter in drafters(model, torch.stack(alone)).items():
                text = generate(model, inputs, Speculator(drafter), eos_token_id=stops or None)[:, width:]
                for row, expected in zip(text.tolist(), alone, strict=True):
                    tokens = expected.tolist()
                    end = next((i + 1 for i, token in enumerate(tokens) if token in stops), NEW_TOKENS)
                    assert row == tokens[:end] + [0] * (text.shape[1] - end), name

    def test_finished_rows_emit_draft_and_count_nothing(self, tiny_model, prompt):
        model, inputs = tiny_model(), padded_batch(prompt, (9, 9, 9))
        script = generate(model, inputs, None)[:, 9:]
        eos = int(script[1, 3])
        ends = [row.index(eos) + 1 if eos in row else NEW_TOKENS for row in script.tolist()]
        assert min(ends) < max(ends)
        active = []

        class Watching(ScriptedDrafter):
            def start(self, request):
                session = super().start(request)
                draft = session.draft

                def watch(state):
                    active.append(state.active)
                    tree = draft(state)
                    assert all(tree.host.num_drafted(row) == 0 for row in range(3) if not state.active[row])
                    return tree

                session.draft = watch
                return session

        drafter = Watching(script, (2, 2, 1), vocab_size=VOCAB_SIZE)
        request = {"eos_token_id": eos, "return_dict_in_generate": True, "output_scores": True}
        output = generate(model, inputs, Speculator(drafter), **request)
        stats = output.speculation
        assert stats.emitted_tokens + stats.prefill_tokens == sum(ends)
        assert any(not all(row) for row in active)
        plain = generate(model, inputs, None, **request)
        for ours, theirs in zip(output.scores, plain.scores, strict=True):  # padding has scores too
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)

    @pytest.mark.parametrize("mask", ["absent", "ones", "holes", "bool"])
    def test_attention_masks_of_any_form_give_plain_text(self, tiny_model, prompt, mask):
        model = tiny_model("qwen2")
        inputs = {"input_ids": torch.cat([prompt(12, seed=1), prompt(12, seed=2)])}
        if mask != "absent":
            inputs["attention_mask"] = torch.ones(2, 12, dtype=torch.long)
        if mask in ("holes", "bool"):
            inputs["attention_mask"][0, [0, 1, 5]] = 0
            inputs["attention_mask"][1, 7:9] = 0
        if mask == "bool":
            inputs["attention_mask"] = inputs["attention_mask"].bool()
        assert_equals_plain(model, inputs, kinds=PADDED)

    def test_right_padding_gives_the_same_text(self, tiny_model, prompt):
        ids = torch.cat([prompt(8, seed=1), torch.nn.functional.pad(prompt(5, seed=2), (0, 3))])
        assert_equals_plain(tiny_model(), {"input_ids": ids, "attention_mask": (ids != 0).long()}, kinds=PADDED)

    def test_position_ids_of_the_users_own(self, tiny_model, prompt):
        model, inputs = tiny_model("qwen2"), padded_batch(prompt, (9, 4))
        positions = torch.arange(9).expand(2, -1)
        own = {
            "shifted": positions + torch.tensor([[7], [0]]),
            "absolute": positions,
            "stretched": 2 * positions,
            "one row for all": positions[:1] + 3,
        }
        default = generate(model, inputs, None)
        differs = 0
        for position_ids in own.values():
            inputs["position_ids"] = position_ids
            text = assert_equals_plain(model, inputs, kinds=PADDED, do_samples=(False,))
            differs += not torch.equal(text, default)
        assert differs, "positions make no difference: the test shows nothing"

    @pytest.mark.parametrize("lengths", [(9,), (9, 4)], ids=["one", "batch"])
    def test_several_sequences_of_each_prompt(self, tiny_model, prompt, lengths):
        model, inputs = tiny_model(), padded_batch(prompt, lengths)
        request = {"num_return_sequences": 3, "eos_token_id": list(range(3, 9))}
        text = assert_equals_plain(model, inputs, lambda: request, kinds=PADDED, do_samples=(True,))
        assert text.shape[0] == 3 * len(lengths)

    def test_generate_without_a_prompt_gives_plain_text(self, tiny_model):
        model = tiny_model()
        for do_sample in (False, True):
            texts = []
            for speculator in (None, Speculator(RandomDrafter(vocab_size=VOCAB_SIZE)), "prompt_lookup"):
                torch.manual_seed(0)
                texts.append(
                    model.generate(
                        max_new_tokens=NEW_TOKENS, bos_token_id=1, do_sample=do_sample, speculator=speculator
                    )
                )
            assert torch.equal(texts[0], texts[1])
            assert torch.equal(texts[0], texts[2])

    def test_token_healing_gives_plain_text(self, real_llama, shared_root):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(shared_root / "models" / "stories260k")
        tokenizer.pad_token = tokenizer.bos_token
        inputs = tokenizer("Once upon a ti", return_tensors="pt")
        request = {"token_healing": True, "tokenizer": tokenizer, "max_new_tokens": NEW_TOKENS, "pad_token_id": 1}
        plain = real_llama.generate(**inputs, **request)
        speculator = Speculator(PromptLookupDrafter.for_target(real_llama))
        assert torch.equal(real_llama.generate(**inputs, **request, speculator=speculator), plain)
        # Healing calls `generate` itself, and that call must not take the speculator away from the request.
        assert speculator.stats.prefill_tokens + speculator.stats.emitted_tokens == NEW_TOKENS


class TestPromptsOfEmbeddings:
    """Lengths and continuations count embeddings where there are no tokens."""

    @pytest.mark.parametrize("with_ids", [False, True])
    @pytest.mark.parametrize(
        "limit", [{"max_length": 25}, {"max_new_tokens": 12}, {"max_length": 30, "min_length": 24}]
    )
    def test_limits_of_length_count_embeddings_as_stock_does(self, tiny_model, prompt, limit, with_ids):
        model, ids = tiny_model(dtype=torch.float64), prompt(9)
        given = {"inputs_embeds": model.get_input_embeddings()(ids)} | ({"input_ids": ids} if with_ids else {})
        free = model.generate(**given, max_new_tokens=NEW_TOKENS)[:, 9 * with_ids :]
        request = {**limit, "eos_token_id": int(free[0, 4])}
        plain = model.generate(**given, **request)
        if "min_length" not in limit:  # the end is drafted, and comes before the limit
            assert plain.shape[1] <= 9 * with_ids + 5
        for name, drafter in drafters(model, free).items():
            ours = model.generate(**given, **request, speculator=Speculator(drafter))
            assert torch.equal(ours, plain), name

    def test_going_on_from_their_cache(self, tiny_model, prompt):
        model, ids = tiny_model(dtype=torch.float64), prompt(9)
        embed = model.get_input_embeddings()
        start, request = embed(ids) * 1.1, {"max_new_tokens": 10, "return_dict_in_generate": True}
        whole = model.generate(inputs_embeds=start, **{**request, "max_new_tokens": 20}).sequences
        for name, drafter in drafters(model, whole).items():
            first = model.generate(inputs_embeds=start, **request, speculator=Speculator(drafter))
            assert torch.equal(first.sequences, whole[:, :10]), name
            longer = torch.cat([start, embed(first.sequences)], dim=1)
            second = {"inputs_embeds": longer, CACHE_NAME: cache_of(first), **request}
            ours = model.generate(**second, speculator=Speculator(drafters(model, whole[:, 10:])[name]))
            assert torch.equal(ours.sequences, whole[:, 10:]), name


class MultiTokenEnd(StoppingCriteria):
    """The behaviour of lm-eval's `MultiTokenEOSCriteria`: stateful, by row index, one verdict for the whole batch."""

    def __init__(self, end: list[int], num_prompt: int, batch_size: int):
        self.end, self.num_prompt = end, num_prompt
        self.done = [False] * batch_size
        self.num_calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.num_calls += 1
        assert len(input_ids) == len(self.done), "called with a part of the batch"
        assert input_ids.shape[1] == self.num_prompt + self.num_calls, "not called once a token, in order"
        for row, tokens in enumerate(input_ids[:, self.num_prompt :][:, -len(self.end) - 1 :].tolist()):
            windows = [tokens[i : i + len(self.end)] for i in range(len(tokens) - len(self.end) + 1)]
            self.done[row] = self.done[row] or self.end in windows
        return torch.full((len(self.done),), all(self.done))


class EveryRowForItself(StoppingCriteria):
    """Ends a row at its third `token`; without EOS rows that have ended write on until the last one ends."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids == self.token).sum(-1) >= 3


class LooksAtScores(StoppingCriteria):
    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(scores[-1].sum().item())
        return torch.full((len(input_ids),), len(self.seen) == 11)


class TestStops:
    """Drafts are up to six deep, so twelve places are every place of a round, twice."""

    @pytest.fixture(params=[(9,), (9, 4, 1)], ids=["one", "batch"])
    def setting(self, request, tiny_model, prompt):
        model, inputs = tiny_model(), padded_batch(prompt, request.param)
        return model, inputs, generate(model, inputs, None, max_new_tokens=NEW_TOKENS + 8)

    @pytest.mark.parametrize("place", quick_quarter(range(12)))
    def test_an_end_of_several_tokens_kept_in_a_state(self, setting, place):
        model, inputs, script = setting
        width, batch_size = inputs["input_ids"].shape[1], len(script)
        end = script[0, width + place : width + place + 2].tolist()
        assert_equals_plain(
            model,
            inputs,
            lambda: {"stopping_criteria": StoppingCriteriaList([MultiTokenEnd(end, width, batch_size)])},
            script=script,
            kinds=("perfect chain", "mixed tree"),
            do_samples=(False,),
        )

    @pytest.mark.parametrize("eos", [False, True])
    def test_rows_that_end_one_by_one(self, setting, eos):
        model, inputs, script = setting
        width = inputs["input_ids"].shape[1]
        tokens, counts = script[:, width:].unique(return_counts=True)
        often = int(tokens[counts.argmax()])

        def request():
            criteria = StoppingCriteriaList([EveryRowForItself(often)])
            return {"stopping_criteria": criteria, "eos_token_id": int(script[0, width + 20]) if eos else None}

        text = assert_equals_plain(model, inputs, request, script=script, kinds=("mixed tree", "random"))
        assert text.shape[1] <= width + NEW_TOKENS

    def test_criteria_see_stocks_scores(self, setting):
        model, inputs, script = setting
        seen = []
        for speculator in (None, *map(Speculator, drafters(model, script[:, inputs["input_ids"].shape[1] :]).values())):
            criterion = LooksAtScores()
            request = {"return_dict_in_generate": True, "output_scores": True}
            generate(model, inputs, speculator, stopping_criteria=StoppingCriteriaList([criterion]), **request)
            seen.append(torch.tensor(criterion.seen))
        for ours in seen[1:]:
            torch.testing.assert_close(ours, seen[0], atol=1e-3, rtol=1e-4)

    @pytest.mark.parametrize("place", quick_quarter(range(12)))
    def test_lists_of_eos_end_rows_as_stock_does(self, setting, place):
        model, inputs, script = setting
        width = inputs["input_ids"].shape[1]
        eos = [int(row[width + (place + 3 * r) % 14]) for r, row in enumerate(script)] + [VOCAB_SIZE - 1]
        assert_equals_plain(
            model, inputs, lambda: {"eos_token_id": eos}, script=script, kinds=("perfect chain", "mixed tree")
        )

    @pytest.mark.parametrize("limit", quick([1, 2, 3, 7, 8, 13], 1, 7))
    def test_limits_of_length_end_the_text_exactly(self, setting, limit):
        model, inputs, script = setting
        width = inputs["input_ids"].shape[1]
        for request in ({"max_new_tokens": limit}, {"max_length": width + limit, "max_new_tokens": None}):
            text = assert_equals_plain(model, inputs, lambda request=request: request, script=script)
            assert text.shape[1] == width + limit

    def test_a_time_that_is_up_in_the_middle_of_a_round(self, setting, monkeypatch):
        # Every look at the clock costs a second: the number of looks, and so the length, must be stock's.
        model, inputs, script = setting
        texts = []
        for name in (None, "perfect chain", "mixed tree"):
            drafter = name and drafters(model, script[:, inputs["input_ids"].shape[1] :])[name]
            now = [1e9]

            def tick(now=now):
                now[0] += 1
                return now[0]

            with monkeypatch.context() as patch:
                patch.setattr(time, "time", tick)
                texts.append(generate(model, inputs, drafter and Speculator(drafter), max_time=9.5))
        assert texts[0].shape[1] < inputs["input_ids"].shape[1] + NEW_TOKENS
        assert all(torch.equal(text, texts[0]) for text in texts)

    @pytest.mark.parametrize("place", quick_quarter(range(8)))
    def test_cache_scores_and_statistics_are_cropped_too(self, setting, place):
        model, inputs, script = setting
        width, batch_size = inputs["input_ids"].shape[1], len(script)
        end = script[0, width + place : width + place + 2].tolist()
        for drafter in drafters(model, script[:, width:]).values():
            cache = DynamicCache(config=model.config)
            output = generate(
                model,
                inputs,
                Speculator(drafter),
                stopping_criteria=StoppingCriteriaList([MultiTokenEnd(end, width, batch_size)]),
                **as_cache(cache),
                return_dict_in_generate=True,
                output_scores=True,
                output_logits=True,
                output_hidden_states=True,
            )
            num_steps = output.sequences.shape[1] - width
            stats = output.speculation
            assert cache.get_seq_length() == output.sequences.shape[1] - 1
            assert len(output.scores) == len(output.logits) == len(output.hidden_states) == num_steps
            assert stats.prefill_tokens + stats.emitted_tokens == batch_size * num_steps
            assert stats.accepted_tokens + stats.bonus_tokens <= stats.emitted_tokens
