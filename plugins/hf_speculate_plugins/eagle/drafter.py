"""The EAGLE drafter: EAGLE-1, EAGLE-2 (the same files with dynamic trees) and EAGLE-3 heads in all their layouts."""

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
from .checkpoint import (
    LayoutName,
    LoadedHead,
    algorithm_tag,
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
    from typing_extensions import Self


class EagleDrafter(Drafter):
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
        self._loaded = loaded
        self.options = options or EagleOptions()
        self.conversations: Conversations[Turn] = Conversations()
        self._target_name = getattr(target.config, "_name_or_path", None) or None
        self._target_architectures = [type(target).__name__]
        self._num_target_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        self.entry_layers = self.spec.entry_layers(self._num_target_layers)
        self.feature_layers = tuple(dict.fromkeys(self.entry_layers))
        tree = self.options.static_tree
        if tree is not None and max(tree.widths) > self.spec.draft_vocab_size:
            raise ValueError(f"eagle: the static tree needs {max(tree.widths)} children; the head has fewer tokens.")

    def __repr__(self) -> str:
        return f"EagleDrafter(EAGLE-{self.spec.version}, {self.spec.dialect}, {self.options})"

    @property
    def head(self) -> EagleHead:
        return self._loaded.head

    @property
    def target_ids(self) -> Tensor | None:
        """See `LoadedHead`."""
        return self._loaded.target_ids

    @property
    def report(self) -> LoadReport:
        """What became of every key of the checkpoint."""
        return self._loaded.report

    @property
    def spec(self) -> EagleSpec:
        return self.head.spec

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        """`head=` is the folder or Hub id of the head; the other options are those of `from_folder`."""
        head = options.pop("head", None)
        if head is None:
            raise TypeError("eagle needs a trained head: from_name('eagle', target=..., head='folder or Hub id').")
        return cls.from_folder(local_folder(head), target, **options)

    @classmethod
    def recognizes(cls, folder: str) -> bool:
        return eagle_version(tensor_shapes(folder)) is not None

    @classmethod
    def from_folder(cls, folder: str, target: PreTrainedModel, **options: Any) -> Self:
        """Options are the fields of `EagleOptions` (how to draft) and `Conventions` (how to read the head)."""
        names = {field.name for field in dataclasses.fields(Conventions)}
        conventions = Conventions(**{name: options.pop(name) for name in list(options) if name in names})
        chosen = read_options(EagleOptions, options, cls.name, also=sorted(names))
        return cls(load_head(folder, target, conventions), target, chosen)

    def save_pretrained(self, path: str | os.PathLike, layout: LayoutName | str | None = None) -> SavedHead:
        """Writes the head in a published layout: "safeailab", "specforge" (SGLang) or "speculators" (vLLM);
        "sglang" and "vllm" are other names of the last two.

        Args:
            layout: None: "speculators", for EAGLE-1 "safeailab", the only one that has it.
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
        return SavedHead(algorithm_tag(self.spec), layout, self._target_name)

    def check_layout(self, layout: LayoutName | str | None = None) -> str:
        """See `save_pretrained`."""
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

    def start(self, request: DraftRequest) -> EagleSession:
        return EagleSession(self._loaded, self.entry_layers, self.options, self.conversations, request)
