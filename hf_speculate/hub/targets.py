"""Which target a head was made for, as far as its folder says, compared with the one that it is given.

What cannot work is refused. What works worse is said once, and what to run: the text never depends on it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from ..errors import CheckpointError, TargetMismatchError
from ..messages import get_logger
from ..models import GenerativeModel
from ..stats import HeadRecord
from ..target import WeightSample, compare_weights, quantization_label, sample_weights
from .origins import PROVENANCE_FILE, adapter_mismatch, read_provenance, warn_of_other_adapters


logger = get_logger(__name__)

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")
# Of samples: matrices in 2 bits are above the first, those of unrelated models (of the same sizes) far below; the same
# values through another kernel are above the second, matrices in 8 bits below.
_UNRELATED, _SAME = 0.5, 0.99998

# What the names of quantised copies of a model end in.
_COPY = re.compile(
    r"[-_.](?:bnb|gptq|awq|gguf|fp8|fp4|nvfp4|mxfp4|int[48]|nf4|w\d+a\d+\w*|[248]-?bits?|unsloth|quantized|hf|bf16|fp16"
    r"|dynamic|i?q\d\w*)$"
)


def describe_identity(target: GenerativeModel) -> dict[str, Any]:
    """What `provenance.json` says of a head's target under "identity"; JSON-serialisable, of a few kilobytes.

    How it is quantised is a fact beside which model it is; adapters are left out (`adapter_fingerprints` has them).
    """
    config = target.config.get_text_config(decoder=True)
    return {
        "architecture": type(target).__name__,
        **{name: getattr(config, name) for name in _SIZES},
        "quantization": quantization_label(target),
        "weights": {name: sample.text for name, sample in sample_weights(target).items()},
    }


def check_origin(folder: str, target: GenerativeModel) -> HeadRecord:
    """Compares what the folder of a head says of its target with the one that it is given; old files say little.

    A difference that costs acceptance is logged, each once: other weights, another quantisation, other adapters.

    Returns:
        What the folder records of the head, and whether this is its own target.
    Raises:
        TargetMismatchError: another number of layers, vocabulary or hidden size, or weights of an unrelated model.
    """
    record, problems = _compare(folder, target)
    for problem in problems:
        _warn(problem)
    warn_of_other_adapters(folder, target)
    return record


def head_record(folder: str, target: GenerativeModel) -> HeadRecord:
    """What `check_origin` returns, without a warning; raises as it does."""
    return _compare(folder, target)[0]


def check_stated_name(folder: str, stated: str | None, architectures: Sequence[str], target: PreTrainedModel) -> None:
    """Logs once if the config of a head names another model or class than its target's; with an identity in its
    provenance, names do not count.

    Args:
        stated: as the config has it, None if it names none; folders on somebody's machine say nothing.
        architectures: names of classes, none if it has none.
    """
    given, name = target.name_or_path or "", type(target).__name__
    if _provenance(folder).get("identity"):
        return
    if architectures and name not in architectures:
        classes = " or ".join(architectures)
        _warn(f"the head {folder} says that it was made for a {classes}, and the target is a {name}.")
    elif stated and _is_hub_id(stated) and _is_hub_id(given) and _model_name(stated) != _model_name(given):
        _warn(f"the head {folder} says that it was made for {stated}, and the target is {given}.")


def identity_problems(folder: str, identity: Mapping[str, Any], target: GenerativeModel) -> Iterator[str]:
    """What is different and costs acceptance; raises `TargetMismatchError` for unrelated weights."""
    theirs = _samples(identity)
    likeness = compare_weights(theirs, sample_weights(target)) if theirs else None
    similarity = likeness.similarity if likeness else None
    architecture, name = identity.get("architecture"), type(target).__name__
    if theirs and likeness and not likeness.compared and architecture != name:
        yield f"the head {folder} was trained for a {architecture}, and the target is a {name}."
    if similarity is not None and similarity < _UNRELATED:
        raise TargetMismatchError(
            f"the head {folder} was trained for a {architecture} of the same sizes whose weights are unrelated to this "
            f"{name}'s: samples of them have a cosine of {similarity:.2f}, those of the same model 1.00."
        )
    if likeness and likeness.changed:
        yield (
            f"the head {folder} was trained for other weights of this architecture (before or after a fine-tune?): of "
            f"{len(likeness.compared)} tensors that were sampled {len(likeness.changed)} differ, {likeness.changed[0]} "
            "for one."
        )
    trained, now = identity.get("quantization"), quantization_label(target)
    if isinstance(trained, str) and trained != now and (similarity is None or similarity < _SAME):
        yield (
            f"the head {folder} was trained for its target {trained or 'without quantisation'}, and this one is "
            f"{now or 'not quantised'}."
        )


def _check_sizes(folder: str, identity: Mapping[str, Any], target: GenerativeModel) -> None:
    config = target.config.get_text_config(decoder=True)
    for name in _SIZES:
        trained, now = identity.get(name), getattr(config, name)
        if isinstance(trained, int) and trained != now:
            raise TargetMismatchError(
                f"the head {folder} was trained for a target of {name} {trained} ({PROVENANCE_FILE}), but this "
                f"{type(target).__name__} has {now}."
            )


def _warn(problem: str) -> None:
    logger.warning_once(
        f"{problem} The text stays the target's own, but fewer drafts may be accepted: `hf-speculate check HEAD "
        "--target TARGET` measures it."
    )


def _compare(folder: str, target: GenerativeModel) -> tuple[HeadRecord, list[str]]:
    """The record of a head, and what is different about its target."""
    content = _provenance(folder)
    identity: Mapping[str, Any] = content.get("identity") or {}
    _check_sizes(folder, identity, target)
    problems = list(identity_problems(folder, identity, target)) if identity else []
    is_own = None if not _samples(identity) else not (problems or adapter_mismatch(folder, target))
    measured = content.get("metrics") or {}
    accuracy, length = (measured.get(f"eval_{name}") for name in ("accuracy_0", "mean_acceptance_length"))
    return HeadRecord(
        is_own,
        accuracy if isinstance(accuracy, float) and 0 < accuracy <= 1 else None,
        length if isinstance(length, float) and length >= 1 else None,
    ), problems


def _provenance(folder: str) -> Mapping[str, Any]:
    """Empty if the folder does not say."""
    try:
        return read_provenance(folder) or {}
    except CheckpointError:
        return {}


def _samples(identity: Mapping[str, Any]) -> dict[str, WeightSample]:
    try:
        return {str(name): WeightSample.parse(text) for name, text in (identity.get("weights") or {}).items()}
    except (ValueError, AttributeError):
        return {}


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not os.path.exists(name)


def _model_name(hub_id: str) -> str:
    """Of a model and of its quantised copies the same."""
    name, before = hub_id.rpartition("/")[2].lower(), ""
    while name != before:
        name, before = _COPY.sub("", name), name
    return name
