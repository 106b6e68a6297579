"""The target that a head was trained for, as its folder states it, compared with the target that it is given.

A target that cannot work is refused. One that accepts less gets one warning with the command that measures it: the text
never depends on the head.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate.messages import get_logger
from hf_speculate.stats import HeadRecord
from hf_speculate.target import GenerativeModel, adapter_fingerprints, quantization_label

from .provenance import PROVENANCE_FILE, read_provenance
from .weights import compare_weights, sample_weights


logger = get_logger(__name__)

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")
_MULTIPLES = (8, 16, 32, 64, 128, 256, 512)  # vocabularies are padded to one of these

# Ends of the names of a model's quantised copies.
_COPY = re.compile(
    r"[-_.](?:bnb|gptq|awq|gguf|fp8|fp4|nvfp4|mxfp4|int[48]|nf4|w\d+a\d+\w*|[248]-?bits?|unsloth|quantized|hf|bf16|fp16"
    r"|dynamic|i?q\d\w*)$"
)


def describe_identity(target: GenerativeModel) -> dict[str, Any]:
    """The "identity" of a head's target in `provenance.json`; JSON-serialisable, of a few kilobytes.

    Quantisation is a field of its own, next to the model's weights. Adapters are left out: `adapter_fingerprints` has
    them.
    """
    config = target.config.get_text_config(decoder=True)
    return {
        "architecture": type(target).__name__,
        **{name: getattr(config, name) for name in _SIZES},
        "quantization": quantization_label(target),
        "weights": sample_weights(target),
    }


def check_origin(folder: str, target: GenerativeModel) -> HeadRecord:
    """Compares the target that a head's folder states with the given one, and logs differences that cost acceptance.

    These are other weights, another quantisation and other adapters. Each message is logged once.

    Returns:
        The figures that the folder records of the head, and whether this is its own target.
    Raises:
        TargetMismatchError: the number of layers or the hidden size differ, or the vocabulary lacks tokens.
    """
    record, problems = _compare(folder, target)
    for problem in problems:
        _warn(problem)
    if problem := adapter_mismatch(folder, target):
        logger.warning(f"{problem} The text stays the target's own, but fewer drafts will be accepted.")
    return record


def head_record(folder: str, target: GenerativeModel) -> HeadRecord:
    """The result of `check_origin`, without warnings; raises the same errors."""
    return _compare(folder, target)[0]


def check_head_vocabulary(head: str, num_tokens: int, target: str, vocab_size: int) -> None:
    """Compares the vocabularies of a head's target and of the given one, of which only the sizes can be seen.

    A vocabulary that was extended at its end is logged once, unless it was only padded.

    Args:
        head: the head, for messages.
        num_tokens: size of the vocabulary that the head was made for.
        target: the target, for messages.
        vocab_size: size of its vocabulary.
    Raises:
        TargetMismatchError: it lacks tokens, or has more than twice as many. Added tokens are fewer.
    """
    if not num_tokens <= vocab_size <= 2 * num_tokens:
        raise TargetMismatchError(
            f"{head} was made for a target of vocabulary {num_tokens}, but {target} has {vocab_size}."
        )
    if vocab_size != num_tokens and vocab_size not in (-(-num_tokens // size) * size for size in _MULTIPLES):
        _warn(f"{head} knows {num_tokens} tokens and never drafts the others of the {vocab_size} that {target} has.")


def check_stated_name(folder: str, stated: str | None, architectures: Sequence[str], target: GenerativeModel) -> None:
    """Logs once if the config of a head names another model or class than its target's.

    Names do not count for a head whose provenance has an identity.

    Args:
        stated: name of the target in the config, None if there is none; a local folder has none.
        architectures: classes of the target that the config names.
    """
    given, name = target.name_or_path or "", type(target).__name__
    if _provenance(folder).get("identity"):
        return
    if architectures and name not in architectures:
        classes = " or ".join(architectures)
        _warn(f"the head {folder} was made for a {classes}, and the target is a {name}.")
    elif stated and _is_hub_id(stated) and _is_hub_id(given) and _model_name(stated) != _model_name(given):
        _warn(f"the head {folder} was made for {stated}, and the target is {given}.")


def _identity_problems(
    folder: str, identity: Mapping[str, Any], target: GenerativeModel, are_same: Mapping[str, bool]
) -> Iterator[str]:
    """Differences that cost acceptance.

    Args:
        are_same: whether the weights of each compared tensor are the same.
    """
    architecture, name = identity.get("architecture"), type(target).__name__
    changed = [tensor for tensor, is_same in are_same.items() if not is_same]
    if not are_same and architecture != name:
        yield f"the head {folder} was trained for a {architecture}, and the target is a {name}."
    if changed:
        yield (
            f"the head {folder} was trained for other weights of this architecture (before or after a fine-tune?): of "
            f"{len(are_same)} tensors that were sampled {len(changed)} differ, {changed[0]} for one."
        )
    trained, now = identity.get("quantization"), quantization_label(target)
    if isinstance(trained, str) and now and trained != now:  # a dense target may hold the same values
        before = trained or "without quantisation"
        yield f"the head {folder} was trained for its target {before}, and this one is {now}."


def _check_sizes(folder: str, identity: Mapping[str, Any], target: GenerativeModel) -> None:
    config = target.config.get_text_config(decoder=True)
    for name in _SIZES:
        trained, now = identity.get(name), getattr(config, name)
        may_grow = name == "vocab_size"  # by added tokens; the drafter's `check_target` names them
        if isinstance(trained, int) and (not 0 < trained <= now if may_grow else trained != now):
            raise TargetMismatchError(
                f"the head {folder} was trained for a target of {name} {trained} ({PROVENANCE_FILE}), but this "
                f"{type(target).__name__} has {now}."
            )


def adapter_mismatch(folder: str, target: GenerativeModel) -> str:
    """The difference between the PEFT adapters that a head was trained for and those in effect; "" if there is none.

    Adapters are distinguished by their weights, not by their names. Merged ones cannot be seen.
    """
    trained, now = _trained_adapters(folder), adapter_fingerprints(target)
    if set((trained or {}).values()) == set(now.values()):
        return ""
    in_effect = f"{_listed(now)} in effect on this {type(target).__name__}"
    if trained is None:
        return f"the head {folder} has no record of training for the PEFT adapter {in_effect}."
    if not trained:
        return f"the head {folder} was trained for the target without adapters, but there is {in_effect}."
    wanted = f"the head {folder} was trained for a target with the PEFT adapter {_listed(trained)}"
    if not now:
        return f"{wanted}, and none is in effect on this {type(target).__name__} (unless it was merged and unloaded)."
    return f"{wanted}, but another one is: {in_effect}."


def _trained_adapters(folder: str) -> Mapping[str, str] | None:
    """Adapter name -> fingerprint; None if the folder has none, like most heads of others."""
    try:
        content: Any = read_provenance(folder) or {}
        if "adapters" in content:
            return {str(name): str(fingerprint) for name, fingerprint in content["adapters"].items()}
        return {} if content["target"]["adapters"] is None else None  # written before fingerprints were
    except (CheckpointError, KeyError, TypeError, AttributeError):
        return None


def _listed(names: Mapping[str, str]) -> str:
    return " and ".join(repr(name) for name in names)


def _warn(problem: str) -> None:
    logger.warning_once(
        f"{problem} The text stays the target's own, but fewer drafts may be accepted: `hf-speculate check HEAD "
        "--target TARGET` measures it."
    )


def _compare(folder: str, target: GenerativeModel) -> tuple[HeadRecord, list[str]]:
    """The record of a head, and the differences of its target."""
    content = _provenance(folder)
    identity: Mapping[str, Any] = content.get("identity") or {}
    _check_sizes(folder, identity, target)
    weights = identity.get("weights")
    are_same = compare_weights(sample_weights(target), weights) if isinstance(weights, Mapping) else {}
    problems = list(_identity_problems(folder, identity, target, are_same)) if identity else []
    is_own = None if not are_same else not (problems or adapter_mismatch(folder, target))
    measured = content.get("metrics") or {}
    accuracy, length = (measured.get(f"eval_{name}") for name in ("accuracy_0", "mean_acceptance_length"))
    training = content.get("training")
    steps = training.get("steps") if isinstance(training, Mapping) else None
    return HeadRecord(
        is_own,
        accuracy if isinstance(accuracy, float) and 0 < accuracy <= 1 else None,
        length if isinstance(length, float) and length >= 1 else None,
        steps if isinstance(steps, int) and steps >= 0 else None,
    ), problems


def _provenance(folder: str) -> Mapping[str, Any]:
    """The provenance in a folder; empty if it has none that can be read."""
    try:
        return read_provenance(folder) or {}
    except CheckpointError:
        return {}


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not os.path.exists(name)


def _model_name(hub_id: str) -> str:
    """Name of a model, the same for its quantised copies."""
    name, before = hub_id.rpartition("/")[2].lower(), ""
    while name != before:
        name, before = _COPY.sub("", name), name
    return name
