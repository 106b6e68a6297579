"""The `prompt_lookup` drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from hf_speculate.drafting import Drafter, DraftRequest
from hf_speculate.options import read_options
from hf_speculate.stats import Advice

from .options import PromptLookupOptions
from .session import PromptLookupSession


if TYPE_CHECKING:
    from typing_extensions import Self


class PromptLookupDrafter(Drafter):
    """Drafts from the text itself; fits every target."""

    name = "prompt_lookup"
    is_free = True
    options_classes = (PromptLookupOptions,)

    def __init__(self, options: PromptLookupOptions | None = None):
        self.options = options or PromptLookupOptions()

    @property
    def advice(self) -> Advice:
        return Advice(
            good="the text repeats itself or its prompt often enough",
            poor="The text repeats little of itself or of its prompt; a head or a draft model would draft more.",
        )

    def __repr__(self) -> str:
        return f"PromptLookupDrafter({self.options})"

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        return cls(read_options(PromptLookupOptions, options, cls.name))

    def start(self, request: DraftRequest) -> PromptLookupSession:
        return PromptLookupSession(self.options, request)
