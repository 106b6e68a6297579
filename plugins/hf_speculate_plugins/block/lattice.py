"""LiLiCorr: scores of pairs of tokens in neighbouring slots, computed for a whole block at once.

Sources: LiLiCorr (arXiv:2608.20530), NVIDIA/Model-Optimizer, and SGLang 0.5.23 (`models/lilicorr.py`). The K best
tokens of S slots are the cells of a lattice. A few layers of attention over all cells give every cell two unit vectors:

    score(a, b) = logit_scale * <out(a), in(b)>,   of a token b after the token a of the slot before
    score(b)    = logit_scale * <out(anchor), in(b)>,   of a token b of the first slot

The anchor is the state of the last context entry, the one before the root. The logits of a slot choose its cells, and
are features of the cells. They are not added to the scores.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from hf_speculate.attention import tree_backends
from hf_speculate.errors import CheckpointError

from ..checkpoints import ConfigValues


_NUM_FEATURES = 5  # facts about a cell's probability, see `LatticeHead.features`
_MOST = 1 << 14  # bound of every size in a config
# ModelOpt names some modules by their places in a sequence.
_PLACES = {
    r"feature_mlp\.0\.": "feature_norm.",
    r"feature_mlp\.1\.": "feature_mlp.up_proj.",
    r"feature_mlp\.3\.": "feature_mlp.down_proj.",
    r"(layers\.\d+\.mlp)\.0\.": r"\1.up_proj.",
    r"(layers\.\d+\.mlp)\.2\.": r"\1.down_proj.",
}


def plain_name(name: str) -> str:
    """SGLang's name of a tensor that may have ModelOpt's."""
    for place, ours in _PLACES.items():
        name = re.sub(rf"^lilicorr\.{place}", rf"lilicorr.{ours}", name)
    return name


@dataclass(frozen=True, kw_only=True)
class Lattice:
    """Sizes of a lattice, by the names that `dflash_config` has for them after `lilicorr_`.

    Attributes:
        candidate_topk: K, candidates of a slot.
        hidden_size: width of a cell's state.
        num_layers: layers of attention over the cells.
        num_heads: attention heads of a layer.
        mlp_ratio: width of a layer's feed-forward part, as a multiple of `hidden_size`.
        factor_dim: r, width of the unit vectors.
        vector_eps: least length that a vector is divided by.
        logit_scale: factor of the products of unit vectors.
    """

    candidate_topk: int
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_ratio: float
    factor_dim: int
    vector_eps: float
    logit_scale: float

    @classmethod
    def read(cls, place: ConfigValues, width: int) -> Lattice:
        """The lattice of a head of this width. A `hidden_size` of 0 in the config means this width.

        Raises:
            CheckpointError: a key that is missing (none has a default) or has an impossible value.
        """
        if missing := [key for field in fields(cls) if (key := f"lilicorr_{field.name}") not in place]:
            raise CheckpointError(
                f"{place.where}: dflash_config in {place.file} lacks {', '.join(missing)}. LiLiCorr heads need all "
                "eight lilicorr_ keys, which have no defaults: copy them from the head's training."
            )

        values: dict[str, Any] = {}
        for field in fields(cls):
            key = f"lilicorr_{field.name}"
            if key == "lilicorr_hidden_size" and place.values[key] == 0:
                values[field.name] = width
            elif field.type == "int":
                values[field.name] = place.size(key, most=_MOST)
            elif not (number := place.number(key, 0.0)):
                raise place.wrong(key, "a number above 0")
            else:
                values[field.name] = number
        if values["hidden_size"] % values["num_heads"]:
            raise place.wrong("lilicorr_num_heads", f"a divisor of the lattice's width, {values['hidden_size']}")
        return cls(**values)

    def stated(self) -> dict[str, int | float]:
        """The keys of `dflash_config` that `read` reads."""
        return {f"lilicorr_{name}": value for name, value in asdict(self).items()}


class _FeedForward(nn.Module):
    def __init__(self, num_inputs: int, width: int, num_outputs: int):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(num_inputs, width), nn.Linear(width, num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.up_proj(inputs)))


class _LatticeAttention(nn.Module):
    """Attention with the tensors of `nn.MultiheadAttention`, which cannot be captured."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, cells: Float[Tensor, "B N w"], bias: Float[Tensor, "heads N N"]) -> Float[Tensor, "B N w"]:
        joined = functional.linear(cells, self.in_proj_weight, self.in_proj_bias)
        parts = joined.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        with tree_backends(cells.device):
            mixed = functional.scaled_dot_product_attention(*parts.unbind(), attn_mask=bias[None])
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class _LatticeLayer(nn.Module):
    def __init__(self, sizes: Lattice, eps: float):
        super().__init__()
        width = sizes.hidden_size
        self.attn_norm, self.mlp_norm = nn.RMSNorm(width, eps=eps), nn.RMSNorm(width, eps=eps)
        self.attn = _LatticeAttention(width, sizes.num_heads)
        self.mlp = _FeedForward(width, int(width * sizes.mlp_ratio), width)

    def forward(self, cells: Tensor, bias: Tensor) -> Tensor:
        cells = cells + self.attn(self.attn_norm(cells), bias)
        return cells + self.mlp(self.mlp_norm(cells))


class LatticeHead(nn.Module):
    """The lattice of a LiLiCorr head.

    Args:
        sizes: sizes of the lattice.
        hidden_size: H, width of the one-pass head.
        num_slots: S, slots that propose.
        eps: the head's `rms_norm_eps`.
    """

    def __init__(self, sizes: Lattice, hidden_size: int, num_slots: int, eps: float):
        super().__init__()
        self.sizes, width = sizes, sizes.hidden_size
        if width != hidden_size:
            self.token_proj = nn.Linear(hidden_size, width)
        self.pass_hidden_proj, self.context_proj = nn.Linear(hidden_size, width), nn.Linear(hidden_size, width)
        self.feature_norm = nn.LayerNorm(_NUM_FEATURES)
        self.feature_mlp = _FeedForward(_NUM_FEATURES, width, width)
        self.slot_embedding = nn.Parameter(torch.empty(1, 1, num_slots, 1, width))
        self.rank_embedding = nn.Parameter(torch.empty(1, 1, 1, sizes.candidate_topk, width))
        self.relative_slot_bias = nn.Parameter(torch.empty(sizes.num_heads, 2 * num_slots + 1))
        self.same_slot_bias = nn.Parameter(torch.empty(sizes.num_heads))
        self.layers = nn.ModuleList(_LatticeLayer(sizes, eps) for _ in range(sizes.num_layers))
        self.output_norm, self.anchor_norm = nn.RMSNorm(width, eps=eps), nn.RMSNorm(width, eps=eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head, self.in_head = nn.Linear(width, sizes.factor_dim), nn.Linear(width, sizes.factor_dim)
        self.anchor_out_head = nn.Linear(width, sizes.factor_dim)

    def forward(
        self,
        embeddings: Float[Tensor, "B S K H"],
        log_probs: Float[Tensor, "B S K"],
        states: Float[Tensor, "B S H"],
        anchors: Float[Tensor, "B H"],
    ) -> Float[Tensor, "B S K K"]:
        """Scores of the candidates of each slot (last) after those of the slot before.

        Args:
            embeddings: the candidates' token embeddings, of each slot the most probable first.
            log_probs: their log-probabilities in the whole vocabulary.
            states: the slots' states.
            anchors: states of the last context entries.
        Returns:
            The scores, float32. All rows of the first slot are those after the anchor.
        """
        cells = embeddings if not hasattr(self, "token_proj") else self.token_proj(embeddings)
        cells = cells + self.pass_hidden_proj(states)[:, :, None] + self.slot_embedding[0] + self.rank_embedding[0]
        cells = cells + self.feature_mlp(self.feature_norm(self.features(log_probs).to(cells.dtype)))
        bias, cells = self._bias(), cells.flatten(1, 2)
        for layer in self.layers:
            cells = layer(cells, bias)
        cells = self.output_norm(cells).unflatten(1, log_probs.shape[1:])
        anchors = self.anchor_norm(self.context_proj(anchors))
        around = anchors[:, None, None].expand_as(cells)
        factors = functional.silu(self.factor_input_proj(torch.cat([cells, around, cells * around], dim=-1)))
        first = self._unit(self.anchor_out_head(anchors))[:, None, None].expand(-1, 1, cells.shape[2], -1)
        before = torch.cat([first, self._unit(self.out_head(factors))[:, :-1]], dim=1)
        return self.sizes.logit_scale * (before @ self._unit(self.in_head(factors)).mT).float()

    def features(self, log_probs: Float[Tensor, "B S K"]) -> Float[Tensor, "B S K 5"]:
        """Log-probability, probability, distance to the slot's best, rank from 0 to 1, and 1 for the best."""
        ranks = torch.arange(log_probs.shape[-1], device=log_probs.device, dtype=torch.long)
        of_rank = ranks / max(len(ranks) - 1, 1), (ranks == 0).float()
        alone = log_probs, log_probs.exp(), log_probs - log_probs[..., :1]
        return torch.stack([*alone, *(feature.expand_as(log_probs) for feature in of_rank)], dim=-1)

    def _bias(self) -> Float[Tensor, "heads N N"]:
        """The bias of attention between cells: a value for the distance of their slots, and one within a slot."""
        slots = torch.arange(self.slot_embedding.shape[2], device=self.slot_embedding.device, dtype=torch.long)
        apart = slots[:, None] - slots
        bias = self.relative_slot_bias[:, apart + len(slots)] + self.same_slot_bias[:, None, None] * (apart == 0)
        count = self.sizes.candidate_topk
        return bias.repeat_interleave(count, dim=1).repeat_interleave(count, dim=2)

    def _unit(self, vectors: Tensor) -> Tensor:
        return functional.normalize(vectors, dim=-1, eps=self.sizes.vector_eps)
