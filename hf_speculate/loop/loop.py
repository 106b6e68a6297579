"""The decoding loop: choose a budget, draft a tree, score it in one target forward, verify, keep, publish.

Streaming, statistics and text are consumers of the generator `decode`, not parts of it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack
from typing import Any

from ..policy import NOTHING, Budget, Situation
from ..tree import DraftTree, Round
from ..verification import TaintedScores, Verdict, are_tainted
from .decoding import Decoding


def decode(run: Decoding) -> Generator[Round]:
    """Generates until every row is finished; yields the rounds, beginning with the prompt's.

    It may end in any way: exhausted, closed, interrupted, or by an error in a drafter, criterion or consumer. The cache
    then holds the prompt and all delivered tokens but the last, and the RNG is where plain `generate` would have left
    it.
    """
    try:
        yield prefill(run)
        with run.scorer.model._optimize_model_for_decode():
            while run.is_unfinished:
                budget = choose(run)
                tree = draft(run, budget)
                look_ahead(run, tree, budget)
                output = score(run, tree)
                tree, output, verdict = verify(run, tree, output)
                round = keep(run, tree, verdict)
                publish(run, round, output)
                if any(round.tokens):
                    yield round
    finally:
        end(run)


def prefill(run: Decoding) -> Round:
    """Runs the prompt and chooses the first token of every row."""
    run.meter.begin_round()
    sequences = run.rows.sequences
    verdict = Verdict.empty(sequences.batch_size)
    with run.meter.prefilling:
        run.drafting.start()
        with run.drafting.listening():
            output = run.prompt.run(run.scorer, run.forward_kwargs)
        run.sampler.records.add_prompt(output)
        run.rows.prompt_lengths = run.cache.lengths
        tree = DraftTree.root_only(sequences.last_tokens)
        run.verifier.verify(output.logits[:, -1:], tree, verdict)
    round = run.finished_round(tree, verdict, run.cache.lengths, run.cache.append_index, is_prefill=True)
    run.stats.add(round)
    with run.meter.reading:
        run.drafting.observe_prompt(run.prompt.known_tokens(sequences), output.hidden_states)
    return round


def choose(run: Decoding) -> Budget:
    """The budget of the round. Finished rows leave the target's forwards first, if they can."""
    if run.rows.can_leave:
        run.scorer.leave_out(run.rows.done(run.cache))
    run.meter.begin_round()
    with run.meter.drafting:
        run.sampler.release_noise(run.rows.sequences)
        active = [row for row, is_active in enumerate(run.rows.active) if is_active]
        situation = Situation(active, len(run.cache.rows), run.cache.append_index, run.drafting.num_unread)
        return run.policy.choose(situation) if active else NOTHING


def draft(run: Decoding, budget: Budget) -> DraftTree:
    """A tree for every row that the target will run, cut to the budget and to the tokens that can be emitted."""
    if not budget.is_nothing and run.drafting.num_unread:
        with run.meter.reading:
            run.drafting.read_prompt()
    with run.meter.drafting:
        run.depth = 0
        ahead = None if run.ahead is None else run.ahead.take()
        tree = None if budget.is_nothing else _drafted(run, budget, ahead)
        if tree is None:
            tree = DraftTree.root_only(run.rows.sequences.last_tokens)
        return run.rows.with_padding(tree).select(run.cache.rows)


def _drafted(run: Decoding, budget: Budget, ahead: DraftTree | None) -> DraftTree | None:
    """A draft, made `ahead` or now, within the budget and the tokens that can be emitted; None if no token can be."""
    bounds = run.limits.within(budget, run.rows.active, run.scorer, run.root_positions)
    if not bounds.allow_draft:
        return None
    tree = ahead or run.drafting.draft(run.state(bounds.max_depth, run.policy.early_stopping()))
    run.depth = tree.max_depth
    return bounds.cut(tree, run.policy)


def look_ahead(run: Decoding, tree: DraftTree, budget: Budget) -> None:
    """Lets the drafter begin the next round's draft, if drafting ahead is on."""
    if run.ahead is not None and not budget.is_nothing:
        with run.meter.drafting:
            (limit,) = run.limits(run.scorer, run.root_positions)
            run.ahead.begin(tree, budget, run.state(limit, run.policy.early_stopping_ahead()))


def score(run: Decoding, tree: DraftTree) -> Any:
    """The output of the target's forward over a tree."""
    run.stats.target_forwards += 1
    with run.meter.scoring:
        with run.drafting.listening():
            output = run.scorer(tree, run.root_positions, forward_kwargs=run.forward_kwargs)
        run.drafting.note(output, run.scorer.num_rerun)
        return output


def verify(run: Decoding, tree: DraftTree, output: Any) -> tuple[DraftTree, Any, Verdict]:
    """Walks the tree and emits what the request's sampler chooses.

    Scores that drafts have made NaN are replaced by those of plain steps: tree and output are then those of the roots.
    """
    verdict = Verdict.empty(run.rows.sequences.batch_size)
    may_be_tainted = run.scorer.sums_masked and (tree.num_nodes > 1 or run.cache.is_ragged) and not run.is_text_broken
    run.broken_off = tree, verdict, output
    try:
        with run.meter.verifying:
            table = getattr(output, "table", None)
            run.verifier.verify(output.logits, tree, verdict, table, may_be_tainted=may_be_tainted)
    except TaintedScores:
        tree = tree.first(0)
        output = _scored_again(run, tree)
        run.broken_off = tree, verdict, output
        with run.meter.verifying:
            run.verifier.verify(output.logits, tree, verdict)
    if (ahead := run.ahead) is not None:
        run.meter.wait_for_ahead(lambda: ahead.resolve(verdict.tokens[0], is_over=not run.is_unfinished))
    return tree, output, verdict


def _scored_again(run: Decoding, roots: DraftTree) -> Any:
    """The output of plain steps, in place of one that is not finite because of the drafts."""
    run.stats.fallbacks["scored again without the draft: it led to states that are not finite"] = 1
    run.depth = 0
    run.cache.clear_uncommitted()
    output = score(run, roots)
    # If plain steps give NaN in every row, the text itself is not finite. With sliding windows it may leave the window.
    run.is_text_broken = bool(are_tainted(output.logits).all()) and not run.scorer.has_windows
    return output


def keep(run: Decoding, tree: DraftTree, verdict: Verdict) -> Round:
    """Keeps the entries of the accepted paths, and returns the finished round."""
    run.broken_off = None
    place = run.cache.lengths, run.cache.append_index
    run.cache.keep(run.rows.paths(verdict, run.cache), ended=run.rows.done(run.cache))
    return run.finished_round(tree, verdict, *place)


def publish(run: Decoding, round: Round, output: Any) -> None:
    """Passes the round to all listeners."""
    for listener in run.listeners:
        listener(round, output)
    run.meter.published()


def end(run: Decoding) -> None:
    """Leaves cache, session and RNG consistent with what was delivered. It works after any interruption."""
    with ExitStack() as ends:
        for step in (run.policy.close, run.drafting.close, run.finish):  # the last one runs first
            ends.callback(step)
        ends.callback(_keep_emitted, run)


def _keep_emitted(run: Decoding) -> None:
    """Keeps what a round has emitted that was interrupted while it was verified."""
    if run.broken_off is not None:
        tree, verdict, output = run.broken_off
        run.drafting.observe(keep(run, tree, verdict), output.hidden_states, getattr(output, "along", None))
