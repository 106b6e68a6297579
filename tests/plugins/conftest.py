"""What sessions of heads draft, seen by tests."""

from __future__ import annotations

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
