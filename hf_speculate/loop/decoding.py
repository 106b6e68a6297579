"""The state of one request while the loop runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..cache import TreeCache
from ..drafting import Drafting, DraftState, EarlyStopping
from ..forward import Scorer
from ..policy import PolicySession
from ..stats import SpeculationStats
from ..tree import DraftTree, Round
from ..verification import Sampler, Verdict, Verifier
from .ahead import Ahead
from .delivery import Delivery
from .limits import DepthLimits
from .listeners import Listener
from .meter import Meter
from .prompt import Prompt
from .rows import Rows


@dataclass(kw_only=True)
class Decoding:
    """One request while it runs.

    Attributes:
        rows: texts of the rows, the criteria that end them, and what finished rows still need.
        prompt: forward of the prompt, which runs first.
        scorer: forwards of the target over trees, and the cache that they share.
        forward_kwargs: further arguments of every forward, for the outputs that drafter and records need.
        drafting: drafter at work.
        policy: policy that chooses how much every round drafts.
        limits: limits of the depth of each row.
        ahead: drafts the next round while this one is verified; None if that is off.
        verifier: the sampler and the criteria of stock's loop, which choose the tokens of every round.
        delivery: delivery of every step's tokens [B] to a streamer; None if there is no streamer.
        stats: counters of this call.
        meter: time of the request's phases.
        listeners: functions that are called after every round.
        reads_stops_late: whether stock runs a step after the text's end (`compatibility.stock.reads_stops_late`).
        depth: depth of the last draft before it was cut; 0 without a draft.
        broken_off: tree, verdict and output of the round that is being verified; None in all other phases.
        is_text_broken: whether plain decoding steps give scores that are not finite, in every row.
    """

    rows: Rows
    prompt: Prompt
    scorer: Scorer
    forward_kwargs: dict[str, Any]
    drafting: Drafting
    policy: PolicySession
    limits: DepthLimits
    ahead: Ahead | None
    verifier: Verifier
    delivery: Delivery | None
    stats: SpeculationStats
    meter: Meter
    listeners: Sequence[Listener]
    reads_stops_late: bool = False
    depth: int = field(default=0, init=False)
    broken_off: tuple[DraftTree, Verdict, Any] | None = field(default=None, init=False)
    is_text_broken: bool = field(default=False, init=False)

    @property
    def cache(self) -> TreeCache:
        return self.scorer.cache

    @property
    def sampler(self) -> Sampler:
        return self.verifier.sampler

    @property
    def is_unfinished(self) -> bool:
        return self.rows.are_unfinished(self.cache)

    @property
    def root_positions(self) -> list[int]:
        """Position ids of the last emitted tokens."""
        return self.prompt.root_positions(self.rows.sequences)

    def state(self, max_depth: int, early_stopping: EarlyStopping | None) -> DraftState:
        """The situation of the drafter before a draft of at most `max_depth` levels."""
        return self.drafting.state(
            self.sampler,
            self.rows.sequences,
            self.rows.active,
            max_depth,
            chains_only=self.scorer.shape == "chain",
            early_stopping=early_stopping,
            num_nodes=self.policy.num_nodes(),
        )

    def finished_round(
        self, tree: DraftTree, verdict: Verdict, lengths: Sequence[int], context: int, is_prefill: bool = False
    ) -> Round:
        """The round that ends here.

        Args:
            lengths, context: committed entries of each row, and entries of the longest one, before the round.
        """
        return Round(
            tree=tree,
            paths=tuple(map(tuple, verdict.paths)),
            tokens=tuple(map(tuple, verdict.tokens)),
            num_accepted=tuple(verdict.num_accepted),
            lengths=lengths,
            context=context,
            depth=self.depth,
            seconds=self.meter.end_round(),
            is_prefill=is_prefill,
            is_warm_up=self.meter.has_compiled,
            is_ahead=self.ahead is not None and self.ahead.was_taken,
        )

    def finish(self) -> None:
        """Cuts the cache to what was delivered, and leaves the RNG where plain `generate` would."""
        self.meter.close()
        self.cache.bring_back()
        emitted = self.rows.sequences.num_emitted
        delivered = emitted if self.delivery is None else [min(self.delivery.num_steps, n) for n in emitted]
        if self.rows.prompt_lengths is not None:
            wanted = zip(self.rows.final_lengths(delivered), self.cache.lengths, strict=True)
            self.cache.truncate(list(map(min, wanted)))
            self.scorer.finish()
        if self.cache.is_ragged:  # the next turn masks these entries, so they must be finite
            self.cache.clear_uncommitted()
        self.cache.release()
        if self.sampler.noise is not None:
            self.sampler.noise.finish(max(delivered) + self._draws_once_more(delivered))

    def _draws_once_more(self, delivered: Sequence[int]) -> bool:
        """Whether stock has drawn for a token after the end. It knows in time that a text has reached its length."""
        sequences, max_length = self.rows.sequences, self.verifier.stopping.max_length
        if not self.reads_stops_late or not all(sequences.finished) or max(delivered) < max(sequences.num_emitted):
            return False
        return max_length is None or sequences.prompt.shape[1] + max(delivered) < max_length
