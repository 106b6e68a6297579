"""The check on import for packages that training needs in addition to those of the core."""

from __future__ import annotations

from importlib.util import find_spec

from hf_speculate.errors import SpeculateError


# All modules import these; peft and matplotlib are imported only where they are used.
_NEEDED = ("accelerate", "datasets", "filelock", "pydantic", "yaml")


class MissingExtraError(SpeculateError, ImportError):
    """Packages of the extra `train` are not installed."""


def check_extra() -> None:
    """Raises `MissingExtraError` unless the packages of the extra `train` are installed."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"training needs {', '.join(missing)}: pip install 'hf-speculate[train]'")


check_extra()
