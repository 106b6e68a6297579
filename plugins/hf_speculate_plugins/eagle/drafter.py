"""The EAGLE drafter: EAGLE-1, EAGLE-2 (the same files with dynamic trees) and EAGLE-3 heads in all their layouts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from hf_speculate.conversations import Conversations
from hf_speculate.drafter import Drafter, DraftRequest, Knobs, SavedHead
from hf_speculate.hub import local_folder

from ..checkpoints.reading import LoadReport, tensor_shapes
from ..checkpoints.target_files import TargetFiles
from .checkpoint.conversion import convert_head
from .checkpoint.layouts import eagle_version
from .checkpoint.loading import LoadedHead, check_fits, load_head
from .checkpoint.saving import LayoutName, write_head
from .levels import StaticTree
from .session import EagleSession
from .spec import Conventions, EagleSpec


if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class EagleOptions:
    """Options of EAGLE drafting.

    Attributes:
        depth: tokens drafted along a branch; each costs one forward of the head.
        top_k: 1 drafts a chain, more a dynamic tree with that many branches a level.
        max_nodes: draft nodes of a dynamic tree, the root not counted. (SafeAILab's `total_token` counts it, and its
            `depth` counts the levels below the first: total_token=60, depth=7 are max_nodes=59, depth=8 here.)
        tree: a static tree instead, as a list of paths of ranks, e.g. `[(0,), (1,), (0, 0)]`.
    """

    depth: int = 8
    top_k: int = 4
    max_nodes: int = 24
    tree: StaticTree | Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        for name in ("depth", "top_k", "max_nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"eagle: {name} must be at least 1, got {getattr(self, name)}.")
        if self.tree is not None and not isinstance(self.tree, StaticTree):
            object.__setattr__(self, "tree", StaticTree.from_choices(self.tree))

    @property
    def static_tree(self) -> StaticTree | None:
        return self.tree if isinstance(self.tree, StaticTree) else None

    @property
    def max_depth(self) -> int:
        """Depth of a chain, or of what a static tree is cut to where only chains can be verified."""
        return self.depth if self.static_tree is None else max(map(len, self.static_tree.choices))

    @property
    def max_frontier(self) -> int:
        """Nodes of a level that are run at once."""
        return self.top_k if self.static_tree is None else max(len(level.nodes) for level in self.static_tree.levels)


class EagleDrafter(Drafter):
    """Drafts with an EAGLE head.

    Args:
        loaded: the head, see `load_head`.
        target: the model that it was loaded for; only its sizes and name are kept.
        options: see `EagleOptions`.

    Attributes:
        report: what became of every key of the checkpoint.
    """

    name = "eagle"
    knobs = Knobs(
        depth="depth",
        width="top_k",
        nodes="max_nodes",
        explored={"depth": 12, "top_k": 8, "max_nodes": 64, "tree": None},
        others=("tree",),
    )

    def __init__(self, loaded: LoadedHead, target: PreTrainedModel, options: EagleOptions | None = None):
        self.head, self.target_ids, self.report = loaded.head, loaded.target_ids, loaded.report
        self.options = options or EagleOptions()
        self.conversations: Conversations = Conversations()
        self._target_name = getattr(target.config, "_name_or_path", None) or None
        self._target_architectures = [type(target).__name__]
        self._num_target_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        self.entry_layers = self.spec.entry_layers(self._num_target_layers)
        self.feature_layers = tuple(dict.fromkeys(self.entry_layers))
        tree = self.options.static_tree
        if tree is not None and tree.max_rank >= self.spec.draft_vocab_size:
            raise ValueError(f"eagle: the static tree needs {tree.max_rank + 1} children; the head has fewer tokens.")

    def __repr__(self) -> str:
        return f"EagleDrafter(EAGLE-{self.spec.version}, {self.spec.dialect}, {self.options})"

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
        chosen = EagleOptions(**options)
        return cls(load_head(folder, target, conventions), target, chosen)

    def save_pretrained(self, path: str | os.PathLike, layout: LayoutName | str | None = None) -> SavedHead:
        """Writes the head in a published layout: "safeailab", "specforge" (SGLang) or "speculators" (vLLM).

        Args:
            layout: None: "speculators", for EAGLE-1 "safeailab", the only one that has it.
        Raises:
            CheckpointError: the layout cannot express this head.
        """
        layout = layout or ("speculators" if self.spec.version == 3 else "safeailab")
        write_head(
            path,
            self.head,
            self.target_ids,
            layout,
            num_target_layers=self._num_target_layers,
            target_name=self._target_name,
            target_architectures=self._target_architectures,
        )
        return SavedHead("eagle3" if self.spec.version == 3 else "eagle", layout, self._target_name)

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
        return EagleSession(self, request)
