"""The drafter as a whole: the text stays the target's, and every source is drafted from."""

from __future__ import annotations

import math

import pytest
import torch

from hf_speculate import AutoSpeculator, DraftRequest, DraftState
from hf_speculate.drafting import Choices
from hf_speculate.errors import CheckpointError, SpeculateError, TargetMismatchError
from hf_speculate.testing import check_lossless
from hf_speculate.tree import HostTree
from hf_speculate.verification import Noise
from hf_speculate_plugins.suffix import SuffixDrafter, SuffixOptions, SuffixStore
from hf_speculate_plugins.suffix.automaton import Race

from ...support.inputs import padded_batch
from ...support.text_drafters import start, state
from ...support.tiers import quick


VOCAB_SIZE = 100


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


@pytest.mark.parametrize("do_sample", quick([True, False]))
def test_suffix_drafts_give_plain_text(tiny_model, prompt, do_sample):
    model = tiny_model()
    speculator = AutoSpeculator.from_name("suffix", target=model, store=True)
    prompts = [prompt(n) for n in (1, 9, 20)]
    for _ in range(2):  # the second time the store knows the answers
        report = check_lossless(model, speculator, prompts, max_new_tokens=24, do_sample=do_sample, seeds=(7,))
        assert report.num_identical == 3, report.ties


@pytest.mark.parametrize("do_sample", [False, True])
def test_suffix_drafts_give_plain_text_with_left_padding(tiny_model, prompt, do_sample):
    model, batch = tiny_model(), padded_batch(prompt, (9, 5, 7))
    speculator = AutoSpeculator.from_name("suffix", target=model, store=True)
    for _ in range(2):
        texts = []
        for each in (None, speculator):
            torch.manual_seed(3)
            texts.append(model.generate(**batch, max_new_tokens=16, do_sample=do_sample, speculator=each))
        assert torch.equal(*texts)
    assert speculator.stats.accepted_tokens > 0


def test_rows_of_one_prompt_that_draft_from_each_other_give_plain_text(tiny_model, prompt):
    model, inputs = tiny_model(), prompt(9)
    speculator = AutoSpeculator.from_name("suffix", target=model, store=True)
    for _ in range(2):
        texts = []
        for each in (None, speculator):
            torch.manual_seed(3)
            options = {"max_new_tokens": 16, "do_sample": True, "num_return_sequences": 3, "temperature": 0.3}
            texts.append(model.generate(inputs, speculator=each, **options))
        assert torch.equal(*texts)
    assert speculator.stats.accepted_tokens > 0


class TestDrafts:
    def test_earlier_text_is_drafted_again(self):
        text = [1, 2, 40, 41, 42, 43, 9, 1, 2, 40]
        [(tokens, parents)] = draft(start(drafter(), text), text, max_depth=3, chains_only=True)
        assert tokens[:3] == [40, 41, 42]
        assert parents == list(range(-1, len(tokens) - 1))

    def test_padding_is_not_text_and_ended_rows_are_left_alone(self):
        short, long = [7, 0, 0], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
        owner = drafter()
        alone, _ = draft(start(owner, short), short), draft(start(owner, long), long)
        together = draft(start(owner, short, long), short, long)
        assert together[0] == alone[0]
        ended = draft(start(owner, long, long), long, long, active=(True, False))
        assert len(ended[0][0]) > 1 == len(ended[1][0])

    def test_the_store_and_the_corpus_are_drafted_from(self):
        fresh = [50, 60, 1, 2, 3]
        assert draft(start(drafter(), fresh), fresh)[0][0] == [3]
        owner = drafter(store=True)
        run(owner, [9, 1], 2, 3, 4, 5)
        assert draft(start(owner, fresh), fresh, max_depth=1)[0][0] == [3, 4]
        assert draft(start(owner, fresh, adapters="other"), fresh)[0][0] == [3]
        assert draft(start(drafter(corpus=[[2, 3, 6]]), fresh), fresh, max_depth=1)[0][0] == [3, 6]

    def test_prompts_do_not_enter_the_store(self):
        owner = drafter(store=True)
        run(owner, [1, 2, 3, 4, 5, 9])
        assert owner.store.num_tokens == 1


class TestAnswersToOnePrompt:
    def test_rows_draft_from_each_other(self):
        prompt = [50, 60, 1]
        for second, drafted in ((prompt, [3, 4, 5]), ([50, 61, 1], [3])):
            session = start(drafter(), [*prompt, 3], [*second, 3])
            session.observe(torch.tensor([[4, 5], [0, 0]]), {}, torch.tensor([2, 0]))
            texts = [*prompt, 3, 4, 5], [*second, 3]
            assert draft(session, *texts, max_depth=2, chains_only=True)[1][0] == drafted

    def test_the_first_token_of_an_answer_follows_the_prompt(self):
        owner, prompt = drafter(store=True), [50, 60, 1]
        run(owner, [*prompt, 3], 4)
        counts = start(owner, [*prompt, 9])._rows[0]._answers
        assert counts.after((60, 1)).counts == {3: 1, 9: 1}
        assert counts.after((1, 3)).counts == {4: 1}

    def test_answers_that_are_not_counted_any_more_are_drafted_for_their_prompt_only(self):
        owner, prompt = drafter(store=SuffixStore(max_tokens=1)), [50, 60, 1]
        run(owner, [*prompt, 3], 4, 5)
        assert owner.store.num_counted == 0
        again, other = [*prompt, 3], [50, 61, 1, 3]
        assert draft(start(owner, again), again, max_depth=2)[0][0] == [3, 4, 5]
        assert draft(start(owner, other), other, max_depth=2)[0][0] == [3]
        assert draft(start(owner, again, adapters="other"), again, max_depth=2)[0][0] == [3]

    def test_the_newest_answers_are_counted_up_to_a_limit(self, monkeypatch):
        monkeypatch.setattr("hf_speculate_plugins.suffix.answers._MAX_TOKENS", 4)
        owner, prompt = drafter(store=True), [50, 60, 1]
        for answer in ([3, 4, 5, 6], [7, 8, 9]):
            run(owner, [*prompt, answer[0]], *answer[1:])
        followers = start(owner, [*prompt, 2])._rows[0]._answers.followers
        assert {context for context in followers if len(context) == 1} == {(1,), (7,), (8,)}


def test_weights_are_carried_from_request_to_request_but_not_to_sampled_ones():
    owner = drafter()
    run(owner, [1, 2] * 4, 1, 2, 1, 2)
    assert [sampled for _, sampled in owner._mixtures] == [False]
    weights = owner._mixtures["", False].weights
    assert weights
    run(owner, [1, 2] * 4, 1, 2)
    assert owner._mixtures["", False].weights != weights


class TestRecycledRows:
    """What the target found probable after a token is drafted after it."""

    def told(self, session, tokens, parents, followers, probs):
        tree = HostTree([tokens], [parents])
        session.observe_choices(Choices([0], tree, torch.tensor([followers]), torch.tensor([probs])))

    def test_recycled_rows_include_rejected_nodes(self):
        text = [50, 60, 3]
        session = start(drafter(), text)
        assert session.num_choices == 32
        self.told(session, [60, 3, 9], [-1, 0, 0], [[1, 2], [7, 8], [4, 5]], [[0.9, 0.1], [0.6, 0.4], [0.7, 0.3]])
        [(tokens, parents)] = draft(session, text, max_depth=1)
        assert (tokens, parents) == ([3, 7, 8], [-1, 0, 0])
        [(tokens, _)] = draft(session, [50, 60, 9], max_depth=1)
        session.observe(torch.tensor([[9]]), {}, torch.tensor([1]))
        [(tokens, _)] = draft(session, [50, 60, 3, 9], max_depth=1)
        assert tokens == [9, 4, 5]

    def test_the_last_node_of_a_token_counts_and_padding_does_not(self):
        text = [50, 60, 3]
        session = start(drafter(), text)
        self.told(session, [3, 3, 3], [-1, 0, -2], [[1], [2], [4]], [[1.0]] * 3)
        assert draft(session, text, max_depth=1)[0][0] == [3, 2]

    def test_recycled_rows_reach_other_requests_through_a_store_only(self):
        text = [50, 60, 3]
        for store in (False, True):
            owner = drafter(store=store)
            self.told(start(owner, text), [3], [-1], [[7]], [[1.0]])
            assert draft(start(owner, text), text, max_depth=1)[0][0] == ([3, 7] if store else [3])
            assert draft(start(owner, text, adapters="other"), text, max_depth=1)[0][0] == [3]
            if store:
                owner.store.clear()
                assert draft(start(owner, text), text, max_depth=1)[0][0] == [3]

    def test_combined_session_asks_for_the_choices_of_suffix(self, tiny_model):
        speculator = AutoSpeculator.from_name("combined", target=tiny_model(), parts=["suffix", "prompt_lookup"])
        session = speculator.drafter.start(DraftRequest(target=tiny_model(), input_ids=torch.tensor([[1, 2, 3]])))
        assert session.num_choices == 32


def sampling(noise, **options):
    options = {"num_emitted": (0,), **options}
    rows = len(options["num_emitted"])
    roots, active = torch.ones(rows, dtype=torch.long), (True,) * rows
    return DraftState(root_ids=roots, active=active, max_depth=5, chains_only=False, _noise=noise, **options)


def test_sampled_drafts_are_what_the_noise_will_choose():
    """Of a target whose distributions are known, every token."""
    torch.manual_seed(0)
    noise = Noise(2, 50, torch.device("cpu"))
    state = sampling(noise, num_emitted=(3, 1))
    for row in (0, 1):
        race = Race(state, row)
        for depth in range(5):
            probs = torch.rand(50, generator=torch.Generator().manual_seed(depth)).pow(6)
            probs /= probs.sum()
            found = race(dict(enumerate(probs.tolist())), depth)
            chosen = (probs / noise.rows([state.num_emitted[row] + depth], [row])[0]).argmax()
            assert max(found, key=found.__getitem__) == chosen
            assert sum(found.values()) <= 1.0001


def test_race_lets_unnamed_tokens_win_by_their_probability():
    """The likelier one wins as often as is told. False alarms: 6e-5 (4 standard deviations)."""
    torch.manual_seed(1)
    wins, told, count = 0, 0.0, 2000
    for _ in range(count):
        noise = Noise(1, 12, torch.device("cpu"))
        torch.rand(12)  # the next noise is another
        probs = torch.tensor([0.5, *[0.5 / 11] * 11])
        told += Race(sampling(noise), 0)({0: 0.5}, 0)[0]
        wins += int((probs / noise.row(0)[0]).argmax()) == 0
    assert abs(wins - told) < 4 * math.sqrt(count) / 2
    assert 0.4 < wins / count < 0.6


class TestBadInput:
    def test_options_refuse_a_store_of_another_type(self):
        with pytest.raises(ValueError, match="store is True, False or a SuffixStore, got str"):
            SuffixOptions(store="path")  # type: ignore[arg-type]

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
    def test_drafter_refuses_a_corpus_that_it_cannot_read(self, corpus, message):
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
