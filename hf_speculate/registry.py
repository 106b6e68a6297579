"""Installed drafters, found through the entry-point group `hf_speculate.drafters`.

Built-in methods enter by the same door as third parties. Listing imports nothing; a drafter is imported when it is
first asked for, so a broken optional dependency of one does not hide the others. What else is found by entry point
(training methods) is found by the same functions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TypeVar

from .drafting import Drafter
from .errors import DrafterNotFoundError, SpeculateError


GROUP = "hf_speculate.drafters"

Kind = TypeVar("Kind")


@lru_cache(maxsize=1)
def installed_drafters() -> dict[str, EntryPoint]:
    """Name -> entry point of every installed drafter. Raises `SpeculateError` if two distributions claim a name."""
    return find_installed(GROUP, "drafter")


def load_drafter(name: str) -> type[Drafter]:
    """The drafter class installed under `name`; raises `DrafterNotFoundError` with a suggestion."""
    drafters = installed_drafters()
    if name not in drafters:
        raise DrafterNotFoundError(unknown_drafter_message(name))
    return load_installed(drafters[name], Drafter)


def unknown_drafter_message(name: str) -> str:
    """The message for a name that is no drafter's: the nearest one, and where trained heads are."""
    told = unknown_name_message(name, installed_drafters(), "drafter")
    heads = [str(path.parent) for path in sorted(Path("examples").glob("*/provenance.json"))]
    near = [head for head in heads if name in head] or heads
    return f"{told} A trained head is given by its folder or Hub id{': ' if near else ''}{', '.join(near)}."


def find_installed(group: str, what: str) -> dict[str, EntryPoint]:
    """Name -> entry point of everything in an entry-point group.

    Args:
        what: a member of the group is called in messages.
    Raises:
        SpeculateError: two distributions claim a name.
    """
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        other = found.get(point.name)
        if other is not None and other.value != point.value:
            raise SpeculateError(
                f"two installed {what}s are called {point.name!r}: {_origin(other)} and {_origin(point)}. "
                "Uninstall one of them."
            )
        found[point.name] = point
    return found


def load_installed(point: EntryPoint, kind: type[Kind]) -> type[Kind]:
    """The class behind an entry point; raises `SpeculateError` for what is no subclass of `kind`."""
    found = point.load()
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise SpeculateError(
            f"entry point {point.name!r} ({_origin(point)}) is {found!r}, not a {kind.__name__} class."
        )
    return found


def unknown_name_message(name: str, installed: Iterable[str], what: str, where: str = "") -> str:
    """What to say of a name that is not installed, with a suggestion.

    Args:
        what: as of `find_installed`.
        where: the name was read, " in method.name" for one.
    """
    names = list(installed)
    if not names:
        noun = what.split()[-1]
        return (
            f"unknown {what} {name!r}: no {noun} is installed. Entry points are read from installed metadata: "
            "`pip install -e .` (again, after adding one)."
        )
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown {what} {name!r}{where}.{hint} Installed: {', '.join(names)}."


def _origin(point: EntryPoint) -> str:
    return f"{point.value} of {point.dist.name if point.dist else 'an unknown distribution'}"
