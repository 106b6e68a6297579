"""The `mtp` drafter: the draft layers of the target's own checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_speculate.drafting import DraftRequest, SavedHead
from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate.files import user_path
from hf_speculate.speculator import check_sizes, read_options
from hf_speculate.stats import Advice
from hf_speculate.target import GenerativeModel

from ..checkpoints import ConfigValues, checkpoint_files, read_config, stated_name, tensor_shapes
from ..eagle import EagleOptions, EagleSession
from ..heads import LoadedDrafter, LoadedHead, check_follows
from .head import MtpHead, load_head
from .layouts import layout_of
from .saving import write_head
from .source import Source, num_layers_of


if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class MtpOptions(EagleOptions):
    """Options of drafting with a target's own draft layers.

    Attributes:
        depth: tokens drafted along a branch. The layer was trained for the first; each further one is less probable.
        top_k, max_nodes: see `EagleOptions`.
        draft_vocab: number of token ids, from 0 on, that are drafted; None drafts all. Ids of a BPE tokenizer are
            roughly in the order of their frequency. With a large vocabulary, scores of all tokens are most of a draft.
    """

    depth: int = 4
    draft_vocab: int | None = None

    def __post_init__(self) -> None:
        check_sizes("mtp", self, "depth", "top_k", "max_nodes", "draft_vocab")


class MtpDrafter(LoadedDrafter[MtpHead]):
    """Drafts with the draft layers (MTP) that the target's checkpoint holds with the model.

    Args:
        loaded: draft layer.
        target: model that it belongs to.
        options: how to draft.
    """

    name = "mtp"
    options_classes = (MtpOptions,)

    def __init__(self, loaded: LoadedHead[MtpHead], target: GenerativeModel, options: MtpOptions | None = None):
        super().__init__(loaded, target, options)
        self._config = target.config.get_text_config(decoder=True)
        sees_pictures = hasattr(target.config, "vision_config")  # their embeddings are the input of layer 0
        self.feature_layers = (*self.spec.entry_layers(self._num_target_layers), *([0] if sees_pictures else []))

    def __repr__(self) -> str:
        return f"MtpDrafter({self.spec.dialect}, {self.options})"

    @property
    def advice(self) -> Advice:
        return Advice()

    @classmethod
    def for_target(cls, target: GenerativeModel, **options: Any) -> Self:
        """Finds the draft layers where the target was loaded from.

        Args:
            options: `head`, a folder or Hub id that holds them instead; the fields of `MtpOptions`.
        Raises:
            CheckpointError: there are none.
        """
        head = options.pop("head", None)
        chosen = read_options(MtpOptions, options, cls.name, also=["head"])
        source = Source.of_target(target) if head is None else Source.find(head, num_layers_of(target))
        return cls(load_head(source, target, chosen.draft_vocab, packed=True), target, chosen)

    @classmethod
    def recognizes(cls, folder: str) -> bool:
        """Whether a folder holds draft layers and no model."""
        names = tensor_shapes(folder, strip=())
        found = layout_of(names, num_target_layers=0)
        return found is not None and not found[0].follows_target and len(found[1]) == len(names)

    @classmethod
    def from_folder(cls, folder: str, target: GenerativeModel, **options: Any) -> Self:
        return cls.for_target(target, head=folder, **options)

    def save_pretrained(self, path: str | os.PathLike, layout: str | None = None) -> SavedHead:
        """Writes the draft layer alone, in the layout "speculators" ("vllm").

        Raises:
            CheckpointError: the layout does not exist, or cannot express this layer.
        """
        self.check_layout(layout)
        write_head(user_path(path), self.head, self._config, self._target_name, self._target_architectures)
        return SavedHead("mtp", "speculators", self._target_name)

    def check_layout(self, layout: str | None = None) -> str:
        if layout not in (None, "speculators", "vllm"):
            raise CheckpointError(f"draft layers alone are written as 'speculators' ('vllm'), not as {layout!r}.")
        return "speculators"

    @classmethod
    def describe(cls, folder: str) -> SavedHead:
        return SavedHead("mtp", "speculators", stated_name(ConfigValues(folder, read_config(folder))))

    @classmethod
    def files(cls, folder: str) -> list[str]:
        return checkpoint_files(folder)

    def check_target(self, target: GenerativeModel) -> None:
        """Compares hidden size, vocabulary and depth."""
        config = target.config.get_text_config(decoder=True)
        wanted = self.spec.hidden_size, self.spec.vocab_size, self._num_target_layers
        found = config.hidden_size, config.vocab_size, config.num_hidden_layers
        if wanted != found:
            raise TargetMismatchError(
                f"these draft layers belong to a model with hidden size, vocabulary and layers {wanted}; this "
                f"{type(target).__name__} has {found}."
            )
        check_follows(self._loaded, target)

    def start(self, request: DraftRequest) -> EagleSession:
        loaded = self.follow(request.target)
        loaded.head.quantize_for_drafting()
        return EagleSession(loaded, self.feature_layers, self.options, self.conversations, request)
