"""Errors of hf_speculate. Each message names what was requested, what was found and what is possible."""

from .messages import message


class SpeculateError(Exception):
    """Base class of every error that hf_speculate raises on its own account.

    Its text quotes files and servers, without their secrets and with visible control characters.

    Class attributes:
        exit_code: exit status of a command that ends with this error.
    """

    exit_code = 1

    def __str__(self) -> str:
        return message(super().__str__())


class IncompatibleTransformersError(SpeculateError, ImportError):
    """A transformers that is too old, or that lacks or changed something we wrap or call."""


class UnsupportedRequestError(SpeculateError, ValueError):
    """A `generate` request (mode, cache, model class) that cannot run with a speculator."""


class PromptError(UnsupportedRequestError):
    """A prompt that trees cannot continue as stock does; it has run, and nothing was emitted."""


class TargetMismatchError(SpeculateError, ValueError):
    """A drafter that does not fit the target: its vocabulary, hidden size or number of layers."""


class DrafterNotFoundError(SpeculateError, LookupError):
    """A name that is neither an installed drafter nor a loadable head."""


class OptionError(SpeculateError, TypeError, ValueError):
    """An option that does not exist, stands in the wrong place, lacks another one or has a value without a meaning.

    All errors of options are of this class: those of speculators, drafters, policies, acceptance rules and stores. The
    message has what was written and what is possible. The class is a `TypeError` and a `ValueError` for code that
    catches one of them.
    """


class DrafterError(SpeculateError, RuntimeError):
    """A drafter that raised, or returned a malformed draft tree; the text emitted so far stays valid."""


class CheckpointError(SpeculateError, ValueError):
    """A checkpoint that cannot be read as it is: unknown layout, missing or unknown keys, broken file."""


class UploadError(SpeculateError, RuntimeError):
    """A head that could not be uploaded, or may not be; what is on this machine stays as it is."""


class CacheStateError(SpeculateError, RuntimeError):
    """A KV-cache operation that the cache's state does not allow (e.g. a snapshot from the future)."""


class LosslessnessError(SpeculateError, AssertionError):
    """Speculative text differs from plain text and the difference is not a proven numerical tie."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
