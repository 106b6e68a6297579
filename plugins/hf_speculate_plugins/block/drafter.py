"""The `block` drafter: DFlash, DSpark, DFlash2 and JetSpec heads in all their layouts."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.drafting import Conversations, Drafter, DraftRequest, SavedHead
from hf_speculate.hub import local_folder
from hf_speculate.options import read_options

from ..checkpoints import LoadReport, TargetFiles, tensor_shapes
from ..heads import Reading
from .checkpoint import (
    LayoutName,
    LoadedHead,
    check_fits,
    check_layout,
    convert_head,
    default_layout,
    describe_head,
    is_block_head,
    load_head,
    write_head,
)
from .head import BlockHead
from .options import BlockOptions, Conventions
from .session import BlockSession
from .spec import BlockSpec


if TYPE_CHECKING:
    from typing_extensions import Self


class BlockDrafter(Drafter):
    """Drafts a whole block in one forward of a head.

    Args:
        loaded: the head, see `load_head`.
        target: the model that it was loaded for; only its name and depth are kept.
        options: see `BlockOptions`.
    """

    name = "block"
    options_classes = (BlockOptions, Conventions)

    def __init__(self, loaded: LoadedHead, target: PreTrainedModel, options: BlockOptions | None = None):
        self._loaded = loaded
        self.options = options or BlockOptions()
        self.conversations: Conversations[Reading] = Conversations()
        self._target_name = getattr(target.config, "_name_or_path", None) or None
        self._target_architectures = [type(target).__name__]
        self._num_target_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        self.feature_layers = tuple(dict.fromkeys(self.spec.feature_layers))
        if self.options.min_confidence and not self.spec.confidence:
            raise ValueError("block: min_confidence is for heads with a confidence head; this one has none.")

    def __repr__(self) -> str:
        return f"BlockDrafter({self.spec.method}, {self.spec.dialect}, block of {self.spec.block_size}, {self.options})"

    @property
    def head(self) -> BlockHead:
        return self._loaded.head

    @property
    def spec(self) -> BlockSpec:
        return self.head.spec

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
            raise TypeError("block needs a trained head: from_name('block', target=..., head='folder or Hub id').")
        return cls.from_folder(local_folder(head), target, **options)

    @classmethod
    def recognizes(cls, folder: str) -> bool:
        return is_block_head(tensor_shapes(folder))

    @classmethod
    def from_folder(cls, folder: str, target: PreTrainedModel, **options: Any) -> Self:
        """Options are the fields of `BlockOptions` (how to draft) and `Conventions` (how to read the head)."""
        names = {field.name for field in dataclasses.fields(Conventions)}
        conventions = Conventions(**{name: options.pop(name) for name in list(options) if name in names})
        chosen = read_options(BlockOptions, options, cls.name, also=sorted(names))
        return cls(load_head(folder, target, conventions), target, chosen)

    def save_pretrained(self, path: str | os.PathLike, layout: LayoutName | str | None = None) -> SavedHead:
        """Writes the head in a published layout: "zlab" (z-lab's DFlash and DFlash2, JetSpec), "deepspec" or
        "speculators" ("vllm" is another name of it).

        Args:
            layout: None: the one that it was read from, or the first that can say it.
        Raises:
            CheckpointError: the layout cannot express this head.
        """
        layout = self.check_layout(layout)
        write_head(
            path,
            self.head,
            self.target_ids,
            layout,
            num_target_layers=self._num_target_layers,
            target_name=self._target_name,
            target_architectures=self._target_architectures,
        )
        return SavedHead(self.spec.method, layout, self._target_name)

    def check_layout(self, layout: LayoutName | str | None = None) -> str:
        """See `save_pretrained`."""
        return check_layout(layout or default_layout(self.spec), self.spec)

    @classmethod
    def describe(cls, folder: str) -> SavedHead:
        return describe_head(folder)

    @staticmethod
    def convert(
        folder: str, path: str | os.PathLike, layout: str, target: TargetFiles | None = None
    ) -> tuple[SavedHead, LoadReport]:
        """Writes the head in `folder` to `path` in another layout, see `convert_head`."""
        return convert_head(folder, path, layout, target)

    def check_target(self, target: PreTrainedModel) -> None:
        """Compares hidden size, vocabulary and depth."""
        check_fits(self.spec, target)

    def start(self, request: DraftRequest) -> BlockSession:
        return BlockSession(self._loaded, self.options, self.conversations, request)
