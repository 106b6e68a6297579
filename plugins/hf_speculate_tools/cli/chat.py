"""`hf-speculate chat`: a conversation on the terminal, with one cache for all turns."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from hf_speculate.cache import as_cache
from hf_speculate.errors import SpeculateError

from ..commands import Typist, chat_ids, readable, say
from .options import CHAT_COMMANDS, ChatOptions
from .session import Session, print_piece, set_seed


class Conversation:
    """Messages of a chat, and the cache of their tokens.

    Attributes:
        messages: messages so far, the system's included.
    """

    def __init__(self, session: Session, system: str | None):
        self._session = session
        self._system = system
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system's message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system is not None else []
        self._forget_cache()

    def answer(self, text: str, write: Any) -> Typist:
        """Answers the user. Of an interrupted answer the finished part stays in the chat."""
        session, question = self._session, {"role": "user", "content": text}
        ids = chat_ids([*self.messages, question], session.tokenizer)
        self.messages.append(question)
        self._keep_common(ids)
        typist = session.typist(write)
        try:
            session.run(ids[None], typist, session.speculator, **as_cache(self._cache))
        except KeyboardInterrupt:
            write(" …")
        except Exception:
            self.messages.pop()
            self._forget_cache()
            raise
        self._known = [*ids.tolist(), *typist.tokens][: self._cache.get_seq_length()]
        self.messages.append({"role": "assistant", "content": typist.text})
        return typist

    def _keep_common(self, ids: Tensor) -> None:
        """Cuts the cache to the tokens that it shares with the text; at least the last token has to run."""
        length = len(ids) - 1
        common = next((i for i, (a, b) in enumerate(zip(self._known, ids.tolist(), strict=False)) if a != b), length)
        surplus = self._cache.get_seq_length() - min(common, length, len(self._known))
        if surplus <= 0:
            return
        try:
            self._cache.crop(-surplus)
        except Exception:  # layers with a window or a state cannot always go back: then the whole text runs again
            self._forget_cache()

    def _forget_cache(self) -> None:
        self._cache = DynamicCache(config=self._session.model.config)
        self._known: list[int] = []


def converse(options: ChatOptions) -> None:
    """Runs the command `chat`."""
    session = Session.load(options)
    if not session.tokenizer.chat_template:
        raise SpeculateError(
            "this target's tokenizer has no chat template, so it is not a chat model: `hf-speculate generate --raw` "
            "completes texts with it."
        )
    if options.seed is not None:
        set_seed(options.seed)
    conversation = Conversation(session, options.system_message)
    say(f"{session.title}; /exit leaves, /help lists the commands.", err=True)
    try:
        while _turn(conversation, session, options.stats):
            pass
    except EOFError:
        pass
    finally:
        if options.stats:
            _show_stats(session)


def _turn(conversation: Conversation, session: Session, shows_speed: bool) -> bool:
    """Reads one line from the user and acts on it; False to leave."""
    line = readable(input("> " if sys.stdin.isatty() else ""), "the line").strip()
    if line == "/exit":
        return False
    if line == "/reset":
        conversation.reset()
    elif line == "/stats":
        _show_stats(session)
    elif line == "/help":
        say(f"{CHAT_COMMANDS}.", err=True)
    elif line.startswith("/"):
        say(f"unknown command {line}; possible: /reset, /stats, /help, /exit.", err=True)
    elif line:
        typist = conversation.answer(line, print_piece)
        print_piece("\n")
        if shows_speed or sys.stdin.isatty():
            say(session.speed_line(typist), err=True)
    return True


def _show_stats(session: Session) -> None:
    shown = "plain generation: no speculator." if session.speculator is None else session.speculator.stats.summary()
    say(shown, err=True)
