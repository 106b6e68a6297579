"""The versions of transformers that this package works with.

This is imported first, and imports nothing that another version of transformers may lack.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from .errors import IncompatibleTransformersError


# The same as in pyproject.toml. Newer versions are not refused by number, but where something is missing or changed.
OLDEST, WORKING = "5.23", ">=5.23,<6"


def check_version() -> None:
    """Raises `IncompatibleTransformersError` if transformers is absent or too old."""
    found = installed_version()
    if found is None or Version(found) < Version(OLDEST):
        raise incompatible()


def installed_version() -> str | None:
    """The installed version of transformers, without importing it; None if it is absent."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def incompatible(problem: str = "") -> IncompatibleTransformersError:
    """The error for the transformers that is installed.

    Args:
        problem: reason, if the version alone does not tell it.
    """
    found = installed_version()
    return IncompatibleTransformersError(
        f"hf_speculate works with transformers {WORKING}, but {found or 'none'} is installed"
        f"{problem and f' and does not fit ({problem})'}: pip install 'transformers{WORKING}'"
    )


def explained(error: ImportError | AttributeError) -> Exception:
    """The error to raise for a failed import: one sentence if transformers lacks something, else the error itself."""
    module = error.name if isinstance(error, ImportError) else getattr(error.obj, "__name__", None)
    is_transformers = isinstance(module, str) and module.partition(".")[0] == "transformers"
    return incompatible(str(error)) if is_transformers else error
