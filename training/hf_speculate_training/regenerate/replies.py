"""Answers in OpenAI's form, read by a schema: a field that is used has its type, or the answer is refused.

Numbers are no texts, booleans no token ids, and a text holds no lone surrogates. Fields that nobody uses may hold
anything.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError


TokenIds = list[Annotated[int, Field(ge=0)]]


class _Reply(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class Message(_Reply):
    """Text of a chat's answer. The other fields hold what the server has taken out of it."""

    content: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None

    @property
    def is_taken_apart(self) -> bool:
        return any((self.reasoning, self.reasoning_content, self.tool_calls))


class Choice(_Reply):
    """One answer. Servers that return tokens (vLLM) name those of a text's prompt here."""

    finish_reason: Literal["stop", "length", "tool_calls"]
    message: Message | None = None
    text: str | None = None
    token_ids: TokenIds | None = None
    prompt_token_ids: TokenIds | None = None


class Usage(_Reply):
    """Counts of tokens."""

    prompt_tokens: int | None = None


class Completion(_Reply):
    """Reply to a request for text, or for a chat's next turn."""

    choices: Annotated[list[Choice], Field(min_length=1)]
    prompt_token_ids: TokenIds | None = None
    usage: Usage | None = None


class Model(_Reply):
    """One of the models that a server has."""

    id: str


class Models(_Reply):
    """Reply to the question for them."""

    data: list[Model]


def is_cut(error: ValidationError) -> bool:
    """Whether the reply is no JSON: the line was cut, or somebody else answered."""
    return error.errors(include_url=False)[0]["type"] == "json_invalid"


def first_fault(error: ValidationError) -> str:
    """One line on the first field that is not as it must be."""
    fault = error.errors(include_url=False)[0]
    place = ".".join(map(str, fault["loc"])) or "the reply"
    return f"{place}: {fault['msg']}, found {reprlib.repr(fault['input'])}"
