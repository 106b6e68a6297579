"""The `medusa` drafter: one pass of all heads per round, and a static tree filled with their best tokens.

Source: Cai et al., "Medusa" (arXiv:2401.10774). The heads see the target's last hidden state (after the final norm) at
the node whose chosen token is the new root, so head h proposes tokens for depth h + 1. There is no draft cache.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_speculate.drafting import Drafter, DraftRequest, DraftSession, DraftState, SavedHead
from hf_speculate.errors import OptionError, TargetMismatchError
from hf_speculate.files import user_path
from hf_speculate.speculator import check_sizes, read_options
from hf_speculate.stats import HeadRecord
from hf_speculate.target import GenerativeModel, weight_device
from hf_speculate.tree import DraftTree

from ..checkpoints import LoadReport, check_stated_target, checkpoint_files, tensor_shapes
from ..heads import can_prepare, is_placed, placed_copy
from ..origin import check_head_vocabulary, check_origin
from .head import MedusaHeads, QuantizedOutputs
from .loading import PREFIXES, check_backbone, layout_of, read_heads
from .saving import check_layout, convert_heads, describe_heads, write_heads
from .steps import Seen, Steps, steps_of
from .tree import ACCURACIES, StaticTree, best_static_tree


if TYPE_CHECKING:
    from typing_extensions import Self


# On an accelerator verifying 64 tokens takes about as long as one. On two CPU cores it takes three times as long, and
# 16 tokens take 1.4 times as long (measured).
_MAX_NODES_ACCELERATOR = 63
_MAX_NODES_CPU = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaOptions:
    """Options of Medusa drafting.

    Attributes:
        max_nodes: nodes of the tree, the root not counted; None: 63 on accelerators, 15 on a CPU.
    """

    max_nodes: int | None = None

    def __post_init__(self) -> None:
        check_sizes("medusa", self, "max_nodes")


class MedusaSession(DraftSession):
    """Keeps the target's states of the last round. The newest token of each row was chosen from one of them."""

    def __init__(self, num_heads: int, tree: StaticTree, layer: int, steps: Steps):
        self.tree, self._num_heads, self._layer, self._steps = tree, num_heads, layer, steps
        self._seen: Seen | None = None

    def observe(self, tokens, features, lengths) -> None:
        self._seen = Seen.of(features[self._layer], lengths.tolist(), self._num_heads)

    def draft(self, state: DraftState) -> DraftTree:
        # Targets that cannot score branches get the best token of every head.
        tree = StaticTree.chain(self._num_heads) if state.chains_only else self.tree
        depth = min(tree.max_depth, state.max_depth)
        if not depth or self._seen is None:
            return DraftTree.root_only(state.root_ids)
        return self._steps.draft(self._seen, state, tree, depth)

    def close(self) -> None:
        self._steps.close()


class MedusaDrafter(Drafter):
    """Drafts with Medusa heads.

    Args:
        tree: the static tree to draft, cut to the number of heads; None: the best one of `max_nodes` nodes.

    Attributes:
        tree: the static tree that is drafted.
    """

    name = "medusa"
    options_classes = (MedusaOptions,)

    def __init__(
        self,
        heads: MedusaHeads,
        target: GenerativeModel,
        options: MedusaOptions | None = None,
        report: LoadReport | None = None,
        tree: StaticTree | None = None,
    ):
        config = target.config.get_text_config(decoder=True)
        self.options = options or MedusaOptions()
        self.heads = heads.eval().requires_grad_(False)
        self.report = report
        self.feature_layers = (config.num_hidden_layers,)
        self._num_target_layers = config.num_hidden_layers
        self._target_vocab_size = config.vocab_size
        self._target_name = getattr(target.config, "_name_or_path", None) or None
        self._given_tree = tree
        self._made: tuple[MedusaHeads, QuantizedOutputs] | None = None
        self.tree = (tree or self._best_tree()).cut(heads.num_heads)

    def __repr__(self) -> str:
        heads = self.heads
        kind = f"{heads.num_heads} heads of {heads.num_layers} blocks, {len(self.tree.paths)} nodes"
        return f"MedusaDrafter({kind}, {self.options})"

    @classmethod
    def for_target(cls, target: GenerativeModel, **options: Any) -> Self:
        """`heads=` are `MedusaHeads`, or the folder they are in; the other options are `MedusaOptions`."""
        heads = options.pop("heads", None)
        if isinstance(heads, str | os.PathLike):
            return cls.from_folder(user_path(heads), target, **options)
        if not isinstance(heads, MedusaHeads):
            raise OptionError("medusa needs its heads: AutoSpeculator.from_pretrained(<folder or Hub id>, target=...).")
        return cls(heads, target, read_options(MedusaOptions, options, cls.name, also=["heads"]))

    @classmethod
    def from_folder(cls, folder: str, target: GenerativeModel, **options: Any) -> Self:
        """Reads heads of any layout; dtype and device are the target's."""
        parsed = read_options(MedusaOptions, options, cls.name)
        checkpoint = read_heads(folder)
        check_backbone(target, checkpoint.backbone, folder)
        heads = _share_output(checkpoint.heads, target)
        _check_sizes(heads, target)  # before memory is spent on them
        check_stated_target(folder, checkpoint.config, target)
        heads = heads.to(device=weight_device(target.get_output_embeddings(), target), dtype=target.dtype)
        return cls(heads, target, parsed, checkpoint.report)

    def save_pretrained(self, path: str | os.PathLike, layout: str | None = None) -> SavedHead:
        """Writes the heads in a published layout.

        Args:
            layout: "fasterdecoding" (`medusa_lm_head.pt`; safetensors of "version 2" when the heads use the target's
                output matrix) or "vllm"; None: the first, but "vllm" for truncated vocabularies, which need it.
        Raises:
            CheckpointError: the layout cannot express these heads.
        """
        layout = self.check_layout(layout)
        path = user_path(path)
        write_heads(path, self.heads, layout, vocab_size=self._target_vocab_size, base_model=self._target_name)
        return SavedHead("medusa", layout, self._target_name)

    def check_layout(self, layout: str | None = None) -> str:
        """The layout that `save_pretrained` would write, checked."""
        layout = layout or ("fasterdecoding" if self.heads.token_ids is None else "vllm")
        check_layout(layout, self.heads)
        return layout

    @classmethod
    def recognizes(cls, folder: str) -> bool:
        return layout_of(tensor_shapes(folder, strip=PREFIXES)) is not None

    @classmethod
    def describe(cls, folder: str) -> SavedHead:
        return describe_heads(folder)

    @classmethod
    def files(cls, folder: str) -> list[str]:
        return checkpoint_files(folder)

    convert = staticmethod(convert_heads)

    def record_in(self, folder: str, target: GenerativeModel) -> HeadRecord:
        return check_origin(folder, target)

    def check_target(self, target: GenerativeModel) -> None:
        """Compares hidden size, vocabulary and number of layers."""
        _check_sizes(self.heads, target)
        num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        if num_layers != self._num_target_layers:
            raise TargetMismatchError(
                f"these Medusa heads were loaded for a target of {self._num_target_layers} layers; this one has "
                f"{num_layers}. Load them again with target= this model."
            )

    def _quantized_outputs_of(self, heads: MedusaHeads) -> QuantizedOutputs:
        """The outputs in 8 bits. Making them may take a compiler, so they wait for the first request."""
        made = self._made
        if made is None or made[0] is not heads:
            made = self._made = heads, QuantizedOutputs(heads)
        return made[1]

    def follow(self, target: GenerativeModel) -> MedusaHeads:
        """The heads in the dtype and on the device that `target` has now. Later requests take them too."""
        heads, device = self.heads, weight_device(target.get_output_embeddings(), target)
        if not is_placed(heads, target.dtype, device):
            heads = self.heads = placed_copy(heads, target.dtype, device)
            self.tree = (self._given_tree or self._best_tree()).cut(heads.num_heads)
        return heads

    def prepare(self, target: GenerativeModel) -> None:
        """Makes the outputs in 8 bits, unless the kernel is still to be compiled."""
        if can_prepare(self.heads.device):
            self._quantized_outputs_of(self.follow(target)).of(target)

    def start(self, request: DraftRequest) -> MedusaSession:
        heads = self.follow(request.target)
        steps = steps_of(heads, self._quantized_outputs_of(heads), request)
        return MedusaSession(heads.num_heads, self.tree, self.feature_layers[0], steps)

    def _best_tree(self) -> StaticTree:
        default = _MAX_NODES_CPU if self.heads.device.type == "cpu" else _MAX_NODES_ACCELERATOR
        num_tokens = self.heads.vocab_size or self._target_vocab_size
        accuracies = [ranks[:num_tokens] for ranks in ACCURACIES[: self.heads.num_heads]]
        return best_static_tree(accuracies, self.options.max_nodes or default)


def _check_sizes(heads: MedusaHeads, target: GenerativeModel) -> None:
    config = target.config.get_text_config(decoder=True)
    if heads.hidden_size != config.hidden_size:
        raise TargetMismatchError(
            f"the Medusa heads take hidden states of size {heads.hidden_size}, the target's have {config.hidden_size}: "
            "they belong to another model."
        )
    if heads.token_ids is not None:
        if int(heads.token_ids.max()) >= config.vocab_size:
            raise TargetMismatchError(
                f"the Medusa heads draft token {int(heads.token_ids.max())}, the target's vocabulary has "
                f"{config.vocab_size}: they belong to another model."
            )
    elif heads.vocab_size is not None:
        check_head_vocabulary("the Medusa heads", heads.vocab_size, "the target", config.vocab_size)


def _share_output(heads: MedusaHeads, target: GenerativeModel) -> MedusaHeads:
    """The heads, without an output matrix that they share if it is the target's own (vLLM's `original_lm_head`)."""
    ours, theirs = heads.output_weight, getattr(target.get_output_embeddings(), "weight", None)
    if ours is None or ours.shape[0] > 1 or theirs is None or theirs.shape != ours.shape[1:]:
        return heads
    if theirs.device.type == "meta":  # offloaded: its values cannot be read here
        return heads
    if heads.token_ids is not None or not torch.equal(ours[0].to(theirs.device, theirs.dtype), theirs):
        return heads
    return heads.with_output(None)
