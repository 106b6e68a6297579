"""Documents of tokens made from examples, with a mark on the tokens that the target is to emit."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from hf_speculate.errors import SpeculateError, first_line

from .records import Chat, Completion, Example, Message, Plain, RecordError, Tokens


# A user's message, where only what is around it matters.
_MESSAGE = "a message"

# White space between prompt and answer at most, and characters that must be alike before it, in `_start_of_answer`.
_WHITE_SPACE, _LIKE_END = 4, 4
_UNLIKE = (
    "the chat template renders what precedes an assistant turn in another way than the conversation with that turn: "
    "what the target is to emit cannot be found. Possible: turns='separate', a template with {% generation %} marks, "
    "or pre-tokenised data (input_ids and loss_mask)"
)


@dataclass(frozen=True)
class Encoded:
    """One document: token ids and, for each, whether the target is to emit it."""

    input_ids: list[int]
    loss_mask: list[bool]


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Turns examples into documents.

    Args:
        tokenizer: the target's tokenizer.
        end_ids: tokens at which the target stops. It emits the end-of-turn token, but not what a template writes after
            that.
        turns: "together" makes one document of a conversation, with a loss on every assistant turn. "separate" makes a
            document of every assistant turn, after the history that the template shows there. Templates that rewrite
            earlier turns (and drop, for example, the reasoning of all but the last) need it.
        append_eos: True ends plain texts and completions with the tokenizer's eos token, as the target's own training
            documents end.
    """

    tokenizer: Any
    end_ids: Collection[int] = ()
    turns: Literal["together", "separate"] = "together"
    append_eos: bool = True

    def __call__(self, example: Example) -> list[Encoded]:
        """The documents of an example; raises `RecordError` if it cannot be rendered, and others perhaps can."""
        if isinstance(example, Tokens):
            return [Encoded(list(example.input_ids), list(example.loss_mask))]
        if isinstance(example, Plain):
            ids = self.tokenizer(example.text, verbose=False)["input_ids"]
            return [self._ended(Encoded(ids, [True] * len(ids)))]
        if isinstance(example, Completion):
            if not example.completion:
                raise RecordError(
                    "a prompt without an answer: nothing to train on. Possible: `hf-speculate regenerate`, which makes "
                    "answers, or data.columns with the name of yours, {completion: ...}"
                )
            return [self._ended(self._completion(example))]
        return self._chat(example)

    def text_prompt_ids(self, text: str) -> list[int]:
        """The prompt for continuing a text, without the eos token that some tokenizers append."""
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        return ids[:-1] if len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id else ids

    def chat_prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """The prompt for the assistant's next turn."""
        return self._tokenized(self._rendered(messages, True, tools))["input_ids"]

    def user_turn(self) -> tuple[list[int], int]:
        """The prompt for the user's first message, and the token that ends such a message."""
        text = self._rendered([{"role": "user", "content": _MESSAGE}], False)
        before, _, after = text.partition(_MESSAGE)
        ids = self._tokenized(after.lstrip())["input_ids"]
        if not ids or ids[0] not in self.tokenizer.added_tokens_decoder:
            raise SpeculateError(
                f"the chat template ends a user's message with {after[:40]!r}, which is not a special token: the "
                "end of a message that the target writes cannot be found. Possible: prompts from data."
            )
        return self._tokenized(before)["input_ids"], ids[0]

    def _ended(self, encoded: Encoded) -> Encoded:
        eos = self.tokenizer.eos_token_id
        if not self.append_eos or eos is None or encoded.input_ids[-1:] == [eos]:
            return encoded
        return Encoded([*encoded.input_ids, eos], [*encoded.loss_mask, True])

    def _completion(self, example: Completion) -> Encoded:
        """Prompt and completion, each tokenised alone: `generate` would get the one and emit the other."""
        prompt = self.text_prompt_ids(example.prompt)
        completion = self.tokenizer(example.completion, add_special_tokens=False, verbose=False)["input_ids"]
        return Encoded([*prompt, *completion], [False] * len(prompt) + [True] * len(completion))

    def _chat(self, example: Chat) -> list[Encoded]:
        answers = [index for index, message in enumerate(example.messages) if message["role"] == "assistant"]
        if not answers:
            return []
        if self.turns == "separate":
            return [self._last_turn(example.messages[: index + 1], example.tools) for index in answers]
        messages = example.messages[: answers[-1] + 1]
        if has_generation_marks(self.tokenizer):
            return [self._marked(messages, example.tools)]
        text = self._rendered(messages, False, example.tools)
        spans = [self._span(messages, index, text, example.tools) for index in answers]
        return [self._masked(text, spans)]

    def _last_turn(self, messages: Sequence[Message], tools: Sequence[Any]) -> Encoded:
        """The prompt as rendered for `generate`, followed by the answer as the template writes it."""
        before, text = self._rendered(messages[:-1], True, tools), self._rendered(messages, False, tools)
        start = len(before) if text.startswith(before) else _start_of_answer(before, text, messages[-1]["content"])
        return self._masked(before + text[start:], [(len(before), len(before) + len(text) - start)])

    def _marked(self, messages: Sequence[Message], tools: Sequence[Any]) -> Encoded:
        """A conversation whose template marks the assistant's words with `{% generation %}`."""
        self._rendered(messages, False, tools)  # for its errors
        encoded = self.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return Encoded(encoded["input_ids"], [bool(value) for value in encoded["assistant_masks"]])

    def _span(self, messages: Sequence[Message], index: int, text: str, tools: Sequence[Any]) -> tuple[int, int]:
        """First and last character of turn `index` in the rendered conversation."""
        before = self._rendered(messages[:index], True, tools)
        after = self._rendered(messages[: index + 1], False, tools)
        if after.startswith(before) and text.startswith(after):
            return len(before), len(after)
        if after.startswith(before):
            raise SpeculateError(
                "the chat template rewrites earlier turns when others follow, so the turns of a rendered conversation "
                "cannot be separated. Possible: turns='separate' (every assistant turn becomes a document of its "
                "own), or a template with {% generation %} marks."
            )
        raise RecordError(_UNLIKE)

    def _masked(self, text: str, spans: Sequence[tuple[int, int]]) -> Encoded:
        encoded = self._tokenized(text)
        ids, starts = encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]
        mask = [False] * len(ids)
        for begin, end in spans:
            turn = [i for i, start in enumerate(starts) if begin <= start < end]
            ends = [i for i in turn if ids[i] in self.end_ids]
            for i in turn:
                mask[i] = not ends or i <= ends[-1]
        return Encoded(ids, mask)

    def _tokenized(self, text: str) -> Any:
        if not self.tokenizer.is_fast:
            raise SpeculateError(
                f"{type(self.tokenizer).__name__} does not give its tokens' places in the text. Possible: the fast "
                "version of this tokenizer, or pre-tokenised data (input_ids and loss_mask)."
            )
        # The template writes the special tokens itself.
        return self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)

    def _rendered(self, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Any] = ()) -> str:
        if not self.tokenizer.chat_template:
            raise SpeculateError(
                "the data are conversations, but the target's tokenizer has no chat template. Possible: set "
                "tokenizer.chat_template to the one that the target was trained with, or give data with text or "
                "prompt + completion."
            )
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise RecordError(f"the chat template refuses it: {first_line(error)}") from error


def _start_of_answer(before: str, text: str, content: str) -> int:
    """The character at which the answer begins in a rendered conversation that does not begin with the prompt.

    Mistral's templates put a system message before the *last* message of the user. The conversation with the answer
    has it elsewhere, yet ends like the prompt. Only a little white space may come before the answer's own words.
    """
    words = content.strip()
    place = text.rfind(words) if words else -1
    starts = [start for start in range(place, place - _WHITE_SPACE, -1) if start > 0 and not text[start:place].strip()]
    start = max(starts, key=lambda start: _common_end(before, text[:start]), default=0)
    if _common_end(before, text[:start]) < _LIKE_END:
        raise RecordError(_UNLIKE)
    return start


def _common_end(one: str, other: str) -> int:
    """Number of characters at the end that two texts have in common."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def has_generation_marks(tokenizer: Any) -> bool:
    """True if the chat template marks the assistant's words."""
    template = tokenizer.chat_template
    return isinstance(template, str) and re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
