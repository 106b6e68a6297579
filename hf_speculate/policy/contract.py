"""The contract of a policy: asked before every round how much may be drafted, told after it what that brought."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from ..drafting import CalibrationTable, Deepening
from ..tree import DraftTree, Round


@dataclass(frozen=True)
class Budget:
    """The most that a round may draft.

    Attributes:
        max_nodes: draft nodes a row, the root not counted; None for what the drafter gives.
        max_depth: likewise.
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
    """The situation before a draft.

    Attributes:
        rows: of the batch, that can emit tokens in this round.
        num_scored: rows that the target is going to run; finished ones may be among them.
        context: cache entries of the longest row.
    """

    rows: Sequence[int]
    num_scored: int
    context: int


@dataclass(frozen=True, kw_only=True)
class PolicyRequest:
    """The `generate` call as a policy knows it.

    Attributes:
        target: the model that verifies.
        batch_size: B.
        adapters: of the target that are in effect, "" for none (`active_adapters`).
        samples: whether tokens are sampled.
        calibration: what is known of the drafter's values before it drafts.
        looks_ahead: whether the next round is drafted while the target verifies this one, which may take longer then.
        drafter: its name; "" keeps costs in this process.
    """

    target: PreTrainedModel
    batch_size: int
    adapters: str = ""
    samples: bool = False
    calibration: CalibrationTable = field(default_factory=CalibrationTable)
    looks_ahead: bool = False
    drafter: str = ""


class PolicySession(ABC):
    """The policy of one request."""

    @abstractmethod
    def choose(self, situation: Situation) -> Budget:
        """The budget of the next round; `NOTHING` makes it a plain decoding step."""

    def deepening(self) -> Deepening | None:
        """The decision that the drafter asks for before every level of the draft that follows; None: it drafts to the
        budget's depth."""
        return None

    def deepening_ahead(self) -> Deepening | None:
        """Likewise of a draft for the round after the coming one, on another thread; `learn` is called when it has
        ended."""
        return None

    def cut(self, tree: DraftTree) -> DraftTree:
        """The part of a draft that is worth scoring."""
        return tree

    def learn(self, round: Round) -> None:
        """Called after every round that emitted something, the prompt's left out."""

    def close(self) -> None:
        """The request is over."""


class DraftPolicy(ABC):
    """A rule for how much a speculator drafts; shared by its requests, and by threads. A policy never changes a text,
    in 16 bit up to near ties.

    Class attributes:
        is_adaptive: whether what is drafted may differ from run to run, so that drafters may choose by the clock too.
    """

    is_adaptive: bool = False

    @abstractmethod
    def start(self, request: PolicyRequest) -> PolicySession:
        """Opens the policy of one request."""
