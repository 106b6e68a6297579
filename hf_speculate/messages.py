"""Words on their way to a reader: errors, warnings, results.

They quote what others wrote: names of files and tensors, configs, answers of servers. Here, in one place, secrets are
taken out of them, and control characters are shown as such. A terminal would obey them.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from .masking import masked


# C0 and C1 but for tab and line feed, marks that change the direction of a text, other ends of lines, lone surrogates.
_CONTROLS = re.compile(
    r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: Any) -> str:
    """A text that a terminal shows and does not obey: an escape character becomes the four characters `\\x1b`."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), str(text))


def message(text: Any) -> str:
    """A `printable` text without what looks like a secret."""
    return printable(masked(str(text)))


def get_logger(name: str) -> Any:
    """The logger of that name, as transformers makes them (with `warning_once`); it logs a `message`."""
    from transformers.utils import logging as transformers_logging  # errors are made before it is known to be there

    logger = transformers_logging.get_logger(name)
    logger.addFilter(_MESSAGES)
    return logger


class _Messages(logging.Filter):
    """Lets every record through, as a `message`."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = message(record.getMessage()), ()
        return True


_MESSAGES = _Messages()
