"""What a training method is: a module around a decode head that turns a batch and the target's states into a loss.

The head that is trained is the module that decodes, so training and decoding cannot compute different things. The
target is never a submodule: `state_dict` holds what is trained and nothing else.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_speculate.drafter import Drafter

from ..data.batches import Batch
from ..states.target_states import TargetStates


AnyModule = TypeVar("AnyModule", bound=nn.Module)


@dataclass(frozen=True)
class StepOutput:
    """What a forward of a method gives.

    Attributes:
        loss: scalar with a graph.
        metrics: detached scalars by name. `loss_k` and `accuracy_k` belong to unrolled step (or head) k: the mean loss
            of the entries that it counts, and the share of those where the draft's best token is the target's.
    """

    loss: Float[Tensor, ""]
    metrics: dict[str, Float[Tensor, ""]]


class HeadMethod(nn.Module, ABC):
    """A head and how it is trained.

    Attributes:
        name: of the method, as recipes call it.
        feature_layers: the states of the target that `forward` reads, as `Drafter.feature_layers`.
        trains_target: whether the states must come with a graph (Medusa-2).
    """

    name: ClassVar[str]
    feature_layers: tuple[int, ...] = ()
    trains_target: bool = False

    @abstractmethod
    def forward(self, batch: Batch, states: TargetStates) -> StepOutput:
        """The loss of a batch. In `eval()` mode without noise."""

    @abstractmethod
    def drafter(self, target: PreTrainedModel, **options: Any) -> Drafter:
        """A drafter with the weights as they are now, in the target's dtype, to evaluate and to save.

        It shares memory with what is trained where the dtypes agree; the trained parameters are left as they are.
        Options are those of the drafter's class.
        """

    def on_step(self, step: int, num_steps: int) -> None:
        """Called before optimiser step `step` (from 0) of `num_steps`: for methods with stages."""


def detached_copy(module: AnyModule, dtype: torch.dtype) -> AnyModule:
    """A module for decoding around the same weights: parameters detached and cast, buffers as they are.

    `copy.deepcopy` would copy the target's modules that a head refers to, and hold both sets of weights at once.
    """
    placed = {id(p): nn.Parameter(p.detach().to(dtype), requires_grad=False) for p in module.parameters()}
    return _rebuilt(module, placed).eval()


def _rebuilt(module: Any, placed: dict[int, nn.Parameter]) -> Any:
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = {name: None if p is None else placed[id(p)] for name, p in module._parameters.items()}
    twin._buffers = dict(module._buffers)
    twin._modules = {name: None if m is None else _rebuilt(m, placed) for name, m in module._modules.items()}
    return twin
