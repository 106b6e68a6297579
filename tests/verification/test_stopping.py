"""Stopping rules on the host equal stock's criteria, and rows are judged alone only where that is known to be right."""

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

from hf_speculate.verification.records import Records, StepRecord
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
    def test_they_equal_the_criteria_themselves_after_every_token(self, name, seed):
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

    def test_a_criterion_sees_the_scores_that_stock_shows_it(self):
        seen = []

        class Watcher(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                seen.append((input_ids.clone(), scores))
                return torch.zeros(len(input_ids), dtype=torch.bool)

        stopping, sequences = Stopping(StoppingCriteriaList([Watcher()])), Sequences(PROMPT, 0)
        records = Records(scores=StepRecord())
        for row in range(2):
            sequences.append(row, 7)
            records.scores.add(0, row, torch.full((4,), float(row)))
        stopping.update([0, 1], sequences, records)
        (ids, scores) = seen[0]
        assert ids.tolist() == [[4, 5, 6, 7], [7, 8, 9, 7]]
        assert [step.tolist() for step in scores] == [[[0.0] * 4, [1.0] * 4]]


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

    def test_the_length_limit_is_known(self):
        assert Stopping(StoppingCriteriaList([EosTokenCriteria(EOS), MaxLengthCriteria(9)])).max_length == 9
        assert Stopping(StoppingCriteriaList([EosTokenCriteria(EOS)])).max_length is None
