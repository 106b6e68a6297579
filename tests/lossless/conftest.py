"""Whole requests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fast(unchecked_shapes):
    """See `unchecked_shapes`."""
