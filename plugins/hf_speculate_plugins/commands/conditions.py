"""A head measured under other conditions than it is used in, by `hf-speculate check` where acceptance is low."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_speculate.commands import Prompt, chat_ids
from hf_speculate.errors import CheckpointError, SpeculateError, first_line
from hf_speculate.files import read_json, section
from hf_speculate.hub import read_provenance
from hf_speculate.messages import get_logger
from hf_speculate.models import GenerativeModel, unwrap
from hf_speculate.target import quantization_label

from ..calibration import (
    Finding,
    Measured,
    Options,
    Reader,
    compare_conditions,
    compare_context,
    compare_sets,
    write_texts,
)
from .foreign_templates import foreign_chat_ids


logger = get_logger(__name__)

# Prompts that another copy of the target writes after: it is as large again.
_FEW = 8
# Positions: no text is as long.
_MOST = 1 << 31

# Gives the target in another form: (dtype, dense) -> model.
LoadTarget = Callable[[str, bool], GenerativeModel]


@dataclass(frozen=True)
class HeadMeasure:
    """How a head is measured, the same way under all conditions.

    Args:
        folder: of the head.
        make_reader: of its method.
        options: as which it is read.
        depth, max_new_tokens: of chains, and of what the target writes.
    """

    folder: str
    make_reader: Callable[[str, Any], Reader]
    depth: int
    max_new_tokens: int
    options: Options = field(default_factory=dict)

    def of(self, name: str, target: GenerativeModel, prompts: Sequence[Tensor]) -> Measured:
        """Acceptance on what `target` writes after `prompts`."""
        reader = self.make_reader(self.folder, target)
        depth, accepted, starts = reader.depth(self.depth), [], []
        for text in write_texts(target, prompts, max_new_tokens=self.max_new_tokens):
            roots = text.roots(depth)
            accepted.append(reader.accepted(self.options, [text], depth) if roots else torch.zeros(0, dtype=torch.long))
            starts.append(roots.start)
        return Measured(name, tuple(accepted), tuple(starts), depth)


@dataclass(frozen=True)
class Use:
    """How a target is used: what is compared with other conditions.

    Args:
        target: as `unwrap` gives it.
        tokenizer: with or without a chat template.
        prompts: before tokenisation.
        ids: what they became, int64 [S] each.
        uses_template: whether the chat template was applied.
        without_adapter: switches adapters of the target off; None where there is none.
        load: another form of the target.
    """

    target: GenerativeModel
    tokenizer: Any
    prompts: Sequence[Prompt]
    ids: Sequence[Tensor]
    uses_template: bool
    load: LoadTarget
    without_adapter: Callable[[], AbstractContextManager[Any]] | None = None


def find_conditions(measure: HeadMeasure, use: Use, *, others: bool) -> tuple[Finding, ...]:
    """What clearly changes acceptance, the largest gain first.

    Args:
        others: whether to write under other conditions, too; else the same texts are looked at by prompts and position.
    """
    now = measure.of("as it is used", use.target, use.ids)
    if not now.num_chains:
        return ()
    findings = [*_by_prompts(now, use), *_by_position(now, measure, use)]
    if others:
        for compare in (_templates, _trained_template, _thinking, _adapter, _forms):
            findings += [finding for finding in compare(now, measure, use) if finding is not None]
    return tuple(sorted(findings, key=lambda finding: -finding.gain))


def _by_prompts(now: Measured, use: Use) -> list[Finding]:
    sets: dict[str, list[int]] = {}
    for index, prompt in enumerate(use.prompts):
        sets.setdefault(prompt.category, []).append(index)
    return compare_sets(now, sets) if len(sets) > 1 else []


def _by_position(now: Measured, measure: HeadMeasure, use: Use) -> Iterator[Finding]:
    """Beyond the shortest of: what it was trained with, what the head and the target were configured for."""
    trained = section(_provenance(measure.folder), "recipe", "data").get("max_length")
    head = _config(measure.folder)
    stated = {**head, **section(head, "transformer_layer_config")}.get("max_position_embeddings")
    limits = ((trained, "the length that it was trained with"), (stated, "the head's max_position_embeddings"))
    for limit, what in limits:
        if isinstance(limit, int) and 0 < limit < _MOST and (finding := compare_context(now, limit, what)):
            yield finding
            return


def _templates(now: Measured, measure: HeadMeasure, use: Use) -> Iterator[Finding | None]:
    if not use.tokenizer.chat_template or any(not isinstance(prompt.content, str) for prompt in use.prompts):
        return
    if use.uses_template:
        ids = [use.tokenizer(prompt.content, return_tensors="pt").input_ids[0] for prompt in use.prompts]
        name = "without the chat template"
    else:
        ids = [chat_ids(prompt.messages, use.tokenizer) for prompt in use.prompts]
        name = "with the chat template"
    yield compare_conditions(
        "chat template",
        replace(now, name=f"{'with' if use.uses_template else 'without'} the chat template"),
        measure.of(name, use.target, ids),
        lower=f"it was trained on texts {name}, or on another template; prompts should be given as it was trained.",
        higher=f"prompts {name} are not what it was trained on.",
    )


def _trained_template(now: Measured, measure: HeadMeasure, use: Use) -> Iterator[Finding | None]:
    """The chat template that the head's provenance has, where it is another one."""
    trained = _provenance(measure.folder).get("chat_template")
    if not trained or not use.uses_template or trained == use.tokenizer.chat_template:
        return
    try:
        ids = foreign_chat_ids([prompt.messages for prompt in use.prompts], use.tokenizer, trained)
    except SpeculateError as error:
        logger.warning(f"prompts as the head was trained on them were not measured: {first_line(error)}")
        return
    yield compare_conditions(
        "chat template",
        replace(now, name="with the target's chat template"),
        measure.of("with the one that it was trained with", use.target, ids),
        lower="the target's chat template is another one than the head was trained with.",
        higher="the target's chat template suits the head better than the one that it was trained with.",
    )


def _thinking(now: Measured, measure: HeadMeasure, use: Use) -> Iterator[Finding | None]:
    if not use.uses_template or "enable_thinking" not in str(use.tokenizer.chat_template):
        return
    for switch in (True, False):
        ids = [chat_ids(prompt.messages, use.tokenizer, enable_thinking=switch) for prompt in use.prompts]
        if all(torch.equal(one, other) for one, other in zip(ids, use.ids, strict=True)):
            continue
        yield compare_conditions(
            "thinking",
            now,
            measure.of(f"with enable_thinking={switch}", use.target, ids),
            lower=f"it was trained on answers with enable_thinking={switch}.",
            higher=f"it was not trained on answers with enable_thinking={switch}.",
        )


def _adapter(now: Measured, measure: HeadMeasure, use: Use) -> Iterator[Finding | None]:
    if use.without_adapter is None:
        return
    with use.without_adapter():
        other = measure.of("without it", use.target, use.ids)
    yield compare_conditions(
        "adapter",
        replace(now, name="with the adapter"),
        other,
        lower="the head was trained for the target without this adapter: train one for it.",
        higher="the head was trained for the target with this adapter.",
    )


def _forms(now: Measured, measure: HeadMeasure, use: Use) -> Iterator[Finding | None]:
    """The target dequantised, and in float32: other copies of it, on a few prompts."""
    if use.without_adapter is not None:  # an adapter belongs to this copy
        return
    few = range(min(_FEW, len(use.ids)))
    here, ids = now.chosen("as it is used", few), [use.ids[i] for i in few]
    dtype = str(use.target.dtype).removeprefix("torch.")
    if label := quantization_label(use.target):
        with _loaded(lambda: use.load(dtype, True)) as dense:
            if dense is not None:
                yield compare_conditions(
                    "quantisation",
                    replace(here, name=f"as {label}"),
                    measure.of("dequantised", dense, ids),
                    lower="what multiplies with the packed weights rounds otherwise than the head was trained for.",
                    higher="the head was trained for the quantised target.",
                )
    if dtype in ("bfloat16", "float16"):
        with _loaded(lambda: use.load("float32", False)) as wide:
            if wide is not None:
                yield compare_conditions(
                    "dtype",
                    replace(here, name=f"in {dtype}"),
                    measure.of("in float32", wide, ids),
                    lower=f"{dtype} loses what the head reads: use a wider dtype.",
                    higher=f"the head was trained on states in {dtype}.",
                )


@contextmanager
def _loaded(load: Callable[[], GenerativeModel]) -> Iterator[GenerativeModel | None]:
    """Another form of the target; None, with a warning, where it cannot be had."""
    try:
        model = load()
    except (SpeculateError, MemoryError, RuntimeError, ValueError) as error:  # "cannot be dequantised" has many types
        logger.warning(f"another form of the target was not measured: {first_line(error)}")
        model = None
    yield model


def with_adapter(target: Any, adapter: str) -> tuple[GenerativeModel, Callable[[], AbstractContextManager[Any]]]:
    """The target with a PEFT adapter around it, and what switches that off.

    Raises:
        SpeculateError: PEFT is not installed, or there is no such adapter for this target.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise SpeculateError("--adapter needs PEFT: pip install peft.") from error
    try:
        adapted: Any = PeftModel.from_pretrained(target, adapter).eval()
    except (ValueError, OSError, RuntimeError) as error:
        raise SpeculateError(f"cannot load the adapter {adapter}: {first_line(error)}") from error
    return unwrap(adapted), adapted.disable_adapter


def _provenance(folder: str) -> dict[str, Any]:
    try:
        return read_provenance(folder) or {}
    except CheckpointError:
        return {}


def _config(folder: str) -> dict[str, Any]:
    try:
        return read_json(Path(folder) / "config.json")
    except CheckpointError:
        return {}
