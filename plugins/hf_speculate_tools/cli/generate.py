"""`hf-speculate generate`: a text, printed while it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rich.text import Text
from torch import Tensor

from hf_speculate import rounds
from hf_speculate.errors import SpeculateError

from ..commands import Typist, chat_ids, console, say, say_json, side_by_side
from .options import GenerateOptions
from .session import Session, print_piece, set_seed


_WARM_UP_TOKENS = 8


def write_text(options: GenerateOptions, text: str) -> None:
    """Runs the command `generate` on a prompt."""
    system = options.system_message
    session = Session.load(options)
    ids = _ids(text, system, options.raw, session.tokenizer)
    restart, quiet = _seeding(options.seed), options.json_only
    if options.draw:
        _draw(session, ids)
    else:
        result = _compared(session, ids, restart, quiet) if options.compare else _single(session, ids, quiet)
        if quiet:
            say_json(result)
    if options.stats and session.speculator is not None:
        say(session.speculator.stats.summary(), err=True)


def _ids(text: str, system: str | None, raw: bool, tokenizer: Any) -> Tensor:
    """Token ids, int64 [1, S], through the chat template if there is one and `raw` is not set."""
    if raw or not tokenizer.chat_template:
        if system is not None:
            raise SpeculateError("--system needs a chat template: the target's tokenizer has none, or --raw was given.")
        if not (ids := tokenizer(text).input_ids):
            raise SpeculateError("the prompt is empty: it has no tokens.")
        return torch.tensor([ids], dtype=torch.long, device="cpu")
    messages = [{"role": "system", "content": system}] if system is not None else []
    return chat_ids([*messages, {"role": "user", "content": text}], tokenizer)[None]


def _seeding(seed: int | None) -> Callable[[], Any]:
    """A function that sets the seed, now and before every run of a comparison."""
    state = torch.get_rng_state()
    restart = (lambda: set_seed(seed)) if seed is not None else lambda: torch.set_rng_state(state)
    restart()
    return restart


def _single(session: Session, ids: Tensor, quiet: bool) -> dict[str, Any]:
    typist = session.typist(_silent if quiet else print_piece)
    session.run(ids, typist, session.speculator)
    if not quiet:
        print_piece("\n")
        say(session.speed_line(typist), err=True)
    return _figures(typist) | _speculation(session)


def _compared(session: Session, ids: Tensor, restart: Callable[[], Any], quiet: bool) -> dict[str, Any]:
    """Figures of plain generation and of the speculator, from the same seed, both warmed up."""
    choices = {"plain": None, "speculative": session.speculator}
    for choice in choices.values():
        session.run(ids, session.typist(_silent), choice, max_new_tokens=_WARM_UP_TOKENS)
    if session.speculator is not None:
        session.speculator.stats.reset()

    def started(choice):
        def run(streamer) -> None:
            restart()
            session.run(ids, streamer, choice)

        return run

    style = "white" if session.shows_drafts else "green"
    runs = [(title, style if choice else "white", started(choice)) for title, choice in choices.items()]
    shown = console()
    shown.quiet = quiet
    plain, ours = side_by_side(shown, session.tokenizer, runs)
    speedup = (len(ours.tokens) / ours.seconds) / (len(plain.tokens) / plain.seconds)
    is_equal = plain.tokens == ours.tokens
    if not quiet:
        equal = "the same text" if is_equal else "another text (16 bit: near ties may fall otherwise; float32 is exact)"
        hint = "" if speedup >= 1.0 else ". `hf-speculate doctor` measures whether drafts pay for this model here"
        say(f"{speedup:.2f}x, {equal}; {session.speed_line(ours)}{hint}", err=True)
    compared = {"plain": _figures(plain), "speedup": speedup, "same_text": is_equal}
    return _figures(ours) | _speculation(session) | compared


def _draw(session: Session, ids: Tensor) -> None:
    for round in rounds(session.model, ids.to(session.model.device), speculator=session.speculator, **session.request):
        if round.num_nodes:
            console().print(Text(round.draw(session.tokenizer) + "\n"))


def _figures(typist: Typist) -> dict[str, Any]:
    return {
        "text": typist.text,
        "new_tokens": len(typist.tokens),
        "seconds": typist.seconds,
        "tokens_per_second": len(typist.tokens) / typist.seconds if typist.seconds else None,
    }


def _speculation(session: Session) -> dict[str, Any]:
    return {"speculation": None if session.speculator is None else session.speculator.stats.to_dict()}


def _silent(*_piece: Any) -> None:
    pass
