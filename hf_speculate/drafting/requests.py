"""The facts that a drafter is told: of the `generate` call (`DraftRequest`), and before each round (`DraftState`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Event
from typing import TYPE_CHECKING, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache

from ..transfers import to_device
from ..tree import DraftTree
from ..verification import Noise
from .ranking import rank_children


if TYPE_CHECKING:
    from ..compilation import Compiler


@dataclass(frozen=True, kw_only=True)
class DraftRequest:
    """The `generate` call as a session knows it.

    Attributes:
        target: the model that verifies.
        input_ids: int64 [B, S], the prompt as `generate` was given it (left padded).
        attention_mask: int64 [B, S'], None when all ones; S' > S when the prompt continues a cache.
        known_from: index into `input_ids` of the first prompt token that `observe` will report; tokens before it
            belong to a reused cache and come without features.
        do_sample: whether the request samples.
        max_new_tokens: upper bound of what will be emitted, None if unbounded.
        cache: the target's cache: drafters key by it what the next turn of a conversation can use (`conversations`).
            None where the caller does not get to see it: there will be no such turn.
        num_earlier: tokens that the cache holds and `input_ids` does not (a turn that was given its new tokens only).
        earlier_ids: these tokens, where they are known (one row).
        adaptive: whether what is drafted may depend on how long things take.
        compiler: what forwards of static shapes can be compiled with; None where the user did not ask for that. The
            target's are already; a drafter may have its own compiled too (`Compiler.run`), or leave it.
        adapters: the target's PEFT adapters in effect, "" for none (`active_adapters`): what a drafter learns about
            acceptance from one text to the next holds for these.
    """

    target: PreTrainedModel
    input_ids: Int[Tensor, "B S"]
    attention_mask: Tensor | None = None
    known_from: int = 0
    do_sample: bool = False
    max_new_tokens: int | None = None
    cache: Cache | None = None
    num_earlier: int = 0
    earlier_ids: Sequence[int] | None = None
    adaptive: bool = True
    compiler: Compiler | None = None
    adapters: str = ""

    @property
    def text(self) -> list[int] | None:
        """The whole text so far, of a request with one row, no padding and nothing unknown; else None."""
        is_plain = self.input_ids.shape[0] == 1 and self.attention_mask is None
        if not is_plain or (self.num_earlier and self.earlier_ids is None):
            return None
        return [*(self.earlier_ids or ()), *self.input_ids[0].tolist()]

    @property
    def carried_text(self) -> list[int] | None:
        """The same where a later turn may go on from it, else None: nobody has to read what comes last."""
        return None if self.cache is None else self.text

    @property
    def row_texts(self) -> list[list[int]]:
        """The text of every row so far, without padding, as far as it is known."""
        mask, texts = self.attention_mask, []
        for row, tokens in enumerate(self.input_ids.tolist()):
            if mask is not None and tokens:
                real = mask[row, -len(tokens) :].tolist()
                tokens = [token for token, is_real in zip(tokens, real, strict=True) if is_real]
            texts.append([*(self.earlier_ids or ()), *tokens])
        return texts


class Deepening(Protocol):
    """Whether another level of a draft pays."""

    def __call__(self, values: Float[Tensor, "B F"], previous: Int[Tensor, "B F"] | None = None) -> bool:
        """Decides on the next level; called in the order of the levels of one draft.

        Args:
            values: of the nodes that the next level would expand (`DraftTree.values`), on the CPU.
            previous: index of each one's parent among those of the last call; None: it is the one in the same place.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class DraftState:
    """The situation before one round.

    Attributes:
        root_ids: int64 [B] on the CPU, the last committed token of each row (node 0 of the tree to be drafted).
        active: False for rows that are finished; what is drafted for them is ignored.
        max_depth: nodes deeper than this cannot be emitted; 0 asks for no draft. Always >= 0.
        chains_only: True where the target cannot score branches: only the first branch of a tree is used.
        num_emitted: new tokens of each row so far; noise row `num_emitted[r] + d` chooses the children of row r's
            nodes at depth d.
        deepening: what `goes_on` asks.
        cancelled: set when nobody wants the draft any more (`DraftSession.ahead`); None: it will be wanted.
    """

    root_ids: Int[Tensor, " B"]
    active: tuple[bool, ...]
    max_depth: int
    chains_only: bool
    num_emitted: tuple[int, ...]
    deepening: Deepening | None = None
    cancelled: Event | None = None
    _noise: Noise | None = None
    _warpers: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    _rows: Sequence[int] | None = None

    def select(self, rows: Sequence[int]) -> DraftState:
        """The situation of some rows, for a drafter that leaves finished ones out; see `whole_tree`."""
        if len(rows) == len(self.active):
            return self
        active, num_emitted = (tuple(values[row] for row in rows) for values in (self.active, self.num_emitted))
        return replace(self, root_ids=self.root_ids[list(rows)], active=active, num_emitted=num_emitted, _rows=rows)

    def whole_tree(self, tree: DraftTree, rows: Sequence[int]) -> DraftTree:
        """The result of `draft`, made of a tree of `rows`: the other rows get a draft that nobody looks at."""
        if len(rows) == len(self.active):
            return tree
        slots = {row: slot for slot, row in enumerate(rows)}
        whole = tree.gather([slots.get(row, 0) for row in range(len(self.active))])
        roots, parents = to_device(self.root_ids, whole.token_ids.device)[:, None], whole.parents
        max_depth = whole.max_depth if isinstance(parents, Tensor) else None
        tokens = torch.cat([roots, whole.token_ids[:, 1:]], dim=1)
        return DraftTree(tokens, parents, max_depth, values=whole.values)

    def goes_on(self, values: Float[Tensor, "B F"], previous: Int[Tensor, "B F"] | None = None) -> bool:
        """Whether another level pays, for drafters that ask before each but the first; see `Deepening`. Always true on
        a device, which would have to be waited for: `max_depth` is chosen for that. No level of a draft that was
        cancelled does."""
        if self.cancelled is not None and self.cancelled.is_set():
            return False
        return self.deepening is None or values.device.type != "cpu" or self.deepening(values, previous)

    def child_scores(
        self, draft_logits: Float[Tensor, "B N W"], depth: int, token_ids: Int[Tensor, " W"] | None = None
    ) -> Float[Tensor, "B N W"]:
        """Scores by which children of nodes at `depth` should be ranked (top-k of these are the children).

        For a greedy request these are the logits. For a sampled one they are `warped logits - log(noise of that step)`:
        the target samples with the same noise, so drafting with it raises acceptance (Gumbel top-k coupling) and cannot
        change the text. Scores of different nodes are comparable only after `log_softmax`.

        Args:
            draft_logits: logits of the drafter, any float dtype.
            depth: depth of the nodes whose children are ranked (0: children of the root).
            token_ids: target vocabulary id of each column, when the draft vocabulary is a part of the target's.
        """
        noise = self.log_noise((depth,), draft_logits.shape[-1], token_ids)
        return rank_children(draft_logits, None if noise is None else noise[:, 0].to(draft_logits.device), self.warpers)

    def log_noise(
        self, depths: Sequence[int], num_columns: int | None = None, token_ids: Int[Tensor, " W"] | None = None
    ) -> Float[Tensor, "B D C"] | None:
        """log of the noise that chooses the children of nodes at `depths`, None for a greedy request.

        Args:
            num_columns: W, of the draft logits; None: of the target's.
            token_ids: see `child_scores`. Without it, C is the smaller of W and the target's vocabulary.
        """
        if self._noise is None:
            return None
        levels = [
            self._noise.log_rows([n + depth for n in self.num_emitted], self._rows, token_ids)[:, :num_columns]
            for depth in depths
        ]
        return levels[0][:, None] if len(levels) == 1 else torch.stack(levels, dim=1)

    @property
    def samples(self) -> bool:
        """Whether the request samples."""
        return self._noise is not None

    @property
    def warpers(self) -> LogitsProcessorList:
        """Those processors of the request that warp a drafter's logits as they warp the target's."""
        return self._warpers
