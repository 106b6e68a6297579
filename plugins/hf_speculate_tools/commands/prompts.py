"""Prompt sets: small built-in ones, and any JSON-lines file with prompts, questions or turns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_speculate.errors import SpeculateError, first_line
from hf_speculate.files import user_path

from .reporting import say


if TYPE_CHECKING:
    from torch import Tensor


FIELDS = ("prompt", "text", "question", "turns", "messages")

_SURROGATES = re.compile("[\ud800-\udfff]")

# Written for this purpose, published nowhere else: beginnings of Python files, for the bundled target (a model of
# Python source); and questions, for models with a chat template.
_PYTHON, _CHAT = (Path(__file__).with_name(f"{kind}_prompts.jsonl") for kind in ("python", "chat"))


@dataclass(frozen=True)
class Prompt:
    """One prompt before tokenisation: a text, or the messages of a chat.

    Attributes:
        category: name of its group in tables.
        content: the text, or the messages.
        later_turns: the user's turns after the answer (Spec-Bench, MT-Bench).
    """

    category: str
    content: str | tuple[dict[str, Any], ...]
    later_turns: tuple[str, ...] = ()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as a chat: a text is the user's message."""
        return [{"role": "user", "content": self.content}] if isinstance(self.content, str) else list(self.content)


def builtin_prompts(limit: int | None = None, *, chat: bool = False) -> list[Prompt]:
    """Built-in prompts: beginnings of short Python files, or questions to a chat model in four categories."""
    return read_prompts(_CHAT if chat else _PYTHON, limit)


def read_prompts(path: str | Path, limit: int | None = None, categories: Sequence[str] | None = None) -> list[Prompt]:
    """Prompts of a JSON-lines file.

    The prompt of a line is the first of these fields that it has: `prompt`, `text`, `question`, `turns` (Spec-Bench and
    MT-Bench: a list of the user's turns), `messages`. A list of {"role", "content"} is a chat. `category` groups
    prompts in the tables (default: the file's name). A `limit` is spread over the categories.

    Raises:
        SpeculateError: there is no such file; it is not JSON, has none of the fields or no prompts; or a category is
            unknown.
    """
    path = Path(user_path(path))
    groups: dict[str, list[Prompt]] = {}
    for number, line in _lines(path):
        prompt = _prompt_of(line, default_category=path.stem, where=f"{path}, line {number}")
        groups.setdefault(prompt.category, []).append(prompt)
    if not groups:
        raise SpeculateError(f"no prompts in {path}.")
    if categories is not None:
        if unknown := [name for name in categories if name not in groups]:
            raise SpeculateError(f"{path} has no category {', '.join(unknown)}; there are {', '.join(groups)}.")
        groups = {name: group for name, group in groups.items() if name in categories}
    if limit is None:
        return [prompt for group in groups.values() for prompt in group]
    rounds = zip_longest(*groups.values())
    chosen = [prompt for one_round in rounds for prompt in one_round if prompt is not None][:limit]
    return sorted(chosen, key=lambda prompt: list(groups).index(prompt.category))


def tokenize(prompts: Sequence[Prompt], tokenizer, *, use_chat_template: bool) -> list[tuple[str, Tensor]]:
    """(category, int64 [S]) of each prompt; with a chat template a text becomes the user's message."""
    result = []
    for prompt in prompts:
        content, is_chat = prompt.content, not isinstance(prompt.content, str)
        if is_chat and not tokenizer.chat_template:
            raise SpeculateError(
                f"the prompts of {prompt.category!r} are chats, but the target's tokenizer has no chat template."
            )
        if is_chat or use_chat_template:
            ids = chat_ids(prompt.messages, tokenizer)
        else:
            ids = tokenizer(content, return_tensors="pt").input_ids[0]
        result.append((prompt.category, ids))
    return result


def chat_ids(messages: Sequence[dict[str, Any]], tokenizer, **template: Any) -> Tensor:
    """Token ids of a chat up to where the answer begins, int64 [S], through the tokenizer's template.

    Args:
        messages: messages of the chat.
        tokenizer: the target's.
        template: arguments of the template (`enable_thinking=False`), or `chat_template=` instead of the tokenizer's.
    Raises:
        SpeculateError: the template raises, or its prompt is empty.
    """
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
    except Exception as error:  # templates are programs, and raise what they like
        raise SpeculateError(f"the target's chat template refuses this chat: {first_line(error)}") from error
    if not len(ids):
        raise SpeculateError("the target's chat template makes an empty prompt of this chat.")
    return ids


def readable(text: str, origin: str) -> str:
    """Replaces bytes that are not characters, so that every tokenizer takes the text, and reports it on stderr."""
    replaced, count = _SURROGATES.subn("\N{REPLACEMENT CHARACTER}", text)
    if count:
        say(f"hf-speculate: {origin} is not all UTF-8; bytes replaced by U+FFFD: {count}.", err=True)
    return replaced


def check_prompts(path: str | Path) -> None:
    """Raises `SpeculateError` for a file of prompts that cannot be opened."""
    try:
        Path(user_path(path)).open("rb").close()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str | Path, error: Exception) -> SpeculateError:
    return SpeculateError(f"cannot read prompts from {path}: {error}")


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    value = json.loads(line)
                    if not isinstance(value, dict):
                        raise SpeculateError(f"{path}, line {number} is not a JSON object.")
                    yield number, value
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    except json.JSONDecodeError as error:
        raise SpeculateError(f"{path} is not JSON lines (one object per line): {error}") from error


def _prompt_of(line: dict[str, Any], default_category: str, where: str) -> Prompt:
    field = next((field for field in FIELDS if line.get(field)), None)
    if field is None:
        raise SpeculateError(f"{where} has none of the fields {', '.join(FIELDS)}; found: {', '.join(line)}.")
    value = line[field]
    category = str(line.get("category") or default_category)
    if field == "turns" and isinstance(value, list) and all(isinstance(turn, str) for turn in value):
        return Prompt(category, value[0], tuple(value[1:]))
    if isinstance(value, str):
        return Prompt(category, value)
    if isinstance(value, list) and all(isinstance(message, dict) and "role" in message for message in value):
        # An answer at the end is for the target to write.
        return Prompt(category, tuple(value[:-1] if value[-1]["role"] == "assistant" else value))
    raise SpeculateError(f"{where}: {field!r} is neither a text nor a list of messages.")
