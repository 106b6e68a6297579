"""The contract between the decoding loop and a drafting method.

A `Drafter` is weights and options and does not change while generating; `start` opens a `DraftSession` for one
request. A drafter holds no decoding loop, no acceptance rule and no cache surgery on the target: it can be wrong only
in speed, never in text. `hf_speculate.testing.check_drafter` is the conformance suite.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import CheckpointError
from ..files import file_names
from ..stats import Advice, HeadRecord, of_heads
from ..tree import DraftTree
from .calibration import CalibrationTable
from .choices import Choices
from .requests import DraftRequest, DraftState


if TYPE_CHECKING:
    from typing_extensions import Self


# Key in `Drafter.feature_layers`: the last layer's own output. The last entry of `hidden_states` comes after the final
# norm, so this one is in no index.
RAW_LAST = -1


class DraftSession(ABC):
    """The drafting state of one request. Sessions are used by one thread at a time and closed exactly once.

    Attributes:
        carries_over: whether the next turn of a conversation can use what this session knows; then it is also told of
            the last rounds, after which nothing was drafted.
        num_choices: how many of the target's most probable tokens `observe_choices` is told of at every node of a
            round; 0: it is not called, and nothing is computed for it.
    """

    carries_over: bool = False
    num_choices: int = 0

    @abstractmethod
    def draft(self, state: DraftState) -> DraftTree:
        """A tree for the next round, all B rows; its node 0 is `state.root_ids`. May be the root alone.

        The loop may score only the nodes of the highest values (`DraftTree.values`), or the first ones where there are
        none; at most 511. It checks what it is given (see `DraftChecks`): a breach is a `DrafterError`, the root is its
        own.
        """

    @abstractmethod
    def observe(
        self,
        tokens: Int[Tensor, "B J"],
        features: Mapping[int, Float[Tensor, "B J H"]],
        lengths: Int[Tensor, " B"],
    ) -> None:
        """Learns what was committed: once after the prefill, then before every `draft`, but the first, what the rounds
        since the last one brought (several, if some of them had no draft).

        Args:
            tokens: int64 on the CPU; `tokens[r, j]` was chosen *after* path node j of row r, root first. After the
                prefill, "path node j" is prompt token `known_from + j`. Columns from `lengths[r]` on are padding.
            features: the target's hidden state *at* path node j, for each index in `Drafter.feature_layers`.
            lengths: int64 on the CPU, how many columns of each row are real (0 for finished rows).
        """

    def observe_choices(self, choices: Choices) -> None:
        """Learns what the target found probable at the nodes of a round, where `num_choices` asks for it; before that
        round's `observe`."""

    def ahead(self, state: DraftState, path: Sequence[int]) -> DraftTree:
        """A tree for the round after the coming one, as if that had committed `path`: as `observe(path)`, without any
        hidden states, and `draft(state)` would. Leaves the session where it was before, however it ends.

        Called of drafters that say `drafts_ahead`, on a thread of its own while the target verifies; until it has
        returned nothing else of the session is. It draws no random numbers but the state's noise. Where
        `state.goes_on` says no, nobody wants the draft any more: the next level need not be drafted.

        Args:
            state: of a request with one row. Its root is the last of `path` (the session's own where that is empty):
                what it draws of the first level are guesses at the token that the target chooses there itself, so a
                draft may be one level deeper than one of `draft`.
            path: tokens of the draft that the target is likely to accept.
        """
        raise NotImplementedError(f"{type(self).__name__} drafts nothing ahead.")

    def close(self) -> None:
        """Releases what the session holds. Called exactly once, also after an error."""


@dataclass(frozen=True)
class SavedHead:
    """The result of `Drafter.save_pretrained`, for the model card.

    Attributes:
        algorithm: tag of the method on the Hub, e.g. "eagle3".
        layout: name of the layout that was written.
        base_model: Hub id or path of the target, if the drafter knows it.
    """

    algorithm: str
    layout: str
    base_model: str | None = None


class Drafter(ABC):
    """Weights and options of a drafting method; may be shared by threads and requests.

    Where the user asked for compiled forwards, `DraftRequest.compiler` is set: a drafter may hand it functions of
    static shapes (`hf_speculate.compilation.Compiler.run`, with tensors from its `Buffers`), or ignore it.

    Class attributes:
        name: the entry point's name.
        feature_layers: indices into the target's `hidden_states` tuple (0: embeddings, k: output of layer k - 1, L:
            after the final norm) that `observe` wants; `RAW_LAST` asks for the last layer's output before that norm.
        calibration: what the values of its trees mean, as far as that is known before it drafts.
        record: what the folder of a head records of its target and its acceptance.
        is_free: whether drafting takes next to nothing: no forward of a model.
        drafts_ahead: whether its sessions have `DraftSession.ahead`.
        options_classes: dataclasses whose fields are the drafter's options, for those who list them.
    """

    name: ClassVar[str]
    is_free: ClassVar[bool] = False
    drafts_ahead: bool = False
    options_classes: ClassVar[tuple[type[Any], ...]] = ()
    feature_layers: tuple[int, ...] = ()
    calibration: CalibrationTable = CalibrationTable()
    record: HeadRecord = HeadRecord()

    @property
    def advice(self) -> Advice:
        """The advice that statistics give on the drafter's acceptance; by default the one for heads, for drafters that
        read the target's states."""
        return of_heads(self.record) if self.feature_layers else Advice()

    @classmethod
    @abstractmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        """Builds the drafter for a target from keyword options; unknown options raise `TypeError`."""

    @classmethod
    def recognizes(cls, folder: str) -> bool:
        """Whether `folder` holds a checkpoint of this method. Looks at files; loads no weights."""
        return False

    @classmethod
    def from_folder(cls, folder: str, target: PreTrainedModel, **options: Any) -> Self:
        """Builds the drafter from a local checkpoint folder that `recognizes` accepted."""
        raise NotImplementedError(f"{cls.__name__} has no checkpoints to load.")

    def save_pretrained(self, path: str | os.PathLike, layout: str | None = None) -> SavedHead:
        """Writes weights and config to the folder `path` in a published layout (None: the drafter's default).

        Raises:
            CheckpointError: nothing to save, or the layout cannot express it; nothing has been written then.
        """
        raise CheckpointError(f"the drafter {self.name!r} has no weights to save.")

    def check_layout(self, layout: str | None = None) -> str | None:
        """The layout that `save_pretrained` would write, by its own name; None: the only one.

        Raises:
            CheckpointError: no such layout, or it cannot express this head.
        """
        return layout

    @classmethod
    def describe(cls, folder: str) -> SavedHead:
        """A description of a folder that `recognizes` accepted, for its model card."""
        return SavedHead(cls.name, cls.name)

    @classmethod
    def files(cls, folder: str) -> list[str]:
        """Names of the files that make up the head in a folder that `recognizes` accepted: an upload takes no others.

        By default those are `config.json` and everything in safetensors. A name without a file is passed over.
        """
        return ["config.json", *(name for name in file_names(folder) if name.endswith(".safetensors"))]

    def check_target(self, target: PreTrainedModel) -> None:
        """Raises `TargetMismatchError` if this drafter does not fit `target`. Called before every request."""

    def forget(self) -> None:
        """Drops the texts that it keeps of earlier requests. A benchmark calls it before it repeats its requests."""

    @abstractmethod
    def start(self, request: DraftRequest) -> DraftSession:
        """Opens a session for one request."""
