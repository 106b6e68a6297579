"""Checks of options that need no model: they run while options are read, before torch is imported."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_speculate.errors import SpeculateError


DTYPES = ("float32", "bfloat16", "float16", "float64")

# Logits that are divided by less than this may overflow.
COLDEST = 1e-6


def checked(check: Callable[[Any], Any], *also: str) -> Callable[[Any], Any]:
    """A callback for typer that checks the value of an option, or each of its values.

    Args:
        check: function that raises `SpeculateError` for a wrong value.
        also: further values that are right. None, an option that was not given, is always right.
    """

    def callback(value: Any) -> Any:
        for item in value if isinstance(value, list | tuple) else (value,):
            if item is not None and item not in also:
                check(item)
        return value

    return callback


def check_dtype(name: str) -> None:
    """Raises `SpeculateError` for a name that `find_dtype` does not know."""
    if name not in DTYPES:
        raise SpeculateError(f"unknown dtype {name!r}; possible: {', '.join(DTYPES)}.")


def check_temperatures(*temperatures: float | None) -> None:
    """Raises `SpeculateError` for a temperature that makes no probabilities; None is an absent one."""
    for value in temperatures:
        if value is not None and value != 0 and not COLDEST <= value < math.inf:
            raise SpeculateError(f"temperature {value}: possible are 0 (greedy) and numbers from {COLDEST} up.")


def check_plots(folder: Path) -> None:
    """Raises `SpeculateError` if matplotlib is missing: before the measurement, not after it."""
    if find_spec("matplotlib") is None:
        raise SpeculateError("--plot needs matplotlib: pip install 'hf-speculate[plots]'.")
