"""The decoding loop: choose a budget, draft a tree, score it in one target forward, verify, keep, publish.

Streaming, statistics and text are consumers of the generator `decode`, not parts of it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ..cache import TreeCache
from ..policy import Budget
from ..stats import SpeculationStats
from ..tree import DraftTree, Round
from ..verification import TaintedScores, Verdict, are_tainted
from .choosing import Choosing
from .drafts import Drafts
from .listeners import Listener
from .meter import Meter
from .rows import Rows
from .target import Target


def decode(run: Decoding) -> Generator[Round]:
    """Generates until every row is finished; yields the rounds, beginning with the prompt's.

    It may end in any way: exhausted, closed, interrupted, or by an error in a drafter, criterion or consumer. The cache
    then holds the prompt and all delivered tokens but the last, and the RNG is where plain `generate` would have left
    it.
    """
    try:
        yield run.prefill()
        with run.target.model._optimize_model_for_decode():
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
    """One request while it runs: the state that `decode` needs, and the steps of its loop.

    Attributes:
        rows: texts of the rows, the criteria that end them, and what finished rows still need.
        target: model with its prompt and its forwards over trees.
        drafts: drafter, policy and depth limits.
        choosing: sampler and streamer.
        stats: counters of this call.
        listeners: functions that are called after every round.
        meter: time of the request's phases.
    """

    rows: Rows
    target: Target
    drafts: Drafts
    choosing: Choosing
    stats: SpeculationStats
    meter: Meter
    listeners: Sequence[Listener] = ()

    _broken_off: tuple[DraftTree, Verdict, Any] | None = field(default=None, init=False)

    @property
    def cache(self) -> TreeCache:
        return self.target.cache

    @property
    def is_unfinished(self) -> bool:
        return self.rows.are_unfinished(self.cache)

    def prefill(self) -> Round:
        """Runs the prompt and chooses the first token of every row."""
        driver, sequences = self.drafts.driver, self.rows.sequences
        if self.rows.lockstep_reason:
            self.stats.fallbacks[f"rows in lock-step: {self.rows.lockstep_reason}"] += 1
        self.meter.begin_round()
        verdict, text = Verdict.empty(sequences.batch_size), sequences.prompt
        with self.meter.prefilling():
            driver.start()
            with driver.listening():
                output = self.target.prompt.run(self.target.scorer, self.target.forward_kwargs)
            self.choosing.sampler.records.add_prompt(output)
            self.rows.prompt_lengths = self.cache.lengths
            roots = text[:, -1] if text.shape[1] else text.new_zeros(text.shape[0])
            tree = DraftTree.root_only(roots.cpu())
            self.choosing.walk(output.logits[:, -1:], tree, self.rows, verdict)
        round = self._round(tree, verdict, self.cache.lengths, self.cache.append_index, is_prefill=True)
        self.stats.add(round)
        with self.meter.reading():
            driver.observe_prompt(self.target.prompt.known_tokens(sequences), output.hidden_states)
        return round

    def choose(self) -> Budget:
        """The budget of the round."""
        self.target.begin_round(self.rows)
        self.meter.begin_round()
        with self.meter.drafting():
            self.choosing.sampler.release_noise(self.rows.sequences)
            return self.drafts.choose(self.rows, self.cache)

    def draft(self, budget: Budget) -> DraftTree:
        """A tree for every row that the target will run."""
        if not budget.is_nothing and self.drafts.driver.has_unread_prompt:
            with self.meter.reading():
                self.drafts.driver.read_prompt()
        with self.meter.drafting():
            tree = self.drafts.tree(budget, self.rows, self.target, self.choosing.sampler)
            return self.rows.with_padding(tree).select(self.cache.rows)

    def look_ahead(self, tree: DraftTree, budget: Budget) -> None:
        """Lets the drafter begin the next round's draft, if drafting ahead is on."""
        if self.drafts.ahead is not None and not budget.is_nothing:
            with self.meter.drafting():
                self.drafts.begin_ahead(tree, budget, self.rows, self.target, self.choosing.sampler)

    def score(self, tree: DraftTree) -> Any:
        """The output of the target's forward over a tree."""
        with self.meter.scoring():
            return self._score(tree)

    def _score(self, tree: DraftTree) -> Any:
        self.stats.target_forwards += 1
        driver = self.drafts.driver
        with driver.listening():
            output = self.target.score(tree, self.rows.sequences)
        driver.note(output)
        driver.skip(self.target.scorer.num_rerun)
        return output

    def verify(self, tree: DraftTree, output: Any) -> tuple[DraftTree, Verdict]:
        """Walks the tree and emits what the request's sampler chooses.

        The returned tree is only the root if the scores of its nodes could not be trusted.
        """
        with self.meter.verifying():
            verdict = Verdict.empty(self.rows.sequences.batch_size)
            self._broken_off = tree, verdict, output
            may_be_tainted, table = self.target.may_be_tainted(tree), getattr(output, "table", None)
            try:
                self.choosing.walk(output.logits, tree, self.rows, verdict, table, may_be_tainted)
            except TaintedScores:
                tree = tree.first(0)
                self._score_again(tree, output)
                self._broken_off = tree, verdict, output
                self.choosing.walk(output.logits, tree, self.rows, verdict)
        if (ahead := self.drafts.ahead) is not None:
            self.meter.settle_ahead(lambda: ahead.settle(verdict.tokens[0], is_over=not self.is_unfinished))
        return tree, verdict

    def _score_again(self, roots: DraftTree, output: Any) -> None:
        """Replaces an output that is not finite because of the drafts by that of plain steps."""
        self.stats.fallbacks["scored again without the draft: it led to states that are not finite"] += 1
        self.drafts.depth = 0
        self.cache.clear_uncommitted()
        again = self._score(roots)
        output.table = output.along = None
        for name, value in vars(again).items():
            setattr(output, name, value)
        # If plain steps give NaN in every row, the text itself is not finite. With sliding windows it may leave the
        # window.
        is_broken = bool(are_tainted(output.logits).all()) and not self.target.scorer.has_windows
        self.choosing.is_text_broken = is_broken

    def keep(self, tree: DraftTree, verdict: Verdict) -> Round:
        """Keeps the entries of the accepted paths, and returns the finished round."""
        self._broken_off = None
        place = self.cache.lengths, self.cache.append_index
        self.cache.keep(self.rows.paths(verdict, self.cache), ended=self.rows.done(self.cache))
        return self._round(tree, verdict, *place)

    def publish(self, round: Round, output: Any) -> None:
        """Passes the round to all listeners."""
        for listener in self.listeners:
            listener(round, output)
        self.meter.published()

    def close(self) -> None:
        """Leaves cache, session and RNG consistent with what was delivered. It works after any interruption."""
        with ExitStack() as ends:
            for end in (self.drafts.policy.close, self.drafts.driver.close, self._settle):  # the last one runs first
                ends.callback(end)

    def _settle(self) -> None:
        if self._broken_off is not None:  # keep what an interrupted round has emitted
            tree, verdict, output = self._broken_off
            along = getattr(output, "along", None)
            self.drafts.driver.observe(self.keep(tree, verdict), output.hidden_states, along)
        if self.target.compiler is not None and self.target.compiler.num_bytes:
            self.stats.recorded_bytes.append(self.target.compiler.num_bytes)
        self.cache.bring_back()
        delivered = self.choosing.num_delivered(self.rows)
        if self.rows.prompt_lengths is not None:
            wanted = zip(self.rows.settled_lengths(delivered), self.cache.lengths, strict=True)
            self.cache.truncate(list(map(min, wanted)))
            self.target.scorer.settle()
        if self.cache.is_ragged:  # the next turn masks these entries, so they must be finite
            self.cache.clear_uncommitted()
        self.cache.release()
        if self.choosing.sampler.noise is not None:
            self.choosing.sampler.noise.finish(max(delivered))

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
            depth=self.drafts.depth,
            seconds=self.meter.end_round(),
            is_prefill=is_prefill,
            is_warm_up=self.target.has_compiled,
            is_ahead=self.drafts.was_made_ahead,
        )
