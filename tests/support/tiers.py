"""The tiers: `make test` runs what is not marked `rest`, `make test-rest` what is, `make slow` the nightly one.

Modules mark their own tests, most of them in their parametrisations. Folders where whole modules go to the rest are
listed here: everything in `REST`, but what is in `QUICK`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

import pytest


# Paths below `tests`.
REST: tuple[str, ...] = ()
QUICK: tuple[str, ...] = ()


def quick(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Parameters of which the chosen ones (none named: the first) stay in `make test`."""
    values = list(values)
    chosen = chosen or (values[0],)
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.rest) for value in values]


def quick_quarter(values: Iterable[Any]) -> list[Any]:
    """Parameters of which every fourth one stays in `make test`."""
    values = list(values)
    return quick(values, *values[::4])


def is_rest(path: PurePosixPath) -> bool:
    """Whether the tables put a module (below `tests`) into the rest."""
    return _is_below(path, REST) and not _is_below(path, QUICK)


def _is_below(path: PurePosixPath, places: Iterable[str]) -> bool:
    return any(path.is_relative_to(place) for place in places)
