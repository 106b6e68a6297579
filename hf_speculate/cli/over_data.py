"""Where `generate --data` finds what answers a dataset: the packages that read datasets are of the extra `train`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from ..errors import SpeculateError


GROUP = "hf_speculate.data_generation"


def data_generator() -> Callable[..., dict[str, Any]]:
    """What the entry point of `GROUP` names; raises `SpeculateError` if nobody declares one."""
    points = list(entry_points(group=GROUP))
    if not points:
        raise SpeculateError("--data needs the trainer's packages: pip install 'hf-speculate[train]'")
    return points[0].load()


def given_options(**options: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in options.items() if value is not None}
