"""What the training of heads of decoder layers shares, whatever they draft."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate_plugins.checkpoints import LoadReport
from hf_speculate_plugins.heads import LoadedHead, SharingHead

from .contract import TrainingMethod
from .teacher import Teacher
from .weights import detached_copy


Head = TypeVar("Head", bound=SharingHead[Any])
Options = TypeVar("Options")


class HeadMethod(TrainingMethod, Generic[Head, Options]):
    """A method that trains one head, against the target's own distribution.

    Args:
        head: the head, with parameters in float32.
        target: whose states it reads; only its output layer is kept, and not as a submodule.
        target_ids: int64 [Vd], target id of each draft id, ascending; None where they are the same.
        options: of `options_class`; None: its defaults.
    """

    def __init__(
        self,
        head: Head,
        target: PreTrainedModel,
        target_ids: Int[Tensor, " Vd"] | None = None,
        options: Options | None = None,
    ):
        super().__init__()
        self.head = head
        self.options: Options = self.options_class() if options is None else options
        self.target_ids = target_ids
        vocab_size = target.config.get_text_config(decoder=True).vocab_size
        self.teacher = Teacher(target.get_output_embeddings(), target_ids, vocab_size)

    @property
    def draft_vocabulary(self) -> Int[Tensor, " Vd"] | None:
        return self.target_ids

    def decoding_head(self, target: PreTrainedModel) -> LoadedHead[Head]:
        """The head as it is now, for decoding with `target`, around the same weights."""
        ids = None if self.target_ids is None else self.target_ids.to(self.head.device)
        return LoadedHead(detached_copy(self.head, target.dtype), ids, LoadReport("the head in training"))
