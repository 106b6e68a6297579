"""Commands of the app, with their options and help. Each checks its options, then imports what it runs.

So help, and errors that need no model, come without the seconds that torch takes.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hf_speculate.errors import DrafterNotFoundError, SpeculateError
from hf_speculate.speculator.registry import installed_drafters, unknown_drafter_message  # the package imports torch

from ..commands import (
    Device,
    JsonOnly,
    TargetDtype,
    Threads,
    check_backend,
    readable,
    say,
    say_json,
    speculators_option,
)
from .options import CHAT_COMMANDS, ChatOptions, ChatTarget, GenerateOptions, ServeOptions, default_target


GENERATE_EXAMPLES = """
\b
Examples:
  hf-speculate generate "Why is the sky blue?"
  hf-speculate generate "Write a haiku." -t ./model -s ./eagle3-head --temperature 0.8 --seed 1 --stats
  hf-speculate generate --compare -t model.gguf -s prompt_lookup:max_ngram=4 < question.txt
  hf-speculate generate "def fibonacci(" --raw --draw -t examples/pycoder -s examples/pycoder-eagle3
  hf-speculate generate "Write a haiku." --compare --show-drafts
"""

CHAT_EXAMPLES = f"""
While chatting: {CHAT_COMMANDS}, Ctrl-C stops an answer.

\b
Examples:
  hf-speculate chat
  hf-speculate chat -t ./model -s ./eagle3-head --system "Answer in one sentence." --stats
"""

SERVE_EXAMPLES = """
\b
Examples:
  hf-speculate serve
  hf-speculate serve -t ./model -s ./eagle3-head --port 8001
  hf-speculate serve -t model.gguf -s suffix
"""

DOCTOR_EXAMPLES = """
\b
Examples:
  hf-speculate doctor -t ./model -s ./eagle3-head
  hf-speculate doctor -t smollm2
"""

DRAFTERS_EXAMPLES = """
\b
Examples:
  hf-speculate drafters
  hf-speculate drafters eagle
"""

ENV_EXAMPLES = """
\b
Examples:
  hf-speculate env --json
"""


def generate(options: GenerateOptions) -> None:
    """Generate text with a speculator, printed while it is written."""
    options.checked_request()
    text = _prompt(options.prompt)
    from .generate import write_text

    write_text(options, text)


def chat(options: ChatOptions) -> None:
    """Chat with a model on the terminal.

    The model needs a chat template. From a pipe, each line is one turn.
    """
    options.checked_request()
    from .chat import converse

    converse(options)


def serve(options: ServeOptions) -> None:
    """Serve a model with a speculator over OpenAI's protocol.

    Requests run one after the other: without continuous batching, so not for many users. The server is transformers'
    own, with chat completions, completions and responses. Every request has a line in the log, and its drafts in usage.
    Ctrl-C ends it.
    """
    options.check()
    from .serve import serve_model

    serve_model(options)


def doctor(
    target: ChatTarget = None,
    speculator: Annotated[
        list[str] | None,
        speculators_option("Head or drafter to try (repeatable; default: suffix, prompt lookup and a bundled head)."),
    ] = None,
    gguf_backend: Annotated[
        str | None,
        typer.Option(
            help="Backend of a GGUF file: auto, native, native-int8, dequantize, triton or dense (default: "
            "native and native-int8)."
        ),
    ] = None,
    dtype: TargetDtype = "auto",
    device: Device = None,
    threads: Threads = None,
    json_only: JsonOnly = False,
) -> None:
    """Measure for 20 s whether speculative decoding speeds up this model on this machine.

    Plain generation and every drafter take turns. The last line recommends the fastest. Loading comes on top.
    """
    name = target or default_target()
    check_backend(name, gguf_backend or "auto")
    from .doctor import diagnose

    diagnose(name, speculator or (), gguf_backend, dtype=dtype, device=device, threads=threads, json_only=json_only)


def drafters(
    name: Annotated[
        str | None, typer.Argument(help="Show the options of this drafter (default: list all drafters).")
    ] = None,
    json_only: JsonOnly = False,
) -> None:
    """List the installed drafters, or show the options of one."""
    if name is not None and name not in installed_drafters():
        raise DrafterNotFoundError(unknown_drafter_message(name))
    from .listing import describe_drafter, list_drafters

    list_drafters(json_only) if name is None else describe_drafter(name, json_only)


def env(json_only: JsonOnly = False) -> None:
    """Print versions and hardware for a bug report."""
    from ..commands import environment

    facts = environment()
    if json_only:
        say_json(facts)
        return
    for name, value in (facts.pop("versions") | facts).items():
        say(f"- {name}: {', '.join(value) if isinstance(value, list) else value}")


def _prompt(given: str | None) -> str:
    if given is not None and given != "-":
        return readable(given, "the prompt")
    if sys.stdin.isatty():
        raise SpeculateError("no prompt: pass it as an argument, or on stdin.")
    text = readable(sys.stdin.read(), "stdin")
    if not text.strip():
        raise SpeculateError("the prompt from stdin is empty.")
    return text
