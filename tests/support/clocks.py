"""Clocks that tests set."""

from __future__ import annotations

from hf_speculate.tree import round as round_clock


class ForwardClock:
    """Stands in for the clock: a forward over one node takes a second, each further node `slope` of one."""

    def __init__(self, monkeypatch, model, slope=0.1):
        self.now, self.slope = 0.0, slope
        monkeypatch.setattr(round_clock.time, "perf_counter", lambda: self.now)
        self.hook = model.register_forward_pre_hook(self.tick, with_kwargs=True)

    def tick(self, _module, _args, kwargs):
        self.now += 1 + self.slope * (kwargs["input_ids"].shape[1] - 1)
