"""The seconds of rounds, by a made-up clock."""

from __future__ import annotations

import pytest

from hf_speculate.loop import RoundClock, meter


class Event:
    """An event of a device that reaches it at a given second."""

    def __init__(self, seconds, is_over=True):
        self.seconds, self.is_over = seconds, is_over

    def record(self):
        pass

    def query(self):
        return self.is_over

    def elapsed_time(self, end_event):
        return 1000 * (end_event.seconds - self.seconds)


class TestRoundClock:
    """A host that launches a draft in 0.1 seconds, and a round of 2 seconds."""

    @pytest.fixture
    def seconds(self, monkeypatch):
        def seconds_of(events, drafts=True):
            now = [0.0]
            monkeypatch.setattr(meter.time, "perf_counter", lambda: now[0])
            clock = RoundClock(events)
            clock.start()
            now[0] = 0.1
            if drafts:
                clock.drafted()
            now[0] = 2.0
            return clock.stop()

        return seconds_of

    def test_drafting_is_the_time_of_the_device(self, seconds):
        measured = seconds((Event(5.0), Event(5.7)))
        assert (measured.drafting, measured.total) == (pytest.approx(0.7), 2.0)

    def test_drafting_is_the_time_of_the_host_if_that_is_longer(self, seconds):
        assert seconds(None).drafting == pytest.approx(0.1)
        assert seconds((Event(5.0), Event(5.01))).drafting == pytest.approx(0.1)

    def test_drafting_is_never_longer_than_the_round_nor_waited_for(self, seconds):
        assert seconds((Event(5.0), Event(9.0))).drafting == 2.0
        assert seconds((Event(5.0), Event(5.7, is_over=False))).drafting == pytest.approx(0.1)
