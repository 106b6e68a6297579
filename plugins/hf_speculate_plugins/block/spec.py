"""What a one-pass head computes: one description for all methods and dialects.

`checkpoint` derives a `BlockSpec` from files; `head` builds the module from it and reads nothing else, so whatever
differs between published files is visible here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


Dialect = Literal["zlab", "deepspec", "specforge", "speculators"]
Method = Literal["dflash", "dspark", "dflash2"]
MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """Shapes and switches of a head.

    Attributes:
        dialect: whose file layout the checkpoint follows.
        method: what the Hub calls it: "dflash" (slots know nothing of each other's tokens; JetSpec's causal heads are
            these, too), "dspark" (a Markov head adds what the token before says), "dflash2" (convolutions, and a
            selector that scores pairs of candidates).
        hidden_size: H, width of the head.
        target_hidden_size: Ht, width of one target feature.
        vocab_size: V, the target's vocabulary.
        draft_vocab_size: Vd, rows of the output matrix.
        num_layers, intermediate_size, num_heads, num_kv_heads, head_dim, hidden_act, rms_norm_eps: of the layers.
        attention_bias, mlp_bias: whether these projections have biases.
        qk_norm: RMSNorm of queries and keys per head, before RoPE.
        rope: `rope_parameters` as transformers 5 has them.
        max_position_embeddings: length that the head was configured for; only some RoPE types use it.
        feature_layers: indices into the target's `hidden_states`, in concatenation order.
        adapts_features: a projection from Ht to H of every feature before they are joined (JetSpec).
        block_size: slots of a block, the anchor's included.
        mask_token_id: what is embedded in the slots behind the anchor.
        first_slot: the first slot that proposes: 1 where a slot proposes the token at its own place (z-lab), 0 where it
            proposes the one behind it (DeepSpec).
        causal: for each layer, whether slots see only slots up to their own.
        windows: for each layer the length of its sliding window, None for full attention.
        window_from_anchor: windows count context entries from the anchor, for all slots alike (speculators), instead of
            from each slot (z-lab).
        markov: kind of the Markov head, None without one.
        markov_rank: r, width of its codes.
        confidence: whether there is a head that says how sure a slot is.
        confidence_with_markov: it sees the Markov code of the token before, too.
        conv_kernel_size, conv_group_size: of the convolutions over slots, 0 without.
        selector_rank, selector_top_k: of the selector, 0 without.
        embedding_scale: of the block's embeddings.
        output_multiplier, softcap: logits are multiplied, then bent by `softcap * tanh(logits / softcap)`.
    """

    dialect: Dialect
    method: Method
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    feature_layers: tuple[int, ...]
    first_slot: Literal[0, 1]
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = True
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    adapts_features: bool = False
    window_from_anchor: bool = False
    markov: MarkovKind | None = None
    markov_rank: int = 0
    confidence: bool = False
    confidence_with_markov: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float | None = None

    @property
    def num_features(self) -> int:
        return len(self.feature_layers)

    @property
    def scores_pairs(self) -> bool:
        """Whether what a slot says depends on the token before it."""
        return self.markov is not None or self.selector_rank > 0

    @property
    def max_depth(self) -> int:
        """Of a draft: slots that propose."""
        return self.block_size - self.first_slot
