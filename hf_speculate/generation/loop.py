"""The decoding loop: choose a budget, draft a tree, score it in one target forward, verify, keep, tell everybody.

Streaming, statistics and text are consumers of the generator `decode`, not parts of it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from ..cache import TreeCache
from ..compilation import Compiler
from ..drafting import Deepening, Drafting, DraftState
from ..models import GenerativeModel
from ..policy import NOTHING, Budget, PolicySession, Situation
from ..round import Round
from ..stats import SpeculationStats
from ..target import Scorer
from ..tree import DraftTree
from ..verification import Sampler, Sequences, Stopping, TaintedScores, Verdict, are_tainted, verify
from .ahead import Ahead
from .clock import RoundClock
from .delivery import Delivery
from .ended_rows import EndedRows
from .limits import DepthLimits
from .listeners import Listener
from .prompt import Prompt


def decode(run: Decoding) -> Generator[Round]:
    """Generates until every row is finished; yields the rounds, the prompt's first.

    However it ends (exhausted, closed, interrupted, an error in a drafter, criterion or consumer), the cache then holds
    the prompt and the delivered tokens but the last, and the RNG is where plain `generate` would have left it.
    """
    try:
        yield run.prefill()
        with run.target._optimize_model_for_decode():
            while run.is_unfinished:
                budget = run.choose()
                tree = run.draft(budget)
                run.look_ahead(tree, budget)
                output = run.score(tree)
                tree, verdict = run.verify(tree, output)
                round = run.keep(tree, verdict)
                run.publish(round, output)
                if any(round.tokens):
                    yield round
    finally:
        run.close()


@dataclass(kw_only=True)
class Decoding:
    """One request on its way: what `decode` needs, and the verbs of its loop.

    Attributes:
        target: the model.
        prompt: what has to run first.
        drafting: what drafts for it.
        scorer: the target's forward over trees (owns the cache).
        policy: chooses how much every round drafts.
        sampler, stopping, sequences, stats: see there.
        ended: what rows that have ended owe.
        limits: how deep a round may draft.
        lockstep_reason: why all rows must emit the same number of tokens a round; "" if each goes on alone.
        compiler: of the target's and the drafter's forwards; None: nothing is compiled.
        delivery: hands the tokens [B] of every step to a streamer; all rows advance together for it.
        ahead: drafts the next round while this one is verified; None: nobody does.
        listeners: told of every round.
    """

    target: GenerativeModel
    prompt: Prompt
    drafting: Drafting
    scorer: Scorer
    policy: PolicySession
    sampler: Sampler
    stopping: Stopping
    sequences: Sequences
    stats: SpeculationStats
    ended: EndedRows
    limits: DepthLimits
    lockstep_reason: str = ""
    compiler: Compiler | None = None
    delivery: Delivery | None = None
    ahead: Ahead | None = None
    listeners: Sequence[Listener] = ()

    _clock: RoundClock = field(default_factory=RoundClock, init=False)
    _num_compiled_before: int = field(default=0, init=False)
    _drafted_depth: int = field(default=0, init=False)
    _is_text_broken: bool = field(default=False, init=False)
    _broken_off: tuple[DraftTree, Verdict, Any] | None = field(default=None, init=False)

    @property
    def cache(self) -> TreeCache:
        return self.scorer.cache

    @cached_property
    def _forward_kwargs(self) -> dict[str, Any]:
        return {**self.drafting.forward_kwargs, **self.sampler.records.forward_kwargs}

    @property
    def lockstep(self) -> bool:
        """Whether all rows advance together."""
        return self.sequences.batch_size == 1 or bool(self.lockstep_reason)

    @property
    def is_unfinished(self) -> bool:
        return not all(self.sequences.finished) or self.ended.is_any_behind(self.cache)

    def prefill(self) -> Round:
        """Runs the prompt and chooses the first token of every row."""
        if self.lockstep_reason:
            self.stats.fallbacks[f"rows in lock-step: {self.lockstep_reason}"] += 1
        self._clock.start()
        with self.stats.timed("prefill_seconds"):
            self.drafting.start()
            with self.drafting.listening():
                output = self.prompt.run(self.scorer, self._forward_kwargs)
            self.sampler.records.add_prompt(output)
            self.ended.prompt_lengths = self.cache.lengths
            text = self.sequences.prompt
            roots = text[:, -1] if text.shape[1] else text.new_zeros(text.shape[0])
            tree = DraftTree.root_only(roots.cpu())
            verdict = Verdict.empty(self.sequences.batch_size)
            self._verify(output.logits[:, -1:], tree, verdict)
        self._leave_to_streamer("prefill_seconds")
        round = self._round(tree, verdict, self.cache.lengths, self.cache.append_index, is_prefill=True)
        self.stats.add(round)
        with self.stats.timed("drafter_prefill_seconds"):
            self.drafting.observe_prompt(self.prompt.known_tokens(self.sequences), output.hidden_states)
        return round

    def choose(self) -> Budget:
        """What the round may draft; from here on, as far as it pays, the target runs only rows that are not finished.

        In lock-step it runs all: what is called with the whole batch must see what stock shows it.
        """
        finished = self.sequences.finished
        if not self.lockstep and any(finished) and not all(finished):
            self.scorer.leave_out(self.ended.done(self.cache))
        self._num_compiled_before = self._num_compiled
        self._clock.start()
        with self.stats.timed("drafter_seconds"):
            self.sampler.release_noise(self.sequences)
            rows = [row for row, takes_part in enumerate(self._active) if takes_part]
            situation = Situation(rows, len(self.cache.rows), self.cache.append_index)
            return self.policy.choose(situation) if rows else NOTHING

    def draft(self, budget: Budget) -> DraftTree:
        """A tree for every row that the target is going to run."""
        if not budget.is_nothing and self.drafting.has_unread_prompt:
            self._read_prompt()
        with self.stats.timed("drafter_seconds"):
            tree = self.ended.with_padding(self._drafted(budget)).select(self.cache.rows)
        self._clock.drafted()
        return tree

    def _read_prompt(self) -> None:
        """The drafter reads the prompt when a draft is wanted. It is no round's work."""
        before = self.stats.drafter_prefill_seconds
        with self.stats.timed("drafter_prefill_seconds"):
            self.drafting.read_prompt()
        self._clock.leave_out(self.stats.drafter_prefill_seconds - before)

    def _drafted(self, budget: Budget) -> DraftTree:
        """What the drafter gives within the budget, as far as it can be emitted."""
        active, limits = self._active, self.limits(self.scorer, self.prompt.root_positions(self.sequences))
        tree = None if self.ahead is None else self.ahead.take()
        taking_part = [limit for limit, takes_part in zip(limits, active, strict=True) if takes_part]
        max_depth = max(taking_part, default=0)
        if budget.max_depth is not None:
            max_depth = min(max_depth, budget.max_depth)
        self._drafted_depth = 0
        if budget.max_nodes == 0 or max_depth <= 0:
            return DraftTree.root_only(self.sequences.last_tokens)
        if tree is None:
            tree = self.drafting.draft(self._state(active, max_depth, self.policy.deepening()))
        if tree.num_nodes == 1:
            return tree
        self._drafted_depth = tree.max_depth
        if budget.max_nodes is not None:
            tree = tree.best(budget.max_nodes)
        tree = self.policy.cut(tree)
        return tree.pruned(limits) if tree.max_depth > min(taking_part) else tree

    def look_ahead(self, tree: DraftTree, budget: Budget) -> None:
        """Lets the drafter begin with the next round, where it may."""
        if self.ahead is not None and not budget.is_nothing:
            with self.stats.timed("drafter_seconds"):
                (limit,) = self.limits(self.scorer, self.prompt.root_positions(self.sequences))
                self.ahead.begin(tree, budget, self._state(self._active, limit, self.policy.deepening_ahead()))
            self._clock.drafted()

    def _state(self, active: tuple[bool, ...], max_depth: int, deepening: Deepening | None) -> DraftState:
        is_chain = self.scorer.shape == "chain"
        place = self.sampler, self.sequences, active, max_depth
        return self.drafting.state(*place, chains_only=is_chain, deepening=deepening)

    def score(self, tree: DraftTree) -> Any:
        """The output of the target's forward over a tree."""
        with self.stats.timed("target_seconds"):
            return self._score(tree)

    def _score(self, tree: DraftTree) -> Any:
        self.stats.target_forwards += 1
        with self.drafting.listening():
            output = self.scorer(tree, self.prompt.root_positions(self.sequences), forward_kwargs=self._forward_kwargs)
        self.drafting.skip(self.scorer.num_rerun)
        return output

    def verify(self, tree: DraftTree, output: Any) -> tuple[DraftTree, Verdict]:
        """Walks the tree, emitting what the request's sampler chooses; the tree is its root alone where scores of its
        nodes cannot be trusted."""
        with self.stats.timed("target_seconds"):
            verdict = Verdict.empty(self.sequences.batch_size)
            self._broken_off = tree, verdict, output
            has_masked_entries = self.scorer.sums_masked and (tree.num_nodes > 1 or self.cache.is_ragged)
            try:
                self._verify(output.logits, tree, verdict, has_masked_entries and not self._is_text_broken)
            except TaintedScores:
                tree = tree.root_alone()
                self._score_again(tree, output)
                self._broken_off = tree, verdict, output
                self._verify(output.logits, tree, verdict)
        self._leave_to_streamer("target_seconds")
        if self.ahead is not None:
            with self.stats.timed("drafter_seconds"):
                self._clock.put_off(self.ahead.settle(verdict.tokens[0], is_over=not self.is_unfinished))
        return tree, verdict

    def _score_again(self, roots: DraftTree, output: Any) -> None:
        """Puts the output of plain steps in place of one over drafts with states that are not finite."""
        self.stats.fallbacks["scored again without the draft: it led to states that are not finite"] += 1
        self._drafted_depth = 0
        self.cache.clear_uncommitted()
        for name, value in self._score(roots).items():
            output[name] = value
        # Where single steps give NaN in every row, the text itself is what is not finite. (A window may leave it.)
        self._is_text_broken = bool(are_tainted(output.logits).all()) and not self.scorer.has_windows

    def keep(self, tree: DraftTree, verdict: Verdict) -> Round:
        """Keeps the entries of the accepted paths; the round that this makes."""
        self._broken_off = None
        place = self.cache.lengths, self.cache.append_index
        self.cache.keep(self.ended.paths(verdict, self.cache), ended=self.ended.done(self.cache))
        return self._round(tree, verdict, *place)

    def publish(self, round: Round, output: Any) -> None:
        """Tells the listeners what the round did."""
        for listener in self.listeners:
            listener(round, output)
        self._clock.told()

    def close(self) -> None:
        """Leaves cache, session and RNG consistent with what was delivered; works after any interruption."""
        with ExitStack() as ends:
            for end in (self.policy.close, self.drafting.close, self._settle):  # the last first
                ends.callback(end)

    def _settle(self) -> None:
        if self._broken_off is not None:  # what was emitted of a round that was broken off
            tree, verdict, output = self._broken_off
            self.drafting.observe(self.keep(tree, verdict), output.hidden_states)
        self.cache.bring_back()
        delivered = self.sequences.num_emitted
        if self.delivery is not None:
            delivered = [min(self.delivery.num_steps, n) for n in delivered]
        if self.ended.prompt_lengths is not None:
            wanted = zip(self.ended.settled_lengths(delivered), self.cache.lengths, strict=True)
            self.cache.truncate(list(map(min, wanted)))
            self.scorer.settle()
        if self.cache.is_ragged:  # what the next turn masks must be finite
            self.cache.clear_uncommitted()
        self.cache.release()
        if self.sampler.noise is not None:
            self.sampler.noise.finish(max(delivered))

    def _round(
        self, tree: DraftTree, verdict: Verdict, lengths: Sequence[int], context: int, is_prefill: bool = False
    ) -> Round:
        return Round(
            tree=tree,
            paths=tuple(map(tuple, verdict.paths)),
            tokens=tuple(map(tuple, verdict.tokens)),
            num_accepted=tuple(verdict.num_accepted),
            lengths=lengths,
            context=context,
            depth=self._drafted_depth,
            seconds=self._clock.stop(),
            is_prefill=is_prefill,
            is_warm_up=self._num_compiled != self._num_compiled_before,
            is_ahead=self.ahead is not None and self.ahead.was_taken,
        )

    def _verify(self, logits: Tensor, tree: DraftTree, verdict: Verdict, may_be_tainted: bool = False) -> None:
        verify(
            logits,
            tree,
            self.sampler,
            self.stopping,
            self.sequences,
            lockstep=self.lockstep,
            pads_ended=self.ended.are_padded,
            may_be_tainted=may_be_tainted,
            after_step=self.delivery,
            verdict=verdict,
        )

    def _leave_to_streamer(self, counter: str) -> None:
        """Takes the streamer's time out of ours."""
        if self.delivery is not None:
            seconds = self.delivery.take_seconds()
            self.stats.take_out(seconds, counter)
            self._clock.leave_out(seconds)

    @property
    def _active(self) -> tuple[bool, ...]:
        """Whether the next round can emit tokens in a row."""
        sequences = self.sequences
        if not self.lockstep:
            return tuple(not finished for finished in sequences.finished)
        return tuple(self.stopping.is_running(sequences, row) for row in range(sequences.batch_size))

    @property
    def _num_compiled(self) -> int:
        """Forwards so far that compiled before they ran."""
        return 0 if self.compiler is None else self.compiler.num_slow
