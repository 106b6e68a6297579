"""`main`, which the script `hf-speculate` calls: the overview and the version at once, every command by the app."""

from __future__ import annotations

import errno
import sys

from .endings import INTERRUPTED, MISUSED, drop_stdout
from .overview import overview, version_line


def main() -> None:
    """Runs the command line in `sys.argv`."""
    first = sys.argv[1] if len(sys.argv) > 1 else None
    if first in ("-h", "--help"):
        _print(overview())
    elif first == "--version":
        _print(version_line())
    elif first is None:
        _print(overview())
        raise SystemExit(MISUSED)
    else:
        _run_command()


def _run_command() -> None:
    try:
        # It imports torch and transformers: seconds that the answers above do not cost.
        from .cli import app
    except KeyboardInterrupt:
        sys.stderr.write("hf-speculate: interrupted.\n")
        raise SystemExit(INTERRUPTED) from None
    app(prog_name="hf-speculate")


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        drop_stdout()
        if error.errno != errno.EPIPE:  # a reader that has gone needs no message
            sys.stderr.write(f"hf-speculate: error: cannot write to stdout: {error.strerror}\n")
        raise SystemExit(1) from None
