"""Medusa heads read in several ways, to find out how they were trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.errors import SpeculateError

from ..check import Alternative, Options, Text, accepted_lengths
from .drafter import MedusaDrafter


class MedusaReader:
    """The heads in `folder` under `MedusaOptions` that say how to read them."""

    name = "medusa"

    def __init__(self, folder: str, target: PreTrainedModel):
        self._target = target
        self._lm_head = target.get_output_embeddings()
        self._loaded = MedusaDrafter.from_folder(folder, target)
        self._folder = folder

    def depth(self, depth: int) -> int:
        return min(depth, self._loaded.heads.num_heads)

    @torch.inference_mode()
    def accepted(self, options: Options, texts: Sequence[Text], depth: int) -> Int[Tensor, " P"]:
        try:
            drafter = MedusaDrafter.from_folder(self._folder, self._target, **options)
        except ValueError as error:
            raise SpeculateError(str(error)) from error
        lengths = []
        for text in texts:
            roots = text.roots(depth)
            lengths.append(accepted_lengths(self._drafted(drafter, text, roots, depth), text, roots))
        return torch.cat(lengths)

    def _drafted(self, drafter: MedusaDrafter, text: Text, roots: range, depth: int) -> Int[Tensor, "P D"]:
        """The best token of every head, from the state that each root was chosen from. Fewer heads draft less."""
        heads, states = drafter.heads, text.states[drafter.feature_layers[0]]
        features = states[torch.tensor(roots, dtype=torch.long) - 1].to(heads.device, heads.dtype)
        best = heads(features, self._lm_head, num_heads=min(depth, heads.num_heads)).argmax(-1).T
        if heads.token_ids is not None:
            best = heads.token_ids[best]
        return torch.nn.functional.pad(best, (0, depth - best.shape[1]), value=-1)

    def alternatives(self, options: Options) -> list[Alternative]:
        """Heads in reverse order or beginning with one that repeats the target's own token; states before the norm."""
        found = []
        order = list(range(self._loaded.heads.num_heads))
        if "order" not in options and len(order) > 1:
            found.append(Alternative({"order": order[::-1]}, "the heads in reverse order"))
            found.append(Alternative({"order": order[1:]}, "without head 0, which repeats the target's own token"))
        if "before_final_norm" not in options:
            found.append(Alternative({"before_final_norm": True}, "states before the target's final norm"))
        return found
