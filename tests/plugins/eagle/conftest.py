"""Folders of EAGLE heads."""

from __future__ import annotations

from itertools import count

import pytest

from ...support.heads import write_head


@pytest.fixture
def head(tmp_path):
    """Factory of head folders, see `write_head`."""
    number = count()
    return lambda *args, **kwargs: write_head(tmp_path / f"head{next(number)}", *args, **kwargs)
