"""The tiers: `make test` runs what is not marked `rest`, `make test-rest` what is, `make slow` the nightly one, `make
scale` what is in `tests/scale`.

Modules mark their own tests, most of them in their parametrisations. Of plug-ins, trainer and command lines whole
modules are the rest: those that match `REST`, but not those that match `QUICK`.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import pytest


# Patterns of paths below `tests`; `*` goes across folders.
REST = (
    "training/*",
    "bench/*",
    "lossless/test_smollm2.py",
    "lossless/test_coder.py",
    "*/test_cli.py",
    "*/test_generating.py",
    "plugins/check/*",
    "plugins/*test_captured_heads.py",
    "plugins/*test_convert.py",
    "plugins/*test_float16.py",
    "plugins/*test_hostile_heads.py",
    "plugins/*test_interrupted_writers.py",
)
QUICK = (
    "training/*test_data.py",
    "training/*test_losses.py",
    "training/*test_optimizers.py",
    "training/*test_recipe.py",
)


def quick(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Parameters of which the chosen ones (none named: the first) stay in `make test`."""
    values = list(values)
    chosen = chosen or (values[0],)
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.rest) for value in values]


def quick_quarter(values: Iterable[Any]) -> list[Any]:
    """Parameters of which every fourth one stays in `make test`."""
    values = list(values)
    return quick(values, *values[::4])


def is_rest(path: str) -> bool:
    """Whether the tables put a module (its path below `tests`) into the rest."""
    return _matches(path, REST) and not _matches(path, QUICK)


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)
