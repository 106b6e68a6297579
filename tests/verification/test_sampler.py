"""Verification: three tiers with one result, and that result is what stock's own loop would choose."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation import logits_process as lp
from transformers.generation.stopping_criteria import EosTokenCriteria

from hf_speculate.tree import DraftTree
from hf_speculate.verification import Sampler, Verifier
from hf_speculate.verification import processors as known
from hf_speculate.verification.noise import Noise
from hf_speculate.verification.processors import processors_of_row, required_tier, score_only, see_rows_alone
from hf_speculate.verification.records import Records, StepRecord
from hf_speculate.verification.sequences import Sequences
from hf_speculate.verification.stopping import Stopping

from ..support.tiers import quick
from ..support.versions import has_transformers


VOCAB_SIZE = 7
EOS = 1
NUM_PROMPT = 5
MAX_LENGTH = NUM_PROMPT + 14
CPU = torch.device("cpu")
# Row 1 is left padded by two.
PROMPT = torch.tensor([[2, 3, 4, 3, 4], [0, 0, 5, 2, 6], [6, 6, 2, 3, 2]])

PROCESSORS = {
    lp.TemperatureLogitsWarper: lambda: lp.TemperatureLogitsWarper(0.7),
    lp.TopKLogitsWarper: lambda: lp.TopKLogitsWarper(3),
    lp.TopPLogitsWarper: lambda: lp.TopPLogitsWarper(0.7),
    lp.TopHLogitsWarper: lambda: lp.TopHLogitsWarper(0.5),
    lp.MinPLogitsWarper: lambda: lp.MinPLogitsWarper(0.2),
    lp.TypicalLogitsWarper: lambda: lp.TypicalLogitsWarper(0.6),
    lp.EpsilonLogitsWarper: lambda: lp.EpsilonLogitsWarper(0.1),
    lp.EtaLogitsWarper: lambda: lp.EtaLogitsWarper(0.1),
    lp.InfNanRemoveLogitsProcessor: lp.InfNanRemoveLogitsProcessor,
    lp.LogitNormalization: lp.LogitNormalization,
    lp.SuppressTokensLogitsProcessor: lambda: lp.SuppressTokensLogitsProcessor([2, 3]),
    lp.RepetitionPenaltyLogitsProcessor: lambda: lp.RepetitionPenaltyLogitsProcessor(1.8),
    lp.NoRepeatNGramLogitsProcessor: lambda: lp.NoRepeatNGramLogitsProcessor(2),
    lp.SequenceBiasLogitsProcessor: lambda: lp.SequenceBiasLogitsProcessor([[[3], -2.0], [[2, 4], 3.0]]),
    lp.NoBadWordsLogitsProcessor: lambda: lp.NoBadWordsLogitsProcessor([[3], [2, 4], [5, 6]], eos_token_id=EOS),
    lp.MinLengthLogitsProcessor: lambda: lp.MinLengthLogitsProcessor(NUM_PROMPT + 4, EOS),
    lp.MinNewTokensLengthLogitsProcessor: lambda: lp.MinNewTokensLengthLogitsProcessor(NUM_PROMPT, 4, EOS),
    lp.ForcedBOSTokenLogitsProcessor: lambda: lp.ForcedBOSTokenLogitsProcessor(2),
    lp.ForcedEOSTokenLogitsProcessor: lambda: lp.ForcedEOSTokenLogitsProcessor(MAX_LENGTH, EOS),
    lp.SuppressTokensAtBeginLogitsProcessor: lambda: lp.SuppressTokensAtBeginLogitsProcessor([2, 3, 4], NUM_PROMPT + 3),
    lp.ExponentialDecayLengthPenalty: lambda: lp.ExponentialDecayLengthPenalty((2, 1.5), EOS, NUM_PROMPT),
    lp.EncoderRepetitionPenaltyLogitsProcessor: lambda: lp.EncoderRepetitionPenaltyLogitsProcessor(1.8, PROMPT[:1]),
    lp.EncoderNoRepeatNGramLogitsProcessor: lambda: lp.EncoderNoRepeatNGramLogitsProcessor(2, PROMPT[:1]),
}
COMBINATIONS = {
    **{kind.__name__: [make] for kind, make in PROCESSORS.items()},
    "none": [],
    "usual": [PROCESSORS[k] for k in (lp.TemperatureLogitsWarper, lp.TopKLogitsWarper, lp.TopPLogitsWarper)],
    "mixed": [
        PROCESSORS[k]
        for k in (lp.RepetitionPenaltyLogitsProcessor, lp.NoRepeatNGramLogitsProcessor, lp.TemperatureLogitsWarper)
    ],
}
# Older penalties leave out the same number of tokens in every row.
if KNOWS_PADDING := has_transformers("5.23"):
    COMBINATIONS["penalty of new text only"] = [
        lambda: lp.RepetitionPenaltyLogitsProcessor(1.8, torch.tensor([0, 2, 1]))
    ]
# Of one row: stock hands over one entry then.
PENALTY_FOR_ONE_ROW = [lambda: lp.RepetitionPenaltyLogitsProcessor(1.8, torch.tensor([2]))]


class EndsWithoutEos(StoppingCriteria):
    """Ends rows one by one as EOS does, but stock lets them write on, as it knows of no EOS."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


class Stateful(LogitsProcessor):
    """Its bias depends on how often it was called: any extra or missing call changes the text."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        assert input_ids.shape[0] == scores.shape[0]
        return scores.roll(self.num_calls, dims=-1)


def bushy_tree(seed, roots):
    """Most of the vocabulary at every node, four levels deep: long paths are common."""
    choose, rows = random.Random(seed), []
    for root in roots:
        tokens, parents, level = [root], [-1], [0]
        for num_children in (6, 4, 3, 2):
            below = [(node, token) for node in level for token in choose.sample(range(VOCAB_SIZE), num_children)]
            level = choose.sample(range(len(tokens), len(tokens) + len(below)), min(len(below), 12))
            tokens += [token for _, token in below]
            parents += [node for node, _ in below]
        rows.append((tokens, parents))
    return DraftTree.from_rows(rows)


@dataclass
class Outcome:
    verdicts: list
    new_tokens: list
    finished: list
    ends: list
    rng: torch.Tensor
    scores: tuple
    logits: tuple


def run(
    tier,
    combination,
    random_tree,
    *,
    batch_size,
    do_sample,
    lockstep,
    seed,
    num_prompt=NUM_PROMPT,
    ends=EosTokenCriteria,
    max_rounds=12,
):
    """Rounds with random trees and random logits until all rows are finished."""
    torch.manual_seed(seed)
    sequences = Sequences(PROMPT[:batch_size, -num_prompt:], pad_token_id=0)
    noise = Noise(batch_size, VOCAB_SIZE, CPU) if do_sample else None
    records = Records(StepRecord(), StepRecord())
    sampler = Sampler(LogitsProcessorList([make() for make in combination]), noise, records, tier=tier)
    stopping = Stopping(StoppingCriteriaList([MaxLengthCriteria(MAX_LENGTH), ends(EOS)]))
    verifier = Verifier(sampler, stopping, sequences, lockstep=lockstep)
    generator = torch.Generator().manual_seed(seed)
    verdicts = []
    for index in range(max_rounds):
        roots = [tokens[-1] if tokens else 0 for tokens in sequences.new_tokens]
        if index % 2:
            tree = random_tree(100 * seed + index, batch_size, VOCAB_SIZE, max_nodes=16, roots=roots)
        else:
            tree = bushy_tree(100 * seed + index, roots)
        limits = [MAX_LENGTH - sequences.length(row) - 1 for row in range(batch_size)]
        tree = tree.pruned([max(limit, 0) for limit in limits])
        logits = 2 * torch.randn(batch_size, tree.num_nodes, VOCAB_SIZE, generator=generator)
        if noise is not None:  # as the loop does
            noise.release_before(
                min(n for n, done in zip(sequences.num_emitted, sequences.finished, strict=True) if not done)
            )
        verdicts.append(verifier.verify(logits, tree))
        if all(sequences.finished):
            break
    if noise is not None:
        noise.finish(max(sequences.num_emitted))
    return Outcome(
        verdicts=verdicts,
        new_tokens=sequences.new_tokens,
        finished=sequences.finished,
        ends=[ts.index(EOS) + 1 if stopping.has_eos and EOS in ts else len(ts) for ts in sequences.new_tokens],
        rng=torch.get_rng_state(),
        scores=records.scores.complete(batch_size),
        logits=records.logits.complete(batch_size),
    )


def assert_same_outcome(one, other):
    assert one.new_tokens == other.new_tokens
    assert one.verdicts == other.verdicts
    assert one.finished == other.finished
    assert torch.equal(one.rng, other.rng), "the RNG is elsewhere"
    for name in ("scores", "logits"):
        for step, (a, b) in enumerate(zip(getattr(one, name), getattr(other, name), strict=True)):
            # What is recorded for a row behind its end is nobody's business.
            rows = [row for row, end in enumerate(one.ends) if step < end]
            assert torch.equal(a[rows], b[rows]), f"{name} of step {step}"


def tiers(combination):
    """Those that these processors allow, the reference left out."""
    required = required_tier(LogitsProcessorList([make() for make in combination]))
    return {"scores": ["scores", "prefix"], "prefix": ["prefix"], "walk": []}[required]


def test_every_processor_that_is_batched_is_tested():
    by_price = {lp.EncoderRepetitionPenaltyLogitsProcessor}  # batched or not, by the version of transformers
    assert set(PROCESSORS) == {*known._SEE_SCORES, *known._SEE_PREFIX, *by_price}


class TestTiers:
    @pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
    @pytest.mark.parametrize("batch_size", quick([1, 3], 3))
    @pytest.mark.parametrize("name", COMBINATIONS)
    def test_wider_tiers_give_the_walks_result(self, random_tree, name, batch_size, do_sample):
        combination = COMBINATIONS[name]
        if name == "penalty of new text only" and batch_size == 1:
            combination = PENALTY_FOR_ONE_ROW
        case = {"batch_size": batch_size, "do_sample": do_sample, "lockstep": False}
        longest = 0
        for seed in range(3):
            reference = run("walk", combination, random_tree, seed=seed, **case)
            longest = max(longest, *(len(path) for verdict in reference.verdicts for path in verdict.paths))
            for tier in tiers(combination):
                assert_same_outcome(run(tier, combination, random_tree, seed=seed, **case), reference)
        assert longest >= (2 if batch_size == 1 else 3), "only short paths were taken: the trees test little"

    @pytest.mark.parametrize("ends", [EosTokenCriteria, EndsWithoutEos])
    @pytest.mark.parametrize("name", ["none", "usual", "mixed"])
    def test_rows_in_lock_step_give_the_walks_result_too(self, random_tree, name, ends):
        case = {"batch_size": 3, "do_sample": True, "lockstep": True, "ends": ends}
        for seed in range(3):
            reference = run("walk", COMBINATIONS[name], random_tree, seed=seed, **case)
            assert len(set(map(len, reference.new_tokens))) == 1
            for tier in tiers(COMBINATIONS[name]):
                assert_same_outcome(run(tier, COMBINATIONS[name], random_tree, seed=seed, **case), reference)

    def test_the_forced_first_token_is_seen_by_the_prefix_tier(self, random_tree):
        combination = [PROCESSORS[lp.ForcedBOSTokenLogitsProcessor]]
        case = {"batch_size": 1, "do_sample": False, "lockstep": False, "num_prompt": 1, "seed": 0}
        reference = run("walk", combination, random_tree, **case)
        assert reference.new_tokens[0][0] == 2
        assert_same_outcome(run("prefix", combination, random_tree, **case), reference)


class TestWalk:
    """The reference itself, beside stock's loop written out."""

    @pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
    @pytest.mark.parametrize("name", [*COMBINATIONS, "stateful"])
    def test_walk_makes_stocks_calls_in_stocks_order(self, random_tree, name, do_sample):
        combination = [Stateful] if name == "stateful" else COMBINATIONS[name]
        if name == "penalty of new text only":
            combination = PENALTY_FOR_ONE_ROW
        for seed in range(2):
            ours = run("walk", combination, random_tree, batch_size=1, do_sample=do_sample, lockstep=True, seed=seed)
            torch.manual_seed(seed)
            processors = LogitsProcessorList([make() for make in combination])
            text = PROMPT[:1]
            for step, logits in enumerate(ours.logits):
                scores = processors(text, logits.clone())
                assert torch.equal(scores, ours.scores[step])
                token = torch.multinomial(torch.softmax(scores, -1), 1) if do_sample else scores.argmax(-1, True)
                text = torch.cat([text, token], dim=1)
            assert ours.new_tokens[0] == text[0, NUM_PROMPT:].tolist()
            assert torch.equal(ours.rng, torch.get_rng_state())

    def test_paths_follow_the_tree_and_tokens_the_sampler(self):
        tree = DraftTree(torch.tensor([[4, 2, 3, 5, 6]]), [-1, 0, 0, 2, 3])
        logits = torch.zeros(1, 5, VOCAB_SIZE)
        for node, token in enumerate([3, 0, 5, 4, 0]):  # root -> 3 (node 2) -> 5 (node 3) -> 4: no child, the bonus
            logits[0, node, token] = 1
        sequences = Sequences(PROMPT[:1], 0)
        stopping = Stopping(StoppingCriteriaList([MaxLengthCriteria(MAX_LENGTH)]))
        sampler = Sampler(LogitsProcessorList(), None, Records())
        verdict = Verifier(sampler, stopping, sequences, lockstep=True).verify(logits, tree)
        assert verdict.paths == [[0, 2, 3]]
        assert verdict.tokens == [[3, 5, 4]]
        assert verdict.num_accepted == [2]


class RowWise(LogitsProcessor):
    row_wise = True


class Unknown(LogitsProcessor):
    pass


class MyTemperature(lp.TemperatureLogitsWarper):
    pass


class MyPenalty(lp.RepetitionPenaltyLogitsProcessor):
    pass


class TestClassification:
    @pytest.mark.parametrize(
        ("processors", "tier"),
        [
            ([], "scores"),
            ([lp.TemperatureLogitsWarper(0.5), lp.TopKLogitsWarper(3)], "scores"),
            ([lp.TemperatureLogitsWarper(0.5), lp.RepetitionPenaltyLogitsProcessor(1.2)], "prefix"),
            ([RowWise()], "prefix"),
            ([Unknown()], "walk"),
            ([lp.TopKLogitsWarper(3), Unknown(), RowWise()], "walk"),
            ([MyTemperature(0.5)], "walk"),
            ([MyPenalty(1.2)], "walk"),
            ([lp.WatermarkLogitsProcessor(VOCAB_SIZE, "cpu")], "walk"),
            ([lp.PrefixConstrainedLogitsProcessor(lambda row, text: [2], 1)], "walk"),
        ],
    )
    def test_the_tier_is_what_the_most_demanding_processor_needs(self, processors, tier):
        assert required_tier(LogitsProcessorList(processors)) == tier

    @pytest.mark.parametrize(
        ("processors", "alone"),
        [
            ([], True),
            ([lp.TemperatureLogitsWarper(0.5), lp.RepetitionPenaltyLogitsProcessor(1.2), RowWise()], True),
            ([lp.WatermarkLogitsProcessor(VOCAB_SIZE, "cpu")], True),
            ([lp.PrefixConstrainedLogitsProcessor(lambda row, text: [2], 1)], True),
            ([lp.SynthIDTextWatermarkLogitsProcessor(3, [5], 7, 0, 4, CPU)], False),
            ([lp.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None)], False),
            ([lp.TopKLogitsWarper(3), Unknown()], False),
            ([MyPenalty(1.2)], False),
        ],
    )
    def test_rows_go_their_own_pace_only_with_processors_known_to_allow_it(self, processors, alone):
        assert see_rows_alone(LogitsProcessorList(processors)) is alone

    def test_every_row_of_a_batch_has_its_own_allowed_tokens_and_its_own_prompt(self):
        allowed = lp.PrefixConstrainedLogitsProcessor(lambda row, text: [2 + row, int(text[-1])], 1)
        ngrams = lp.EncoderNoRepeatNGramLogitsProcessor(2, PROMPT)
        penalty = lp.EncoderRepetitionPenaltyLogitsProcessor(1.8, PROMPT)
        scores = torch.randn(3, VOCAB_SIZE)
        of_new_text = [lp.RepetitionPenaltyLogitsProcessor(1.8, torch.tensor([0, 2, 4]))] if KNOWS_PADDING else []
        for processor in (allowed, ngrams, penalty, *of_new_text):
            expected = processor(PROMPT, scores.clone())
            assert not torch.equal(expected, scores)
            for row in range(3):
                (alone,) = processors_of_row(LogitsProcessorList([processor]), row, 3)
                assert torch.equal(alone(PROMPT[[row]], scores[[row]].clone()), expected[[row]])

    def test_a_drafter_gets_warpers_that_name_no_token(self):
        temperature, top_k = lp.TemperatureLogitsWarper(0.5), lp.TopKLogitsWarper(3)
        others = [lp.SuppressTokensLogitsProcessor([2]), lp.RepetitionPenaltyLogitsProcessor(1.2), MyTemperature(0.5)]
        assert score_only(LogitsProcessorList([temperature, *others, top_k])) == [temperature, top_k]


class TestRecords:
    def test_records_do_not_keep_the_logits_of_the_tree_alive(self):
        logits = torch.randn(1, 9, VOCAB_SIZE)
        records = Records(StepRecord(), StepRecord())
        records.add(0, 0, logits[0, 3], logits[0, 3])
        for record in (records.scores, records.logits):
            assert record._rows[0][0].untyped_storage().nbytes() == VOCAB_SIZE * 4
