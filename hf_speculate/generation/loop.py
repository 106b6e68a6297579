"""The decoding loop: draft a tree, score it in one target forward, choose a path, keep it, tell the drafter.

Streaming, statistics and text are consumers of the generator `decode`, not parts of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..cache import TreeCache
from ..compilation import Compiler
from ..drafting import Drafting, DraftState
from ..errors import PromptError
from ..models import GenerativeModel
from ..policy import UNLIMITED, Tuner
from ..stats import SpeculationStats
from ..target import DepthLimit, Scorer, has_length_dependent_rope, layer_windows, takes_position_ids
from ..tree import DraftTree
from ..verification import Sampler, Sequences, Stopping, Verdict, score_only, verify
from .delivery import Delivery
from .ended_rows import EndedRows
from .stock_step import StockStep


def decode(run: Decoding) -> Generator[Verdict]:
    """Generates until every row is finished; yields what each round emitted, the prefill's token first.

    However it ends (exhausted, closed, interrupted, an error in a drafter, criterion or consumer), the cache then holds
    the prompt and the delivered tokens but the last, and the RNG is where plain `generate` would have left it.
    """
    try:
        yield run.prefill()
        with run.target._optimize_model_for_decode():
            while run.is_unfinished:
                run.leave_out_finished()
                tree = run.draft()
                output = run.score(tree)
                verdict = run.verify(output.logits, tree)
                run.record(output, verdict)
                run.keep(verdict)
                run.observe(verdict, output.hidden_states)
                run.learn(tree, verdict)
                if any(verdict.tokens):
                    yield verdict
    finally:
        run.close()


@dataclass(kw_only=True)
class Decoding:
    """One request on its way: what `decode` needs, and the verbs of its loop.

    Attributes:
        target: the model.
        drafting: what drafts for it.
        scorer: the target's forward over trees (owns the cache).
        prefill_forward: runs the prompt, `hidden_states` layers given, and returns the model's output.
        sampler, stopping, sequences, stats: see there.
        prompt_positions: position id of each row's last prompt token.
        num_expected: entries that the cache should have behind the prompt, if that is known.
        step: what stock would hand the model behind the prompt.
        tuner: chooses how much every round drafts; None: what the drafter gives.
        compiler: of the target's and the drafter's forwards; None: nothing is compiled.
        shows_cache: somebody gets to see the cache: of rows that have ended it holds what stock's would.
        delivery: hands the tokens [B] of every step to a streamer; all rows advance together for it.
    """

    target: GenerativeModel
    drafting: Drafting
    scorer: Scorer
    prefill_forward: Callable[..., Any]
    sampler: Sampler
    stopping: Stopping
    sequences: Sequences
    stats: SpeculationStats
    prompt_positions: Sequence[int]
    step: StockStep
    num_expected: int | None = None
    tuner: Tuner | None = None
    compiler: Compiler | None = None
    shows_cache: bool = True
    delivery: Delivery | None = None

    _round_start: float = field(default=0.0, init=False)
    _draft_seconds: float = field(default=0.0, init=False)
    _drafted_depth: int = field(default=0, init=False)
    _num_slow: int = field(default=0, init=False)
    _walked: Verdict | None = field(default=None, init=False)
    _hidden_states: Any = field(default=None, init=False)

    @property
    def cache(self) -> TreeCache:
        return self.scorer.cache

    @cached_property
    def _forward_kwargs(self) -> dict[str, Any]:
        return {**self.drafting.forward_kwargs, **self.sampler.records.forward_kwargs}

    @cached_property
    def _layer_windows(self) -> list[int | None]:
        return layer_windows(self.target.config)

    @cached_property
    def _vocab_size(self) -> int:
        return self.target.config.get_text_config(decoder=True).vocab_size

    @cached_property
    def _takes_position_ids(self) -> bool:
        return takes_position_ids(self.target)

    @cached_property
    def _has_length_dependent_rope(self) -> bool:
        return has_length_dependent_rope(self.target.config)

    @cached_property
    def lockstep(self) -> bool:
        """Whether all rows must emit the same number of tokens a round (see design: processors and criteria)."""
        return self.sequences.batch_size == 1 or bool(self.lockstep_reason)

    @cached_property
    def lockstep_reason(self) -> str:
        if self.sequences.batch_size == 1:
            return ""
        if not self.sampler.row_wise:
            return "a logits processor that is not known to be row-wise"
        if not self.stopping.row_wise:
            return "a stopping criterion that is not known to be row-wise"
        if self._has_length_dependent_rope:
            return "RoPE that depends on the longest position"
        if self.scorer.needs_equal_rows:
            return "attention that counts along the cache"
        return "a streamer" if self.delivery is not None else ""

    @cached_property
    def ended(self) -> EndedRows:
        """What rows that have ended owe; padding where something looks at the whole batch, or at every step of it."""
        looks = self.lockstep or self.sampler.records.are_kept
        pads = self.stopping.has_eos and self.sequences.batch_size > 1 and looks
        return EndedRows(self.sequences, self.stopping, are_padded=pads, show_cache=self.shows_cache)

    @property
    def is_unfinished(self) -> bool:
        return not all(self.sequences.finished) or self.ended.is_any_behind(self.cache)

    def prefill(self) -> Verdict:
        """Runs the prompt and chooses the first token of every row."""
        if self.lockstep_reason:
            self.stats.fallbacks[f"rows in lock-step: {self.lockstep_reason}"] += 1
        with self.stats.timed("prefill_seconds"):
            self.drafting.start()
            with self.drafting.listening():
                output = self.prefill_forward(**self._forward_kwargs)
            if output.past_key_values is not self.cache.cache:  # prefix tuning brings its own
                self.scorer.cache = TreeCache(output.past_key_values, self.sequences.batch_size)
            self._check_prompt()
            self.scorer.set_forward_kwargs(self.step.forward_kwargs(self.cache.cache))
            self.cache.commit_appended()
            self.sampler.records.add_prompt(output)
            self.ended.prompt_lengths = self.cache.lengths
            prompt = self.sequences.prompt
            roots = prompt[:, -1] if prompt.shape[1] else prompt.new_zeros(prompt.shape[0])
            verdict = self._verify(output.logits[:, -1:], DraftTree.root_only(roots.cpu()))
            self.stats.prefill_tokens += sum(map(len, verdict.tokens))
        self._leave_to_streamer("prefill_seconds")
        with self.stats.timed("drafter_prefill_seconds"):
            self.drafting.observe_prompt(self._known_tokens(), output.hidden_states)
        return verdict

    def _check_prompt(self) -> None:
        """Masks, positions and paths are laid over entries by their index: there has to be one for each token."""
        found = self.cache.cache.get_seq_length()
        if self.num_expected is not None and found != self.num_expected:
            raise PromptError(
                f"{type(self.target).__name__} keeps {found} cache entries of a prompt of {self.num_expected} tokens "
                "(images in front of the text, as a rule): which entry belongs to which token is not known."
            )

    def leave_out_finished(self) -> None:
        """From here on, as far as it pays, the target runs the other rows only; the tokens of finished ones are known.
        In lock-step it runs all: what is called with the whole batch must see what stock shows it."""
        finished = self.sequences.finished
        if self.lockstep or self.ended.are_padded or not any(finished) or all(finished):
            return
        if self.scorer.leave_out(self.ended.done(self.cache)) and self.tuner is not None:
            self.tuner.leave(len(self.cache.rows))

    def draft(self) -> DraftTree:
        """A tree for every row that the target is going to run."""
        self._round_start, self._num_slow = time.perf_counter(), self._num_compiled
        with self.stats.timed("drafter_seconds"):
            self._release_noise()
            rows = [row for row in range(self.sequences.batch_size) if self._takes_part(row)]
            tree = self._tree_for(rows) if rows else DraftTree.root_only(self._root_ids)
            tree = self.ended.with_padding(tree).select(self.cache.rows)
        self._draft_seconds = time.perf_counter() - self._round_start
        return tree

    def _tree_for(self, rows: Sequence[int]) -> DraftTree:
        """What the drafter gives, as far as it can be emitted, and as far as the tuner has it pay."""
        limits = self._depth_limits()
        budget = UNLIMITED if self.tuner is None else self.tuner.choose(rows, self.cache.append_index)
        max_depth = max(limits[row] for row in rows)
        if budget.max_depth is not None:
            max_depth = min(max_depth, budget.max_depth)
        tree = self._draft(max_depth) if max_depth else DraftTree.root_only(self._root_ids)
        self._drafted_depth = tree.max_depth
        if budget.max_nodes is not None:
            tree = tree.first(budget.max_nodes)
        return tree.pruned(limits) if tree.max_depth > min(limits[row] for row in rows) else tree

    def score(self, tree: DraftTree) -> Any:
        with self.stats.timed("target_seconds"), self.drafting.listening():
            self.stats.target_forwards += 1
            output = self.scorer(tree, self._root_positions, forward_kwargs=self._forward_kwargs)
            self._hidden_states = output.hidden_states
            self.drafting.skip(self.scorer.num_rerun)
            return output

    def verify(self, logits: Tensor, tree: DraftTree) -> Verdict:
        with self.stats.timed("target_seconds"):
            self.drafting.confirm_draft()
            self._walked = Verdict.empty(self.sequences.batch_size)
            verdict = self._verify(logits, tree, self._walked)
        self._leave_to_streamer("target_seconds")
        for row, tokens in enumerate(verdict.tokens):
            if tokens:
                self.stats.record_round(
                    num_drafted=tree.host.num_drafted(tree.slot(row)),
                    depth=tree.host.depth(tree.slot(row)),
                    num_emitted=len(tokens),
                    num_accepted=verdict.num_accepted[row],
                )
        return verdict

    def record(self, output: Any, verdict: Verdict) -> None:
        """Keeps the hidden states and attentions of the accepted paths if the request asked for them."""
        records, cache, whole = self.sampler.records, self.cache, self.scorer.whole_output
        for slot, row in enumerate(cache.rows) if records.forward_kwargs else ():
            path = verdict.paths[row]
            first_step = len(self.sequences.new_tokens[row]) - len(path)
            if whole is not None:
                records.add_whole(whole, row, first_step)
            else:
                place = first_step, cache.lengths[row], cache.append_index
                records.add_path(output, slot, row, path, *place, self._layer_windows)

    def keep(self, verdict: Verdict) -> None:
        """Keeps the entries of the accepted paths."""
        self._walked = None
        self.cache.keep(self.ended.paths(verdict, self.cache), ended=self.ended.done(self.cache))

    def observe(self, verdict: Verdict, hidden_states: Any) -> None:
        """Notes what the drafter will be told before its next draft."""
        if any(verdict.tokens):
            with self.stats.timed("drafter_seconds"):
                self.drafting.observe(verdict, hidden_states, self.cache.rows)

    def learn(self, tree: DraftTree, verdict: Verdict) -> None:
        """Tells the tuner what the round cost and brought."""
        is_usual = any(verdict.tokens) and self._num_slow == self._num_compiled
        if self.tuner is not None and is_usual:  # else its time says nothing about others
            self.tuner.record(
                tree.num_nodes - 1,
                self._drafted_depth,  # of levels that were not scored, the draft took time and the text saw nothing
                {row: verdict.paths[row][1 : len(tokens)] for row, tokens in enumerate(verdict.tokens) if tokens},
                seconds=time.perf_counter() - self._round_start,
                drafting_seconds=self._draft_seconds,
            )

    def close(self) -> None:
        """Leaves cache, session and RNG consistent with what was delivered; works after any interruption."""
        try:
            self._settle()
        finally:
            self.drafting.close()

    def _settle(self) -> None:
        if (verdict := self._walked) is not None:  # what was emitted of a round that was broken off
            self.keep(verdict)
            self.observe(verdict, self._hidden_states)
        self.cache.bring_back()
        delivered = self.sequences.num_emitted
        if self.delivery is not None:
            delivered = [min(self.delivery.num_steps, n) for n in delivered]
        if self.ended.prompt_lengths is not None:
            wanted = zip(self.ended.settled_lengths(delivered), self.cache.lengths, strict=True)
            self.cache.truncate(list(map(min, wanted)))
            self.scorer.settle()
        self.cache.release()
        if self.sampler.noise is not None:
            self.sampler.noise.finish(max(delivered))

    def _verify(self, logits: Tensor, tree: DraftTree, verdict: Verdict | None = None) -> Verdict:
        return verify(
            logits,
            tree,
            self.sampler,
            self.stopping,
            self.sequences,
            lockstep=self.lockstep,
            pads_ended=self.ended.are_padded,
            after_step=self.delivery,
            verdict=verdict,
        )

    def _leave_to_streamer(self, counter: str) -> None:
        """Takes the streamer's time out of ours."""
        if self.delivery is not None:
            seconds = self.delivery.take_seconds()
            for name in (counter, "total_seconds"):
                setattr(self.stats, name, getattr(self.stats, name) - seconds)
            self._round_start += seconds

    def _release_noise(self) -> None:
        """Forgets noise rows that every row has used; only now, as what they chose has been delivered."""
        if self.sampler.noise is not None:
            emitted = self.sequences.num_emitted
            running = (n for r, n in enumerate(emitted) if not self.sequences.finished[r])
            self.sampler.noise.release_before(min(running, default=max(emitted)))

    @property
    def _num_compiled(self) -> int:
        """Forwards so far that compiled before they ran."""
        return 0 if self.compiler is None else self.compiler.num_slow

    @property
    def _root_positions(self) -> list[int]:
        """The root is the last emitted token: one position behind the prompt's last token for the first of them."""
        return [p + n for p, n in zip(self.prompt_positions, self.sequences.num_emitted, strict=True)]

    def _depth_limits(self) -> list[int]:
        """How deep each row may draft: a node at depth d can be emitted only if d tokens and the bonus still fit."""
        of_positions = self._depth_limit(self._counts()) if self._depth_limit.is_any else None
        if self.scorer.takes_root_only:
            of_positions = 0
        limits = []
        for row in range(self.sequences.batch_size):
            limit = 10**9 if of_positions is None else of_positions
            if self.stopping.max_length is not None:
                limit = min(limit, self.stopping.max_length - self.sequences.length(row) - 1)
            limits.append(max(limit, 0))
        return limits

    @cached_property
    def _depth_limit(self) -> DepthLimit:
        return DepthLimit(self.target.config)

    def _counts(self) -> set[int]:
        """The places that the model may take its roots to be at. Padding has no positions, but some models count it."""
        counts = {self.cache.append_index}
        if self._takes_position_ids:
            counts = {max(self._root_positions), *(counts if self._has_length_dependent_rope else ())}
        return counts

    def _takes_part(self, row: int) -> bool:
        """Whether the next round can emit tokens in a row."""
        if self.lockstep:
            return self.stopping.is_running(self.sequences, row)
        return not self.sequences.finished[row]

    @property
    def _root_ids(self) -> Tensor:
        return torch.tensor([tokens[-1] for tokens in self.sequences.new_tokens])

    def _draft(self, max_depth: int) -> DraftTree:
        sampler = self.sampler
        # Somebody who draws from the same RNG once will do so again: no noise is drawn ahead of its turn then. Drafters
        # draw for the target's vocabulary.
        noise = sampler.noise
        shares_noise = noise is not None and not noise.was_disturbed and noise.width == self._vocab_size
        state = DraftState(
            root_ids=self._root_ids,
            active=tuple(map(self._takes_part, range(self.sequences.batch_size))),
            max_depth=max_depth,
            chains_only=self.scorer.shape == "chain",
            num_emitted=tuple(self.sequences.num_emitted),
            _noise=noise if shares_noise else None,
            _warpers=score_only(sampler.processors),
        )
        return self.drafting.draft(state)

    def _known_tokens(self) -> Tensor:
        """What came after each prompt position that the drafter will be told of: the prompt's next token."""
        first = torch.tensor([tokens[:1] for tokens in self.sequences.new_tokens])
        return torch.cat([self.sequences.prompt[:, self.drafting.request.known_from + 1 :].cpu(), first], dim=1)
