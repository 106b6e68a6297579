"""Rows that have ended leave the target's forwards; text, outputs, cache and RNG are as if they had stayed."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache, StoppingCriteriaList

import hf_speculate
from hf_speculate import Speculator
from hf_speculate.cache import as_cache, cache_of, rows
from hf_speculate.cache.tree_cache import TreeCache
from hf_speculate.forward import scorer as scoring
from hf_speculate.forward.scorer import Scorer
from hf_speculate.loop import Decoding
from hf_speculate.testing import RandomDrafter, ScriptedDrafter
from hf_speculate.verification.sampler import Sampler
from hf_speculate_plugins.combined import CombinedDrafter
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions
from hf_speculate_plugins.prompt_lookup import PromptLookupDrafter

from ..support.block_heads import random_block
from ..support.criteria import EndsRows, all_rows_stay
from ..support.inputs import padded_batch
from ..support.models import CHAIN_ONLY, build_tiny_model
from ..support.tiers import quick
from ..support.tiny_heads import random_eagle, random_medusa


VOCAB_SIZE, WINDOW = 96, 8
LENGTHS = (7, 3, 9, 1)
WIDTH, STEPS = max(LENGTHS), 24
# When each row ends: one by one, all but one at once, the longest first, two together.
ENDS = [(5, 24, 11, 17), (3, 3, 3, 24), (24, 2, 1, 9), (12, 4, 12, 24)]
PARTS = ("scores", "logits", "hidden_states", "attentions")
MEDUSA_CHOICES = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))


def drafters(model, script):
    return {
        "scripted": ScriptedDrafter(script, (2, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE),
        "random": RandomDrafter(vocab_size=VOCAB_SIZE),
        "prompt_lookup": PromptLookupDrafter.for_target(model, min_ngram=1),
        "draft_model chain": DraftModelDrafter(build_tiny_model(dtype=model.dtype), DraftModelOptions(depth=3)),
        "draft_model tree": DraftModelDrafter(model, DraftModelOptions(depth=3, top_k=2)),
        "eagle": random_eagle(3, 2, 6, build_tiny_model()),
        "eagle chain": random_eagle(3, 1, 6, build_tiny_model()),
        "block": random_block("dspark", build_tiny_model()),
        "medusa": random_medusa(MEDUSA_CHOICES, build_tiny_model()),
        "combined": CombinedDrafter([PromptLookupDrafter.for_target(model), RandomDrafter(vocab_size=VOCAB_SIZE)]),
    }


DRAFTERS = list(drafters(build_tiny_model(), [0]))


def run(model, inputs, ends, speculator, seed=5, **request):
    criteria = StoppingCriteriaList([EndsRows(inputs["input_ids"], ends)])
    torch.manual_seed(seed)
    output = model.generate(
        **inputs,
        **{"max_new_tokens": STEPS, "return_dict_in_generate": True, **request},
        stopping_criteria=criteria,
        speculator=speculator,
    )
    return output, torch.get_rng_state()


@pytest.fixture
def batches():
    """Counts the rows of every forward of a model."""
    handles = []

    def watch(model):
        counts = []

        def count(module, args, kwargs):
            inputs = kwargs["inputs_embeds"] if kwargs.get("input_ids") is None else kwargs["input_ids"]
            counts.append(len(inputs))

        count.row_wise = True
        hook = model.register_forward_pre_hook(count, with_kwargs=True)
        handles.append(hook)
        return counts

    yield watch
    for hook in handles:
        hook.remove()


def assert_same_rows(ours, plain, ends, width, atol=2e-5):
    """Every part; of the cache each row up to its end, EOS included: what stock has behind it is padding."""
    assert torch.equal(ours.sequences, plain.sequences)
    for name in PARTS:
        if name not in plain:
            continue
        assert len(ours[name]) == len(plain[name]), name
        for mine, theirs in zip(ours[name], plain[name], strict=True):
            pairs = [(mine, theirs)] if isinstance(mine, torch.Tensor) else zip(mine, theirs, strict=True)
            for a, b in pairs:
                assert a.shape == b.shape, name
                torch.testing.assert_close(a, b, atol=10 * atol, rtol=1e-4, msg=name)
    for mine, theirs in zip(cache_of(ours).layers, cache_of(plain).layers, strict=True):
        assert mine.get_seq_length() == theirs.get_seq_length() == width + max(ends) - 1
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert a.shape == b.shape
            assert a.isfinite().all()
            for row, end in enumerate(ends):
                length = width + min(end, max(ends) - 1)
                torch.testing.assert_close(a[row, :, :length], b[row, :, :length], atol=atol, rtol=1e-4)


def next_turn(model, inputs, output, ends):
    """Goes on from the returned cache; padding is masked, and nothing else."""
    width, total = inputs["input_ids"].shape[1], output.sequences.shape[1]
    mask = torch.zeros(len(ends), total + 5, dtype=torch.long)
    mask[:, :width] = inputs["attention_mask"]
    for row, end in enumerate(ends):
        mask[row, width : width + end] = 1
    mask[:, total:] = 1
    ids = torch.cat([output.sequences, inputs["input_ids"][:, -5:]], dim=1)
    return model.generate(ids, attention_mask=mask, **as_cache(cache_of(output)), max_new_tokens=10, eos_token_id=None)


def assert_settled(run):
    """The last token of a row has no entry, but the EOS of one that was run with it, while others went on."""
    emitted = run.rows.sequences.num_emitted
    for row, (length, n) in enumerate(zip(run.cache.lengths, emitted, strict=True)):
        has_eos = run.rows.sequences.finished[row] and n < max(emitted)
        assert length in (WIDTH + n - 1, WIDTH + n) if has_eos else length == WIDTH + n - 1


class TestRequests:
    @pytest.mark.parametrize("name", DRAFTERS)
    @pytest.mark.parametrize("do_sample", quick([True, False]), ids=["sampling", "greedy"])
    def test_forwards_run_the_unfinished_rows_and_everything_else_is_plains(self, prompt, batches, name, do_sample):
        model, inputs = build_tiny_model(attention="eager"), padded_batch(prompt, LENGTHS)
        for ends in ENDS[do_sample::2]:
            request = {"do_sample": do_sample, "repetition_penalty": 1.1}
            plain, rng = run(model, inputs, ends, None, **request)
            speculator = Speculator(drafters(model, plain.sequences[:, WIDTH:])[name])
            if "model tree" in name:  # the draft model is the target: its forwards are not counted
                speculator.drafter.model = build_tiny_model(attention="sdpa")
            counts = batches(model)
            ours, our_rng = run(model, inputs, ends, speculator, **request)
            stats = ours.speculation
            assert not stats.fallbacks
            assert torch.equal(our_rng, rng)
            # Each forward behind the prompt's is of the rows that emit in it, and each of these is counted once; rows
            # that end before others are run with their EOS.
            num_emitting = len(ends) + stats.rounds + stats.rounds_without_draft
            assert num_emitting + sum(end < max(ends) for end in ends) <= sum(counts) <= num_emitting + len(ends)
            assert counts[:1] == [len(ends)]
            assert counts[1:] == sorted(counts[1:], reverse=True)
            assert_same_rows(ours, plain, ends, WIDTH)
            assert torch.equal(next_turn(model, inputs, ours, ends), next_turn(model, inputs, plain, ends))

    @pytest.mark.parametrize("name", ["draft_model chain", "draft_model tree"])
    @pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
    def test_the_draft_model_leaves_them_out_too(self, prompt, batches, name, do_sample):
        """And drafts for the others what it drafts with all rows."""
        model, draft = build_tiny_model(), build_tiny_model(dtype=torch.float64)  # of the same weights
        inputs, ends, found = padded_batch(prompt, LENGTHS), (5, 24, 11, 17), []
        for leaves in (True, False):
            drafter, counts = drafters(model, [0])[name], batches(draft)
            drafter.model = draft
            request = {"do_sample": do_sample, "max_new_tokens": 2 * STEPS}
            with nullcontext() if leaves else all_rows_stay(draft):
                output, _ = run(model, inputs, ends, Speculator(drafter), **request)
            assert (counts[-1] < 4) == leaves
            stats = output.speculation
            found.append((output.sequences.tolist(), stats.accepted_tokens, stats.drafted_tokens, len(counts)))
        assert found[0] == found[1]
        assert found[0][1]

    @pytest.mark.parametrize("tier", ["scores", "prefix"])
    def test_batched_samplers_run_the_unfinished_rows(self, prompt, batches, monkeypatch, tier):
        monkeypatch.setattr(Sampler, "tier", lambda self, device: self.required_tier)
        model, inputs = build_tiny_model(), padded_batch(prompt, LENGTHS)
        request = {"do_sample": True, "temperature": 0.8}
        request |= {"repetition_penalty": 1.2} if tier == "prefix" else {"top_k": 20}
        for ends in ENDS:
            plain, rng = run(model, inputs, ends, None, **request)
            drafter = ScriptedDrafter(plain.sequences[:, WIDTH:], (2, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE)
            counts = batches(model)
            ours, our_rng = run(model, inputs, ends, Speculator(drafter), **request)
            assert counts[-1] < len(ends)
            assert torch.equal(our_rng, rng)
            assert_same_rows(ours, plain, ends, WIDTH)

    @pytest.mark.parametrize("attention", ["eager", "sdpa", CHAIN_ONLY])
    def test_rows_leave_for_every_form_of_prompt(self, chain_only, prompt, batches, attention):
        model = build_tiny_model("qwen2", attention=attention)
        ids = torch.cat([prompt(8, seed=seed) for seed in range(3)])
        requests = {
            "no mask": {},
            "own positions": {"position_ids": torch.arange(8).expand(3, -1) + torch.tensor([[7], [0], [3]])},
            "holes": {"attention_mask": (torch.arange(8) != torch.tensor([[2], [9], [5]])).long()},
            "embeddings": {"inputs_embeds": model.get_input_embeddings()(ids) * 1.1},
        }
        for ends, (name, extra) in itertools.product([(6, 24, 13)], requests.items()):
            inputs = {"input_ids": ids, **extra}
            plain, _ = run(model, inputs, ends, None)
            drafter = ScriptedDrafter(plain.sequences[:, 8:], (1,) * 4, accuracy=0.8, vocab_size=VOCAB_SIZE)
            counts = batches(model)
            ours, _ = run(model, inputs, ends, Speculator(drafter))
            assert counts[-1] == 1, name
            assert set(counts) == {1, 2, 3}, name
            assert_same_rows(ours, plain, ends, 8)

    def test_a_hook_that_may_hold_a_value_for_each_row_keeps_all_rows(self, prompt, batches):
        model, inputs, bias = build_tiny_model(), padded_batch(prompt, LENGTHS), torch.randn(4, 1, VOCAB_SIZE)
        handle = model.lm_head.register_forward_hook(lambda module, args, output: output + bias)
        plain, _ = run(model, inputs, ENDS[0], None)
        drafter = ScriptedDrafter(plain.sequences[:, WIDTH:], (2, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE)
        counts = batches(model)
        ours, _ = run(model, inputs, ENDS[0], Speculator(drafter))
        handle.remove()
        assert torch.equal(ours.sequences, plain.sequences)
        assert set(counts) == {4}

    def test_rows_leave_once_copying_the_others_is_cheaper(self, prompt, batches, monkeypatch):
        monkeypatch.setattr(scoring, "_COPY_CONTEXT", 250)  # 23 rows x 27 entries: after 2.5 rounds
        model, inputs = build_tiny_model(), padded_batch(prompt, range(1, 25))
        ends = [2, *[STEPS] * 23]
        plain, _ = run(model, inputs, ends, None)
        counts = batches(model)
        drafter = ScriptedDrafter(plain.sequences[:, 24:], (1,), accuracy=0.0, vocab_size=VOCAB_SIZE)
        ours, _ = run(model, inputs, ends, Speculator(drafter))
        assert_same_rows(ours, plain, ends, 24)
        assert counts == [24, 24, 24, 24, 24, *[23] * (STEPS - 5)]  # one round more for its EOS


class TestInterruptions:
    def setting(self, prompt):
        model, inputs = build_tiny_model(dtype=torch.float64), padded_batch(prompt, LENGTHS)
        plain = run(model, inputs, ENDS[0], None)[0]
        drafter = ScriptedDrafter(plain.sequences[:, WIDTH:], (2, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE)
        return model, inputs, plain, Speculator(drafter)

    def assert_whole(self, cache, plain, lengths):
        for mine, theirs in zip(cache.layers, cache_of(plain).layers, strict=True):
            assert mine.get_seq_length() == max(lengths)
            for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                assert a.shape[0] == len(lengths)
                assert a.isfinite().all()
                for row, length in enumerate(lengths):
                    torch.testing.assert_close(a[row, :, :length], b[row, :, :length], atol=1e-10, rtol=0)

    @pytest.mark.parametrize("layer", [0, 1])
    @pytest.mark.parametrize("num_rows", [4, 3, 2, 1])
    def test_ctrl_c_in_a_forward_leaves_the_cache_usable(self, prompt, layer, num_rows):
        model, inputs, plain, speculator = self.setting(prompt)
        cache, runs = DynamicCache(config=model.config), []

        def interrupt(module, args):
            if args[0].shape[0] <= num_rows and args[0].shape[1] != WIDTH:
                raise KeyboardInterrupt

        interrupt.row_wise = True
        hook = model.model.layers[layer].mlp.register_forward_pre_hook(interrupt)
        with pytest.MonkeyPatch.context() as patch:
            self.watch(patch, runs)
            try:
                with pytest.raises(KeyboardInterrupt):
                    run(model, inputs, ENDS[0], speculator, **as_cache(cache))
            finally:
                hook.remove()
        self.assert_whole(cache, plain, runs[0].cache.lengths)
        assert_settled(runs[0])

    @pytest.mark.parametrize("call", range(1, 11))
    def test_ctrl_c_while_rows_leave_keeps_the_cache_usable(self, prompt, monkeypatch, call):
        """In one of the two layers, or between them: of each, keys and values of those who leave are copied first."""
        model, inputs, plain, speculator = self.setting(prompt)
        cache, runs, calls = DynamicCache(config=model.config), [], []
        take = rows._take

        def interrupted(*args):
            calls.append(args)
            if len(calls) == call:
                raise KeyboardInterrupt
            return take(*args)

        self.watch(monkeypatch, runs)
        monkeypatch.setattr(rows, "_take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(model, inputs, ENDS[0], speculator, **as_cache(cache))
        assert_settled(runs[0])
        self.assert_whole(cache, plain, runs[0].cache.lengths)

    def test_closed_stream_leaves_the_cache_usable(self, prompt):
        model, inputs, plain, speculator = self.setting(prompt)
        criteria = StoppingCriteriaList([EndsRows(inputs["input_ids"], ENDS[0])])
        for num_rounds in range(1, 9):
            cache = DynamicCache(config=model.config)
            stream = hf_speculate.stream(
                model,
                **inputs,
                speculator=speculator,
                **as_cache(cache),
                stopping_criteria=criteria,
                max_new_tokens=STEPS,
            )
            emitted = [0] * 4
            for tokens in itertools.islice(stream, num_rounds):
                emitted = [n + len(new) for n, new in zip(emitted, tokens, strict=True)]
            stream.close()
            self.assert_whole(cache, plain, [WIDTH + n - 1 for n in emitted])

    @staticmethod
    def watch(patch, runs):
        finish = Decoding.finish
        patch.setattr(Decoding, "finish", lambda run: (runs.append(run), finish(run)))


class TestSlidingWindow:
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    @pytest.mark.parametrize("ends", [(9, 50, 20), (50, 12, 12)])
    def test_sliding_windows_give_plain_text_and_cache(self, prompt, batches, attention, ends):
        model = build_tiny_model("mistral", attention=attention, sliding_window=WINDOW)
        inputs = padded_batch(prompt, (19, 6, 12))
        plain, _ = run(model, inputs, ends, None, max_new_tokens=50)
        drafter = ScriptedDrafter(plain.sequences[:, 19:], (2, 2, 1), accuracy=0.7, vocab_size=VOCAB_SIZE)
        counts = batches(model)
        ours, _ = run(model, inputs, ends, Speculator(drafter), max_new_tokens=50)
        assert counts[-1] == 1
        assert torch.equal(ours.sequences, plain.sequences)
        longest = ends.index(50)
        for mine, theirs in zip(cache_of(ours).layers, cache_of(plain).layers, strict=True):
            assert mine.keys.shape == theirs.keys.shape
            assert mine.get_seq_length() == theirs.get_seq_length()
            assert mine.keys.isfinite().all()
            torch.testing.assert_close(mine.keys[longest], theirs.keys[longest], atol=2e-5, rtol=1e-4)


def test_arguments_with_a_value_for_each_row_keep_all_rows():
    model = build_tiny_model()
    for kwargs, can in (({}, True), ({"flag": True}, True), ({"ids": torch.zeros(2)}, False), ({"ids": [1, 2]}, False)):
        cache = TreeCache(DynamicCache(), 2)
        model(torch.ones(2, 4, dtype=torch.long), **as_cache(cache.cache))
        cache.commit_appended()
        scorer = Scorer(model, cache, forward_kwargs=kwargs)
        scorer.leave_out([1])
        assert (list(cache.rows) == [0]) == can
