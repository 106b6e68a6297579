"""What an EAGLE head computes: one description for all generations and dialects.

`checkpoint` derives an `EagleSpec` from files; `head` builds the module from it and reads nothing else, so whatever
differs between published files is visible here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_speculate.drafting import RAW_LAST


Dialect = Literal["eagle1", "safeailab", "specforge", "speculators", "deepspec", "modelopt", "vllm"]


@dataclass(frozen=True, kw_only=True)
class EagleSpec:
    """Shapes and switches of a head.

    Attributes:
        dialect: whose file layout and conventions the checkpoint follows. "vllm": vLLM's names with a flat config, as
            NeMo Automodel and SpecForge's P-EAGLE write.
        version: 1 (EAGLE-1 and -2, which share files) or 3.
        hidden_size: Hd, width of the draft state.
        target_hidden_size: Ht, width of one target feature.
        vocab_size: V, the target's vocabulary.
        draft_vocab_size: Vd, rows of the head's output matrix.
        own_output: whether these rows are the head's own. Otherwise they are the target's for the draft vocabulary
            ("frequency-ranked", FR-Spec, arXiv:2502.14856), and no file needs to hold them.
        num_layers: decoder layers; the first is special, see `head`.
        intermediate_size, num_heads, num_kv_heads, head_dim, hidden_act, rms_norm_eps: of every layer.
        rope: `rope_parameters` as transformers 5 has them (`rope_type`, `rope_theta`, …).
        max_position_embeddings: length that the head was configured for; only some RoPE types use it.
        feature_layers: indices into the target's `hidden_states`, in concatenation order; None asks for the default,
            which depends on the target's depth, see `resolved_layers`.
        num_features: how many features the first projection takes (1 for EAGLE-1).
        fc_bias, qkv_bias, o_bias, mlp_bias: whether these projections have a bias.
        qk_norm: RMSNorm of queries and keys per head, before RoPE (Qwen3).
        norm_before_fc: one RMSNorm over the concatenated features.
        fc_norm: one RMSNorm for each feature.
        norm_before_residual: the first layer's residual is the normed state instead of the state itself.
        norm_embedding: the first layer norms the token embedding (not so in some ModelOpt heads).
        norm_logits: RMSNorm before the output matrix.
        feed_back_normed: the next draft step gets the normed state ("norm_output" of speculators and vLLM).
        windows: for each layer the length of its sliding attention window, None for full attention.
        parallel: P-EAGLE: a forward behind the last entry takes masks instead of tokens and states, one for each deeper
            draft token, so that a draft takes no forward a level.
        mask_token_id: whose embedding these masks have. None: the file does not say (SpecForge's do not).
    """

    dialect: Dialect
    version: Literal[1, 3]
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    feature_layers: tuple[int, ...] | None = None
    num_features: int = 3
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_embedding: bool = True
    norm_logits: bool = True
    feed_back_normed: bool = False
    windows: tuple[int | None, ...] = (None,)
    parallel: bool = False
    mask_token_id: int | None = None
    own_output: bool = True

    @property
    def kind(self) -> str:
        """What people call such heads."""
        return "P-EAGLE" if self.parallel else f"EAGLE-{self.version}"

    @property
    def algorithm(self) -> Literal["eagle", "eagle3", "peagle"]:
        """What the Hub calls the method."""
        if self.parallel:
            return "peagle"
        return "eagle3" if self.version == 3 else "eagle"

    def resolved_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """`feature_layers` for a target of L layers.

        EAGLE-1 reads the last hidden state after the final norm, which is entry L of `hidden_states`. EAGLE-3 reads
        the inputs of layers 2, L // 2 and L - 3 unless the file names others (SafeAILab's convention, which SpecForge
        writes as *outputs* of layers 1, L // 2 - 1, L - 4); DeepSpec spreads n outputs over layers 1 … L - 3.
        """
        if self.feature_layers is not None:
            return self.feature_layers
        if self.version == 1:
            return (num_target_layers,)
        if self.dialect == "deepspec":
            step = (num_target_layers - 4) / max(self.num_features - 1, 1)
            return tuple(round(1 + i * step) + 1 for i in range(self.num_features))
        return (2, num_target_layers // 2, num_target_layers - 3)

    def entry_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """`resolved_layers` as `Drafter.feature_layers` names them.

        EAGLE-3 wants every layer's own output; for the last one that is not what `hidden_states` ends with.
        """
        layers = self.resolved_layers(num_target_layers)
        return tuple(RAW_LAST if self.version == 3 and layer == num_target_layers else layer for layer in layers)


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """What the caller knows better than the checkpoint: overrides of how a head is read.

    Files of mis-labelled heads load and draft badly; these switches are the known ambiguities (see the table of
    dialects in the documentation). None leaves what the file says.

    Attributes:
        feature_layers: indices into the target's `hidden_states`, in concatenation order.
        rope_theta: base of the rotary embedding.
        norm_before_residual, norm_logits, feed_back_normed: see `EagleSpec`.
        mask_token_id: of P-EAGLE heads, see `EagleSpec`.
        embeddings: "own" uses the file's token embeddings, "target" the target's; None decides by comparing them.
    """

    feature_layers: Sequence[int] | None = None
    rope_theta: float | None = None
    norm_before_residual: bool | None = None
    norm_logits: bool | None = None
    feed_back_normed: bool | None = None
    mask_token_id: int | None = None
    embeddings: Literal["own", "target"] | None = None

    def __post_init__(self) -> None:
        if self.feature_layers is not None:
            object.__setattr__(self, "feature_layers", tuple(self.feature_layers))
        if self.embeddings not in (None, "own", "target"):
            raise ValueError(f"eagle: embeddings must be 'own', 'target' or None, got {self.embeddings!r}.")
