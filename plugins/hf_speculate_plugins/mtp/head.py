"""The forward pass of a draft layer (MTP).

Sources: DeepSeek-V3 (arXiv:2412.19437, section 2.2), Qwen3-Next and Qwen3.5 as vLLM and speculators run them, GLM-4.5
as transformers' `MtpModel` does, MiMo-7B. Entry q joins the target's state h at position q, after the final norm, with
the embedding of token q + 1, and predicts token q + 2:

    x = fc([enorm(embedding) ; hnorm(h)]);  y = norm(layer(x));  logits = target's output matrix(y)

Deeper tokens take y in place of h. The layer is of the target's own class, with keys and values of its own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface

from hf_speculate.drafting import finite
from hf_speculate.errors import CheckpointError, TargetMismatchError, first_line
from hf_speculate.target import (
    GenerativeModel,
    decoder_of,
    embedding_layer,
    is_dense,
    last_device,
    layer_windows,
    output_layer,
    unwrap,
)

from ..checkpoints import Checkpoint, HeadSpec, KeyAccount, vocabulary_output
from ..heads import Attend, FeedingHead, LoadedHead, keep_packed
from .layouts import LAYOUTS, Layout
from .source import Source
from .trial import POSSIBLE, check_layer


_ATTENTION = "hf_speculate_mtp"  # name of `_attend_by` in transformers' table


def _attend_by(
    _module: nn.Module,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    _mask: None,
    *,
    attend: Attend | None = None,
    scaling: float | None = None,
    **_others: Any,
) -> tuple[Float[Tensor, "B N heads d"], None]:
    """Attention of a draft layer: `attend`, which the forward was called with, has its keys, values and mask."""
    if attend is None:
        raise TargetMismatchError("its attention passes on no arguments of the layer")
    size = queries.shape[-1]
    if scaling is not None and scaling != size**-0.5:  # that is what `attend` scales by
        queries = queries * (scaling * size**0.5)
    return attend(0, queries, keys, values).transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _attend_by)


@dataclass(frozen=True, kw_only=True)
class MtpSpec(HeadSpec):
    """Shapes and switches of a draft layer. `dialect` names the layout of its files.

    Attributes:
        hidden_first, zeroes_first: see `Layout`.
        num_stored: number of draft layers in the files. The first one drafts every token.
        is_latent: keys and values come from a shared latent state (MLA), and have different sizes.
        layer_type: type of the layer in the target's config; None: its layers have one type.
    """

    hidden_first: bool = False
    zeroes_first: bool = False
    num_stored: int = 1
    is_latent: bool = False
    layer_type: str | None = None
    parallel: bool = False

    @property
    def kind(self) -> str:
        return "MTP"

    @property
    def algorithm(self) -> Literal["mtp"]:
        return "mtp"

    def entry_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """The target's state after the final norm, as `Drafter.feature_layers` names it."""
        return (num_target_layers,)


class MtpHead(FeedingHead[MtpSpec]):
    """A draft layer.

    Args:
        layer: decoder layer of the target's class, which attends by `_attend_by`.
        rotary: the target's module for rotations.
        norm: the target's final norm; the head's three norms are of its kind.
        embed_tokens, lm_head: see `SharingHead`.
    """

    def __init__(
        self,
        spec: MtpSpec,
        layer: nn.Module,
        rotary: Any,
        norm: nn.Module,
        embed_tokens: nn.Module,
        lm_head: nn.Module,
    ):
        super().__init__(spec, embed_tokens, lm_head)
        self.enorm, self.hnorm, self.norm = (_empty_twin(norm) for _ in range(3))
        self.fc = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=False)
        self.layers = nn.ModuleList([layer])
        self.rotary = rotary
        self.attends_by_kernel = not spec.is_latent
        self.counts_pictures = hasattr(rotary, "mrope_section")
        has_types = "layer_type" in inspect.signature(rotary.forward).parameters
        self._rotary_options = {"layer_type": spec.layer_type} if has_types else {}

    def fuse(self, features: Sequence[Float[Tensor, "B N Ht"]]) -> Float[Tensor, "B N Hd"]:
        """The draft states for the target's features: the only feature itself."""
        return features[0].to(device=self.device, dtype=self.dtype)

    def prompt_embeddings(
        self, token_ids: Int[Tensor, "B N"], features: Sequence[Float[Tensor, "B N Ht"]]
    ) -> Float[Tensor, "B N Ht"] | None:
        """The target's own inputs, where pictures stand for tokens: those of the next tokens, as entries have them."""
        if len(features) == 1:
            return None
        inputs = features[1].to(device=self.device, dtype=self.dtype)
        return torch.cat([inputs[:, 1:], self.embed(token_ids[:, -1:])], dim=1)

    def forward(
        self,
        token_ids: Int[Tensor, "B N"],
        states: Float[Tensor, "B N Hd"],
        position_ids: Int[Tensor, "*kinds B N"],
        attend: Attend,
        embeddings: Float[Tensor, "B N Hd"] | None = None,
    ) -> Float[Tensor, "B N Hd"]:
        """Runs N entries; arguments and result as of `EagleHead.forward`.

        Args:
            embeddings: embeddings of the tokens, if they are not those of their ids.
        """
        embeddings = self.embed(token_ids) if embeddings is None else embeddings
        if self.spec.zeroes_first:
            embeddings = embeddings.masked_fill((position_ids == 0)[..., None], 0)
        parts = [self.enorm(embeddings), self.hnorm(states)]
        joined = finite(self.fc(torch.cat(parts[::-1] if self.spec.hidden_first else parts, dim=-1)))
        hidden = self.layers[0](
            joined,
            position_embeddings=self._rotations(joined, position_ids),
            attention_mask=None,
            position_ids=position_ids,
            use_cache=False,
            attend=attend,
        )
        return finite(hidden if isinstance(hidden, Tensor) else hidden[0])

    def _rotations(self, states: Tensor, position_ids: Int[Tensor, "*kinds B N"]) -> Any:
        """The rotations at these positions. A module that counts pictures gets positions of every kind: not all
        versions of transformers take one kind there."""
        if self.counts_pictures:
            rotary: Any = self.rotary
            position_ids = position_ids.expand(len(rotary.mrope_section), -1, -1)
        return self.rotary(states, position_ids, **self._rotary_options)

    def finish(self, hidden: Float[Tensor, "*N Hd"]) -> tuple[Float[Tensor, "*N Hd"], Float[Tensor, "*N Hd"]]:
        """The inputs of `output` for `forward`'s states, and the states that the next draft step takes: the same."""
        normed = self.norm(hidden)
        return normed, normed


def load_head(
    source: Source, target: GenerativeModel, draft_vocab: int | None = None, *, packed: bool = False
) -> LoadedHead[MtpHead]:
    """The first draft layer of `source` for `target`, on the device of the target's last layer.

    Args:
        draft_vocab: number of tokens to draft, see `MtpOptions`.
        packed: whether matrices that a GGUF file has in blocks may stay so (`keep_packed`): to draft, not to train.
    Raises:
        CheckpointError: tensors are missing, unknown or of other shapes than the target's own layers.
        TargetMismatchError: the target has another width, no layer of this kind, or one that cannot run alone.
    """
    checkpoint, left_out = source.read()
    _check_width(checkpoint, target)
    keys = KeyAccount(checkpoint, f"MTP, {source.layout.name}")
    layer = matching_layer(unwrap(target), checkpoint.tensors, source.name)
    head = _built(unwrap(target), layer, source.layout, source.num_layers, draft_vocab)
    tensors = {name: keys.take(name, wanted.shape) for name, wanted in head.state_dict().items()}
    copied, later = "the target's own serves", "the first draft layer drafts every token"
    ignored = {name: copied if source.places[name].is_copy else later for name in left_out}
    report = replace(keys.finish(), ignored=ignored)
    dtype, device, parameters = target.dtype, last_device(target), dict(head.named_parameters())
    state = {
        # Corrections of a router stay in float32, as in the target's own layers.
        name: tensor.to(device=device, dtype=dtype if name in parameters else tensor.dtype, copy=True)
        for name, tensor in tensors.items()
    }
    head.load_state_dict(state, assign=True)
    head.rotary.to(device)
    check_layer(head, type(target).__name__)
    if packed and checkpoint.packed:
        keep_packed(head, checkpoint.packed)
    return LoadedHead(head.eval().requires_grad_(False), None, report)


def _check_width(checkpoint: Checkpoint, target: GenerativeModel) -> None:
    """Raises `TargetMismatchError` for draft layers of a model of another width."""
    projection, size = checkpoint.tensors.get("fc.weight"), target.config.get_text_config(decoder=True).hidden_size
    if projection is not None and len(projection) != size:
        raise TargetMismatchError(
            f"the draft layers in {checkpoint.folder} belong to a model of hidden size {len(projection)}; this "
            f"{type(target).__name__} has {size}."
        )


def new_head(target: GenerativeModel) -> MtpHead:
    """A fresh draft layer in float32 for a target that has none, for training, in the layout of speculators.

    Its decoder layer begins as the target's last one with full attention. The projection passes the target's state on,
    with a little of the embedding, so that training begins near the target's own prediction.

    Raises:
        TargetMismatchError: that layer is quantised or cannot run alone, or the target is not built like others.
    """
    model = unwrap(target)
    decoder = _checked_decoder(model)
    state = next(decoder_layer for decoder_layer in reversed(decoder.layers) if _attends(decoder_layer)).state_dict()
    if not all(tensor.is_floating_point() and tensor.device.type != "meta" for tensor in state.values()):
        raise TargetMismatchError(
            "a new draft layer begins as a layer of the target, whose weights are quantised here."
        )
    layer = matching_layer(model, [f"layers.0.{name}" for name in state], type(model).__name__)
    layout = next(known for known in LAYOUTS if known.name == "speculators")
    head = _built(model, layer, layout)
    size, device = head.spec.hidden_size, last_device(target)
    std = getattr(model.config.get_text_config(decoder=True), "initializer_range", 0.02)
    embedding = torch.randn(size, size, dtype=torch.float32, device="cpu") * std
    begun: dict[str, Tensor] = {f"layers.0.{name}": tensor for name, tensor in state.items()}
    begun["fc.weight"] = torch.cat([embedding, torch.eye(size, dtype=torch.float32, device="cpu")], dim=1)
    fresh = _fresh_values(model, decoder.norm)
    begun |= {f"{norm}.{name}": value for norm in ("enorm", "hnorm") for name, value in fresh.items()}
    begun |= {f"norm.{name}": value for name, value in decoder.norm.state_dict().items()}
    copies = {name: tensor.detach().float().to(device, copy=True) for name, tensor in begun.items()}
    head.load_state_dict(copies, assign=True)
    head.rotary.to(device)
    check_layer(head, type(model).__name__)
    return head


def _checked_decoder(target: GenerativeModel) -> Any:
    """The decoder of a target; raises `TargetMismatchError` where it has not all that a draft layer is made of."""
    decoder = decoder_of(target)
    missing = [name for name in ("layers", "norm", "rotary_emb") if getattr(decoder, name, None) is None]
    if not missing and not any(map(_attends, decoder.layers)):
        missing = ["layer with self_attn"]
    if missing:
        raise TargetMismatchError(
            f"{type(decoder).__name__} has no {', no '.join(missing)}, of which a draft layer (MTP) is made. {POSSIBLE}"
        )
    return decoder


def _attends(layer: nn.Module) -> bool:
    return getattr(layer, "self_attn", None) is not None


def _empty_twin(norm: nn.Module) -> nn.Module:
    """A norm of the same class and settings, with empty parameters and without hooks. Norms have no common arguments
    that one could be made with."""
    twin: Any = type(norm).__new__(type(norm))
    nn.Module.__init__(twin)
    settings = {name: value for name, value in vars(norm).items() if not name.startswith("_") and name != "forward"}
    vars(twin).update(settings)
    for name, value in norm._parameters.items():
        empty = None if value is None else torch.empty(value.shape, dtype=value.dtype, device="meta")
        twin.register_parameter(name, None if empty is None else nn.Parameter(empty))
    return twin


@torch.no_grad()
def _fresh_values(target: GenerativeModel, norm: nn.Module) -> Mapping[str, Tensor]:
    """The values with which transformers begins a norm of a target."""
    twin = _empty_twin(norm).to_empty(device="cpu")
    for name, value in twin.named_parameters():
        value.fill_(name.endswith("weight"))
    target._init_weights(twin)
    return twin.state_dict()


def _built(
    target: GenerativeModel,
    layer: tuple[int, nn.Module],
    layout: Layout,
    num_stored: int = 1,
    draft_vocab: int | None = None,
) -> MtpHead:
    """A head on the meta device; arguments as of `matching_layer`'s result and `MtpSpec`."""
    config = target.config.get_text_config(decoder=True)
    decoder = decoder_of(target)
    num_drafted = min(draft_vocab or config.vocab_size, config.vocab_size)
    spec = _spec(layout, num_stored, config, layer[0], num_drafted)
    rotary = copy.deepcopy(decoder.rotary_emb)
    output = _first_rows(output_layer(target), spec, target.dtype)
    with torch.device("meta"):
        return MtpHead(spec, layer[1], rotary, decoder.norm, embedding_layer(target), output)


def _first_rows(output: Any, spec: MtpSpec, dtype: torch.dtype) -> nn.Module:
    """The output layer for the tokens that are drafted: the layer itself, a view of its first rows, or a copy of them
    where the matrix is quantised in another way than in GGUF files."""
    if spec.draft_vocab_size == spec.vocab_size:
        return output
    if first_rows := getattr(output, "first_rows", None):
        return first_rows(spec.draft_vocab_size)
    if not is_dense(output):
        return vocabulary_output(
            output, spec.hidden_size, torch.arange(spec.draft_vocab_size, dtype=torch.long, device="cpu"), dtype
        )
    rows = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=output.bias is not None, device="meta")
    for name, values in output.named_parameters():
        setattr(rows, name, nn.Parameter(values.detach()[: spec.draft_vocab_size], requires_grad=False))
    return rows


def matching_layer(target: GenerativeModel, names: Iterable[str], where: str) -> tuple[int, nn.Module]:
    """The number of a decoder layer of `target` whose parameters have the names of a draft layer (`layers.0.*`), and a
    new layer of its kind on the meta device. The last layers are tried first: draft layers resemble them."""
    decoder = _checked_decoder(target)
    config = copy.deepcopy(target.config.get_text_config(decoder=True))
    config._attn_implementation = _ATTENTION
    wanted = {name for name in names if name.startswith("layers.0.")}
    for index in reversed(range(len(decoder.layers))):
        layer = _empty_layer(decoder.layers[index], config, index)
        if {f"layers.0.{name}" for name in layer.state_dict()} == wanted:
            return index, layer
    shown = ", ".join(sorted(name.removeprefix("layers.0.") for name in wanted)[:6])
    raise CheckpointError(
        f"{where}: no layer of {type(decoder).__name__} has the tensors of its draft layer ({shown}, …). Draft layers "
        "belong to the model that they were published with."
    )


def _empty_layer(like: nn.Module, config: Any, index: int) -> nn.Module:
    """A decoder layer of a class on the meta device; raises `TargetMismatchError` if the class makes none with this
    config, whose attention is ours."""
    layer_class: Any = type(like)
    try:
        with torch.device("meta"):
            return layer_class(config, index)
    except Exception as error:  # a class of transformers may raise anything
        raise TargetMismatchError(
            f"a {layer_class.__name__} cannot be made as a draft layer (MTP): {type(error).__name__}: "
            f"{first_line(error)}. {POSSIBLE}"
        ) from error


def _spec(layout: Layout, num_stored: int, config: Any, index: int, num_drafted: int) -> MtpSpec:
    types = getattr(config, "layer_types", None)
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return MtpSpec(
        dialect=layout.name,
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        draft_vocab_size=num_drafted,
        num_layers=1,
        intermediate_size=config.intermediate_size,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=head_dim,
        feature_layers=(config.num_hidden_layers,),
        mask_token_id=None,
        windows=(layer_windows(config)[index],),
        qk_norm=False,
        rope=dict(getattr(config, "rope_parameters", None) or {"rope_type": "default"}),
        hidden_first=layout.hidden_first,
        zeroes_first=layout.zeroes_first,
        num_stored=num_stored,
        is_latent=getattr(config, "kv_lora_rank", None) is not None,
        layer_type=types[index] if types else None,
    )
