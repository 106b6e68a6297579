"""Folders of EAGLE heads."""

from __future__ import annotations

from itertools import count

import jaxtyping
import pytest

from ...support.heads import write_head


@pytest.fixture
def head(tmp_path):
    """Factory of head folders, see `write_head`."""
    number = count()
    return lambda *args, **kwargs: write_head(tmp_path / f"head{next(number)}", *args, **kwargs)


@pytest.fixture
def unchecked_shapes():
    """Shapes are not checked: that is half of the time of long runs of small heads. Others run this code checked."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
