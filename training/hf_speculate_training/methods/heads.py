"""Heads in training: their draft vocabulary, their first weights, and the method around one of decoder layers."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from hf_speculate.target import GenerativeModel, output_layer, output_rows
from hf_speculate_plugins.checkpoints import NEUTRAL, LoadReport
from hf_speculate_plugins.heads import LoadedHead, SharingHead

from ..data import Batch
from ..sections import RecipeError
from .contract import SMALL_HIDDEN_SIZE, CountTokens, TrainingMethod
from .losses import Teacher


if TYPE_CHECKING:
    from typing_extensions import Self


DRAFT_VOCAB_SIZE = "draft_vocab_size"
_SMALL_VOCABULARY = 16384

AnyModule = TypeVar("AnyModule", bound=nn.Module)
Head = TypeVar("Head", bound=SharingHead[Any])
MethodOptions = TypeVar("MethodOptions")


def count_tokens(batches: Iterable[Batch], vocab_size: int) -> Int[Tensor, " V"]:
    """Number of times that the target is to emit each token (`loss_mask`)."""
    counts = torch.zeros(vocab_size, dtype=torch.long, device="cpu")
    for batch in batches:
        counts += torch.bincount(batch["input_ids"][batch["loss_mask"].bool()].cpu(), minlength=vocab_size)
    return counts


def draft_vocabulary(counts: Int[Tensor, " V"], size: int) -> Int[Tensor, " Vd"]:
    """The `size` most frequent tokens, ascending.

    Among equally frequent tokens, and those that never occur, the lowest ids are taken, as SpecForge does.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(f"a draft vocabulary has 1 to {len(counts)} tokens, not {size}.")
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def suggested_vocabulary(config: PretrainedConfig) -> int | None:
    """Suggested size of the draft vocabulary; None for the whole one.

    A small head would spend most of its time in the output matrix of a large vocabulary. EAGLE-3 drafts with 32000 of
    Llama's 128256 tokens, SpecForge with 16000 for small Qwen models. 8192 of SmolLM2's 49152 tokens cover 94 % of what
    it writes in held-out chats, 4096 cover 87 %; twice as many make a draft a tenth slower (docs/log.md).
    """
    hidden_size = config.hidden_size
    size = 32000 if hidden_size >= 2048 else 16000 if hidden_size >= SMALL_HIDDEN_SIZE else 8192
    return size if config.vocab_size >= 2 * size and config.vocab_size > _SMALL_VOCABULARY else None


def choose_vocabulary(size: int | None, vocab_size: int, count_tokens: CountTokens) -> Int[Tensor, " Vd"] | None:
    """The tokens of a recipe's `method.head.draft_vocab_size`, ascending; None for the whole vocabulary."""
    if size is None or size == vocab_size:
        return None
    if not 1 <= size < vocab_size:
        raise RecipeError(f"method.head.{DRAFT_VOCAB_SIZE} must be from 1 to the target's {vocab_size}, got {size}.")
    return draft_vocabulary(count_tokens(), size)


def detached_copy(module: AnyModule, dtype: torch.dtype) -> AnyModule:
    """A module for decoding around the same weights: parameters detached and cast, buffers as they are.

    `copy.deepcopy` would copy the target's modules that a head refers to, and hold both sets of weights at once.
    """
    placed = {id(p): nn.Parameter(p.detach().to(dtype), requires_grad=False) for p in module.parameters()}
    return _rebuilt(module, placed).eval()


def trainable(head: AnyModule) -> AnyModule:
    """A loaded head whose training can continue: parameters in float32, with gradients."""
    for parameter in head.parameters():
        parameter.data = parameter.data.float()
    return head.requires_grad_(True)


def refuse_added_tokens(num_tokens: int | None, target: GenerativeModel) -> None:
    """Raises `RecipeError` if the target has more tokens than a head whose training is to continue; None: it has
    any."""
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    if num_tokens not in (None, vocab_size):
        raise RecipeError(
            f"method.start_from: this head knows {num_tokens} tokens, the target has {vocab_size}, and training needs "
            "the target's own. Train a new head for it."
        )


def initialise(head: nn.Module, std: float) -> None:
    """Draws normal weights in float32, as the target's own were. Norms are ones already."""
    head.float()  # modules are made in torch's default dtype, which another thread may have changed
    for module in head.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def layer_sizes(config: Any, num_layers: int, intermediate_size: int | None = None) -> dict[str, Any]:
    """Fields of a `HeadSpec` for layers as wide as those of the target's text model, with full attention.

    The layers are Llama's. What the config of another class does not have, or what Llama's layers do not compute, takes
    `HeadSpec`'s default.
    """
    heads = config.num_attention_heads
    width = intermediate_size or getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    rope, activation = _llama_rope(config), getattr(config, "hidden_act", None)
    others = {name: getattr(config, name, None) for name in ("rms_norm_eps", "max_position_embeddings")}
    chosen = {"hidden_act": activation if _is_plain(activation) else None, "rope": rope, **others}
    return {
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_layers": num_layers,
        "intermediate_size": width,
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "windows": (None,) * num_layers,
        **{name: value for name, value in chosen.items() if value is not None},
    }


def _llama_rope(config: Any) -> dict[str, Any] | None:
    """The RoPE of a target, that of full attention if there are several; None where it has none that Llama has.

    Of RoPE with a switch that heads do not follow, such as a share of the values to turn, only the base stays.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if not isinstance(rope.get("rope_theta"), int | float):
        return None
    if "mrope_section" in rope or any(rope.get(switch, neutral) != neutral for switch, neutral in NEUTRAL.items()):
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return dict(rope)


def _is_plain(activation: Any) -> bool:
    """Whether a config names an activation without parameters of its own, which no layout of heads has."""
    return activation in ACT2FN and not any(True for _ in ACT2FN[activation].parameters())


def initial_std(config: Any) -> float:
    """Standard deviation of the target's weights as its training began."""
    stated = (getattr(config, name, None) for name in ("initializer_range", "init_std"))
    return next((std for std in stated if std), 0.02)


def target_rows(target: GenerativeModel, ids: Int[Tensor, " N"] | None = None) -> Float[Tensor, "N Ht"]:
    """Rows of the target's output matrix, whatever format it has; all of them for None."""
    size = target.config.get_text_config(decoder=True).hidden_size
    return output_rows(output_layer(target), size, target.dtype, ids)


@torch.no_grad()
def copy_rows(weight: Float[Tensor, "N Hd"], rows: Float[Tensor, "N Ht"]) -> None:
    """Fills `weight` with rows of a matrix; those of another width are projected on their main directions."""
    rows = rows.to(weight.device, torch.float32)
    if rows.shape[1] != weight.shape[1]:
        directions = torch.linalg.eigh(rows.mT @ rows).eigenvectors.flip(1)[:, : weight.shape[1]]
        rows = rows @ directions
    weight[:, : rows.shape[1]] = rows


def _rebuilt(module: Any, placed: dict[int, nn.Parameter]) -> Any:
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = {name: None if p is None else placed[id(p)] for name, p in module._parameters.items()}
    twin._buffers = dict(module._buffers)
    twin._modules = {name: None if m is None else _rebuilt(m, placed) for name, m in module._modules.items()}
    return twin


class HeadMethod(TrainingMethod, Generic[Head, MethodOptions]):
    """A method that trains one head, against the target's own distribution.

    Args:
        head: the head, with parameters in float32.
        target: the model whose states the head reads; only its output layer is kept, and not as a submodule.
        target_ids: int64 [Vd], target id of each draft id, ascending; None if they are the same.
        options: an instance of `options_class`; None for its defaults.
    """

    def __init__(
        self,
        head: Head,
        target: GenerativeModel,
        target_ids: Int[Tensor, " Vd"] | None = None,
        options: MethodOptions | None = None,
    ):
        super().__init__()
        self.head = head
        self.options: MethodOptions = self.options_class() if options is None else options
        self.target_ids = target_ids
        vocab_size = target.config.get_text_config(decoder=True).vocab_size
        self.teacher = Teacher(output_layer(target), target_ids, vocab_size)

    @staticmethod
    @abstractmethod
    def new_head(target: GenerativeModel, shape: Any, target_ids: Int[Tensor, " Vd"] | None) -> Head:
        """A fresh head of that shape, an instance of `head_class`."""

    @staticmethod
    @abstractmethod
    def warm_head(folder: str, target: GenerativeModel) -> tuple[Head, Int[Tensor, " Vd"] | None]:
        """A trained head (folder or Hub id) and its draft vocabulary."""

    @classmethod
    def suggested(cls, config: PretrainedConfig) -> dict[str, dict[str, Any]]:
        """A draft vocabulary for large vocabularies."""
        size = suggested_vocabulary(config)
        return {"head": {} if size is None else {DRAFT_VOCAB_SIZE: size}}

    @classmethod
    def for_target(cls, target: GenerativeModel, head: Any, options: MethodOptions, count_tokens: CountTokens) -> Self:
        vocab_size = target.config.get_text_config(decoder=True).vocab_size
        target_ids = choose_vocabulary(getattr(head, DRAFT_VOCAB_SIZE, None), vocab_size, count_tokens)
        return cls(cls.new_head(target, head, target_ids), target, target_ids, options)

    @classmethod
    def from_folder(cls, folder: str, target: GenerativeModel, options: MethodOptions) -> Self:
        head, target_ids = cls.warm_head(folder, target)
        return cls(head, target, target_ids, options)

    @property
    def draft_vocabulary(self) -> Int[Tensor, " Vd"] | None:
        return self.target_ids

    def decoding_head(self, target: GenerativeModel) -> LoadedHead[Head]:
        """The head around the present weights, for decoding with `target`."""
        ids = None if self.target_ids is None else self.target_ids.to(self.head.device)
        return LoadedHead(detached_copy(self.head, target.dtype), ids, LoadReport("the head in training"))
