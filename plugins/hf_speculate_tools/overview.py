"""The list of commands that `hf-speculate --help` prints, and the version.

It imports the standard library only: `hf-speculate --help` has to answer before torch could be imported. Commands of
other packages are therefore listed by name, not imported. A test compares the lines with the help of the commands.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points, version


DISTRIBUTION = "hf-speculate"
COMMANDS_GROUP = "hf_speculate.commands"

# Group -> command -> its one-line help.
COMMANDS = {
    "Run": {
        "generate": "Generate text with a speculator, printed while it is written.",
        "chat": "Chat with a model on the terminal.",
        "serve": "Serve a model with a speculator over OpenAI's protocol.",
    },
    "Measure": {
        "doctor": "Measure for 20 s whether speculative decoding speeds up this model on this machine.",
        "bench": "Compare speculators with stock transformers: speed and acceptance.",
    },
    "Heads": {
        "check": "Diagnose a head whose drafts are rarely accepted.",
        "convert": "Convert a head to another project's file layout, or for a serving engine.",
        "push": "Upload a head to the Hub, with its model card.",
        "card": "Regenerate a head's model card. Hand-written cards are kept.",
        "mtp": "Keep a model's own draft layers (MTP).",
    },
    "Train": {
        "regenerate": "Write training data: the target's own answers to prompts.",
        "train": "Train a head for a target model.",
    },
    "Information": {
        "drafters": "List the installed drafters, or show the options of one.",
        "env": "Print versions and hardware for a bug report.",
    },
}

_START = """Usage: hf-speculate COMMAND [OPTIONS]

Speculative decoding for Hugging Face transformers: the same text, faster.
"""

_END = """
Options:
  -h, --help  Show this list. After a command: show its options.
  --version   Print the version.

Examples:
  hf-speculate chat
  hf-speculate generate "Why is the sky blue?" -t ./model -s ./head --compare
  hf-speculate doctor -t ./model -s ./head
  hf-speculate train --help
"""

_WIDTH, _NAMES = 80, 14  # columns of a line, and of a command's name with its margins


def overview(installed: Iterable[EntryPoint] | None = None) -> str:
    """Text of `hf-speculate --help`: the commands in groups, each with one line."""
    points = entry_points(group=COMMANDS_GROUP) if installed is None else installed
    own = {name for commands in COMMANDS.values() for name in commands}
    others = {_ascii(point.name): _ascii(_source(point)) for point in points if point.name not in own}
    groups = {**COMMANDS, "Other packages": dict(sorted(others.items()))}
    return _START + "".join(_section(group, commands) for group, commands in groups.items() if commands) + _END


def version_line() -> str:
    """Text of `hf-speculate --version`."""
    return f"{DISTRIBUTION} {version(DISTRIBUTION)}\n"


def _source(point: EntryPoint) -> str:
    return f"Provided by {point.dist.name}." if point.dist is not None else f"Provided by {point.value}."


def _ascii(text: str) -> str:
    """Shows control characters in the names of others, instead of sending them to the terminal."""
    return ascii(text)[1:-1]


def _section(group: str, commands: dict[str, str]) -> str:
    return f"\n{group}:\n" + "".join(_entry(name, about) for name, about in commands.items())


def _entry(name: str, about: str) -> str:
    """A command with its help, wrapped next to the name."""
    first = f"  {name}".ljust(_NAMES)
    lines = textwrap.wrap(about, _WIDTH - _NAMES)
    if len(first) > _NAMES:  # a long name has a line of its own
        return first + "\n" + textwrap.indent("\n".join(lines), " " * _NAMES) + "\n"
    return first + f"\n{' ' * _NAMES}".join(lines) + "\n"
