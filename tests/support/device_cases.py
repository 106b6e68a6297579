"""Drafters on a device that is not there, and requests for them: what a round of each costs at the most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_speculate import Drafter
from hf_speculate_plugins.combined import CombinedDrafter
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions
from hf_speculate_plugins.eagle import EagleDrafter
from hf_speculate_plugins.medusa import MedusaDrafter
from hf_speculate_plugins.medusa.saving import write_heads
from hf_speculate_plugins.prompt_lookup import PromptLookupDrafter, PromptLookupOptions

from .heads import SHAPES, VOCAB, random_heads, target, write_head


@dataclass(frozen=True)
class Case:
    """A drafter, and what a round of it costs once the request is under way.

    Attributes:
        make: from the target as it was placed, a folder to write in, and what places a module.
        waits: times that the host waits for the device.
        uploads: copies to the device at the most, for one row that is greedy.
    """

    make: Callable[[Any, Any, Callable[[Any], Any]], Drafter]
    waits: int
    uploads: int


def eagle(layout: str, shape: str) -> Callable[..., Drafter]:
    return lambda model, folder, place: EagleDrafter.from_folder(write_head(folder, layout), model, **SHAPES[shape])


def draft_model(**options) -> Callable[..., Drafter]:
    """The target itself: drafts of greedy requests are accepted, and so entries move in the caches."""
    return lambda model, folder, place: DraftModelDrafter(place(target()), DraftModelOptions(**options))


def medusa(model, folder, place) -> Drafter:
    write_heads(str(folder), random_heads(), "fasterdecoding", vocab_size=VOCAB)
    return MedusaDrafter.from_folder(str(folder), model)


def combined(model, folder, place) -> Drafter:
    return CombinedDrafter([PromptLookupDrafter(), CASES["eagle-3"].make(model, folder, place)])


CASES = {
    "prompt_lookup": Case(lambda *_: PromptLookupDrafter(PromptLookupOptions(min_ngram=1)), waits=1, uploads=3),
    "draft_model": Case(draft_model(depth=2), waits=1, uploads=7),
    "draft_model, trees": Case(draft_model(depth=2, top_k=3), waits=1, uploads=9),
    "eagle-1": Case(eagle("eagle1", "dynamic"), waits=1, uploads=13),
    "eagle-3": Case(eagle("safeailab", "dynamic"), waits=1, uploads=14),
    "eagle-3, chains": Case(eagle("safeailab", "chain"), waits=1, uploads=17),
    "medusa": Case(medusa, waits=1, uploads=8),
    # Its parts' trees are merged on the host: one more for every part that drafts on the device, here the head.
    "combined": Case(combined, waits=2, uploads=16),
}
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 40}
PLAIN = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
DEPTH = 5  # no draft goes deeper


def plain_text(model, batch, request, **options):
    torch.manual_seed(5)
    return model.generate(**batch, **request, **options)[:, batch["input_ids"].shape[1] :].tolist()
