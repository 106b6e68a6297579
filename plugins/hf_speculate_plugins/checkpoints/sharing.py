"""Parts of the target that a head uses: embeddings, output matrix, and the tokens that it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from hf_speculate.errors import CheckpointError
from hf_speculate.messages import get_logger
from hf_speculate.target import output_rows

from .accounting import KeyAccount
from .config import ConfigValues
from .decoder_config import HeadSpec
from .files import WEIGHT_TYPES, Checkpoint
from .target_files import TargetFiles


# Trained embeddings stay near those that they started from; below this mean cosine they are noise (TorchSpec exported
# such files) unless the config states that they were trained.
_MIN_COSINE = 0.05


Spec = TypeVar("Spec", bound=HeadSpec)


@dataclass(frozen=True)
class OpenedHead(Generic[Spec]):
    """The files of a head, read and described; its embeddings and output matrix are not chosen yet.

    Attributes:
        spec: shapes and switches of the head.
        checkpoint: the files, names canonical.
        keys: account of this load.
        target_ids: int64 [Vd] on the CPU, target id of each draft id; None where they are the same.
    """

    spec: Spec
    checkpoint: Checkpoint
    keys: KeyAccount
    target_ids: Tensor | None


def shared_embeddings(
    opened: OpenedHead[Any], theirs: Any, choice: str | None = None, *, trained: bool = False
) -> nn.Module | None:
    """The target's embeddings if the head should use them; None if its own are to be loaded.

    Args:
        choice: "own" or "target"; None compares them.
        trained: default of the config's `embed_requires_grad`: such heads train their embeddings.
    Raises:
        CheckpointError: the head needs its own, and the file has none.
    """
    name = "embed_tokens.weight"
    spec, checkpoint, keys = opened.spec, opened.checkpoint, opened.keys
    own, shape = _own(opened, name), _embedding_shape(theirs)
    fits = _fits(shape, spec)
    was_trained = ConfigValues(checkpoint.folder, checkpoint.config).flag("embed_requires_grad", trained)
    if own is None and was_trained and choice != "target":
        raise CheckpointError(
            f"{checkpoint.folder}: {name} is missing, which the head was trained with. embeddings='target' uses the "
            "target's instead."
        )
    if own is None or choice == "target":
        if not fits:
            raise CheckpointError(
                f"{checkpoint.folder} has no embeddings of its own ({name}) of width {spec.hidden_size}, and the "
                f"target's are {shape}."
            )
        keys.share(name, "asked for" if own is not None else "not in the file")
        return theirs
    if not fits or tuple(own.shape) != (spec.vocab_size, spec.hidden_size) or choice == "own":
        return None
    if is_copy(own, theirs.weight):
        keys.share(name, "equal to the target's")
        return theirs
    if not was_trained and _mean_cosine(own, theirs) < _MIN_COSINE:
        keys.share(name, "those in the file look random; pass embeddings='own' to use them")
        return theirs
    return None


def shared_output(opened: OpenedHead[Any], theirs: Any, rows: torch.dtype | None = None) -> nn.Module | None:
    """The target's output matrix (the module `theirs`) if the head should use it; None if its own is to be loaded.

    Args:
        rows: type of the target's rows for the draft vocabulary, for a head whose files leave them out.
    """
    name = "lm_head.weight"
    spec, checkpoint, keys = opened.spec, opened.checkpoint, opened.keys
    own = _own(opened, name)
    if own is not None and not (spec.draft_vocab_size == spec.vocab_size and is_copy(own, theirs.weight)):
        return None
    if own is None and opened.target_ids is not None and rows is not None:
        keys.share(name, "the target's rows for the draft vocabulary")
        return vocabulary_output(theirs, spec.hidden_size, opened.target_ids, rows)
    if own is None and spec.draft_vocab_size != spec.vocab_size:
        keys.take(name, (spec.draft_vocab_size, spec.hidden_size))  # noted as missing
        return None
    # The shape of a quantised matrix is that of its packing: the sizes of the models were compared before.
    if not _fits(theirs.weight.shape, spec) and theirs.weight.is_floating_point():
        raise CheckpointError(
            f"{checkpoint.folder} has no output matrix of its own ({name}) of width {spec.hidden_size}, and the "
            f"target's is {tuple(theirs.weight.shape)}."
        )
    keys.share(name, "equal to the target's" if own is not None else "not in the file")
    return theirs


def vocabulary_output(theirs: Any, hidden_size: int, target_ids: Tensor, dtype: torch.dtype) -> nn.Linear:
    """A copy of the rows of an output layer for some tokens, without gradients."""
    rows = output_rows(theirs, hidden_size, dtype, target_ids)
    layer = nn.Linear(hidden_size, len(target_ids), bias=False, device="meta")
    layer.weight = nn.Parameter(rows.to(dtype).clone(memory_format=torch.contiguous_format), requires_grad=False)
    return layer


def _own(opened: OpenedHead[Any], name: str) -> Tensor | None:
    """The file's tensor, which enters the account only if it is used; None if there is none."""
    own = opened.checkpoint.tensors.get(name)
    if own is not None and own.dtype not in WEIGHT_TYPES:
        raise CheckpointError(f"{opened.checkpoint.folder}: {name} is of {own.dtype}, not of a type of weights.")
    return own


def is_copy(own: Tensor, theirs: Tensor) -> bool:
    """Whether `own` equals the first rows of `theirs`, but for two roundings of tiny numbers to 16 bits."""
    if not theirs.is_floating_point() or theirs.device.type == "meta":
        return False
    if len(own) > len(theirs) or own.shape[1:] != theirs.shape[1:]:
        return False
    step = 16384  # rows at a time: a comparison must not need a copy of the matrix in float32
    for start in range(0, own.shape[0], step):
        rows = slice(start, min(start + step, own.shape[0]))
        ours = own[rows].to(theirs.device, theirs.dtype)
        if not torch.allclose(ours.float(), theirs[rows].float(), rtol=0, atol=1e-6):
            return False
    return True


def _fits(shape: Sequence[int], spec: HeadSpec) -> bool:
    """Whether a matrix of the target has a row of the head's width for each token of the head's vocabulary."""
    return len(shape) == 2 and shape[0] >= spec.vocab_size and shape[1] == spec.hidden_size


def _embedding_shape(module: Any) -> tuple[int, ...]:
    """Rows and width of an embedding module; a quantised matrix has the shape of its packing."""
    weight = module.weight
    return tuple(weight.shape) if weight.is_floating_point() else (module.num_embeddings, module.embedding_dim)


def _mean_cosine(own: Tensor, theirs: nn.Module) -> float:
    """Mean cosine of rows of a matrix and an embedding module's. The module is called, for it may be offloaded."""
    rows = torch.linspace(0, own.shape[0] - 1, min(own.shape[0], 1024), dtype=torch.float32, device="cpu").long()
    device = next(theirs.parameters()).device
    their_rows = theirs(rows if device.type == "meta" else rows.to(device))
    return float(torch.cosine_similarity(own[rows].float(), their_rows.float().cpu(), dim=-1).mean().detach())


logger = get_logger(__name__)


def draft_vocabulary(spec: HeadSpec, checkpoint: Checkpoint, keys: KeyAccount) -> Tensor | None:
    """Target id of every draft id, int64 [Vd], from `d2t` (offsets) and `t2d` (membership), which must agree; None
    where they are the same.

    Raises:
        CheckpointError: they contradict each other, name no tokens of the target, or are missing.
    """
    offsets = keys.optional_ids("d2t", (spec.draft_vocab_size,))
    members = keys.optional_ids("t2d", (spec.vocab_size,))
    keys.check()
    if offsets is not None:
        ids = torch.arange(spec.draft_vocab_size, dtype=torch.long, device="cpu") + offsets.long()
    elif members is not None:
        ids = members.nonzero().flatten()
    else:
        if spec.draft_vocab_size == spec.vocab_size:
            return None
        raise CheckpointError(
            f"{checkpoint.folder}: the head drafts {spec.draft_vocab_size} of {spec.vocab_size} tokens, but has "
            "neither d2t nor t2d to name them."
        )
    if members is not None and not torch.equal(ids, members.nonzero().flatten()):
        raise CheckpointError(
            f"{checkpoint.folder}: d2t (offsets: target id = draft id + d2t) and t2d (which target ids are in the "
            "draft vocabulary) contradict each other."
        )
    num_different = len(ids.unique())
    if num_different != spec.draft_vocab_size or ids.min() < 0 or ids.max() >= spec.vocab_size:
        raise CheckpointError(
            f"{checkpoint.folder}: d2t maps {spec.draft_vocab_size} draft ids to {num_different} different ids "
            f"between {int(ids.min())} and {int(ids.max())}; the vocabulary has {spec.vocab_size}."
        )
    if offsets is not None and members is None and spec.draft_vocab_size < spec.vocab_size and not offsets.any():
        logger.warning_once(
            f"{checkpoint.folder}: d2t is zero everywhere, so draft ids are the target's first {len(offsets)}. It may "
            "never have been filled: `hf-speculate check` measures whether the head drafts as it should."
        )
    is_whole = spec.draft_vocab_size == spec.vocab_size and torch.equal(
        ids, torch.arange(spec.vocab_size, dtype=torch.long, device="cpu")
    )
    return None if is_whole else ids


def vocabulary_tensors(spec: HeadSpec, target_ids: Tensor | None) -> dict[str, Tensor]:
    """The tensors that `draft_vocabulary` reads: offsets and members, on the CPU. None: every token is its own."""
    own = torch.arange(spec.draft_vocab_size, dtype=torch.long, device="cpu")
    ids = own if target_ids is None else target_ids.cpu()
    members = torch.zeros(spec.vocab_size, dtype=torch.bool, device="cpu")
    members[ids] = True
    return {"d2t": ids - own, "t2d": members}


class TargetNeededError(CheckpointError):
    """A conversion that needs the target's files, and was given none."""


def target_needed(opened: OpenedHead[Any], layout: str, name: str) -> TargetNeededError:
    """The error for a part of the target that a layout stores, and that no target was given for."""
    return TargetNeededError(
        f"{opened.checkpoint.folder} has no {name} (it is the target's), which the {layout} layout stores: give the "
        "target (--target)."
    )


def were_trained(opened: OpenedHead[Any], config: ConfigValues, target: TargetFiles | None) -> bool:
    """Whether embeddings in a file are the head's own. They are unless the files state otherwise."""
    if "embed_requires_grad" in config or target is None:
        return config.flag("embed_requires_grad", True)
    own, theirs = opened.checkpoint.tensors["embed_tokens.weight"], target.input_embeddings().weight
    return not is_copy(own, theirs)
