"""The versions of transformers that this package works with, and those that a feature needs.

This is imported first, without transformers. `stock` has the names that differ between the versions.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from ..errors import IncompatibleTransformersError


# The same as in pyproject.toml. Newer versions are not refused by number, but where something is missing or changed.
OLDEST, WORKING = "5.5", ">=5.5,<6"


def check_version() -> None:
    """Raises `IncompatibleTransformersError` if transformers is absent or too old."""
    found = installed_version()
    if found is None or Version(found) < Version(OLDEST):
        raise incompatible()


def check_feature(feature: str, oldest: str) -> None:
    """Raises `IncompatibleTransformersError` if the installed transformers is `too_old` for one feature."""
    if problem := too_old(feature, oldest):
        raise IncompatibleTransformersError(problem)


def too_old(feature: str, oldest: str) -> str:
    """The reason why a feature (the sentence's subject) needs a newer transformers; "" if it works with this one."""
    found = installed_version()
    if found is not None and Version(found) >= Version(oldest):
        return ""
    newer = f"transformers>={oldest},{WORKING.partition(',')[2]}"
    return f"{feature} needs transformers >= {oldest}, but {found or 'none'} is installed: pip install '{newer}'"


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
