"""The contract of a training method, and how installed ones are found.

A method is a module around a decode head that turns a batch and the target's states into a loss. The head that is
trained is the module that decodes, so training and decoding cannot compute different things. The target is never a
submodule: `state_dict` holds what is trained and nothing else.

Methods are found through the entry-point group `hf_speculate.training_methods`, built-in ones too. Listing them imports
nothing. A method is imported when a recipe names it, so a broken dependency of one does not hide the others.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig

from hf_speculate.drafting import Drafter, SavedHead
from hf_speculate.speculator import load_installed
from hf_speculate.target import GenerativeModel

from ..data import Batch
from ..names import check_method, installed_methods
from ..sections import RecipeError
from ..states import TargetStates


if TYPE_CHECKING:
    from typing_extensions import Self


# Hidden size below which heads are trained on CPUs and small GPUs, with other settings; see `suggested`.
SMALL_HIDDEN_SIZE = 768

# Counts how often the training data have the target emit each token, int64 [V]. It reads all of them.
CountTokens: TypeAlias = Callable[[], Tensor]


@dataclass(frozen=True)
class StepOutput:
    """The result of a method's forward.

    Attributes:
        loss: scalar with a graph.
        metrics: detached scalars by name. For unrolled step (or head) k, `loss_k` is the mean loss of its entries, and
            `accuracy_k` the share of them whose best draft token is the target's.
    """

    loss: Float[Tensor, ""]
    metrics: dict[str, Float[Tensor, ""]]


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Options of a method or a head that has none."""


class TrainingMethod(nn.Module, ABC):
    """A head and how it is trained; the class is an entry point of the group `hf_speculate.training_methods`.

    A recipe's `method.head` and `method.options` are read into two dataclasses of the method's own. A key that is not a
    field is refused with a suggestion, values are checked against the annotations, and a `ValueError` of
    `__post_init__` is an error of the recipe. Trained parameters are float32, on the device of the target's last layer.

    Class attributes:
        name: name of the entry point, `method.name` in recipes.
        head_class: dataclass of a new head's shape.
        options_class: dataclass of the method's options.

    Attributes:
        feature_layers: hidden states of the target that `forward` reads, as `Drafter.feature_layers`. The state after
            the final norm, `TargetStates.last_hidden`, always comes along.
    """

    name: ClassVar[str]
    head_class: ClassVar[type] = NoOptions
    options_class: ClassVar[type] = NoOptions
    feature_layers: tuple[int, ...] = ()

    @classmethod
    def suggested(cls, config: PretrainedConfig) -> dict[str, dict[str, Any]]:
        """Suggested values for a recipe's section `method`, by part (`head`, `options`) and key.

        The defaults of the dataclasses hold for all others. `config` is that of the target's text model.
        """
        return {}

    @classmethod
    @abstractmethod
    def for_target(cls, target: GenerativeModel, head: Any, options: Any, count_tokens: CountTokens) -> Self:
        """The method around a fresh head.

        Args:
            target: the frozen target, without wrappers; layers of a PEFT adapter are in it.
            head: an instance of `head_class`.
            options: an instance of `options_class`.
            count_tokens: function that counts tokens for a draft vocabulary, see `choose_vocabulary`. It reads all
                data: call it only if the head has such a vocabulary.
        Raises:
            RecipeError, TargetMismatchError: the head cannot be made, or not for this target.
        """

    @classmethod
    def from_folder(cls, folder: str, target: GenerativeModel, options: Any) -> Self:
        """The method around a trained head (folder or Hub id), whose training continues."""
        raise RecipeError(f"{cls.name} cannot continue the training of a head: leave method.start_from out.")

    @abstractmethod
    def forward(self, batch: Batch, states: TargetStates) -> StepOutput:
        """The loss of a batch of B rows of S tokens, without noise in `eval()` mode.

        Every trained parameter must get a gradient, even if nothing counts (it may be 0): DDP waits for all of them.
        """

    @abstractmethod
    def drafter(self, target: GenerativeModel, **options: Any) -> Drafter:
        """A drafter with the present weights, in the target's dtype, to evaluate and to save.

        It may share memory with the trained parameters, which stay as they are. Options are those of the drafter.
        """

    def evaluation_drafter(self, target: GenerativeModel, num_nodes: int, **options: Any) -> Drafter:
        """The drafter whose acceptance is measured, with draft trees of `num_nodes` without the root.

        Options are a recipe's `evaluation.options`.
        """
        return self.drafter(target, max_nodes=num_nodes, **options)

    def save(self, folder: str | os.PathLike, target: GenerativeModel, layout: str | None = None) -> SavedHead:
        """Writes the head and all that belongs to it, in a layout of the drafter (None: its default).

        Raises:
            CheckpointError: the layout cannot express the head; nothing has been written then.
        """
        return self.drafter(target).save_pretrained(folder, layout)

    @property
    def draft_vocabulary(self) -> Int[Tensor, " Vd"] | None:
        """The target's token of each draft column, ascending; None where they are the same."""
        return None


def load_method(name: str) -> type[TrainingMethod]:
    """The method installed under `name`; raises `RecipeError` if there is none."""
    check_method(name)
    return load_installed(installed_methods()[name], TrainingMethod)
