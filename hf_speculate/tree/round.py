"""One round of the loop as a value: the tree, what was accepted and emitted, and how long it took.

Statistics, records, the policy and the drafter receive every round. `hf_speculate.rounds` yields them to users.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Protocol

from .draft_tree import DraftTree


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RoundSeconds:
    """Wall-clock seconds of a round.

    Attributes:
        drafting: time to choose the budget and draft. On a GPU the device's time counts if it is longer.
        total: time of the whole round, without the time that consumers take between rounds.
    """

    drafting: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Round:
    """The result of one round. Sequences have one item for each row of the batch.

    Attributes:
        tree: scored tree of the rows that took part (`DraftTree.slot` maps rows). The prompt's round has only the root,
            the prompt's last token.
        paths: indices of the accepted nodes, root first; `tokens[r][j]` was chosen after node `paths[r][j]`. The path
            of a finished row may continue with padding.
        tokens: emitted token ids: those of the accepted nodes below the root, then the target's own token.
        num_accepted: number of emitted tokens that were draft nodes.
        lengths: committed cache entries of each row before the round.
        context: number of cache entries before the tree, in the longest row.
        depth: levels that the drafter made, before the tree was cut to the budget.
        seconds: time that the round took.
        is_prefill: whether this is the prompt's round.
        is_warm_up: whether something was compiled in the round, so that its time is not typical.
        is_ahead: whether the draft was made while the previous round was verified.
    """

    tree: DraftTree
    paths: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[int]]
    num_accepted: Sequence[int]
    lengths: Sequence[int]
    context: int
    depth: int = 0
    seconds: RoundSeconds = RoundSeconds()
    is_prefill: bool = False
    is_warm_up: bool = False
    is_ahead: bool = False

    @property
    def num_nodes(self) -> int:
        """Number of scored draft nodes in each row."""
        return self.tree.num_nodes - 1

    def draw(self, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
        """A text picture of the tree, one for each row that emitted something.

        `●` marks accepted nodes, `○` other nodes, and `★` the token that the target chose itself.

        Args:
            tokenizer: decodes tokens to text; None shows token ids.
        """
        return "\n\n".join(self._drawn(row, tokenizer) for row, tokens in enumerate(self.tokens) if tokens)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.draw())}</pre>"

    def _drawn(self, row: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
        slot, emitted = self.tree.slot(row), self.tokens[row]
        tokens, parents = self.tree.host.token_ids[slot], self.tree.host.parents[slot]
        accepted = self.num_accepted[row]
        path = list(self.paths[row][: len(emitted)])
        picture = _Picture(tokens, parents, set(path), tokenizer)
        if accepted < len(emitted):
            picture.add_own(path[-1], emitted[-1])
        heading = f"row {row}: {accepted} of {picture.num_drafted} drafted tokens accepted, {len(emitted)} emitted"
        return "\n".join([heading, picture.text(tokens[0]), *picture.lines(0, "")])


class _Picture:
    def __init__(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        accepted: set[int],
        tokenizer: PreTrainedTokenizerBase | None,
    ):
        self._tokenizer = tokenizer
        self._children: dict[int, list[tuple[int, str]]] = {}
        self.num_drafted = 0
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent >= 0:
                self.num_drafted += 1
                mark = "●" if node in accepted else "○"
                self._children.setdefault(parent, []).append((node, f"{mark} {self.text(token)}"))

    def add_own(self, parent: int, token: int) -> None:
        """Adds the token that the target chose itself."""
        self._children.setdefault(parent, []).append((-1, f"★ {self.text(token)}"))

    def text(self, token: int) -> str:
        return str(token) if self._tokenizer is None else repr(self._tokenizer.decode([token]))

    def lines(self, node: int, indent: str) -> Iterator[str]:
        """The lines for everything below a node."""
        children = self._children.get(node, [])
        for index, (child, text) in enumerate(children):
            is_last = index == len(children) - 1
            yield f"{indent}{'└─' if is_last else '├─'}{text}"
            if child >= 0:
                yield from self.lines(child, indent + ("  " if is_last else "│ "))


class DeviceEvent(Protocol):
    """An event of `torch.cuda`, with timing."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class RoundClock:
    """Measures the rounds of one request.

    The time of consumers is left out. The time that listeners take counts for the next round.

    Args:
        events: two events of the device on which drafts are made; None if the host waits for drafts anyway. The host
            only launches a draft, and waits for it together with the target's forward. The events separate the two.
    """

    def __init__(self, events: tuple[DeviceEvent, DeviceEvent] | None = None) -> None:
        self._start = self._published = 0.0
        self._drafting = self._carried = self._put_off = 0.0
        self._events, self._is_timed = events, False

    def start(self) -> None:
        self._start, self._is_timed = time.perf_counter() - self._carried, False
        if self._events is not None:
            self._events[0].record()

    def drafted(self) -> None:
        """Ends the drafting time."""
        self._drafting = time.perf_counter() - self._start
        if self._events is not None:
            self._events[1].record()
            self._is_timed = True

    def leave_out(self, seconds: float) -> None:
        """Subtracts time within the round that others took."""
        self._start += seconds

    def put_off(self, seconds: float) -> None:
        """Moves time of this round to the next round's draft."""
        self.leave_out(seconds)
        self._put_off += seconds

    def stop(self) -> RoundSeconds:
        """Ends the round; from here on its listeners are called."""
        self._published = time.perf_counter()
        total = self._published - self._start
        return RoundSeconds(drafting=min(max(self._drafting, self._seconds_on_device()), total), total=total)

    def _seconds_on_device(self) -> float:
        """Seconds until the device had made the draft. By now the host has waited for it."""
        if self._events is None or not self._is_timed or not self._events[1].query():
            return 0.0
        return self._carried + self._events[0].elapsed_time(self._events[1]) / 1000

    def published(self) -> None:
        """Ends the time of the listeners."""
        self._carried = time.perf_counter() - self._published + self._put_off
        self._put_off = 0.0
