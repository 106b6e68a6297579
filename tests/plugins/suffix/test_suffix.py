"""The drafter as a whole: the text stays the target's, and every source is drafted from."""

from __future__ import annotations

import pytest
import torch

from hf_speculate import AutoSpeculator
from hf_speculate.errors import CheckpointError, SpeculateError, TargetMismatchError
from hf_speculate.testing import check_lossless
from hf_speculate_plugins.suffix import SuffixDrafter, SuffixOptions, SuffixStore

from ...support.inputs import padded_batch
from ...support.text_drafters import start, state


VOCAB_SIZE = 100
MODES = {"smoothed": {}, "counts": {"smoothing": False}, "path": {"smoothing": False, "tree": False}}


def draft(session, *texts, **options):
    """(tokens, parents) of every row, without padding."""
    host = session.draft(state(*texts, **options)).host
    rows = []
    for tokens, parents in zip(host.token_ids, host.parents, strict=True):
        size = sum(parent != -2 for parent in parents)
        rows.append((list(tokens[:size]), list(parents[:size])))
    return rows


def drafter(**options):
    return SuffixDrafter(VOCAB_SIZE, SuffixOptions(**options))


def run(owner, text, *more, adapters=""):
    """One whole request, whose output is the last token of `text` and `more`."""
    session = start(owner, text, adapters=adapters)
    if more:
        session.observe(torch.tensor([more]), {}, torch.tensor([len(more)]))
    session.close()


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_it_changes_no_text(tiny_model, prompt, mode, do_sample):
    model = tiny_model()
    speculator = AutoSpeculator.from_name("suffix", target=model, store=True, **MODES[mode])
    prompts = [prompt(n) for n in (1, 9, 20)]
    for _ in range(2):  # the second time the store knows the answers
        report = check_lossless(model, speculator, prompts, max_new_tokens=24, do_sample=do_sample, seeds=(7,))
        assert report.num_identical == 3, report.ties


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_nor_that_of_left_padded_rows(tiny_model, prompt, mode, do_sample):
    model, batch = tiny_model(), padded_batch(prompt, (9, 5, 7))
    speculator = AutoSpeculator.from_name("suffix", target=model, store=True, **MODES[mode])
    for _ in range(2):
        texts = []
        for each in (None, speculator):
            torch.manual_seed(3)
            texts.append(model.generate(**batch, max_new_tokens=16, do_sample=do_sample, speculator=each))
        assert torch.equal(*texts)
    assert speculator.stats.accepted_tokens > 0


@pytest.mark.parametrize("mode", MODES)
class TestEveryMode:
    def test_earlier_text_is_drafted_again(self, mode):
        text = [1, 2, 40, 41, 42, 43, 9, 1, 2, 40]
        [(tokens, parents)] = draft(start(drafter(**MODES[mode]), text), text, max_depth=3, chains_only=True)
        assert tokens[:3] == [40, 41, 42]
        assert parents == list(range(-1, len(tokens) - 1))

    def test_padding_is_not_text_and_ended_rows_are_left_alone(self, mode):
        short, long = [7, 0, 0], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
        owner = drafter(**MODES[mode])
        alone, _ = draft(start(owner, short), short), draft(start(owner, long), long)
        together = draft(start(owner, short, long), short, long)
        assert together[0] == alone[0]
        ended = draft(start(owner, long, long), long, long, active=(True, False))
        assert len(ended[0][0]) > 1 == len(ended[1][0])

    @pytest.mark.parametrize("max_depth", [0, 1, 2])
    def test_the_depth_is_kept(self, mode, max_depth):
        text = [1, 2, 3] * 6
        [(_, parents)] = draft(start(drafter(**MODES[mode]), text), text, max_depth=max_depth)
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        assert max(depths) == max_depth

    def test_the_store_and_the_corpus_are_drafted_from(self, mode):
        fresh = [50, 60, 1, 2, 3]
        assert draft(start(drafter(**MODES[mode]), fresh), fresh)[0][0] == [3]
        owner = drafter(store=True, **MODES[mode])
        run(owner, [9, 1], 2, 3, 4, 5)
        assert draft(start(owner, fresh), fresh, max_depth=1)[0][0] == [3, 4]
        assert draft(start(owner, fresh, adapters="other"), fresh)[0][0] == [3]
        assert draft(start(drafter(corpus=[[2, 3, 6]], **MODES[mode]), fresh), fresh, max_depth=1)[0][0] == [3, 6]

    def test_prompts_do_not_enter_the_store(self, mode):
        owner = drafter(store=True, **MODES[mode])
        run(owner, [1, 2, 3, 4, 5, 9])
        assert owner.store.num_tokens == 1


def test_weights_are_carried_from_request_to_request_but_not_to_sampled_ones():
    owner = drafter()
    run(owner, [1, 2] * 4, 1, 2, 1, 2)
    assert [sampled for _, sampled in owner._mixtures] == [False]
    weights = owner._mixtures["", False].weights
    assert weights
    run(owner, [1, 2] * 4, 1, 2)
    assert owner._mixtures["", False].weights != weights


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"depth": 0}, "depth must be at least 1, got 0"),
            ({"max_nodes": 0}, "max_nodes must be at least 1"),
            ({"children": 0}, "children must be at least 1"),
            ({"floor": 1.5}, "floor is a probability"),
            ({"smoothing": False, "min_token_prob": -1.0}, "min_token_prob is a probability"),
            ({"orders": ()}, "orders are context lengths"),
            ({"orders": (0, 2)}, "orders are context lengths"),
            ({"store": "path"}, "store is True, False or a SuffixStore, got str"),
            ({"tree": False}, "tree has no effect with smoothing=True"),
            ({"smoothing": False, "orders": (1, 2)}, "orders has no effect with smoothing=False"),
        ],
    )
    def test_options_without_a_meaning(self, options, message):
        with pytest.raises(ValueError, match=message):
            SuffixOptions(**options)

    @pytest.mark.parametrize(
        ("corpus", "message"),
        [
            ("text", "got one str"),
            (["text"], "give tokenizer="),
            ([3], "corpus text 0 is a int"),
            ([[1], [1, "a"]], "corpus text 1 is a list"),
            ([[1], [VOCAB_SIZE]], "corpus text 1 has token 100, the target has 0 to 99"),
        ],
    )
    def test_corpora(self, corpus, message):
        with pytest.raises(SpeculateError, match=message):
            drafter(corpus=corpus)

    def test_a_text_that_the_tokenizer_cannot_read(self):
        def tokenizer(text, add_special_tokens):
            return {"input_ids": list(text.encode())}

        assert drafter(corpus=["ab"], tokenizer=tokenizer)
        with pytest.raises(SpeculateError, match=r"cannot read corpus text 1.*surrogates not allowed"):
            drafter(corpus=["ab", "\ud800"], tokenizer=tokenizer)

    def test_a_store_of_another_vocabulary(self):
        store = SuffixStore()
        drafter(store=store)
        with pytest.raises(CheckpointError, match="a vocabulary of 100, the target's has 7"):
            SuffixDrafter(7, SuffixOptions(store=store))

    def test_a_target_of_another_vocabulary(self, tiny_model):
        drafter().check_target(tiny_model())
        with pytest.raises(TargetMismatchError, match="a vocabulary of 100, the target's has 96"):
            drafter(store=True).check_target(tiny_model())
