"""A drafter with a head that was read from files."""

from __future__ import annotations

import dataclasses
import os
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.drafting import Drafter, SavedHead
from hf_speculate.hub import local_folder
from hf_speculate.options import read_options

from ..checkpoints import LoadReport, checkpoint_files
from .loading import Head, LoadedHead


if TYPE_CHECKING:
    from typing_extensions import Self


class HeadDrafter(Drafter, Generic[Head]):
    """What drafters with heads of decoder layers share.

    Args:
        loaded: the head.
        target: the model that it was loaded for; only its sizes and name are kept.
        options: an instance of the first of `options_classes`; None: its defaults.

    Class attributes:
        options_classes: how to draft, and how to read a head (conventions).
    """

    options_classes: ClassVar[tuple[type[Any], type[Any]]]

    def __init__(self, loaded: LoadedHead[Head], target: PreTrainedModel, options: Any = None):
        self._loaded = loaded
        self.options = options or self.options_classes[0]()
        self._target_name = getattr(target.config, "_name_or_path", None) or None
        self._target_architectures = [type(target).__name__]
        self._num_target_layers = target.config.get_text_config(decoder=True).num_hidden_layers

    @property
    def head(self) -> Head:
        return self._loaded.head

    @property
    def target_ids(self) -> Tensor | None:
        """See `LoadedHead`."""
        return self._loaded.target_ids

    @property
    def report(self) -> LoadReport:
        """What became of every key of the checkpoint."""
        return self._loaded.report

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        """`head=` is the folder or Hub id of the head; the other options are those of `from_folder`."""
        head = options.pop("head", None)
        if head is None:
            raise TypeError(
                f"{cls.name} needs a trained head: from_name({cls.name!r}, target=..., head='folder or Hub id')."
            )
        return cls.from_folder(local_folder(head), target, **options)

    @classmethod
    def from_folder(cls, folder: str, target: PreTrainedModel, **options: Any) -> Self:
        """Options are the fields of `options_classes`: how to draft, and how to read the head."""
        how_to_draft, how_to_read = cls.options_classes
        names = {field.name for field in dataclasses.fields(how_to_read)}
        conventions = how_to_read(**{name: options.pop(name) for name in list(options) if name in names})
        chosen = read_options(how_to_draft, options, cls.name, also=sorted(names))
        return cls(cls.load(folder, target, conventions), target, chosen)

    def save_pretrained(self, path: str | os.PathLike, layout: str | None = None) -> SavedHead:
        """Writes the head in a published layout, see `check_layout`.

        Raises:
            CheckpointError: the layout cannot express this head.
        """
        layout = self.check_layout(layout)
        self.write(
            path,
            layout,
            num_target_layers=self._num_target_layers,
            target_name=self._target_name,
            target_architectures=self._target_architectures,
        )
        return SavedHead(self.algorithm, layout, self._target_name)

    @classmethod
    def files(cls, folder: str) -> list[str]:
        return checkpoint_files(folder)

    @classmethod
    @abstractmethod
    def load(cls, folder: str, target: PreTrainedModel, conventions: Any) -> LoadedHead[Head]:
        """Loads the head in a folder."""

    @abstractmethod
    def write(self, path: str | os.PathLike, layout: str, **of_target: Any) -> None:
        """Writes the head in a layout by its own name.

        Args:
            of_target: `num_target_layers`, `target_name` and `target_architectures`.
        """

    @property
    @abstractmethod
    def algorithm(self) -> str:
        """What the Hub calls the method of the head."""

    @abstractmethod
    def check_layout(self, layout: str | None = None) -> str: ...
