"""Installed packages, made up or installed for a test."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from hf_speculate.speculator import registry

from .paths import REPOSITORY


@contextmanager
def replaced_entry_points(own_group: str, installed: Any) -> Iterator[Callable[..., None]]:
    """A function that replaces the entry points of a group by (name, value) pairs.

    Args:
        own_group: its name.
        installed: the cached function that lists the group.
    """
    with pytest.MonkeyPatch.context() as patch:

        def replace(*points):
            found = [EntryPoint(name=name, value=value, group=own_group) for name, value in points]
            patch.setattr(registry, "entry_points", lambda *, group: found if group == own_group else [])
            installed.cache_clear()

        yield replace
    installed.cache_clear()
    registry.joining_drafters.cache_clear()


def install_example(name: str, folder: Path) -> Path:
    """A package of `examples/` as `pip install` leaves it, without network; the source is copied, so that no build
    output lands in the checkout. Returns the folder to put on the path."""
    example = REPOSITORY / "examples" / name
    source = shutil.copytree(example, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "--target", str(folder / "site"), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return folder / "site"


def assert_comes_and_goes(site: Path, installed: Any, name: str, distribution: str) -> None:
    """`name` is listed by `installed`, a cached function, as long as `site` is on the path."""
    try:
        assert name not in installed()
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(site))
            installed.cache_clear()
            assert installed()[name].dist.name == distribution
        installed.cache_clear()
        assert name not in installed()
    finally:
        installed.cache_clear()
