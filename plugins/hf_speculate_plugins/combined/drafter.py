"""The `combined` drafter."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from hf_speculate.drafting import Drafter, DraftRequest
from hf_speculate.options import read_options
from hf_speculate.speculator import make_speculator

from .options import CombinedOptions
from .session import CombinedSession, Histories


if TYPE_CHECKING:
    from typing_extensions import Self


class CombinedDrafter(Drafter):
    """Drafts with several drafters at once.

    Args:
        parts: two or more drafters for the same target.
        options: see `CombinedOptions`.
    """

    name = "combined"
    options_classes = (CombinedOptions,)

    def __init__(self, parts: Sequence[Drafter], options: CombinedOptions | None = None):
        if len(parts) < 2:
            raise ValueError(f"combined: needs at least two drafters, got {len(parts)}.")
        self.parts = tuple(parts)
        self.options = options or CombinedOptions()
        self.feature_layers = tuple(dict.fromkeys(layer for part in parts for layer in part.feature_layers))
        self.record = next((part.record for part in parts if part.feature_layers), self.record)
        self.histories: Histories = {}

    def __repr__(self) -> str:
        return f"CombinedDrafter({' + '.join(map(repr, self.parts))}, {self.options})"

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        """`parts=` are drafters, names of drafters, or folders and Hub ids of heads; a pair adds options to a name:
        `parts=["prompt_lookup", ("examples/pycoder-eagle3", {"depth": 8})]`."""
        parts: Iterable[Any] = options.pop("parts", None) or ()
        chosen = read_options(CombinedOptions, options, cls.name, also=["parts"])
        return cls([_part(part, target) for part in parts], chosen)

    def check_target(self, target: PreTrainedModel) -> None:
        """Every part has to fit."""
        for part in self.parts:
            part.check_target(target)

    def forget(self) -> None:
        """Every part forgets."""
        for part in self.parts:
            part.forget()

    def start(self, request: DraftRequest) -> CombinedSession:
        return CombinedSession(self.parts, self.options, self.histories, request)


def _part(part: Any, target: PreTrainedModel) -> Drafter:
    if isinstance(part, Drafter):
        return part
    name, options = (part, {}) if isinstance(part, str | os.PathLike) else part
    return make_speculator(os.fspath(name), target, **options).drafter
