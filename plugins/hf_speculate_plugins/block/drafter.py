"""The `block` drafter: DFlash, DSpark, DFlash2 and JetSpec heads in all their layouts."""

from __future__ import annotations

import os
from typing import Any

from transformers import PreTrainedModel

from hf_speculate.drafting import Conversations, DraftRequest, SavedHead

from ..checkpoints import LoadReport, TargetFiles, tensor_shapes
from ..heads import HeadDrafter, Reading
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


class BlockDrafter(HeadDrafter[BlockHead]):
    """Drafts a whole block in one forward of a head.

    Args:
        loaded: the head, see `load_head`.
        target: the model that it was loaded for; only its name and depth are kept.
        options: see `BlockOptions`.
    """

    name = "block"
    options_classes = (BlockOptions, Conventions)

    def __init__(self, loaded: LoadedHead, target: PreTrainedModel, options: BlockOptions | None = None):
        super().__init__(loaded, target, options)
        self.conversations: Conversations[Reading] = Conversations()
        self.feature_layers = tuple(dict.fromkeys(self.spec.feature_layers))
        if self.options.min_confidence and not self.spec.confidence:
            raise ValueError("block: min_confidence is for heads with a confidence head; this one has none.")

    def __repr__(self) -> str:
        return f"BlockDrafter({self.spec.method}, {self.spec.dialect}, block of {self.spec.block_size}, {self.options})"

    @property
    def spec(self) -> BlockSpec:
        return self.head.spec

    @classmethod
    def recognizes(cls, folder: str) -> bool:
        return is_block_head(tensor_shapes(folder))

    @classmethod
    def load(cls, folder: str, target: PreTrainedModel, conventions: Conventions) -> LoadedHead:
        return load_head(folder, target, conventions)

    def write(self, path: str | os.PathLike, layout: str, **of_target: Any) -> None:
        write_head(path, self.head, self.target_ids, layout, **of_target)

    @property
    def algorithm(self) -> str:
        return self.spec.method

    def check_layout(self, layout: LayoutName | str | None = None) -> str:
        """The layout by its own name: "zlab" (z-lab's and JetSpec's), "deepspec" or "speculators" ("vllm").

        Args:
            layout: None: the one that it was read from, or the first that can say it.
        """
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
        self.head.quicken()
        return BlockSession(self._loaded, self.options, self.conversations, request)
