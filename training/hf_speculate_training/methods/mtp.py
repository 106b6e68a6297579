"""Training of draft layers (MTP): those of the target's own checkpoint, or new ones for a target that has none.

The loss is EAGLE-3's, unrolled (`UnrolledMethod`): the layer learns from its own states as it will have them.
FastMTP (Cai et al., arXiv:2509.18362) weighs step k by a decaying factor in the same way, and trains on the target's
own answers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers import PretrainedConfig

from hf_speculate.errors import CheckpointError
from hf_speculate.messages import get_logger
from hf_speculate.target import GenerativeModel
from hf_speculate_plugins.mtp import MtpDrafter, MtpHead, MtpOptions, Source, load_head, new_head, num_layers_of

from .contract import NoOptions
from .eagle import EagleTrainingOptions, UnrolledMethod
from .heads import trainable


logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class MtpTrainingOptions(EagleTrainingOptions):
    """Options for training a draft layer, see `EagleTrainingOptions`.

    Attributes:
        steps: number of unrolled steps. Draft layers rarely draft more than three tokens that are right.
        step_decay: base of the losses' weights, FastMTP's beta.
    """

    steps: int = 3
    step_decay: float = 0.6


class MtpMethod(UnrolledMethod[MtpTrainingOptions]):
    """Trains a draft layer against the target's distribution, see `MtpTrainingOptions`.

    It begins with the draft layer of the target's own checkpoint, or of the checkpoint that a recipe starts from. For
    any other target it begins with a new one, in the layout of speculators.
    """

    name = "mtp"
    head_class = NoOptions
    options_class = MtpTrainingOptions

    @staticmethod
    def new_head(target: GenerativeModel, shape: Any, target_ids: Int[Tensor, " Vd"] | None) -> MtpHead:
        try:
            source = Source.of_target(target)
        except CheckpointError:
            logger.info("The target has no draft layers: a new one is trained.")
            return new_head(target)
        return trainable(load_head(source, target).head)

    @staticmethod
    def warm_head(folder: str | os.PathLike, target: GenerativeModel) -> tuple[MtpHead, None]:
        return trainable(load_head(Source.find(folder, num_layers_of(target)), target).head), None

    @classmethod
    def suggested(cls, config: PretrainedConfig) -> dict[str, dict[str, Any]]:
        return {}

    def drafter(self, target: GenerativeModel, **options: Any) -> MtpDrafter:
        """A drafter with the present weights; options are those of `MtpOptions`."""
        return MtpDrafter(self.decoding_head(target), target, MtpOptions(**options))
