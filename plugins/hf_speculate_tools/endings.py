"""Endings of a command: exit statuses, and standard output that cannot be written."""

from __future__ import annotations

import os
import sys


MISUSED = 2  # status of a command line that cannot be understood
INTERRUPTED = 130  # status that shells give to a command that Ctrl-C ended


def drop_stdout() -> None:
    """Discards the text that standard output still holds. Python would otherwise write it again at exit, and fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
