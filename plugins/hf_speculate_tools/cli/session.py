"""Target, speculator and request from the options of `generate`, `chat` and `serve`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_speculate import rounds
from hf_speculate.errors import SpeculateError
from hf_speculate.messages import printable
from hf_speculate.speculator import Speculator
from hf_speculate.target import GenerativeModel

from ..commands import (
    DRAFTED,
    DraftTypist,
    Typist,
    console,
    default_specs,
    find_device,
    load_target,
    make_spec,
    parse_spec,
    prepare,
)
from .options import PLAIN, ServeOptions, SessionOptions, default_target


@dataclass(frozen=True)
class Loaded:
    """A loaded target with its speculator.

    Attributes:
        title: short names of target and speculator.
        model, tokenizer: model and tokenizer of the target.
        speculator: the speculator; None for plain generation.
    """

    title: str
    model: GenerativeModel
    tokenizer: PreTrainedTokenizerBase
    speculator: Speculator | None

    @classmethod
    def of(cls, options: SessionOptions | ServeOptions) -> Loaded:
        """Loads target and speculator; raises `SpeculateError`. Names are checked before weights are read."""
        prepare(options.threads)
        name = options.target or default_target()
        spec = default_specs(name)[-1] if options.speculator is None else None
        if options.speculator not in (None, PLAIN):
            spec = parse_spec(options.speculator)
        if options.exact and spec is not None:
            spec = spec.with_option("exact", True)
        model, tokenizer = load_target(
            name, options.dtype, find_device(options.device), options.gguf_backend, neutral=False
        )
        title = f"{Path(name).name}, {'no speculator' if spec is None else f'drafts by {spec.label}'}"
        return cls(title, model, tokenizer, None if spec is None else make_spec(spec, model))


@dataclass(frozen=True)
class Session(Loaded):
    """A loaded target with its speculator and its request.

    Attributes:
        request: arguments of `generate` without the prompt.
        shows_drafts: whether texts come with the knowledge of which tokens were accepted drafts.
    """

    request: dict[str, Any]
    shows_drafts: bool = False

    @classmethod
    def load(cls, options: SessionOptions) -> Session:
        """Checks the request, then loads target and speculator; raises `SpeculateError`."""
        request = options.checked_request()
        return cls(**vars(Loaded.of(options)), request=request, shows_drafts=options.show_drafts)

    def typist(self, write: Callable[..., Any]) -> Typist:
        """A typist for `run`. `write` gets pieces of text, and with `shows_drafts` whether each was drafted."""
        return (DraftTypist if self.shows_drafts else Typist)(self.tokenizer, write)

    def run(self, ids: Tensor, streamer: Any, speculator: Speculator | None, **kwargs: Any) -> None:
        """Generates after a prompt of token ids, int64 [1, S]. With `shows_drafts` the streamer is told of rounds."""
        ids = ids.to(self.model.device)
        prompt = {"inputs": ids, "attention_mask": torch.ones_like(ids), "tokenizer": self.tokenizer}
        request = {**prompt, **self.request, **kwargs}
        if speculator is None or not self.shows_drafts:
            self.model.generate(**request, streamer=streamer, speculator=speculator)
            return
        with closing(rounds(self.model, **request, speculator=speculator)) as request_rounds:
            for round in request_rounds:
                streamer.add(round)
        streamer.end()

    def speed_line(self, typist: Typist) -> str:
        """A line such as `128 tokens, 96.2 tokens/s, 2.10 tokens per round`."""
        length = None if self.speculator is None else self.speculator.stats.tokens_per_round
        return typist.speed + ("" if length is None else f", {length:.2f} tokens per round")


def print_piece(text: str, is_drafted: bool = False) -> None:
    """Prints a piece of text at once. A terminal shows control characters as text; other outputs get them unchanged."""
    if is_drafted and sys.stdout.isatty():
        console().print(Text(text, style=DRAFTED), end="", soft_wrap=True)
        return
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def set_seed(seed: int) -> None:
    """Sets torch's seed; raises `SpeculateError` for one that torch does not take."""
    if not -(2**63) <= seed < 2**64:
        raise SpeculateError(f"--seed must be an integer of 64 bits, got {seed}.")
    torch.manual_seed(seed)
