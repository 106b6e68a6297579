"""Options of EAGLE drafting."""

from __future__ import annotations

import pytest

from hf_speculate_plugins.eagle import EagleDrafter, EagleOptions

from ...support.heads import target


def test_more_ranks_than_tokens(head):
    with pytest.raises(ValueError, match="60 children"):
        EagleDrafter.from_folder(head(), target(), tree=[(59,)])


def test_sizes_are_positive():
    with pytest.raises(ValueError, match="depth must be at least 1"):
        EagleOptions(depth=0)
