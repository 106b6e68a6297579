"""The whole of `hf-speculate tune`: measure, choose, predict, verify."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..bench.environment import environment, find_device
from ..bench.methods import SpeculatorSpec, load_target
from ..bench.prompts import builtin_prompts, read_prompts, tokenize
from ..bench.timing import progress, timed
from ..costs import CostSurface
from ..drafter import Drafter
from ..errors import SpeculateError
from ..models import GenerativeModel
from ..speculator import Speculator
from ..tuning_file import Setting, TargetCosts, TuningFile, cache_costs, cached_costs
from .choosing import Candidate, CostModel, candidates, rank_table, remembered, with_overhead
from .surveys import Survey, learn, measure_drafting, measure_target, pace, request


_CONTEXTS = (128, 512, 2048)
_ROOM = 160  # cache entries that the rounds of one measurement may add


@dataclass(kw_only=True)
class TuneSettings:
    """What to tune, and for what.

    Attributes:
        target: path or Hub id.
        speculator: `NAME_OR_PATH[:option=value,...]`.
        prompts, limit, raw: JSON-lines files (none: the built-in set), prompts of each, no chat template.
        verify: measure the choice against plain `generate` in the end.
        verify_prompts: other prompts for that; none: the same.
        dtype, device, batch_size, temperature: of the calls that are tuned for.
        max_new_tokens: of each call.
        contexts: cache entries at which costs are measured; None: 128, 512, 2048, as far as the target's positions go.
        repeats: of the verification.
        reuse_costs: take the target's costs from the cache if it has them.
    """

    target: str
    speculator: str
    prompts: Sequence[str | Path] = ()
    limit: int | None = None
    raw: bool = False
    verify: bool = True
    verify_prompts: Sequence[str | Path] = ()
    dtype: str = "auto"
    device: str | None = None
    batch_size: int = 1
    temperature: float = 0.0
    max_new_tokens: int = 128
    contexts: Sequence[int] | None = None
    repeats: int = 3
    reuse_costs: bool = False

    def check(self) -> None:
        """Raises `SpeculateError` for what cannot be measured."""
        counts = {"batch_size": self.batch_size, "repeats": self.repeats, "limit": self.limit or 1}
        for name, value in counts.items():
            if value < 1:
                raise SpeculateError(f"{name} must be at least 1, got {value}.")
        if self.max_new_tokens < 16:
            raise SpeculateError(f"max_new_tokens must be at least 16 to tune on, got {self.max_new_tokens}.")
        if self.temperature < 0 or (self.contexts and min(self.contexts) < 1):
            raise SpeculateError(f"temperature {self.temperature} or contexts {self.contexts} below what is possible.")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a candidate is expected to bring on the prompts, from the cost model and what was accepted of its drafts.

    Attributes:
        tokens, seconds: of a round.
        outside: seconds of a call that are not in rounds (prompt, drafter's share of it, preparation).
        speedup: of whole calls against stock's.
    """

    candidate: Candidate
    drafted: Survey = field(repr=False)
    tokens: float
    seconds: float
    outside: float
    speedup: float

    def as_json(self) -> dict[str, Any]:
        names = ("tokens", "seconds", "outside", "speedup")
        return {"options": dict(self.candidate.options), **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Everything that was measured and chosen.

    Attributes:
        costs: of the target with a scripted drafter.
        tuning: what a file should say.
        ranks: trials of each entry of `tuning.ranks`.
        given: the options that the speculator had before.
        best: what was chosen.
        compared: all that were run.
        measured: speed-ups of whole calls over plain `generate`, "fixed" (always the whole tree) and "adaptive"; None
            if it was not asked for.
    """

    costs: TargetCosts
    tuning: TuningFile
    rank_trials: list[list[int]]
    context: int
    best: Prediction
    given: Prediction
    compared: list[Prediction]
    measured: dict[str, float] | None


class Run:
    """One target, one drafter, prompts."""

    def __init__(self, settings: TuneSettings):
        settings.check()
        self.settings = settings
        spec = SpeculatorSpec.parse(settings.speculator)
        self._spec = SpeculatorSpec(spec.text, spec.source, {"tuning": False, **spec.options})
        device = find_device(settings.device)
        self.target, self.tokenizer = load_target(settings.target, settings.dtype, device)
        self.speculator = self._spec.make(self.target)
        self.prompts = self._read(settings.prompts)
        self.others = self._read(settings.verify_prompts) if settings.verify_prompts else self.prompts
        sampling = {"do_sample": True, "temperature": settings.temperature, "top_k": 0} if settings.temperature else {}
        self.arguments: dict[str, Any] = sampling

    @property
    def drafter(self) -> Drafter:
        return self.speculator.drafter

    @property
    def context(self) -> int:
        """Cache entries, on average over the tokens of the calls."""
        return round(sum(p.shape[1] for p in self.prompts) / len(self.prompts) + self.settings.max_new_tokens / 2)

    def __call__(self) -> Outcome:
        widths = self._widths()
        steps = len(self.contexts) * (3 + len(widths)) + len(self.prompts) * (5 + len(self._explored_widths()))
        with progress("tune", total=steps) as advance:
            text = torch.cat([prompt[0] for prompt in self.prompts])
            costs = self._target_costs(text, advance)
            drafting, extra = self._drafting_costs(text, widths, costs, advance)
            costs_here = with_overhead(costs, extra)
            model = CostModel(costs_here, drafting, self.context)
            explored = {width: self._learn(self._explorer(width), advance) for width in self._explored_widths()}
            found = candidates(self.drafter, explored, model)
            outside = self._plain_outside(costs, advance)
            given = Candidate(name="as given", drafter=self.drafter, options={}, width=self._width_of(self.drafter))
            predictions = [self._predict(candidate, model, outside, advance) for candidate in (given, *found)]
            best = max(predictions, key=lambda prediction: prediction.speedup)
            measured = self._verify(best.candidate, advance) if self.settings.verify else None
        table = rank_table(explored[max(explored)].drafted)
        tuning = TuningFile(
            drafter=self.drafter.name,
            options=best.candidate.options,
            costs=costs_here,
            drafting=model.drafting_at(best.candidate.width),
            acceptance=remembered(best.drafted),
            ranks=table.rates(),
            predicted={"speedup": best.speedup, "tokens_per_round": best.tokens, "context": self.context},
        )
        return Outcome(
            costs=costs_here,
            tuning=tuning,
            rank_trials=table.trials,
            context=self.context,
            best=best,
            given=predictions[0],
            compared=predictions,
            measured=measured,
        )

    @property
    def contexts(self) -> list[int]:
        longest = getattr(self.target.config.get_text_config(decoder=True), "max_position_embeddings", 10**9)
        wanted = sorted(set(self.settings.contexts or _CONTEXTS))
        fitting = [context for context in wanted if context + _ROOM <= longest]
        if self.settings.contexts is None and len(fitting) < len(wanted) and longest - _ROOM > fitting[-1] * 1.25:
            fitting.append(longest - _ROOM)
        if not fitting or (self.settings.contexts and fitting != wanted):
            raise SpeculateError(f"contexts {wanted} + {_ROOM} tokens do not fit the target's {longest} positions.")
        return fitting

    def _read(self, files: Sequence[str | Path]) -> list[Tensor]:
        """int64 [B, S] each: the batch is the prompt, repeated."""
        settings = self.settings
        groups = [read_prompts(path, settings.limit) for path in files] or [builtin_prompts(settings.limit)]
        template = bool(self.tokenizer.chat_template) and not settings.raw
        tokens = tokenize([p for group in groups for p in group], self.tokenizer, use_chat_template=template)
        longest = getattr(self.target.config.get_text_config(decoder=True), "max_position_embeddings", 10**9)
        fitting = [ids for _, ids in tokens if 0 < len(ids) <= longest - settings.max_new_tokens]
        if not fitting:
            raise SpeculateError(f"no prompt leaves room for {settings.max_new_tokens} of {longest} positions.")
        return [ids.repeat(settings.batch_size, 1).to(self.target.device) for ids in fitting]

    def _target_costs(self, text: Tensor, advance: Callable[[str], None]) -> TargetCosts:
        setting = Setting.of(self.target, self.settings.batch_size)
        known = cached_costs(setting) if self.settings.reuse_costs else None
        if known is None:
            known = measure_target(self.target, text, self.contexts, self.settings.batch_size, advance)
            cache_costs(known)
        return known

    def _widths(self) -> list[int]:
        knobs = self.drafter.knobs
        return [1] if knobs is None or knobs.width is None else [w for w in knobs.widths if w in (1, 2, 4, 8)]

    def _explored_widths(self) -> list[int]:
        """Narrow trees go deeper than a wide one that has as many nodes."""
        widths = self._widths()
        return sorted({width for width in widths if width <= 2} | {max(widths)})

    def _explorer(self, width: int) -> Drafter:
        """The drafter with trees as deep as is worth a look, of one width."""
        knobs = self.drafter.knobs
        if knobs is None:
            return self.drafter
        return self.drafter.with_options(**{**knobs.explored, **({knobs.width: width} if knobs.width else {})})

    def _width_of(self, drafter: Drafter) -> int:
        knobs = drafter.knobs
        return getattr(drafter.options, knobs.width) if knobs and knobs.width else 1  # type: ignore[attr-defined]

    def _drafting_costs(
        self, text: Tensor, widths: Sequence[int], costs: TargetCosts, advance: Callable[[str], None]
    ) -> tuple[dict[int, CostSurface], float]:
        surfaces, extra = {}, []
        for width in widths:
            drafter, size = self._explorer(width), self.settings.batch_size
            surfaces[width], more = measure_drafting(self.target, drafter, text, self.contexts, size, costs, advance)
            extra += more
        return surfaces, median(extra)

    def _learn(self, drafter: Drafter, advance: Callable[[str], None]) -> Survey:
        return learn(self.target, drafter, self.prompts, self.settings.max_new_tokens, self.arguments, advance)

    def _plain_outside(self, costs: TargetCosts, advance: Callable[[str], None]) -> float:
        """Seconds of a call of stock `generate` that emits one token, on average over the prompts."""
        target, arguments = self.target, {**request(1), **self.arguments}
        before = pace(target, self.prompts[0], costs)
        seconds = [median(_generate(target, p, None, 0, arguments) for _ in range(3)) for p in self.prompts]
        slower = (before + pace(target, self.prompts[0], costs)) / 2
        advance("plain")
        return sum(seconds) / len(seconds) / slower

    def _predict(
        self, candidate: Candidate, model: CostModel, outside: float, advance: Callable[[str], None]
    ) -> Prediction:
        before = pace(self.target, self.prompts[0], model.costs)
        drafted = self._learn(candidate.drafter, advance)
        slower = (before + pace(self.target, self.prompts[0], model.costs)) / 2
        calls, per_call = len(self.prompts), self.settings.max_new_tokens
        in_rounds = sum(m.drafting_seconds + m.other_seconds for m in drafted.rounds)
        outside_here = (drafted.seconds - in_rounds) / calls / slower
        seconds, rounds = model.of(drafted, candidate.width), len(drafted.rounds) / calls
        plain = outside + (per_call - 1) * model.plain
        return Prediction(
            candidate=candidate,
            drafted=drafted,
            tokens=(drafted.tokens / calls - 1) / rounds,
            seconds=seconds,
            outside=outside_here,
            speedup=plain / (outside_here + rounds * seconds),
        )

    def _verify(self, candidate: Candidate, advance: Callable[[str], None]) -> dict[str, float]:
        """Speed-ups of whole calls, interleaved with stock's."""
        methods: dict[str, Speculator | None] = {
            "plain": None,
            "fixed": Speculator(candidate.drafter, adaptive=False),
            "adaptive": Speculator(candidate.drafter, adaptive=True),
        }
        target, names = self.target, list(methods)
        for name in names:
            _generate(target, self.others[0], methods[name], 0, {**request(16), **self.arguments})
        seconds: dict[tuple[str, int], list[float]] = {}
        for repeat in range(self.settings.repeats):
            for index, prompt in enumerate(self.others):
                first = (index + repeat) % len(names)
                for name in names[first:] + names[:first]:
                    arguments = {**request(self.settings.max_new_tokens), **self.arguments}
                    found = _generate(target, prompt, methods[name], index, arguments)
                    seconds.setdefault((name, index), []).append(found)
                advance("verification")
        # Medians of each prompt: a call that the machine held up must not decide the sum.
        sums = {name: sum(median(seconds[name, index]) for index in range(len(self.others))) for name in names}
        return {name: sums["plain"] / sums[name] for name in names if name != "plain"}


def tune(settings: TuneSettings) -> Outcome:
    """Measures, chooses, predicts and verifies, see the package's docstring."""
    return Run(settings)()


def as_json(settings: TuneSettings, outcome: Outcome) -> dict[str, Any]:
    """The outcome, JSON-serialisable."""
    predicted = outcome.best.speedup
    return {
        "tune": outcome.tuning.drafter,
        "target": settings.target,
        "speculator": settings.speculator,
        "options": dict(outcome.best.candidate.options),
        "context": outcome.context,
        "predicted": outcome.best.as_json(),
        "given": outcome.given.as_json(),
        "compared": [prediction.as_json() for prediction in outcome.compared],
        "measured": outcome.measured,
        "error": {k: predicted / v - 1 for k, v in outcome.measured.items()} if outcome.measured else None,
        "ranks": outcome.tuning.ranks,
        "costs": outcome.costs.to_json(),
        "environment": environment(torch.device(settings.device) if settings.device else None),
    }


def _generate(
    target: GenerativeModel, prompt: Tensor, speculator: Speculator | None, seed: int, arguments: Mapping[str, Any]
) -> float:
    torch.manual_seed(seed)
    mask = torch.ones_like(prompt)
    seconds, _ = timed(
        lambda: target.generate(prompt, attention_mask=mask, speculator=speculator, **arguments), target.device
    )
    return seconds
