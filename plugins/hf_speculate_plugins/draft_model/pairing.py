"""The tokenizers of a target and its draft model: as they were given, else from where the models were loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_speculate.errors import CheckpointError, OptionError, TargetMismatchError, first_line
from hf_speculate.files import user_path
from hf_speculate.speculator import path_problem
from hf_speculate.target import GenerativeModel, unwrap

from .translation import Names, Translation
from .vocabulary import Vocabulary


# Tokens that a user may have added to a tokenizer, for example for padding, and not to the model.
_MOST_ADDED = 256


def find_translation(
    target: GenerativeModel, model: GenerativeModel, given: tuple[Any, Any], difference: str
) -> Translation | None:
    """The translation between the vocabularies of a target and a draft model; None if they are the same.

    Args:
        given: the tokenizers of the target and of the draft model: each a tokenizer, a folder, a Hub id, a GGUF file,
            or None for that of the place that the model was loaded from.
        difference: clause on a difference that the models show; "" without one. Then tokenizers are compared only if
            one was given.

    Raises:
        OptionError: a tokenizer that was given is none, or of a kind whose tokens are unknown.
        TargetMismatchError: a tokenizer is missing, or has many more tokens than its model.
    """
    if not difference and given == (None, None):
        return None
    sides = (("target", "tokenizer", target, given[0]), ("draft model", "draft_tokenizer", model, given[1]))
    tokenizers = [_find(tokenizer, owner, name, option, difference) for name, option, owner, tokenizer in sides]
    if not difference and tokenizers[0].get_vocab() == tokenizers[1].get_vocab():
        return None
    vocabularies = []
    for (name, option, owner, _), tokenizer in zip(sides, tokenizers, strict=True):
        size = owner.config.get_text_config(decoder=True).vocab_size
        if len(tokenizer) > size + _MOST_ADDED:
            raise TargetMismatchError(
                f"draft_model: the {name} has a vocabulary of {size} tokens, but its tokenizer has {len(tokenizer)}: "
                f"{option}= must be the {name}'s own."
            )
        vocabularies.append(Vocabulary(tokenizer, size, f"the {name}'s"))
    names = [_names(tokenizer, owner) for tokenizer, owner in zip(tokenizers, (target, model), strict=True)]
    return Translation(vocabularies[0], vocabularies[1], names[0], names[1])


def _find(given: Any, owner: GenerativeModel, name: str, option: str, difference: str) -> Any:
    """The tokenizer of a model."""
    if isinstance(given, PreTrainedTokenizerBase):
        return given
    if given is not None and not isinstance(given, str | os.PathLike):
        raise OptionError(f"draft_model: {option} is a {type(given).__name__}; it takes a tokenizer or its folder.")
    place = user_path(given) if given is not None else getattr(unwrap(owner), "name_or_path", "") or ""
    try:
        return _load(place)
    except Exception as error:  # transformers has several kinds of errors for it
        if given is not None:
            raise OptionError(f"draft_model: {option}={place!r} holds no tokenizer: {first_line(error)}") from error
        source = f"{place!r}, from where it was loaded, has none" if place else "it was not loaded from a folder"
        raise TargetMismatchError(
            f"{difference or 'one tokenizer was given'}, so both tokenizers are needed. That of the {name} was not "
            f"found: {source}. Give {option}=, the tokenizer or its folder."
        ) from error


def _load(place: str) -> Any:
    if not place:
        raise CheckpointError("no place")
    if place.endswith(".gguf"):
        from hf_speculate_gguf import find_file, read_model_file, read_tokenizer  # nothing else needs what it imports

        return read_tokenizer(read_model_file(find_file(place, None, {})))
    if problem := path_problem(place):  # the Hub is not asked for a path
        raise CheckpointError(f"{place!r} {problem}")
    return AutoTokenizer.from_pretrained(place, trust_remote_code=False)


def _names(tokenizer: Any, model: GenerativeModel) -> Names:
    size = model.config.get_text_config(decoder=True).vocab_size

    def known(*tokens: int | None) -> list[int]:
        return [token for token in dict.fromkeys(tokens) if token is not None and token < size]

    of_model = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    more: Sequence[int] = [of_model] if isinstance(of_model, int) else of_model or ()
    begin = next(iter(known(tokenizer.bos_token_id)), None)
    unwritten = known(tokenizer.pad_token_id, tokenizer.unk_token_id)
    return Names(begin, known(tokenizer.eos_token_id, *more), unwritten)
