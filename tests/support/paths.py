"""Where the checkout is, and the data beside it."""

from __future__ import annotations

from pathlib import Path


REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = REPOSITORY / "tests"
SHARED = REPOSITORY.parent / "shared"
