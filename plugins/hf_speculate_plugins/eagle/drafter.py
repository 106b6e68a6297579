"""The EAGLE drafter: EAGLE-1, EAGLE-2 (the same files with dynamic trees), EAGLE-3 and P-EAGLE in all their layouts."""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from hf_speculate.drafting import Conversations, DraftRequest, SavedHead

from ..checkpoints import LoadReport, TargetFiles, tensor_shapes
from ..heads import HeadDrafter
from .checkpoint import (
    LayoutName,
    LoadedHead,
    check_fits,
    check_layout,
    convert_head,
    describe_head,
    eagle_version,
    load_head,
    write_head,
)
from .head import EagleHead
from .options import EagleOptions
from .session import EagleSession, Turn
from .spec import Conventions, EagleSpec


if TYPE_CHECKING:
    from .native import NativeForward


class EagleDrafter(HeadDrafter[EagleHead]):
    """Drafts with an EAGLE head.

    Args:
        loaded: the head, see `load_head`.
        target: the model that it was loaded for; only its sizes and name are kept.
        options: see `EagleOptions`.

    Attributes:
        entry_layers: which of the target's features the head takes, in its order; `feature_layers` has each once.
    """

    name = "eagle"
    options_classes = (EagleOptions, Conventions)

    def __init__(self, loaded: LoadedHead, target: PreTrainedModel, options: EagleOptions | None = None):
        super().__init__(loaded, target, options)
        self.conversations: Conversations[Turn] = Conversations()
        self.entry_layers = self.spec.entry_layers(self._num_target_layers)
        self.feature_layers = tuple(dict.fromkeys(self.entry_layers))
        tree = self.options.static_tree
        if tree is not None and self.spec.parallel:
            raise ValueError(
                "eagle: P-EAGLE heads score all levels at once and draft their best tree: tree= has no use."
            )
        if tree is not None and max(tree.widths) > self.spec.draft_vocab_size:
            raise ValueError(f"eagle: the static tree needs {max(tree.widths)} children; the head has fewer tokens.")

    def __repr__(self) -> str:
        return f"EagleDrafter({self.spec.kind}, {self.spec.dialect}, {self.options})"

    @property
    def spec(self) -> EagleSpec:
        return self.head.spec

    @classmethod
    def recognizes(cls, folder: str) -> bool:
        return eagle_version(tensor_shapes(folder)) is not None

    @classmethod
    def load(cls, folder: str, target: PreTrainedModel, conventions: Conventions) -> LoadedHead:
        return load_head(folder, target, conventions)

    def write(self, path: str | os.PathLike, layout: str, **of_target: Any) -> None:
        write_head(path, self.head, self.target_ids, layout, **of_target)

    @property
    def algorithm(self) -> str:
        return self.spec.algorithm

    def check_layout(self, layout: LayoutName | str | None = None) -> str:
        """The layout by its own name: "safeailab", "specforge" ("sglang"), "speculators" ("vllm") or "compact".

        Args:
            layout: None: "speculators", for EAGLE-1 "safeailab", the only one that has it.
        """
        default = "speculators" if self.spec.version == 3 else "safeailab"
        return check_layout(layout or default, self.spec, self._num_target_layers)

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

    @cached_property
    def _native(self) -> NativeForward | None:
        """Made for the first request: it may take a compiler, which heads that are only read or written need not."""
        from .native import NativeForward  # and the room of packed targets

        return NativeForward.of(self.head)

    def start(self, request: DraftRequest) -> EagleSession:
        self.head.quicken()
        return EagleSession(self._loaded, self.entry_layers, self.options, self.conversations, request, self._native)
