"""What sessions of heads draft, seen by tests, and a disk that is full."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator

import pytest

from hf_speculate_plugins.block.drafter import BlockSession
from hf_speculate_plugins.eagle import EagleSession
from hf_speculate_plugins.medusa.drafter import MedusaSession


@pytest.fixture
def drafts(monkeypatch):
    """The trees of all sessions of this test, as tokens and parents."""
    found = []
    for session in (EagleSession, MedusaSession, BlockSession):

        def draft(self, state, original=session.draft):
            tree = original(self, state)
            found.append((tree.token_ids.tolist(), tree.host.parents))
            return tree

        monkeypatch.setattr(session, "draft", draft)
    return found


@pytest.fixture
def small_disk() -> Iterator[Callable[[], None]]:
    """No file may grow beyond 10 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def shrink():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))

    yield shrink
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, before)
