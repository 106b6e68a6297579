"""Tests of what only some versions of transformers can do."""

from __future__ import annotations

import pytest

from hf_speculate.compatibility import installed_version, too_old


def has_transformers(oldest: str) -> bool:
    """Whether the installed transformers is this version or a newer one."""
    return not too_old("", oldest)


def needs_transformers(oldest: str, why: str) -> pytest.MarkDecorator:
    """Skips a test, or a module, with a transformers that is older."""
    return pytest.mark.skipif(
        not has_transformers(oldest), reason=f"transformers {installed_version()} < {oldest}: {why}"
    )
