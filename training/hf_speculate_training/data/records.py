"""Records as examples, whatever their columns are called, and the test for records like held-out prompts.

The first of these columns that a record has is read: `input_ids` (with `loss_mask`, `assistant_masks`,
`completion_mask` or `labels`), `messages` (role, content), `conversations` (ShareGPT: from, value), `prompt` +
`completion` (texts, or lists of messages), other names of such pairs (`question` + `answer`, Alpaca's `instruction`
(+ `input`) + `output` and their like), `text`. Conversations take `tools` and, if no message is a system message,
`system`. Texts in place of JSON in them (arguments of calls, whole lists of tools) are parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from hf_speculate.errors import SpeculateError


Message: TypeAlias = dict[str, Any]

_MASKS = ("loss_mask", "assistant_masks", "completion_mask")
# Columns of the question, of what may stand below it, and of the answer, in well-known data sets.
_ASKED_AND_ANSWERED = (
    ("instruction", "input", "output"),  # Alpaca
    ("instruction", "context", "response"),  # Dolly
    ("instruction", "input", "response"),
    ("question", "context", "answer"),  # GSM8K
    ("question", "context", "response"),
    ("query", "context", "response"),
    ("prompt", "input", "response"),
    ("prompt", "input", "answer"),
)
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
_ROLES |= {"function_call": "assistant", "observation": "tool"}  # LLaMA-Factory
_IGNORED_LABEL = -100
_WORD = re.compile(r"\w+")


class RecordError(SpeculateError, ValueError):
    """A record that cannot be used, and why."""


@dataclass(frozen=True)
class Chat:
    """Messages and descriptions of tools in OpenAI's form. The target is to emit the assistant's messages."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A text that the target is to emit after another one, without a chat template."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Plain:
    """A text; the target is to emit all of it."""

    text: str


@dataclass(frozen=True)
class Tokens:
    """Token ids and, for each, whether the target is to emit it."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


Example: TypeAlias = Chat | Completion | Plain | Tokens


def read_record(record: Mapping[str, Any], as_chat: bool = False) -> Example:
    """The example that a record holds. Columns that are None count as absent.

    Args:
        as_chat: True takes `prompt` and `completion` for messages of user and assistant, even as mere texts.
    Raises:
        RecordError: the record has none of the known columns, or one that does not hold what it should.
    """
    given = {name: value for name, value in record.items() if value is not None}
    example = _example(given, as_chat)
    if isinstance(example, Chat):
        return replace(example, messages=_with_system(example.messages, given), tools=_tools(given.get("tools")))
    if example is None:
        raise RecordError(
            "none of the columns messages, conversations, prompt + completion (question + answer, instruction + "
            f"output), text, input_ids; found: {', '.join(map(str, record)) or 'nothing'}. Name yours in the recipe, "
            "data.columns: {prompt: ..., completion: ...}"
        )
    return example


def _example(given: Mapping[str, Any], as_chat: bool) -> Example | None:
    if "input_ids" in given:
        return _tokens(given)
    for name in ("messages", "conversations"):
        if name in given:
            return Chat(_messages(given[name], name))
    if "prompt" in given and "completion" in given:
        return _completion(_text(given["prompt"]), _text(given["completion"]), as_chat)
    if pair := _asked_and_answered(given):
        return _completion(*pair, as_chat)
    if isinstance(given.get("prompt"), list):  # to be answered: nothing to train on yet
        return Chat(_messages(given["prompt"], "prompt"))
    if isinstance(given.get("prompt"), str) and "text" not in given:
        return Chat(({"role": "user", "content": given["prompt"]},)) if as_chat else Completion(given["prompt"], "")
    return Plain(given["text"]) if isinstance(given.get("text"), str) else None


def _text(value: Any) -> Any:
    """Numbers as texts; anything else unchanged."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _asked_and_answered(given: Mapping[str, Any]) -> tuple[str, str] | None:
    for asked, below, answered in _ASKED_AND_ANSWERED:
        question, answer, more = (_text(given.get(name)) for name in (asked, answered, below))
        if isinstance(question, str) and isinstance(answer, str):
            return "\n\n".join([question, more] if isinstance(more, str) and more else [question]), answer
    return None


def _tokens(record: Mapping[str, Any]) -> Tokens:
    ids = tuple(record["input_ids"])
    name = next((name for name in _MASKS if name in record), None)
    if name is not None:
        mask = tuple(bool(value) for value in record[name])
    elif "labels" in record:
        name, mask = "labels", tuple(label != _IGNORED_LABEL for label in record["labels"])
    else:
        mask = (True,) * len(ids)
    if len(mask) != len(ids):
        raise RecordError(f"{len(ids)} input_ids but {len(mask)} entries of {name}")
    return Tokens(ids, mask)


def _completion(prompt: Any, completion: Any, as_chat: bool) -> Example:
    texts = isinstance(prompt, str), isinstance(completion, str)
    if all(texts) and not as_chat:
        return Completion(prompt, completion)
    if all(texts):
        return Chat(({"role": "user", "content": prompt}, {"role": "assistant", "content": completion}))
    if any(texts):
        raise RecordError("of prompt and completion one is a text and one a list of messages")
    return Chat(_messages(prompt, "prompt") + _messages(completion, "completion"))


def _messages(value: Any, column: str) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(message, Mapping) for message in value):
        raise RecordError(f"{column} is not a list of messages")
    return tuple(_message(message, column) for message in value)


def _message(message: Mapping[str, Any], column: str) -> Message:
    given = {key: value for key, value in message.items() if value is not None}  # Arrow adds absent keys as None
    role, content = given.pop("role", given.pop("from", None)), given.pop("content", given.pop("value", None))
    if not isinstance(role, str):
        raise RecordError(f"a message of {column} has no role")
    if isinstance(content, list):
        content = _joined_parts(content, column)
    if not isinstance(content, str | None):
        raise RecordError(f"a message of {column} is not a text")
    if role == "function_call":  # the call is the text
        content, given = "", given | {"tool_calls": [{"type": "function", "function": _parsed(content, "a call")}]}
    if "tool_calls" in given:
        given["tool_calls"] = _calls(given["tool_calls"])
    return {"role": _ROLES.get(role, role), "content": content or "", **given}


def _calls(calls: Any) -> list[Any]:
    if not isinstance(calls, list | tuple):
        raise RecordError("tool_calls is not a list of calls")
    found = [_without_nulls(call) for call in calls]
    for call in found:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise RecordError("a call of a tool has no function")
        # OpenAI's form has a text; templates write JSON themselves.
        if isinstance(function.get("arguments"), str):
            function["arguments"] = _parsed(function["arguments"] or "{}", "the arguments of a call")
    return found


def _tools(value: Any) -> tuple[Any, ...]:
    found = _parsed(value, "tools") if isinstance(value, str) and value.strip() else value or ()
    if not isinstance(found, list | tuple):
        raise RecordError("tools is not a list of descriptions")
    return tuple(_without_nulls(tool) for tool in found)


def _with_system(messages: tuple[Message, ...], given: Mapping[str, Any]) -> tuple[Message, ...]:
    system = given.get("system")
    if not isinstance(system, str) or not system or any(message["role"] == "system" for message in messages):
        return messages
    return ({"role": "system", "content": system}, *messages)


def _parsed(text: Any, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise RecordError(f"{what} cannot be read as JSON") from error


def _without_nulls(value: Any) -> Any:
    """`value` without the nulls that Arrow adds: it gives every object of a column the same keys."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _joined_parts(parts: list[Any], column: str) -> str:
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise RecordError(f"a message of {column} holds more than text")
    return "".join(part["text"] for part in parts)


class HeldOut:
    """Prompts that are kept for measuring. Records that share `num_words` words in a row with one are like it.

    Shared runs of words are the usual test for contamination (GPT-3, appendix C). Case and punctuation do not count. A
    held-out text with fewer words is found where it stands whole.
    """

    def __init__(self, texts: Iterable[str], num_words: int = 8):
        self._runs: dict[int, set[tuple[str, ...]]] = {}
        for words in map(_words, texts):
            length = min(num_words, len(words))
            self._runs.setdefault(length, set()).update(_runs_of(words, length))
        self._runs.pop(0, None)

    def is_like(self, example: Example) -> bool:
        """True if a user's message in this example, or its text, is like a held-out one. Token ids always pass."""
        return any(self._shares(_words(text)) for text in _asked(example))

    def _shares(self, words: list[str]) -> bool:
        return any(not runs.isdisjoint(_runs_of(words, length)) for length, runs in self._runs.items())


def _asked(example: Example) -> list[str]:
    if isinstance(example, Chat):
        return [message["content"] for message in example.messages if message["role"] == "user"]
    if isinstance(example, Tokens):
        return []
    return [example.text if isinstance(example, Plain) else example.prompt]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _runs_of(words: list[str], length: int) -> set[tuple[str, ...]]:
    return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}
