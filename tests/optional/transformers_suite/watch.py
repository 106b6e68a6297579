"""Attaches a speculator to every model that generates, and keeps what became of every call.

In the plain run (STOCK_TESTS_PLAIN=1) hf_speculate is not even imported.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import GenerationMixin

from . import sdist


IS_PLAIN = os.environ.get("STOCK_TESTS_PLAIN") == "1"
if not IS_PLAIN:
    # Before anything is patched: it is the `generate` that takes `speculator=` that is watched.
    from hf_speculate import AutoSpeculator, Speculator
    from hf_speculate.testing import ScriptedDrafter

HALF_RIGHT = "half right"


class Calls:
    """The outcomes of the calls of one test.

    Attributes:
        drafter: `HALF_RIGHT` (knows the text, and errs half of the time) or the name of an installed one.
        options: arguments of every call of `generate`, whatever the test says.
        counts: "generate": calls; "asked": those that looked for an attached speculator; "served": those that ran with
            it; "differs": text that is not plain `generate`'s; "drafted", "accepted": tokens.
        stepped_aside: why the others ran without it, and how often.
    """

    def __init__(self, drafter: str, options: dict[str, Any]):
        self.drafter, self.options = drafter, options
        self.counts: Counter[str] = Counter()
        self.stepped_aside: Counter[str] = Counter()
        self.speculator: Any = None

    def attached(self, model) -> Any:
        """In place of `hf_speculate.request.bridge.attached`."""
        self.counts["asked"] += 1
        return self.speculator

    def compare(self, generate, model, *args, **kwargs) -> Any:
        """Calls `generate` without and with a speculator; returns what it gave with it."""
        with torch.random.fork_rng():
            plain = _sequences(generate(model, *args, **kwargs, speculator=None))
        self.speculator = self._make(model, plain[:, args[0].shape[1] :])
        output = generate(model, *args, **kwargs)
        stats, self.speculator = self.speculator.stats, None
        self.counts["differs"] += not torch.equal(_sequences(output), plain)
        self.counts["served"] += stats.calls
        self.counts["drafted"] += stats.drafted_tokens
        self.counts["accepted"] += stats.accepted_tokens
        self.stepped_aside += stats.fallbacks
        return output

    def _make(self, model, text: torch.Tensor) -> Any:
        if self.drafter == HALF_RIGHT:
            drafter = ScriptedDrafter(text, (2, 2, 1), accuracy=0.5, vocab_size=model.config.vocab_size)
            return Speculator(drafter, adaptive=False)
        return AutoSpeculator.from_name(self.drafter, model, adaptive=False)

    def add(self, other: dict[str, Any]) -> None:
        self.counts += Counter(other["counts"])
        self.stepped_aside += Counter(other["stepped_aside"])

    def as_json(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "stepped_aside": dict(self.stepped_aside)}


@contextmanager
def watched(calls: Calls) -> Iterator[None]:
    """Within, models speculate and `calls` counts; in forked ranks too."""
    original = GenerationMixin.generate

    def generate(model, *args, **kwargs):
        if "speculator" in kwargs:  # hf_speculate tries a model before its first request
            return original(model, *args, **kwargs)
        kwargs |= calls.options
        calls.counts["generate"] += 1
        return original(model, *args, **kwargs) if IS_PLAIN else calls.compare(original, model, *args, **kwargs)

    with ExitStack() as stack:
        ranks = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def note_rank() -> None:
            (ranks / str(os.getpid())).write_text(json.dumps(calls.as_json()))

        stack.enter_context(mock.patch.object(GenerationMixin, "generate", generate))
        stack.enter_context(mock.patch.object(sdist, "at_end_of_rank", [note_rank]))
        if not IS_PLAIN:
            stack.enter_context(mock.patch("hf_speculate.request.bridge.attached", calls.attached))
        yield
        for path in ranks.iterdir():
            calls.add(json.loads(path.read_text()))


def _sequences(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences
