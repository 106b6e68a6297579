"""Tests of what only some versions of transformers can do."""

from __future__ import annotations

import pytest

from hf_speculate.compatibility import installed_version, too_old


def has_transformers(oldest: str) -> bool:
    """Whether the installed transformers is this version or a newer one."""
    return not too_old("", oldest)


def needs_transformers(oldest: str, why: str) -> pytest.MarkDecorator:
    """Skips a test, or a class of tests, with a transformers that is older."""
    return pytest.mark.skipif(not has_transformers(oldest), reason=_reason(oldest, why))


def skip_before(oldest: str, why: str) -> None:
    """Skips the test that calls it with a transformers that is older."""
    if not has_transformers(oldest):
        pytest.skip(_reason(oldest, why))


def _reason(oldest: str, why: str) -> str:
    return f"transformers {installed_version()} < {oldest}: {why}"
