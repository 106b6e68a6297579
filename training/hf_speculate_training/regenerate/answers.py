"""Jobs: prompts to answer, and their answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..data import Encoder, Message


# Tokens. Shorter texts do not count as endless: lists and refrains repeat themselves too.
_SHORTEST_LOOP = 64


@dataclass
class Document:
    """Tokens as the target saw and wrote them; the mask marks those that it wrote."""

    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)

    def extend(self, tokens: Sequence[int], written: bool) -> None:
        self.input_ids += tokens
        self.loss_mask += [written] * len(tokens)


@dataclass
class Job:
    """One example, from its first prompt to its last answer.

    Attributes:
        id: number of its record, and of its piece.
        prompt_ids: tokens of the first prompt.
        questions: messages before each later answer of a conversation.
        messages: messages of a conversation so far; None for texts.
        tools: descriptions of tools for a conversation's template.
        documents: prompts and answers as tokens; one, unless the chat template rewrites earlier turns.
        finish: "stop": the last answer came to its end; "length": it did not; "endless": it never would have, since it
            repeats itself; "context": the conversation would have grown beyond the target's context. Empty while there
            is more to answer.
        is_reencoded: whether tokens of an answer come from its text, because the generated ones are not known.
    """

    id: str
    prompt_ids: list[int]
    questions: list[list[Message]] = field(default_factory=list)
    messages: list[Message] | None = None
    tools: list[Any] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    finish: str = ""
    is_reencoded: bool = False

    def start(self) -> list[int]:
        """Begins the document; returns the first prompt."""
        document = Document()
        document.extend(self.prompt_ids, written=False)
        self.documents = [document]
        return self.prompt_ids

    def take(self, answer: list[int], ended: bool, encoder: Encoder) -> None:
        """Notes an answer, end token included if it `ended`."""
        is_endless = not ended and repeats_itself(answer)
        # An endless answer is noted, but no head is to learn it.
        self.documents[-1].extend(answer, written=not is_endless)
        if self.messages is not None:
            text = encoder.tokenizer.decode(answer, skip_special_tokens=True)
            self.messages.append({"role": "assistant", "content": text})
        if not ended:
            self.finish = "endless" if is_endless else "length"
        elif not self.questions:
            self.finish = "stop"

    def ask(self, encoder: Encoder, max_prompt: int) -> list[int] | None:
        """Prompt of the next turn, as a chat would give it to the target; None if it is too long."""
        assert self.messages is not None
        question = self.questions.pop(0)
        ids = encoder.chat_prompt_ids([*self.messages, *question], self.tools)
        if len(ids) > max_prompt:
            self.finish = "context"
            return None
        self.messages += question
        seen = self.documents[-1].input_ids
        if ids[: len(seen)] == seen:
            self.documents[-1].extend(ids[len(seen) :], written=False)
        else:
            self.documents.append(Document())
            self.documents[-1].extend(ids, written=False)
        return ids

    def lines(self, tokenizer: Any) -> list[dict[str, Any]]:
        """Lines of the output: text and token ids of each document."""
        text = self._text(tokenizer)
        if self.is_reencoded:
            text["reencoded"] = True
        return [
            {"id": self.id, "part": part, **text, "finish": self.finish}
            | {"num_prompt_tokens": len(self.prompt_ids), "input_ids": document.input_ids}
            | {"loss_mask": [int(written) for written in document.loss_mask]}
            for part, document in enumerate(self.documents)
        ]

    def _text(self, tokenizer: Any) -> dict[str, Any]:
        if self.messages is not None:
            return {"messages": self.messages} | ({"tools": self.tools} if self.tools else {})
        ids, num_prompt = self.documents[0].input_ids, len(self.prompt_ids)
        parts = {"prompt": ids[:num_prompt], "completion": ids[num_prompt:]}
        return {name: tokenizer.decode(part, skip_special_tokens=True) for name, part in parts.items()}


def repeats_itself(tokens: Sequence[int]) -> bool:
    """True if a text ends in one passage, of at most a quarter of it, three times or more."""
    longest = len(tokens) // 4
    return len(tokens) >= _SHORTEST_LOOP and any(
        list(tokens[-2 * period :]) == list(tokens[-3 * period : -period]) and 3 * period >= _SHORTEST_LOOP // 2
        for period in range(1, longest + 1)
    )


def prompt_digest(ids: Sequence[int]) -> str:
    """Digest of a first prompt: a line of an earlier run with another one answered another prompt."""
    return hashlib.sha256(np.asarray(ids, dtype=np.int64).tobytes()).hexdigest()[:16]
