"""Ways to generate on one model and one batch of prompts, timed in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig

from hf_speculate.speculator import Speculator
from hf_speculate.target import GenerativeModel
from hf_speculate_tools.commands import timed

from .setting import Setting


EAGER, STATIC = "HF eager", "HF static + compile"
_MOST_PASSES, _SLOW_SECONDS, _SLOW_PASSES = 5, 1.0, 1
_MOST_WARM_UPS = 5


@dataclass
class Way:
    """One way to generate, with its times.

    Attributes:
        arguments: further arguments of `generate`.
        first: seconds of the first call.
        whole: seconds of each timed call with all new tokens.
        prompt: seconds of each timed call with one new token.
        same_text: whether the text was always the expected one.
        counts: counters of the last timed call of a speculator.
    """

    arguments: dict[str, Any]
    first: float = 0.0
    whole: list[float] = field(default_factory=list)
    prompt: list[float] = field(default_factory=list)
    same_text: bool = True
    counts: dict[str, Any] = field(default_factory=dict)

    @property
    def speculator(self) -> Speculator | None:
        return self.arguments.get("speculator")


class Cell:
    """One model with one batch of prompts.

    Args:
        name: name in findings.
        model: the model.
        ids: prompts without padding, int64 [B, S].
        count: new tokens of a call.
    """

    def __init__(self, setting: Setting, name: str, model: GenerativeModel, ids: Tensor, count: int):
        self.setting, self.name, self.model, self.ids, self.count = setting, name, model, ids, count
        self._mask = torch.ones_like(ids)
        self.ways: dict[str, Way] = {EAGER: Way({})}
        self.ways[EAGER].first, self.text = self._timed(EAGER, count)

    @property
    def texts(self) -> dict[tuple[int, ...], list[int]]:
        """Prompt -> new tokens of plain `generate`, as scripted drafters want them."""
        start = self.ids.shape[1]
        pairs = zip(self.ids.tolist(), self.text[:, start:].tolist(), strict=True)
        return {tuple(prompt): new for prompt, new in pairs}

    def add_static(self) -> None:
        """Adds stock's static cache with its compiled forward, warmed until a call is no faster than the one before."""
        config = CompileConfig(dynamic=False)
        if not self.setting.on_cuda:
            config = CompileConfig(backend="eager", mode=None, dynamic=False)  # type: ignore[arg-type]
            config._compile_all_devices = True  # type: ignore[assignment]
        way = self.ways[STATIC] = Way({"cache_implementation": "static", "compile_config": config})
        before = counters["stats"]["unique_graphs"]
        with self._dropping(STATIC):
            seconds = []
            while len(seconds) < 3 or (seconds[-1] < 0.9 * seconds[-2] and len(seconds) < _MOST_WARM_UPS):
                seconds.append(self._timed(STATIC, self.count)[0])
            way.first = seconds[0]
            self._timed(STATIC, 1)
            self.setting.report(
                cell=self.name,
                way=STATIC,
                warm_up_seconds=seconds,
                graphs=counters["stats"]["unique_graphs"] - before,
                graphs_without_cuda_graph=counters["inductor"]["cudagraph_skips"],
            )

    def add(self, name: str, speculator: Speculator, warm_ups: int = 2) -> None:
        """Adds a speculator. After its first call it runs `warm_ups` times: recordings are made at second calls."""
        way = self.ways[name] = Way({"speculator": speculator})
        with self._dropping(name):
            way.first = self._timed(name, self.count)[0]
            for _ in range(min(warm_ups, 1) if self.setting.is_tiny else warm_ups):
                self._timed(name, self.count)
            self._timed(name, 1)

    def measure(self, seconds: float, names: Sequence[str] | None = None) -> None:
        """Times the ways in turn, in passes, for about so many seconds and at least once."""
        end = self.setting.left - seconds
        for number in range(1 if self.setting.is_tiny else _MOST_PASSES):
            names_now = [name for name in names or self.ways if name in self.ways]
            turn = number % max(len(names_now), 1)
            for name in [*names_now[turn:], *names_now[:turn]]:
                way = self.ways[name]
                is_slow = bool(way.whole) and way.whole[0] > _SLOW_SECONDS
                if (number and self.setting.left < end) or (is_slow and number >= _SLOW_PASSES):
                    continue
                with self._dropping(name):
                    self._measure_once(name, way, is_slow)

    def _measure_once(self, name: str, way: Way, is_slow: bool) -> None:
        if not is_slow and not self.setting.is_tiny:
            self._timed(name, 1)  # the way before left other memory in the caches
        way.prompt.append(self._timed(name, 1)[0])
        if way.speculator is not None:
            way.speculator.stats.reset()
        taken, text = self._timed(name, self.count)
        way.whole.append(taken)
        way.same_text &= torch.equal(text, self.text)
        if way.speculator is not None:
            way.counts = _counts(way.speculator)

    def rows(self) -> list[dict[str, Any]]:
        """One finding for each way, with ratios to stock's ways."""
        return [self._row(name, way) for name, way in self.ways.items() if way.whole]

    def _row(self, name: str, way: Way) -> dict[str, Any]:
        seconds, tokens = statistics.median(way.whole), self.ids.shape[0] * self.count
        decode = max(seconds - statistics.median(way.prompt), 1e-9)
        row: dict[str, Any] = {
            "cell": self.name,
            "way": name,
            "tokens_per_second": tokens / seconds,
            "decode_ms_per_token": 1e3 * decode / max(self.count - 1, 1),
            "prompt_ms": 1e3 * statistics.median(way.prompt),
            "best_to_median": min(way.whole) / seconds,
            "calls": len(way.whole),
            "same_text": way.same_text,
        }
        for key, baseline in (("x_eager", EAGER), ("x_static", STATIC)):
            if baseline in self.ways and self.ways[baseline].whole:
                row[key] = statistics.median(self.ways[baseline].whole) / seconds
        if rounds := way.counts.get("rounds"):
            row |= {"ms_per_round": 1e3 * decode / rounds, "first_call_extra_s": way.first - seconds, **way.counts}
        return row

    def _timed(self, name: str, count: int) -> tuple[float, Tensor]:
        arguments = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "speculator": None}
        arguments |= {"attention_mask": self._mask, **self.ways[name].arguments}
        return timed(lambda: self.model.generate(self.ids, max_new_tokens=count, **arguments), self.setting.device)

    def prompt_seconds(self, name: str) -> float:
        """Seconds of a call with one new token."""
        return self._timed(name, 1)[0]

    def call(self, name: str, count: int | None = None) -> Callable[[], Any]:
        """A call of a way with so many new tokens, as a function; None is all."""
        return lambda: self._timed(name, self.count if count is None else count)

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """A block whose error becomes a finding. The way is then dropped."""
        with self.setting.guarded(cell=self.name, way=name):
            try:
                yield
            except Exception:
                self.ways.pop(name, None)
                raise


def _counts(speculator: Speculator) -> dict[str, Any]:
    """Rounds of the last call and their times on the host."""
    stats = speculator.stats
    rounds = max(stats.target_forwards, 1)
    return {
        "rounds": stats.target_forwards,
        "tokens_per_round": stats.tokens_per_round,
        "nodes": stats.drafted_tokens / max(stats.rounds, 1),
        "host_ms": {
            "target": 1e3 * stats.target_seconds / rounds,
            "drafter": 1e3 * stats.drafter_seconds / rounds,
            "rest": 1e3 * stats.rest_seconds / rounds,
        },
        "attention": dict(getattr(stats, "attention", {})),
        "fallbacks": dict(stats.fallbacks),
    }
