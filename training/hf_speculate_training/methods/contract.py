"""What a training method is: a module around a decode head that turns a batch and the target's states into a loss.

The head that is trained is the module that decodes, so training and decoding cannot compute different things. The
target is never a submodule: `state_dict` holds what is trained and nothing else.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hf_speculate.drafting import Drafter, SavedHead

from ..data import Batch
from ..sections import RecipeError
from ..states import TargetStates


if TYPE_CHECKING:
    from typing_extensions import Self


# Targets below are trained for on CPUs and small GPUs, with what was found there (docs/log.md); see `suggested`.
SMALL_HIDDEN_SIZE = 768

# Counts how often the training data have the target emit each token, int64 [V]. It reads all of them.
CountTokens: TypeAlias = Callable[[], Tensor]


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


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Of a method, or a head, that has nothing to choose."""


class TrainingMethod(nn.Module, ABC):
    """A head and how it is trained; the class is an entry point of the group `hf_speculate.training_methods`.

    A recipe's `method.head` and `method.options` are read into two dataclasses of the method's own: a key that is no
    field is refused with a suggestion, values are checked against the annotations, and what `__post_init__` refuses
    with a `ValueError` is an error of the recipe. What is trained is float32, on the device of the target's last layer.

    Class attributes:
        name: of the entry point, `method.name` in recipes.
        head_class: dataclass of a new head's shape.
        options_class: dataclass of the method's options.
        trains_target: whether an adapter of the target learns too. Its states then come with a graph, never from a
            cache, and its adapter's parameters are among those of the method.

    Attributes:
        feature_layers: the states of the target that `forward` reads, as `Drafter.feature_layers`. The state after the
            final norm, `TargetStates.last_hidden`, always comes along.
    """

    name: ClassVar[str]
    head_class: ClassVar[type] = NoOptions
    options_class: ClassVar[type] = NoOptions
    trains_target: ClassVar[bool] = False
    feature_layers: tuple[int, ...] = ()

    @classmethod
    def adapted(cls, target: nn.Module, adapter: Mapping[str, Any]) -> nn.Module:
        """The target with the adapter that is trained, from a recipe's `method.adapter`; here: the target as it is.

        Raises:
            RecipeError: an adapter for a method that trains none, none for one that does, or an unknown key of it.
        """
        if adapter:
            raise RecipeError(
                f"method.adapter is for methods that train the target too; {cls.name} leaves it as it is."
            )
        return target

    @classmethod
    def suggested(cls, config: PretrainedConfig) -> dict[str, dict[str, Any]]:
        """What a recipe's section `method` should say for a target: any of `head`, `options` and `adapter`.

        Args:
            config: the target's, of its text model. Where this says nothing, the defaults of the dataclasses hold.
        """
        return {}

    @classmethod
    @abstractmethod
    def for_target(cls, target: nn.Module, head: Any, options: Any, count_tokens: CountTokens) -> Self:
        """The method around a fresh head.

        Args:
            target: frozen, as `adapted` gave it; `hf_speculate.speculator.unwrap` looks through PEFT.
            head: an instance of `head_class`.
            options: an instance of `options_class`.
            count_tokens: for a draft vocabulary, see `choose_vocabulary`; to be called only where one is asked for.
        Raises:
            RecipeError, TargetMismatchError: a head that cannot be, or not for this target.
        """

    @classmethod
    def from_folder(cls, folder: str, target: nn.Module, options: Any) -> Self:
        """The method around a trained head to go on from (folder or Hub id)."""
        raise RecipeError(f"{cls.name} cannot go on from a trained head: leave method.start_from out.")

    @abstractmethod
    def forward(self, batch: Batch, states: TargetStates) -> StepOutput:
        """The loss of a batch of B rows of S tokens. In `eval()` mode without noise.

        Every trained parameter must get a gradient (it may be 0), also where nothing counts: DDP waits for all.
        """

    @abstractmethod
    def drafter(self, target: PreTrainedModel, **options: Any) -> Drafter:
        """A drafter with the weights as they are now, in the target's dtype, to evaluate and to save.

        It shares memory with what is trained where the dtypes agree; the trained parameters are left as they are.
        Options are those of the drafter's class.
        """

    def evaluation_drafter(self, target: PreTrainedModel, num_nodes: int, **options: Any) -> Drafter:
        """The drafter whose acceptance is measured, with trees of `num_nodes` nodes, the root not counted.

        Args:
            options: a recipe's `evaluation.options`.
        """
        return self.drafter(target, max_nodes=num_nodes, **options)

    def save(self, folder: str | os.PathLike, target: PreTrainedModel, layout: str | None = None) -> SavedHead:
        """Writes the head, and what else belongs to it, in a layout of its drafter (None: the drafter's default).

        Raises:
            CheckpointError: the layout cannot express the head; nothing has been written then.
        """
        return self.drafter(target).save_pretrained(folder, layout)

    def on_step(self, step: int, num_steps: int) -> None:
        """Called before optimiser step `step` (from 0) of `num_steps`: for methods with stages."""

    def check_layout(self, target: PreTrainedModel, layout: str | None) -> None:
        """Raises `CheckpointError` if `save` could not write the head in `layout`; asked before the first step."""
        self.drafter(target).check_layout(layout)

    @property
    def draft_vocabulary(self) -> Int[Tensor, " Vd"] | None:
        """The target's token of each draft column, ascending; None where they are the same."""
        return None
