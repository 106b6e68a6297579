"""Which of the target's tokens a head drafts, read from its files and written into them."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_speculate.errors import CheckpointError
from hf_speculate.messages import get_logger

from .accounting import KeyAccount
from .reading import Checkpoint
from .sharing import HeadSizes


logger = get_logger(__name__)


def draft_vocabulary(spec: HeadSizes, checkpoint: Checkpoint, keys: KeyAccount) -> Tensor | None:
    """Target id of every draft id, int64 [Vd], from `d2t` (offsets) and `t2d` (membership), which must agree; None
    where they are the same.

    Raises:
        CheckpointError: they contradict each other, name no tokens of the target, or are missing.
    """
    offsets = keys.optional_ids("d2t", (spec.draft_vocab_size,))
    members = keys.optional_ids("t2d", (spec.vocab_size,))
    keys.check()
    if offsets is not None:
        ids = torch.arange(spec.draft_vocab_size) + offsets.long()
    elif members is not None:
        ids = members.nonzero().flatten()
    else:
        if spec.draft_vocab_size == spec.vocab_size:
            return None
        raise CheckpointError(
            f"{checkpoint.folder}: the head speaks {spec.draft_vocab_size} of {spec.vocab_size} tokens, but there is "
            "neither d2t nor t2d to say which."
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
            "never have been filled: `hf-speculate check` tells whether the head drafts as it should."
        )
    is_whole = spec.draft_vocab_size == spec.vocab_size and torch.equal(ids, torch.arange(spec.vocab_size))
    return None if is_whole else ids


def vocabulary_tensors(spec: HeadSizes, target_ids: Tensor | None) -> dict[str, Tensor]:
    """What `draft_vocabulary` reads: offsets and members, on the CPU. None: every token is its own."""
    own = torch.arange(spec.draft_vocab_size)
    ids = own if target_ids is None else target_ids.cpu()
    members = torch.zeros(spec.vocab_size, dtype=torch.bool)
    members[ids] = True
    return {"d2t": ids - own, "t2d": members}
