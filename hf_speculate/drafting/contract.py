"""The contract between the decoding loop and a drafting method.

A `Drafter` is weights and options and does not change while generating; `start` opens a `DraftSession` for one request.
A drafter has no decoding loop, no acceptance rule and no access to the target's cache: it can be wrong only in speed,
never in text. `hf_speculate.testing.check_drafter` is the conformance suite.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessorList

from ..errors import CheckpointError
from ..files import file_names
from ..stats import Advice, HeadRecord, of_heads
from ..target import GenerativeModel
from ..tree import DraftTree, TreeRow
from .calibration import CalibrationTable
from .choices import Choices
from .requests import DraftRequest, DraftState


if TYPE_CHECKING:
    from typing_extensions import Self


# Key in `Drafter.feature_layers` for the last layer's own output. The last entry of `hidden_states` comes after the
# final norm, so no index names it.
RAW_LAST = -1


class DraftSession(ABC):
    """The drafting state of one request. One thread at a time uses it, and it is closed exactly once.

    Attributes:
        carries_over: whether the next turn of a conversation can use what this session knows. Then `observe` also gets
            the last rounds, after which nothing was drafted.
        num_choices: number of the target's most probable tokens that `observe_choices` gets at every node; 0 never
            calls it.
    """

    carries_over: bool = False
    num_choices: int = 0

    @abstractmethod
    def draft(self, state: DraftState) -> DraftTree:
        """A tree for the next round, with all B rows; its node 0 is `state.root_ids`. It may be the root alone.

        The loop may score only the nodes with the highest values (`DraftTree.values`), or the first ones if there are
        no values, at most 511. It checks the tree (`DraftChecks`) and raises `DrafterError` for a breach.
        """

    @abstractmethod
    def observe(
        self,
        tokens: Int[Tensor, "B J"],
        features: Mapping[int, Float[Tensor, "B J H"]],
        lengths: Int[Tensor, " B"],
    ) -> None:
        """Learns what was committed.

        The loop calls it once after the prefill. Later it calls it before every `draft` but the first, with the rounds
        since the last call.

        Args:
            tokens: int64 [B, J] on the CPU; `tokens[r, j]` was chosen *after* path node j of row r, root first. After
                the prefill, path node j is prompt token `known_from + j`. Columns from `lengths[r]` on are padding.
            features: hidden states of the target *at* path node j, [B, J, H], for each index in
                `Drafter.feature_layers`.
            lengths: int64 [B] on the CPU: number of real columns of each row (0 for finished rows).
        """

    def complete(self, rows: Sequence[TreeRow], state: DraftState, max_nodes: int) -> Sequence[TreeRow]:
        """Trees of all rows as this session would change them, of at most `max_nodes` draft nodes.

        A combined drafter calls it with what its parts have drafted. A session that knows which nodes cannot be
        accepted drops them; one that knows what must follow a node adds it. The default changes nothing.
        """
        return rows

    def sources(self, row: int, tokens: Sequence[int]) -> Sequence[str]:
        """Names of the drafters of a row's accepted draft tokens, for statistics, before `observe`. Those that had the
        same token are joined by "+". The default, nothing, counts none."""
        return ()

    def observe_choices(self, choices: Choices) -> None:
        """Learns the target's most probable tokens at the nodes of a round, before that round's `observe`.

        It is called if `num_choices` is above 0.
        """

    def ahead(self, state: DraftState, path: Sequence[int]) -> DraftTree:
        """A tree for the round after the coming one, assuming that the coming round commits `path`.

        The result is that of `observe(path)` without hidden states, then `draft(state)`. The session is left as it was,
        however the call ends.

        It is called if `Drafter.drafts_ahead` is set, on a separate thread while the target verifies. Nothing else of
        the session is called until it returns. It draws no random numbers but the state's noise. If
        `state.should_continue` is False, it may return early: another level does not pay, or the draft is not needed
        any more.

        Args:
            state: state of a request with one row. Its root is the last token of `path`, or the session's own root if
                `path` is empty. The first level holds guesses at the token that the target chooses there, so a draft
                may be one level deeper than one of `draft`.
            path: token ids of the draft that the target is likely to accept.
        """
        raise NotImplementedError(f"{type(self).__name__} drafts nothing ahead.")

    def close(self) -> None:
        """Releases what the session holds. The loop calls it exactly once, also after an error."""


@dataclass(frozen=True)
class SavedHead:
    """The result of `Drafter.save_pretrained`, for the model card.

    Attributes:
        algorithm: tag of the method on the Hub, for example "eagle3".
        layout: name of the layout that was written.
        base_model: Hub id or path of the target; None if the drafter does not know it.
    """

    algorithm: str
    layout: str
    base_model: str | None = None


class Drafter(ABC):
    """Weights and options of a drafting method; threads and requests may share it.

    Where forwards are captured or compiled, `DraftRequest.graph_runner` is set. A drafter may pass it functions of
    static shapes (`hf_speculate.graphs.GraphRunner.run`, with tensors from its `Buffers`), or ignore it.

    Class attributes:
        name: name of the entry point.
        feature_layers: indices into the target's `hidden_states` that `observe` wants (0: embeddings, k: output of
            layer k - 1, L: after the final norm). `RAW_LAST` is the last layer's output before that norm.
        calibration: calibration of the drafter's node values before it has drafted.
        record: record of a head's target and acceptance, read from its folder.
        is_free: whether drafting takes almost no time: it runs no model.
        drafts_ahead: whether its sessions implement `DraftSession.ahead`.
        takes_parts: whether it combines several drafters, which `for_target` takes as the option `parts`. "a+b" means
            the drafter of the entry-point group `hf_speculate.joining_drafters` that combines them.
        options_classes: dataclasses whose fields are the drafter's options, for listings.
    """

    name: ClassVar[str]
    is_free: ClassVar[bool] = False
    takes_parts: ClassVar[bool] = False
    drafts_ahead: bool = False
    options_classes: ClassVar[tuple[type[Any], ...]] = ()
    feature_layers: tuple[int, ...] = ()
    calibration: CalibrationTable = CalibrationTable()
    record: HeadRecord = HeadRecord()

    @property
    def advice(self) -> Advice:
        """Advice that statistics show about the acceptance. The default is advice for heads if the drafter reads the
        target's states."""
        return of_heads(self.record) if self.feature_layers else Advice()

    @classmethod
    @abstractmethod
    def for_target(cls, target: GenerativeModel, **options: Any) -> Self:
        """Builds the drafter for a target from keyword options. Unknown options raise `TypeError`."""

    @classmethod
    def joins(cls, processors: LogitsProcessorList) -> bool:
        """Whether requests with these processors are better drafted with this drafter in addition to any other one.

        It is called only for drafters of the entry-point group `hf_speculate.joining_drafters`.
        """
        return False

    @property
    def parts(self) -> Sequence[Drafter]:
        """The drafters that draft together; this one alone by default."""
        return (self,)

    @classmethod
    def recognizes(cls, folder: str) -> bool:
        """Whether `folder` holds a checkpoint of this method. Looks at files only; loads no weights."""
        return False

    @classmethod
    def from_folder(cls, folder: str, target: GenerativeModel, **options: Any) -> Self:
        """Builds the drafter from a local checkpoint folder that `recognizes` accepted."""
        raise NotImplementedError(f"{cls.__name__} has no checkpoints to load.")

    def record_in(self, folder: str, target: GenerativeModel) -> HeadRecord:
        """The record of a checkpoint's target and acceptance in its folder. Differences from `target` that cost
        acceptance are logged; raises `TargetMismatchError` for a target that cannot work."""
        return HeadRecord()

    def save_pretrained(self, path: str | os.PathLike, layout: str | None = None) -> SavedHead:
        """Writes weights and config to the folder `path` in a published layout (None: the drafter's default).

        Raises:
            CheckpointError: there is nothing to save, or the layout cannot express it. Nothing was written.
        """
        raise CheckpointError(f"the drafter {self.name!r} has no weights to save.")

    def check_layout(self, layout: str | None = None) -> str | None:
        """The name of the layout that `save_pretrained` would write.

        Raises:
            CheckpointError: the layout does not exist, or cannot express this head.
        """
        return layout

    @classmethod
    def describe(cls, folder: str) -> SavedHead:
        """A description of a folder that `recognizes` accepted, for its model card."""
        return SavedHead(cls.name, cls.name)

    @classmethod
    def files(cls, folder: str) -> list[str]:
        """Names of the files of the head in a folder that `recognizes` accepted; an upload takes only these.

        The default is `config.json` and all safetensors files. A name without a file is ignored.
        """
        return ["config.json", *(name for name in file_names(folder) if name.endswith(".safetensors"))]

    def check_target(self, target: GenerativeModel) -> None:
        """Raises `TargetMismatchError` if this drafter does not fit `target`. Called before every request."""

    def prepare(self, target: GenerativeModel) -> None:
        """Makes what the first request would make, so that it need not wait. Called once, after loading.

        What takes a compiler is left to the first request, which says what it waits for. The default does nothing.
        """

    def forget(self) -> None:
        """Drops the texts kept from earlier requests. A benchmark calls it before it repeats its requests."""

    @abstractmethod
    def start(self, request: DraftRequest) -> DraftSession:
        """Opens a session for one request."""
