"""Which transformers this package works with. Imported before anything that a transformers of other versions may lack:
it imports none of it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from .errors import IncompatibleTransformersError


# As in pyproject.toml. Newer versions are not refused by their number, but by what is missing or changed in them.
OLDEST, WORKING = "5.23", ">=5.23,<6"


def check_version() -> None:
    """Raises `IncompatibleTransformersError` for a transformers that is older than any that works, or absent."""
    found = installed_version()
    if found is None or Version(found) < Version(OLDEST):
        raise incompatible()


def installed_version() -> str | None:
    """The version of transformers, which is not imported for it; None if it is absent."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def incompatible(problem: str = "") -> IncompatibleTransformersError:
    """The error for the transformers that is installed.

    Args:
        problem: what is wrong with it, where its version alone does not say that.
    """
    found = installed_version()
    return IncompatibleTransformersError(
        f"hf_speculate works with transformers {WORKING}, but {found or 'none'} is installed"
        f"{problem and f' and does not fit ({problem})'}: pip install 'transformers{WORKING}'"
    )


def explained(error: ImportError | AttributeError) -> Exception:
    """What to raise for an error of our own imports: where it is transformers that lacks something, one sentence."""
    module = error.name if isinstance(error, ImportError) else getattr(error.obj, "__name__", None)
    is_transformers = isinstance(module, str) and module.partition(".")[0] == "transformers"
    return incompatible(str(error)) if is_transformers else error
