"""A head from one published layout to another, exactly: no target model is loaded, tensors keep their dtype."""

from __future__ import annotations

import os

from torch import nn

from hf_speculate.drafting import SavedHead
from hf_speculate.errors import CheckpointError

from ...checkpoints import (
    ConfigValues,
    LoadReport,
    OpenedHead,
    TargetFiles,
    facts_of_target,
    is_copy,
    shared_embeddings,
    shared_output,
    stated_name,
)
from ..spec import EagleSpec
from .loading import assemble, check_sizes, open_head
from .saving import check_layout, stores, write_head


_EMBEDDINGS, _OUTPUT = "embed_tokens.weight", "lm_head.weight"


def convert_head(
    folder: str, path: str | os.PathLike, layout: str, target: TargetFiles | None = None
) -> tuple[SavedHead, LoadReport]:
    """Writes the head in `folder` to the folder `path` in `layout`.

    Args:
        target: needed where the layout stores what the file shares with the target (embeddings, an output matrix or
            its rows for the draft vocabulary), and where the layers that the head reads cannot be said without the
            target's depth.
    Raises:
        CheckpointError: unreadable; the layout cannot express the head; the target is needed and was not given.
        TargetMismatchError: the target is another one.
    """
    opened = open_head(folder)
    layout = check_layout(layout, opened.spec)
    config = ConfigValues(folder, opened.checkpoint.config)
    if target is not None:
        check_sizes(opened.spec, target.text_config, target.name)
    embed_tokens = _embeddings(opened, layout, target)
    loaded = assemble(opened, embed_tokens, _output(opened, layout, target))
    facts = facts_of_target(config, target)
    write_head(
        path,
        loaded.head,
        loaded.target_ids,
        layout,
        **facts,
        embeddings_were_trained=embed_tokens is None and _were_trained(opened, target),
    )
    return SavedHead(opened.spec.algorithm, layout, facts["target_name"]), loaded.report


def describe_head(folder: str) -> SavedHead:
    """Method, layout and target of the head in `folder`, as far as it says."""
    opened = open_head(folder)
    layout = "safeailab" if opened.spec.version == 1 else opened.spec.dialect if opened.spec.own_output else "compact"
    name = stated_name(ConfigValues(folder, opened.checkpoint.config))
    return SavedHead(opened.spec.algorithm, layout, name)


def _embeddings(opened: OpenedHead[EagleSpec], layout: str, target: TargetFiles | None) -> nn.Module | None:
    """The target's embeddings where the file has none, or none worth keeping; None where its own are written."""
    is_stored, own = stores(layout, opened.spec)["embed_tokens"], opened.checkpoint.tensors.get(_EMBEDDINGS)
    if target is None or (own is None and not is_stored):
        if own is None and is_stored:
            raise _target_needed(opened, layout, _EMBEDDINGS)
        return None if own is not None else _absent(opened)
    theirs = target.input_embeddings()
    if is_stored and own is not None and own.shape == theirs.weight.shape and is_copy(own, theirs.weight):
        return None  # what the file has is written as it is, bit for bit
    return shared_embeddings(opened, theirs, trained=opened.spec.parallel)


def _output(opened: OpenedHead[EagleSpec], layout: str, target: TargetFiles | None) -> nn.Module | None:
    """The target's output matrix where the file has none; None where its own is written."""
    spec = opened.spec
    if _OUTPUT in opened.checkpoint.tensors or (spec.own_output and spec.draft_vocab_size != spec.vocab_size):
        return None
    if not stores(layout, spec)["lm_head"]:
        opened.keys.share(_OUTPUT, "not in the file")
        return nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False, device="meta")
    if target is None:
        raise _target_needed(opened, layout, _OUTPUT)
    theirs = target.output_embeddings()
    return shared_output(opened, theirs, None if spec.own_output else theirs.weight.dtype)


def _absent(opened: OpenedHead) -> nn.Module:
    """Stands for the target's embeddings in a layout that does not store them."""
    opened.keys.share(_EMBEDDINGS, "not in the file")
    return nn.Embedding(opened.spec.vocab_size, opened.spec.hidden_size, device="meta")


def _were_trained(opened: OpenedHead[EagleSpec], target: TargetFiles | None) -> bool:
    """Whether embeddings in a file are the head's own. Unless something says otherwise they are."""
    config = ConfigValues(opened.checkpoint.folder, opened.checkpoint.config)
    if "embed_requires_grad" in config or target is None:
        return config.flag("embed_requires_grad", True)
    own, theirs = opened.checkpoint.tensors[_EMBEDDINGS], target.input_embeddings().weight
    return own.shape != theirs.shape or not is_copy(own, theirs)


def _target_needed(opened: OpenedHead[EagleSpec], layout: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"{opened.checkpoint.folder} has no {name} (it is the target's), which the {layout} layout stores: give the "
        "target (--target)."
    )
