"""Methods of transformers' models that count or change weights, and its mark, for a model with packed weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from transformers.quantizers.base import HfQuantizer

from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.target import GenerativeModel

from .native import PackedEmbedding, PackedMatrix


class _Method:
    """A function as a method of one model. It does not keep the model alive, and a copy is of the model's copy."""

    def __init__(self, function: Callable[..., Any], model: GenerativeModel):
        self._function, self._model = function, weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._model(), *args, **kwargs)

    def __reduce__(self):
        return _Method, (self._function, self._model())


def replace_methods(model: GenerativeModel) -> None:
    """Replaces, for one packed model, the methods that would read its packed bytes as weights."""
    replaced: Any = model
    replaced.num_parameters = _Method(num_parameters, model)
    vocabulary = model.get_input_embeddings(), model.get_output_embeddings()
    if any(isinstance(layer, PackedEmbedding | PackedMatrix) for layer in vocabulary):
        for part in (model, model.get_decoder()):
            part.resize_token_embeddings = _Method(resize_token_embeddings, part)


def num_parameters(model: GenerativeModel, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Number of weights, not of packed bytes. Tied embeddings count once, as in the model that was packed.

    Args:
        only_trainable: whether to leave out weights without gradients.
        exclude_embeddings: whether to leave out embeddings, and an output matrix that is tied to them.
    """
    output: Any = model.get_output_embeddings() if model.config.tie_word_embeddings else nn.Module()
    tied = [layer for layer in output.modules() if isinstance(layer, PackedMatrix)]
    tables = [id(table) for module, _, table in _parameters(model) if isinstance(module, nn.Embedding)]
    counts: dict[int, Any] = {}
    for module, name, parameter in _parameters(model):
        is_left_out = module in tied or (exclude_embeddings and id(parameter) in tables)
        if not is_left_out and (parameter.requires_grad or not only_trainable):
            counts[id(parameter)] = module.num_weights if name == "packed" else parameter.numel()
    return sum(counts.values())


def _parameters(model: nn.Module) -> Iterator[tuple[Any, str, Tensor]]:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield module, name, parameter


def resize_token_embeddings(
    model: GenerativeModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Embedding:
    """The embeddings, if they have the wanted size.

    Raises:
        UnsupportedRequestError: another size; nothing was changed.
    """
    embeddings: Any = model.get_input_embeddings()
    wanted, step = new_num_tokens or embeddings.num_embeddings, pad_to_multiple_of or 1
    wanted = -(-wanted // step) * step
    if wanted != embeddings.num_embeddings:
        raise UnsupportedRequestError(
            f"this model has {embeddings.num_embeddings} token embeddings, packed as in its GGUF file, and cannot have "
            f"{wanted}. To add or remove tokens, load the file with load_gguf(..., backend='dense')."
        )
    return embeddings


class PackedGgufQuantizer(HfQuantizer):
    """Marks a model as quantised for transformers: it must not save, train or compile it by itself.

    Args:
        problem_without_kernel: reason why the weights were dequantised, if a kernel was to multiply them packed; else
            "" (`target.problem_without_kernel`).
    """

    requires_calibration = False

    def __init__(self, problem_without_kernel: str):
        from transformers.utils.quantization_config import GgufConfig  # `build_model` has checked that it is there

        super().__init__(GgufConfig())
        self.problem_without_kernel = problem_without_kernel

    def is_serializable(self) -> bool:  # type: ignore[override]
        return False

    @property
    def is_trainable(self) -> bool:  # type: ignore[override]
        return False

    @property
    def is_compileable(self) -> bool:
        return False
