"""What a drafter's values mean: learnt from rounds, kept beside heads."""

from __future__ import annotations

import json
import math
import random

import pytest

from hf_speculate.drafting import Calibration, CalibrationTable, rising
from hf_speculate.errors import CheckpointError


def taught(pairs, count=400, seed=0):
    """A calibration that saw nodes of value log(said), right with probability `right`."""
    calibration, generator = Calibration(), random.Random(seed)
    for _ in range(count):
        for said, right in pairs:
            calibration.count(math.log(said), generator.random() < right)
        calibration.fade()
    return calibration


def test_calibration_starts_with_the_drafters_own_values():
    calibration = Calibration()
    for said in (0.0009, 0.05, 0.3, 0.8, 0.98):
        assert calibration.share(math.log(said)) == pytest.approx(said, rel=0.25)
    assert calibration.share(0.0) > 0.98
    assert calibration.share(-math.inf) < 0.002
    assert calibration.share(math.nan) == 0.0


def test_calibration_maps_values_to_observed_acceptance():
    """About 33 nodes of each value are remembered: three standard errors are 0.25."""
    calibration = taught([(0.9, 0.6), (0.2, 0.4), (0.02, 0.01)])
    assert calibration.share(math.log(0.9)) == pytest.approx(0.6, abs=0.25)
    assert calibration.share(math.log(0.2)) == pytest.approx(0.4, abs=0.25)
    assert calibration.share(math.log(0.02)) < 0.15


def test_calibration_fades_to_its_start():
    calibration = taught([(0.9, 0.0)])
    assert calibration.share(math.log(0.9)) < 0.3  # never rising: nodes of smaller values count, too
    for _ in range(300):
        calibration.fade()
    assert calibration.share(math.log(0.9)) == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_rising_equals_brute_force_isotonic_regression(seed):
    """Pooled adjacent violators against the min-max formula of isotonic regression."""
    generator = random.Random(seed)
    values = [generator.random() for _ in range(9)]
    weights = [generator.uniform(0.1, 3) for _ in range(9)]

    def mean(first, last):
        part = slice(first, last + 1)
        return sum(v * w for v, w in zip(values[part], weights[part], strict=True)) / sum(weights[part])

    best = [max(min(mean(i, j) for j in range(k, 9)) for i in range(k + 1)) for k in range(9)]
    assert rising(values, weights) == pytest.approx(best)


class TestTable:
    def test_table_survives_saving_and_loading(self, tmp_path):
        table = CalibrationTable(greedy=tuple(taught([(0.9, 0.5)]).shares))
        table.save(tmp_path)
        found = CalibrationTable.load(tmp_path)
        assert found == table
        assert found.start(samples=False).shares == pytest.approx(table.greedy)
        assert found.start(samples=True).shares == Calibration().shares

    def test_table_is_empty_without_a_file(self, tmp_path):
        assert CalibrationTable.load(tmp_path) == CalibrationTable()

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            ("{", "cannot read .*--calibrate"),
            ("[" * 100000, "nested too deeply.*--calibrate"),
            ("[]", "holds a list"),
            ('{"edges": [1]}', "other ranges"),
            ({"greedy": [0.5]}, "'greedy' must be 16 shares"),
            ({"sampled": [2.0] * 16}, "'sampled' must be 16 shares"),
            ({"sampled": ["a"] * 16}, "'sampled' must be 16 shares"),
        ],
    )
    def test_table_refuses_invalid_files(self, tmp_path, content, problem):
        CalibrationTable().save(tmp_path)
        path = tmp_path / "calibration.json"
        if not isinstance(content, str):
            content = json.dumps(json.loads(path.read_text()) | content)
        path.write_text(content)
        with pytest.raises(CheckpointError, match=problem):
            CalibrationTable.load(tmp_path)
