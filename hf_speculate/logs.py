"""The handler of this project's log messages: a prefix, and transformers' verbosity.

`transformers.logging.set_verbosity_error()` quietens these messages too; so do the `logging` module's own ways. Where a
program has set up logging for itself, its handlers get the messages as they are.
"""

from __future__ import annotations

import logging
import sys

from transformers.utils import logging as of_transformers


ROOTS = ("hf_speculate", "hf_speculate_plugins", "hf_speculate_training")


class PrefixHandler(logging.Handler):
    """Writes messages to stderr as transformers' handler would."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < of_transformers.get_verbosity() or logging.getLogger().handlers:
            return
        sys.stderr.write(f"[hf_speculate] {self.format(record)}\n")


def install_handler() -> None:
    """Gives our loggers the handler, once."""
    for name in ROOTS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, PrefixHandler) for handler in logger.handlers):
            logger.addHandler(PrefixHandler())
