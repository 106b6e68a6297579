"""Drafter and session of a head that was read from files."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, ClassVar, Generic

import torch
from torch import Tensor

from hf_speculate.drafting import Conversations, Drafter, DraftRequest, DraftSession, SavedHead
from hf_speculate.errors import OptionError, TargetMismatchError
from hf_speculate.files import user_path
from hf_speculate.speculator import local_folder, read_options
from hf_speculate.stats import HeadRecord
from hf_speculate.target import GenerativeModel

from ..checkpoints import LoadReport, TargetFiles, checkpoint_files, tensor_shapes
from ..origin import check_origin
from .captured import problem_with_head
from .files import HeadFiles
from .following import check_follows, following
from .head import Head, LoadedHead
from .head_cache import HeadCache


if TYPE_CHECKING:
    from typing_extensions import Self


class LoadedDrafter(Drafter, Generic[Head]):
    """Drafts with a loaded head, wherever it was found. The first of `options_classes` has the options of drafting."""

    def __init__(self, loaded: LoadedHead[Head], target: GenerativeModel, options: Any = None):
        self._loaded = loaded
        self.options = options or self.options_classes[0]()
        self.conversations: Conversations[Any] = Conversations()
        self._target_name = getattr(target.config, "_name_or_path", None) or None
        self._target_architectures = [type(target).__name__]
        self._num_target_layers = target.config.get_text_config(decoder=True).num_hidden_layers

    @property
    def head(self) -> Head:
        return self._loaded.head

    @property
    def spec(self) -> Any:
        """Shapes and switches of the head."""
        return self._loaded.head.spec

    @property
    def target_ids(self) -> Tensor | None:
        """Target id of each draft id, see `LoadedHead`."""
        return self._loaded.target_ids

    @property
    def report(self) -> LoadReport:
        """Account of every key of the checkpoint."""
        return self._loaded.report

    def record_in(self, folder: str, target: GenerativeModel) -> HeadRecord:
        return check_origin(folder, target)

    def follow(self, target: GenerativeModel) -> LoadedHead[Head]:
        """The head in the dtype and on the device that `target` has now. Later requests take it too."""
        loaded = following(self._loaded, target)
        if loaded is not self._loaded:
            self._loaded, self.conversations = loaded, Conversations()  # caches of another head are useless
        return loaded

    def ready(self, target: GenerativeModel) -> LoadedHead[Head]:
        """The head that drafts for `target`, its matrices in 8 bits where the kernel multiplies them."""
        loaded = self.follow(target)
        loaded.head.quantize_for_drafting()
        return loaded

    def prepare(self, target: GenerativeModel) -> None:
        """Makes the 8-bit matrices, unless the kernel is still to be compiled."""
        if can_prepare(self.head.device):
            self.ready(target)


def can_prepare(device: torch.device) -> bool:
    """Whether the kernel multiplies on `device` and is at hand. The first request compiles one that is not."""
    if device.type != "cpu":
        return False
    from hf_speculate_gguf.native import needs_compiler  # and the package for packed targets

    return not needs_compiler()


class HeadDrafter(LoadedDrafter[Head]):
    """Drafts with a head of decoder layers that has files of its own.

    Class attributes:
        options_classes: options of drafting, and options of reading a head (conventions).
        head_files: reads and writes the heads of the method.
    """

    options_classes: ClassVar[tuple[type[Any], type[Any]]]
    head_files: ClassVar[type[HeadFiles[Any, Any]]]

    @classmethod
    def recognizes(cls, folder: str) -> bool:
        return cls.head_files.recognizes(tensor_shapes(folder))

    @classmethod
    def for_target(cls, target: GenerativeModel, **options: Any) -> Self:
        """`head=` is the folder or Hub id of the head; the other options are those of `from_folder`."""
        head = options.pop("head", None)
        if head is None:
            raise OptionError(
                f"{cls.name} needs a trained head: from_name({cls.name!r}, target=..., head='folder or Hub id')."
            )
        return cls.from_folder(local_folder(head), target, **options)

    @classmethod
    def from_folder(cls, folder: str, target: GenerativeModel, **options: Any) -> Self:
        """Options are the fields of `options_classes`, for drafting and for reading the head."""
        how_to_draft, how_to_read = cls.options_classes
        names = {field.name for field in dataclasses.fields(how_to_read)}
        of_reading = {name: options.pop(name) for name in list(options) if name in names}
        conventions = read_options(how_to_read, of_reading, cls.name)
        chosen = read_options(how_to_draft, options, cls.name, also=sorted(names))
        return cls(cls.head_files.load(folder, target, conventions), target, chosen)

    def save_pretrained(self, path: str | os.PathLike, layout: str | None = None) -> SavedHead:
        """Writes the head in a published layout, see `check_layout`.

        Raises:
            CheckpointError: the layout cannot express this head.
        """
        layout = self.check_layout(layout)
        self.head_files.write(
            user_path(path),
            self.head,
            self.target_ids,
            layout,
            num_target_layers=self._num_target_layers,
            target_name=self._target_name,
            target_architectures=self._target_architectures,
        )
        return SavedHead(self.spec.algorithm, layout, self._target_name)

    def check_layout(self, layout: str | None = None) -> str:
        """The layout by its own name, see `HeadFiles.check_layout`; None stands for the default of the head."""
        layout = layout or self.head_files.default_layout(self.spec)
        return self.head_files.check_layout(layout, self.spec, self._num_target_layers)

    @classmethod
    def files(cls, folder: str) -> list[str]:
        return checkpoint_files(folder)

    @classmethod
    def describe(cls, folder: str) -> SavedHead:
        return cls.head_files.saved(folder)

    @classmethod
    def convert(
        cls,
        folder: str,
        path: str | os.PathLike,
        layout: str,
        target: TargetFiles | None = None,
        out_type: str = "f16",
    ) -> tuple[SavedHead, LoadReport]:
        """Writes the head in `folder` to `path` in another layout, see `HeadFiles.convert`."""
        return cls.head_files.convert(folder, path, layout, target, out_type)

    def check_target(self, target: GenerativeModel) -> None:
        """Compares hidden size, vocabulary and depth. A target with added tokens needs embeddings that have them."""
        self.head_files.check_fits(self.spec, target)
        num_tokens = target.config.get_text_config(decoder=True).vocab_size
        num_rows = getattr(self.head.shared["embed_tokens"], "num_embeddings", num_tokens)
        if num_rows < num_tokens:
            raise TargetMismatchError(
                f"this {self.spec.kind} head was loaded for a target of {num_rows} tokens; this one has {num_tokens}. "
                "Load it again with target= this model."
            )
        check_follows(self._loaded, target)


class HeadSession(DraftSession, Generic[Head]):
    """One request of a head. It may continue the head's cache from the last turn of a conversation."""

    def __init__(
        self, loaded: LoadedHead[Head], options: Any, conversations: Conversations[Any], request: DraftRequest
    ):
        self.options = options
        self._loaded, self._request, self._conversations = loaded, request, conversations
        self._text = request.carried_text
        self.carries_over = self._text is not None
        self._runner = request.graph_runner
        if self._runner is not None and (problem := problem_with_head(loaded.head)):
            request.record.refuse(self._runner.state, problem)
            self._runner = None
        self._head_cache: HeadCache | None = None
        self._steps: Any = None

    def close(self) -> None:
        """Stores the head's cache for the next turn of the conversation."""
        if self._head_cache is not None and self._text is not None and self._request.cache is not None:
            self._conversations.keep(self._request.cache, self._text, self._carried_state(self._head_cache))
        self._head_cache = self._steps = None

    def _carried_state(self, head_cache: HeadCache) -> Any:
        """The state to store for the next turn: the head's cache, unless a method needs more."""
        return head_cache

    def _begin(self, tokens: Tensor) -> HeadCache:
        """The head's cache before it reads the prompt's tokens [B, J]."""
        num_rows, count = tokens.shape
        head = self._loaded.head
        self._head_cache = HeadCache.begin(
            head, self._request, (num_rows, count), lambda first: self._resumed(first, count)
        )
        return self._head_cache

    def _resumed(self, first: int, count: int) -> HeadCache | None:
        """The last turn's cache, ready for `count` more entries. None unless it holds all entries before `first` of
        this text."""
        carried = self._conversations.take(self._request.cache, self._text)
        if carried is None or first == 0:
            return None
        num_alike, left = carried
        return self._resume(left, num_alike, first, count)

    def _resume(self, left: Any, num_alike: int, first: int, count: int) -> HeadCache | None:
        """The last turn's cache, cut to `first` entries and ready for `count` more; None if the texts differ before.

        Args:
            left: state that the last turn stored, see `_carried_state`.
            num_alike: length of the common prefix of both texts.
        """
        return left.resumed(first, count) if num_alike >= first else None
