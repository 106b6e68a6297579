"""Texts on their way to a reader: errors, warnings, results, log messages.

They quote file and tensor names, configs and answers of servers. So secrets are masked here, and control characters,
which a terminal would obey, are made visible.

A secret is a token of the Hub, an authorisation header, or the user in a URL. Masking takes time linear in the text.

Log messages go to stderr with a prefix, at transformers' verbosity (`transformers.logging.set_verbosity_error()`). A
program that has set up logging gets them in its own handlers.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from typing import Any


_ROOTS = ("hf_speculate", "hf_speculate_gguf", "hf_speculate_plugins", "hf_speculate_tools", "hf_speculate_training")

# C0 and C1 without tab and line feed, marks that change the direction of a text, other ends of lines, lone surrogates.
_CONTROLS = re.compile(
    r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

MASK = "***"

_HUB_TOKEN = re.compile(r"(?<![A-Za-z0-9])hf_(?:oauth_|app_)?[A-Za-z0-9]{16,}")
_AUTHORIZATION = re.compile(
    r"(?i)(\bauthorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token)\s+)?|\b(?:bearer|basic)\s+(?=\S*\d))"
    r"[^\s\"',;]{8,}"
)
_URL_USER = re.compile(r"(?<![\w+.-])([\w+.-]+://)(?!git@)[^\s/?#@\"'<>]+@")

_SECRET_NAME = re.compile(r"(?i)(?:^|\.)token$|(?:hub|hf|access|auth)_?token$|api[_-]?key$|secret$|password$")


def printable(text: Any) -> str:
    """A text that a terminal shows and does not obey: an escape character becomes the four characters `\\x1b`."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), str(text))


def message(text: Any) -> str:
    """A `printable` text without anything that looks like a secret."""
    return printable(masked(str(text)))


def get_logger(name: str) -> Any:
    """A logger of transformers' kind (with `warning_once`), whose records pass through `message`."""
    from transformers.utils import logging as transformers_logging  # an error may be that transformers is missing

    logger = transformers_logging.get_logger(name)
    logger.addFilter(_MESSAGES)
    return logger


class _Messages(logging.Filter):
    """Turns the text of every record into a `message`."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = message(record.getMessage()), ()
        return True


_MESSAGES = _Messages()


class PrefixHandler(logging.Handler):
    """Writes log messages to stderr as transformers' handler would."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm
        from transformers.utils import logging as transformers_logging

        if record.levelno >= transformers_logging.get_verbosity() and not logging.getLogger().handlers:
            # It takes progress bars away while it writes: a message would begin on the line of a bar.
            tqdm.write(f"[hf_speculate] {self.format(record)}", file=sys.stderr)


def install_handler() -> None:
    """Gives each of this project's loggers the handler, once."""
    for name in _ROOTS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, PrefixHandler) for handler in logger.handlers):
            logger.addHandler(PrefixHandler())


def masked(text: str) -> str:
    """A text without its secrets."""
    text = _AUTHORIZATION.sub(rf"\1{MASK}", _HUB_TOKEN.sub(MASK, text))
    return _URL_USER.sub(rf"\1{MASK}@", text)


def has_secret(text: str) -> bool:
    return masked(text) != text


def is_secret_name(name: str) -> bool:
    """Whether a name is that of a token, a key or a password. `pad_token` and similar names are not."""
    return _SECRET_NAME.search(name) is not None


def find_secret(value: Any, place: str = "") -> str | None:
    """The place of a secret in nested values, by its look or its name, like "section.key"; None if there is none."""
    if isinstance(value, str):
        return place if has_secret(value) or (value and is_secret_name(place)) else None
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    return next(filter(None, (find_secret(item, f"{place}.{key}".lstrip(".")) for key, item in items)), None)
