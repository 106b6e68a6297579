"""The contract of a policy: it chooses a budget before every round, and learns from the round after it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..drafting import CalibrationTable, EarlyStopping
from ..target import GenerativeModel
from ..tree import DraftTree, Round


@dataclass(frozen=True)
class Budget:
    """The most that a round may draft.

    Attributes:
        max_nodes: draft nodes a row, the root not counted; None sets no limit.
        max_depth: levels below the root; None sets no limit.
    """

    max_nodes: int | None = None
    max_depth: int | None = None

    @property
    def is_nothing(self) -> bool:
        return self.max_nodes == 0 or self.max_depth == 0


UNLIMITED = Budget()
NOTHING = Budget(0, 0)


@dataclass(frozen=True)
class Situation:
    """The state of a request before a draft.

    Attributes:
        rows: indices of the batch rows that can emit tokens in this round.
        num_scored: number of rows that the target will run; finished rows may be among them.
        context: number of cache entries of the longest row.
        num_unread: number of tokens of the prompt that the drafter reads first if there is a draft.
    """

    rows: Sequence[int]
    num_scored: int
    context: int
    num_unread: int = 0


@dataclass(frozen=True, kw_only=True)
class PolicyRequest:
    """The facts of a `generate` call that a policy gets.

    Attributes:
        target: the model that verifies.
        batch_size: number of rows, B.
        adapters: names of the target's active adapters, "" for none (`active_adapters`).
        samples: whether tokens are sampled.
        calibration: calibration of the drafter's values that was saved with it.
        looks_ahead: whether the next round is drafted while the target verifies this one. Verifying may then take
            longer.
        widths: numbers of nodes, root included, to which forwards of the target are padded, ascending; empty if they
            are not.
    """

    target: GenerativeModel
    batch_size: int
    adapters: str = ""
    samples: bool = False
    calibration: CalibrationTable = field(default_factory=CalibrationTable)
    looks_ahead: bool = False
    widths: Sequence[int] = ()


class PolicySession(ABC):
    """The policy of one request."""

    @abstractmethod
    def choose(self, situation: Situation) -> Budget:
        """The budget of the next round; `NOTHING` makes it a plain decoding step."""

    def early_stopping(self) -> EarlyStopping | None:
        """The decision that the drafter requests before every level of the next draft. With None the drafter goes to
        the budget's depth."""
        return None

    def num_nodes(self) -> float | None:
        """Number of draft nodes that `cut` left in recent rounds, on average; None if that is unknown."""
        return None

    def early_stopping_ahead(self) -> EarlyStopping | None:
        """The same decision for a draft made ahead, on another thread. `learn` is called after that draft has ended."""
        return None

    def cut(self, tree: DraftTree) -> DraftTree:
        """The part of a draft that is worth scoring."""
        return tree

    def learn(self, round: Round) -> None:
        """Learns from a round that emitted tokens. It is not called for the prompt's round."""

    def close(self) -> None:
        """Ends the policy of this request."""


class DraftPolicy(ABC):
    """A rule for how much a speculator drafts; requests and threads share it.

    A policy never changes a text. In 16 bit, two tokens within rounding of each other may swap.

    Class attributes:
        is_adaptive: whether the amount drafted may differ from run to run. Drafters may then choose by the clock too.
    """

    is_adaptive: bool = False

    @abstractmethod
    def start(self, request: PolicyRequest) -> PolicySession:
        """Opens the policy of one request."""
