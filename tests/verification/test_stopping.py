"""Growing texts and the rules that end them: stock's criteria, for rows alone only where that is known to be right."""

from __future__ import annotations

import random
import time

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hf_speculate.verification.records import Records
from hf_speculate.verification.sequences import Sequences
from hf_speculate.verification.stopping import Stopping


PROMPT = torch.tensor([[4, 5, 6], [7, 8, 9]])
EOS = 2


class EndsAt(StoppingCriteria):
    """A criterion that nobody knows."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


class RowWise(EndsAt):
    row_wise = True


class MyMaxLength(MaxLengthCriteria):
    pass


# Only its type is looked at; a real one needs a tokenizer.
STOP_STRING = object.__new__(StopStringCriteria)


def past(max_time=-1.0):
    return MaxTimeCriteria(max_time, initial_timestamp=time.time())


CRITERIA = {
    "length": lambda: [MaxLengthCriteria(7, max_position_embeddings=64)],
    "one EOS": lambda: [MaxLengthCriteria(9), EosTokenCriteria(EOS)],
    "several EOS": lambda: [MaxLengthCriteria(9), EosTokenCriteria([EOS, 5, 6])],
    "time that is up": lambda: [MaxLengthCriteria(9), past()],
    "time to spare": lambda: [MaxLengthCriteria(9), past(1000.0), EosTokenCriteria(EOS)],
}


class TestHostRules:
    @pytest.mark.parametrize("name", CRITERIA)
    @pytest.mark.parametrize("seed", range(5))
    def test_host_rules_equal_the_criteria_after_every_token(self, name, seed):
        choose, criteria = random.Random(seed), StoppingCriteriaList(CRITERIA[name]())
        stopping, sequences = Stopping(criteria), Sequences(PROMPT, 0)
        assert stopping._host_rules is not None
        expected = torch.zeros(2, dtype=torch.bool)
        for _ in range(6):
            for row in range(2):
                sequences.append(row, choose.randrange(10))
            stopping.update([0, 1], sequences, Records())
            expected |= criteria(sequences.view([0, 1]), None)
            assert sequences.finished == expected.tolist()

    @pytest.mark.parametrize(
        "criteria",
        [[EndsAt(3)], [MaxLengthCriteria(9), EndsAt(3)], [MyMaxLength(9)], [MaxLengthCriteria(9, 8)]],
        ids=["unknown", "one unknown", "subclass", "stock warns beyond the context"],
    )
    def test_other_criteria_are_called_themselves(self, criteria):
        stopping, sequences = Stopping(StoppingCriteriaList(criteria)), Sequences(PROMPT, 0)
        assert stopping._host_rules is None
        for row, token in enumerate((3, 4)):
            sequences.append(row, token)
        stopping.update([0, 1], sequences, Records())
        assert sequences.finished == criteria[-1](sequences.view([0, 1]), None).tolist()

    def test_only_the_given_rows_are_judged_and_the_verdict_stays(self):
        stopping, sequences = Stopping(StoppingCriteriaList([EosTokenCriteria(EOS)])), Sequences(PROMPT, 0)
        sequences.append(0, EOS)
        sequences.append(1, EOS)
        stopping.update([0], sequences, Records())
        assert sequences.finished == [True, False]
        sequences.append(0, 5)
        stopping.update([0], sequences, Records())
        assert sequences.finished == [True, False]


class TestClassification:
    @pytest.mark.parametrize(
        ("criteria", "row_wise", "has_eos"),
        [
            ([], True, False),
            ([MaxLengthCriteria(9)], True, False),
            ([MaxLengthCriteria(9), past()], False, False),
            ([MaxLengthCriteria(9), EosTokenCriteria(EOS)], True, True),
            ([EosTokenCriteria(EOS), RowWise(3)], True, True),
            ([EosTokenCriteria(EOS), STOP_STRING], True, True),
            # Without EOS stock lets rows that have stopped write on: all must advance together.
            ([STOP_STRING], False, False),
            ([RowWise(3)], False, False),
            ([EosTokenCriteria(EOS), EndsAt(3)], False, True),
            ([EosTokenCriteria(EOS), MyMaxLength(9)], False, True),
        ],
    )
    def test_rows_are_judged_alone_only_by_criteria_known_to_be_row_wise(self, criteria, row_wise, has_eos):
        stopping = Stopping(StoppingCriteriaList(criteria))
        assert stopping.row_wise is row_wise
        assert stopping.has_eos is has_eos

    def test_finished_rows_write_on_only_where_there_is_no_eos(self):
        sequences = Sequences(PROMPT, 0)
        sequences.finished = [True, False]
        for criteria, expected in (([EosTokenCriteria(EOS)], [False, True]), ([EndsAt(3)], [True, True])):
            stopping = Stopping(StoppingCriteriaList(criteria))
            assert [stopping.is_running(sequences, row) for row in range(2)] == expected


TEXTS = torch.tensor([[0, 4, 5], [6, 7, 8], [9, 1, 2]])


@pytest.mark.parametrize("num_prompt", [3, 1, 0])
@pytest.mark.parametrize("seed", range(4))
def test_views_show_prompt_and_new_tokens_whenever_they_are_looked_at(num_prompt, seed):
    choose, sequences = random.Random(seed), Sequences(TEXTS[:, :num_prompt], 0)
    rows = [TEXTS[row, :num_prompt].tolist() for row in range(3)]
    for _ in range(300):  # beyond every first capacity
        row = choose.randrange(3)
        token = choose.randrange(10)
        sequences.append(row, token)
        rows[row].append(token)
        if choose.random() < 0.3:
            look = choose.randrange(3)
            assert sequences.length(look) == len(rows[look])
            if rows[look]:
                assert sequences.view([look]).tolist() == [rows[look]]
    assert sequences.num_emitted == [len(row) - num_prompt for row in rows]


@pytest.mark.parametrize(("pad", "filled"), [(7, 7), (0, 0), (None, 0)])
def test_the_result_fills_rows_that_ended_early(pad, filled):
    sequences = Sequences(TEXTS, pad)
    for row, tokens in enumerate(([1, 2, 3], [4], [])):
        for token in tokens:
            sequences.append(row, token)
    expected = torch.tensor([[1, 2, 3], [4, filled, filled], [filled] * 3])
    assert torch.equal(sequences.result(), torch.cat([TEXTS, expected], dim=1))
