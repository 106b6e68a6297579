"""Installed drafters, found through the entry-point group `hf_speculate.drafters`.

Built-in methods enter by the same door as third parties. Listing imports nothing; a drafter is imported when it is
first asked for, so a broken optional dependency of one does not hide the others.
"""

from __future__ import annotations

import difflib
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from .drafting import Drafter
from .errors import DrafterNotFoundError, SpeculateError


GROUP = "hf_speculate.drafters"


@lru_cache(maxsize=1)
def installed_drafters() -> dict[str, EntryPoint]:
    """Name -> entry point of every installed drafter. Raises `SpeculateError` if two distributions claim a name."""
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        other = found.get(point.name)
        if other is not None and other.value != point.value:
            raise SpeculateError(
                f"two installed drafters are called {point.name!r}: {_origin(other)} and {_origin(point)}. "
                "Uninstall one of them."
            )
        found[point.name] = point
    return found


def load_drafter(name: str) -> type[Drafter]:
    """The drafter class installed under `name`; raises `DrafterNotFoundError` with a suggestion."""
    drafters = installed_drafters()
    if name not in drafters:
        raise DrafterNotFoundError(unknown_drafter_message(name))
    drafter = drafters[name].load()
    if not (isinstance(drafter, type) and issubclass(drafter, Drafter)):
        raise SpeculateError(f"entry point {name!r} ({_origin(drafters[name])}) is {drafter!r}, not a Drafter class.")
    return drafter


def unknown_drafter_message(name: str) -> str:
    names = list(installed_drafters())
    if not names:
        return (
            f"unknown drafter {name!r}: no drafter is installed. Entry points are read from installed metadata: "
            "`pip install -e .` (again, after adding one)."
        )
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown drafter {name!r}.{hint} Installed: {', '.join(names)}."


def _origin(point: EntryPoint) -> str:
    return f"{point.value} of {point.dist.name if point.dist else 'an unknown distribution'}"
