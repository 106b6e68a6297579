"""Texts on their way to a reader: errors, warnings, results, log messages.

They quote file and tensor names, configs and answers of servers. So secrets are masked here, and control characters,
which a terminal would obey, are made visible.

A secret is recognised by its name (`hub_token`, `WANDB_API_KEY`, `password`), its look (`hf_…`), or its place in a URL
(before the host, or after the question mark). Masking takes time linear in the text: every pattern either consumes the
characters it has looked at, or looks at a bounded number of them.

Log messages go to stderr with a prefix, at transformers' verbosity (`transformers.logging.set_verbosity_error()`). A
program that has set up logging gets them in its own handlers.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


_ROOTS = ("hf_speculate", "hf_speculate_plugins", "hf_speculate_training")

# C0 and C1 without tab and line feed, marks that change the direction of a text, other ends of lines, lone surrogates.
_CONTROLS = re.compile(
    r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

MASK = "***"

_SECRET = "token|secret|password|passwd|pwd|passphrase|credentials?|authorization|auth|apikey|key|signature|sig"
_SECRET_NAME = re.compile(rf"(?:^|_)(?:{_SECRET})$")
_NAMES_OF_TEXT = re.compile(
    r"^key$|(?:^|_)(?:bos|eos|pad|unk|sep|cls|mask|image|video|audio|start|end|special|first|last|stop)_token$"
)
_PASSWORD_NAME = re.compile(r"(?:^|_)(?:secret|password|passwd|pwd|passphrase)$")
_REVISION_NAME = re.compile(r"(?:revision|commit|hash|sha\d*|fingerprint|digest)$")

# Looks that only tokens have.
_LOOKS = re.compile(
    r"""
    -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    | (?<![A-Za-z0-9])(?:
        hf_(?:oauth_|app_)?(?:(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{16,}|[a-z]{24,})
        | api_org_[A-Za-z0-9]{16,}
        | sk-(?=[A-Za-z_-]{0,40}[0-9])[\w-]{20,}
        | wandb_v1_\w{20,} | local-[0-9a-f]{40}
        | gh[oprsu]_[A-Za-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w-]{16,}
        | xox[abeprs]-[\w-]{10,} | AKIA[0-9A-Z]{16} | AIza[\w-]{30,}
        | nvapi-[\w-]{20,} | gsk_[A-Za-z0-9]{20,} | r8_[A-Za-z0-9]{30,}
        | eyJ[\w-]{16,}(?:\.[\w-]*)*
    )
    """,
    re.VERBOSE | re.DOTALL,
)
_URL = re.compile(r"(?<![\w+.-])(?P<scheme>[\w+.-]+://)(?P<rest>[^\s\"'<>]*)")
_AUTHORIZATION = re.compile(
    r"(?i)(?P<head>\bauthorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token)\s+)?|\b(?:bearer|basic)\s+(?=\S*\d))"
    r"(?!\*\*\*)(?P<value>[^\s\"',;]{8,})"
)
_ASSIGNMENT = re.compile(
    rf"(?i)(?P<head>(?<![\w.-])(?P<name>[\w.-]*(?:{_SECRET}))[\"']?(?:\s+is)?\s*(?P<sep>[=:])\s*)"
    r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',;&}\])]+)"
)
# Keys of wandb look like this, and so do commits of git.
_HEX = re.compile(
    r"(?P<head>(?<![\w.-])(?P<name>[\w.-]+)[\"']?\s*[=:]\s*[\"']?)?(?<![\w/@.-])(?P<value>[0-9a-f]{40})(?![\w-])"
)


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
        from transformers.utils import logging as transformers_logging

        if record.levelno >= transformers_logging.get_verbosity() and not logging.getLogger().handlers:
            sys.stderr.write(f"[hf_speculate] {self.format(record)}\n")


def install_handler() -> None:
    """Gives each of this project's loggers the handler, once."""
    for name in _ROOTS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, PrefixHandler) for handler in logger.handlers):
            logger.addHandler(PrefixHandler())


def is_secret_name(name: str) -> bool:
    """Whether a name is that of a token, a key or a password. `pad_token` and similar names are not."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").rpartition(".")[2].lower()
    return bool(_SECRET_NAME.search(name)) and not _NAMES_OF_TEXT.search(name)


def find_secret(value: Any, place: str = "") -> str | None:
    """The place of a token or a password in nested values, like "section.key"; None if there is none."""
    if _is_secret(place.rpartition(".")[2], value):
        return place
    if isinstance(value, str):
        found: Any = _LOOKS.search(value) or _AUTHORIZATION.search(value)
        found = found or any(_without_user(match["rest"]) != match["rest"] for match in _URL.finditer(value))
        if not found and not re.search(r"\s", value):  # e.g. a URL's query; prose is only masked
            found = _ASSIGNMENT.sub(_mask_assigned, value) != value
        return place if found else None
    for key, item in _items(value):
        if place_of_item := find_secret(item, f"{place}.{key}".lstrip(".")):
            return place_of_item
    return None


def has_secret(text: str) -> bool:
    """Whether some part of a text is a token, or a password in a URL."""
    urls = (match["rest"] for match in _URL.finditer(text))
    return bool(_LOOKS.search(text) or _AUTHORIZATION.search(text)) or any(_without_user(url) != url for url in urls)


def masked(value: Any, name: str = "") -> Any:
    """A copy of nested values without their secrets; URLs lose user and query.

    Args:
        value: any value; others than texts, lists and mappings stay as they are.
        name: key of `value`, "" without one.
    """
    if _is_secret(name, value):
        return MASK
    if isinstance(value, str):
        return _HEX.sub(_mask_hex, _known(value, _mask_url)) if not _REVISION_NAME.search(name) else masked_prose(value)
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return masked_arguments(value)  # it may be a command line
    return mapped(value, masked)


def masked_prose(text: str) -> str:
    """A person's text without its secrets; its links still work."""
    return _known(text, _mask_user)


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without its secrets, including those of `--token X` and `--token=X`."""
    shown, is_next = [], False
    for argument in map(str, arguments):
        name, equals, value = argument.partition("=")
        is_option, plain_name = argument.startswith("-"), name.lstrip("-")
        is_secret = is_secret_name(plain_name) or (is_option and plain_name == "key")
        if is_next and not argument.startswith("--"):
            shown.append(MASK)
        elif equals and value and is_secret and re.fullmatch(r"[\w.-]+", name):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(masked(argument))
        is_next = is_option and is_secret and not equals
    return shown


def mapped(value: Any, function: Callable[[Any, str], Any]) -> Any:
    """A copy of a list or a mapping with `function(item, key)` for every item; any other value as it is."""
    if isinstance(value, Mapping):
        return {_printable_key(key): function(item, str(key)) for key, item in value.items()}
    return [function(item, "") for item in value] if isinstance(value, list | tuple) else value


def _is_secret(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool | float) or not is_secret_name(name):
        return False
    if isinstance(value, int):
        return bool(_PASSWORD_NAME.search(name.lower()))
    return bool(value) and not (isinstance(value, str) and value.startswith("<") and value.endswith(">"))


def _known(text: str, mask_url: Callable[[re.Match[str]], str]) -> str:
    """A text without everything that is a secret wherever it stands."""
    text = _URL.sub(mask_url, _LOOKS.sub(MASK, text))
    return _ASSIGNMENT.sub(_mask_assigned, _AUTHORIZATION.sub(rf"\g<head>{MASK}", text))


def _mask_url(match: re.Match[str]) -> str:
    address, question, _ = _mask_user(match).partition("?")
    return address + question + (MASK if question else "")


def _mask_user(match: re.Match[str]) -> str:
    return match["scheme"] + _without_user(match["rest"])


def _without_user(rest: str) -> str:
    """The part of a URL after its scheme, without user and password.

    A password may hold characters that end a host. So the host ends early only if a port can stand after its colon.
    """
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    port = host.partition(":")[2]
    is_host = "@" not in host and (host.startswith("[") or re.fullmatch(r"\d*\W*", port) is not None)
    if is_host or host.startswith(("git@", f"{MASK}@")):
        return rest
    return f"{MASK}@{rest.rpartition('@')[2]}" if "@" in rest else MASK


def _mask_assigned(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"].strip("\"'")
    # "a token: its probability" is prose.
    is_plain = re.fullmatch(r"(?i)token|secret|auth|credentials?|sig(nature)?|\w*(?<!_)key", name) is not None
    is_prose = match["sep"] == ":" and is_plain and not set(match["head"]) & set("\"'")
    is_none = value.lower() in ("", "null", "none", "true", "false", MASK)
    has_own_rule = name.lower().endswith("authorization")
    if is_prose or is_none or has_own_rule or not _is_secret(name, value):
        return match[0]
    return match["head"] + match["value"].replace(value, MASK)


def _mask_hex(match: re.Match[str]) -> str:
    if match["name"] and _REVISION_NAME.search(match["name"].lower()):
        return match[0]
    return (match["head"] or "") + MASK


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _printable_key(key: Any) -> Any:
    return _LOOKS.sub(MASK, key) if isinstance(key, str) else key
