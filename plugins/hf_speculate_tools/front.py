"""`main`, which the script `hf-speculate` calls: the overview and the version at once, every command by the app."""

from __future__ import annotations

import errno
import os
import sys

from .overview import overview, version_line


_MISSING_COMMAND = 2  # status of a command line that cannot be understood
_INTERRUPTED = 130  # status that shells give to a command that Ctrl-C ended


def main() -> None:
    """Runs the command line in `sys.argv`."""
    first = sys.argv[1] if len(sys.argv) > 1 else None
    if first in ("-h", "--help"):
        _print(overview())
    elif first == "--version":
        _print(version_line())
    elif first is None:
        _print(overview())
        raise SystemExit(_MISSING_COMMAND)
    else:
        _run_command()


def _run_command() -> None:
    try:
        from hf_speculate.cli import app  # imports torch and transformers: seconds that the answers above do not cost
    except KeyboardInterrupt:
        sys.stderr.write("hf-speculate: interrupted.\n")
        raise SystemExit(_INTERRUPTED) from None
    app(prog_name="hf-speculate")


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Python would otherwise try to write the text again at exit, and fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:  # a reader that has gone needs no message
            sys.stderr.write(f"hf-speculate: error: cannot write to stdout: {error.strerror}\n")
        raise SystemExit(1) from None
