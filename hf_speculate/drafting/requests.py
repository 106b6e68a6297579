"""The facts that a drafter gets: about the `generate` call (`DraftRequest`), and before each round (`DraftState`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Event
from typing import TYPE_CHECKING, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.cache_utils import Cache

from ..stats import RunnerRecord
from ..target import GenerativeModel
from ..transfers import to_device
from ..tree import DraftTree
from ..verification import Noise
from .ranking import rank_children


if TYPE_CHECKING:
    from ..graphs import GraphRunner


@dataclass(frozen=True, kw_only=True)
class DraftRequest:
    """The facts of a `generate` call that a session gets.

    Attributes:
        target: model that verifies.
        input_ids: int64 [B, S], prompt as given to `generate` (left padded).
        attention_mask: int64 [B, S'], None when all ones; S' > S when the prompt continues a cache.
        position_ids: int64 [kinds, B, S], positions of the prompt in a model that counts texts and pictures apart, the
            text's first; None in others.
        known_from: index into `input_ids` of the first prompt token that `observe` will report. Earlier tokens belong
            to a reused cache and come without features.
        do_sample: whether the request samples.
        max_new_tokens: upper bound of the new tokens; None if there is none.
        cache: KV cache of the target, by which drafters store what the next turn can use (`conversations`). None if the
            caller does not get the cache, so that there is no next turn.
        num_earlier: number of tokens in the cache that are not in `input_ids` (for a turn given as new tokens only).
        earlier_ids: token ids of these; None if unknown. Known for one row only.
        adaptive: whether the amount drafted may depend on measured time.
        graph_runner: runner of functions of static shapes; None if nothing is captured or compiled. A drafter may
            capture its own functions (`GraphRunner.run`).
        adapters: names of the target's active PEFT adapters, "" for none (`active_adapters`). What a drafter learns
            about acceptance holds for these only.
        record: record of the runners of the drafter's forwards, which statistics show.
        processors: the request's logits processors, to be read, not called: their state belongs to the emitted text.
    """

    target: GenerativeModel
    input_ids: Int[Tensor, "B S"]
    attention_mask: Tensor | None = None
    position_ids: Int[Tensor, "kinds B S"] | None = None
    known_from: int = 0
    do_sample: bool = False
    max_new_tokens: int | None = None
    cache: Cache | None = None
    num_earlier: int = 0
    earlier_ids: Sequence[int] | None = None
    adaptive: bool = True
    graph_runner: GraphRunner | None = None
    adapters: str = ""
    record: RunnerRecord = field(default_factory=RunnerRecord)
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)

    @property
    def text(self) -> list[int] | None:
        """The whole text so far; None for several rows, padding or unknown tokens."""
        is_plain = self.input_ids.shape[0] == 1 and self.attention_mask is None
        if not is_plain or (self.num_earlier and self.earlier_ids is None):
            return None
        return [*(self.earlier_ids or ()), *self.input_ids[0].tolist()]

    @property
    def carried_text(self) -> list[int] | None:
        """The text so far if a later turn may continue it; else None."""
        return None if self.cache is None else self.text

    @property
    def row_texts(self) -> list[list[int]]:
        """The known text of every row so far, without padding."""
        mask, texts = self.attention_mask, []
        for row, tokens in enumerate(self.input_ids.tolist()):
            if mask is not None and tokens:
                real = mask[row, -len(tokens) :].tolist()
                tokens = [token for token, is_real in zip(tokens, real, strict=True) if is_real]
            texts.append([*(self.earlier_ids or ()), *tokens])
        return texts


class EarlyStopping(Protocol):
    """The decision, before each level of a draft, whether to draft that level or to stop early."""

    def __call__(self, values: Float[Tensor, "B F"], previous: Int[Tensor, "B F"] | None = None) -> bool:
        """Whether to draft the next level. It is called level by level.

        Args:
            values: path log-probabilities on the CPU (`DraftTree.values`) of the nodes that the next level would
                expand.
            previous: index of each node's parent in the previous call's `values`; None if parents are at the same
                index.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class DraftState:
    """The state of a request before one round.

    Attributes:
        root_ids: int64 [B] on the CPU, last committed token of each row (node 0 of the tree to be drafted).
        active: whether each row is unfinished; drafts of finished rows are ignored.
        max_depth: deepest level whose nodes can still be emitted; 0: draft nothing.
        chains_only: whether the target cannot score branches, so that only the first branch of a tree is used.
        num_emitted: number of new tokens of each row so far. Noise row `num_emitted[r] + d` chooses the children of row
            r's nodes at depth d.
        early_stopping: decision that `should_continue` returns; None never stops early.
        num_nodes: number of draft nodes that the target scored in recent rounds, on average; a draft need not consider
            many more. None if that is unknown.
        cancelled: event that is set when the draft is not needed any more (`DraftSession.ahead`); None if it cannot be
            cancelled.
    """

    root_ids: Int[Tensor, " B"]
    active: tuple[bool, ...]
    max_depth: int
    chains_only: bool
    num_emitted: tuple[int, ...]
    early_stopping: EarlyStopping | None = None
    num_nodes: float | None = None
    cancelled: Event | None = None
    _noise: Noise | None = None
    _warpers: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    _rows: Sequence[int] | None = None

    def select(self, rows: Sequence[int]) -> DraftState:
        """The state of some rows, for a drafter that leaves finished rows out (see `whole_tree`)."""
        if len(rows) == len(self.active):
            return self
        active, num_emitted = (tuple(values[row] for row in rows) for values in (self.active, self.num_emitted))
        of_batch = rows if self._rows is None else [self._rows[row] for row in rows]
        return replace(self, root_ids=self.root_ids[list(rows)], active=active, num_emitted=num_emitted, _rows=of_batch)

    def whole_tree(self, tree: DraftTree, rows: Sequence[int]) -> DraftTree:
        """A tree of all rows for `draft` to return, made from a tree of `rows`. The drafts of other rows are never
        used."""
        if len(rows) == len(self.active):
            return tree
        slots = {row: slot for slot, row in enumerate(rows)}
        whole = tree.gather([slots.get(row, 0) for row in range(len(self.active))])
        roots, parents = to_device(self.root_ids, whole.token_ids.device)[:, None], whole.parents
        max_depth = whole.max_depth if isinstance(parents, Tensor) else None
        tokens = torch.cat([roots, whole.token_ids[:, 1:]], dim=1)
        return DraftTree(tokens, parents, max_depth, values=whole.values)

    def should_continue(self, values: Float[Tensor, "B F"], previous: Int[Tensor, "B F"] | None = None) -> bool:
        """Whether to draft another level; drafters call this before each level but the first.

        The answer is always True on a device, as the host would have to wait for it; `max_depth` limits such drafts. It
        is False once the draft is cancelled. Arguments: see `EarlyStopping`.
        """
        if self.cancelled is not None and self.cancelled.is_set():
            return False
        return self.early_stopping is None or values.device.type != "cpu" or self.early_stopping(values, previous)

    def child_scores(
        self, draft_logits: Float[Tensor, "B N W"], depth: int, token_ids: Int[Tensor, " W"] | None = None
    ) -> Float[Tensor, "B N W"]:
        """Scores by which children of nodes at `depth` are ranked; the top k become the children.

        For a greedy request these are the logits. For a sampled one they are `warped logits - log(noise of that step)`:
        the target samples with the same noise, so drafting with it raises acceptance (Gumbel top-k coupling) and cannot
        change the text. Scores of different nodes are comparable only after `log_softmax`.

        Args:
            draft_logits: logits of the drafter, of any float dtype.
            depth: depth of the nodes whose children are ranked (0: children of the root).
            token_ids: target token id of each column, if the draft vocabulary is a part of the target's; None if the
                columns are the target's.
        """
        noise = self.log_noise((depth,), draft_logits.shape[-1], token_ids)
        return rank_children(draft_logits, None if noise is None else noise[:, 0].to(draft_logits.device), self.warpers)

    def log_noise(
        self, depths: Sequence[int], num_columns: int | None = None, token_ids: Int[Tensor, " W"] | None = None
    ) -> Float[Tensor, "B D C"] | None:
        """Logarithm of the noise that chooses the children of nodes at `depths`; None for a greedy request.

        Args:
            num_columns: number of columns of the draft logits, W; None takes the target's.
            token_ids: target token id of each column (`child_scores`). With None, C is the smaller of W and the
                target's vocabulary.
        """
        if self._noise is None:
            return None
        levels = [
            self._noise.log_rows([n + depth for n in self.num_emitted], self._rows, token_ids)[:, :num_columns]
            for depth in depths
        ]
        return levels[0][:, None] if len(levels) == 1 else torch.stack(levels, dim=1)

    @property
    def num_columns(self) -> int:
        """Number of columns of the noise of a request that samples."""
        assert self._noise is not None
        return self._noise.width

    def fill_noise(self, out: Float[Tensor, "D B V"]) -> None:
        """Writes the noise that chooses the children of nodes at the depths 0, 1, … of a request that samples, in one
        copy."""
        assert self._noise is not None
        steps = ([n + depth for n in self.num_emitted] for depth in range(len(out)))
        rows = [row for of_depth in steps for row in self._noise.rows_of(of_depth, self._rows)]
        torch.stack(rows, out=out.view(len(rows), -1))

    @property
    def samples(self) -> bool:
        """Whether the request samples."""
        return self._noise is not None

    @property
    def warpers(self) -> LogitsProcessorList:
        """The request's processors that warp a drafter's logits as they warp the target's."""
        return self._warpers
