"""A one-pass head from one published layout to another, exactly: no target is loaded, tensors keep their dtype."""

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
    shared_embeddings,
    shared_output,
    stated_name,
)
from ..spec import BlockSpec
from .loading import assemble, check_sizes, open_head
from .saving import check_layout, write_head


def convert_head(
    folder: str, path: str | os.PathLike, layout: str, target: TargetFiles | None = None
) -> tuple[SavedHead, LoadReport]:
    """Writes the head in `folder` to the folder `path` in `layout`.

    Args:
        target: needed where the layout stores embeddings and output matrix and the file has none; also tells which of
            the file's are mere copies, which other layouts leave out.
    Raises:
        CheckpointError: unreadable; the layout cannot express the head; the target is needed and was not given.
        TargetMismatchError: the target is another one.
    """
    opened = open_head(folder)
    layout = check_layout(layout, opened.spec)
    if target is not None:
        check_sizes(opened.spec, target.text_config, target.name)
    loaded = assemble(opened, _embeddings(opened, layout, target), _output(opened, layout, target))
    facts = facts_of_target(ConfigValues(folder, opened.checkpoint.config), target)
    write_head(
        path,
        loaded.head,
        loaded.target_ids,
        layout,
        **facts,
    )
    return SavedHead(opened.spec.method, layout, facts["target_name"]), loaded.report


def describe_head(folder: str) -> SavedHead:
    """Method, layout and target of the head in `folder`, as far as it says."""
    opened = open_head(folder)
    name = stated_name(ConfigValues(folder, opened.checkpoint.config))
    return SavedHead(opened.spec.method, opened.spec.dialect, name)


def _embeddings(opened: OpenedHead[BlockSpec], layout: str, target: TargetFiles | None) -> nn.Module | None:
    """The target's embeddings where the file has none or copies; None where its own are written."""
    return _module(opened, layout, target, "embed_tokens.weight", opened.spec.vocab_size)


def _output(opened: OpenedHead[BlockSpec], layout: str, target: TargetFiles | None) -> nn.Module | None:
    """The target's output matrix likewise."""
    if opened.spec.draft_vocab_size != opened.spec.vocab_size:
        return None
    return _module(opened, layout, target, "lm_head.weight", opened.spec.draft_vocab_size)


def _module(
    opened: OpenedHead[BlockSpec], layout: str, target: TargetFiles | None, name: str, rows: int
) -> nn.Module | None:
    has_own, is_stored = name in opened.checkpoint.tensors, layout == "deepspec"
    if has_own and (is_stored or target is None):
        return None  # written as it is
    if target is not None:
        if name == "embed_tokens.weight":
            return shared_embeddings(opened, target.input_embeddings())
        return shared_output(opened, target.output_embeddings())
    if is_stored:
        raise CheckpointError(
            f"{opened.checkpoint.folder} has no {name} (it is the target's), which the {layout} layout stores: give "
            "the target (--target)."
        )
    opened.keys.share(name, "not in the file")
    if name == "embed_tokens.weight":
        return nn.Embedding(rows, opened.spec.hidden_size, device="meta")
    return nn.Linear(opened.spec.hidden_size, rows, bias=False, device="meta")
