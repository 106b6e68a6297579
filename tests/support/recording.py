"""Drafters that note what becomes of their drafts, and what they are shown."""

from __future__ import annotations

import torch

from hf_speculate.testing import ScriptedDrafter

from .models import VOCAB_SIZE


class Recording:
    """Mixed in before a drafter's class: `accepted` has what each round of the last request accepted of its draft."""

    def start(self, request):
        session = super().start(request)
        observe, self.accepted = session.observe, None

        def spy(tokens, features, lengths):
            if self.accepted is None:  # the prompt
                self.accepted = []
            else:
                self.accepted.append(int(lengths[0]) - 1)
            observe(tokens, features, lengths)

        session.observe = spy
        return session


class Tapping(ScriptedDrafter):
    """A script that taps layers of the target, for requests of one row.

    Attributes:
        seen: tokens [1, n], states [1, n, H] by layer, and n, of every observation.
    """

    def __init__(self, script, branching, layers, **options):
        super().__init__(script, branching, vocab_size=VOCAB_SIZE, **options)
        self.feature_layers, self.seen = layers, []

    def start(self, request):
        session = super().start(request)
        session.observe = self._observe
        return session

    def _observe(self, tokens, features, lengths):
        length = int(lengths)
        states = {layer: found[:, :length].clone() for layer, found in features.items()}
        self.seen.append((tokens[:, :length], states, length))

    def assert_saw(self, expected, atol=1e-9):
        """Compares with the states of the whole text, [1, T, H] by layer; returns how many tokens were shown."""
        position = 0
        for _, states, length in self.seen:
            for layer, found in states.items():
                wanted = expected[layer][:, position : position + length]
                torch.testing.assert_close(found, wanted, atol=atol, rtol=0)
            position += length
        return position
