"""Spec of a one-pass head, one for all methods and dialects, and the options of drafting with it.

`loading` derives a `BlockSpec` from files; `head` builds the module from it and reads nothing else, so whatever differs
between published files is visible here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hf_speculate.errors import OptionError
from hf_speculate.speculator import check_sizes

from ..checkpoints import HeadSpec
from .lattice import Lattice


Dialect = Literal["zlab", "deepspec", "specforge", "modelopt", "speculators", "llama.cpp"]
Method = Literal["dflash", "dspark", "dflash2", "domino", "xpress", "lilicorr"]
MarkovKind = Literal["vanilla", "gated", "rnn", "domino", "xpress"]


@dataclass(frozen=True, kw_only=True)
class BlockSpec(HeadSpec):
    """Shapes and switches of a head.

    Attributes:
        method: name on the Hub: "dflash" (slots know nothing of each other's tokens; JetSpec's causal heads are these,
            too), "dspark" (a Markov head adds a bias from the token before), "dflash2" (convolutions, and a selector
            that scores pairs of candidates), "domino" and "xpress" (a Markov head that sees the whole path), "lilicorr"
            (a lattice that scores pairs of all candidates of a block together).
        attention_bias: biases in the attention projections.
        adapts_features: projection from Ht to H of every feature before they are joined (JetSpec).
        block_size: slots of a block, the anchor's included.
        mask_token_id: token that is embedded in the slots after the anchor.
        first_slot: first slot that proposes: 1 where a slot proposes the token at its own place (z-lab), 0 where it
            proposes the one after it (DeepSpec).
        causal: truth value for each layer: slots see only slots up to their own.
        window_from_anchor: windows count context entries from the anchor, for all slots alike (speculators), instead of
            from each slot (z-lab).
        attention_sinks: each attention head has a logit that takes a share of the softmax and adds no value (ModelOpt,
            as in GPT-OSS).
        rope_interleaved: the file's queries and keys have the two values of a RoPE pair next to each other (LFM2).
            Loading sorts them into halves, so the module computes ordinary RoPE.
        markov: kind of the Markov head, None without one.
        markov_rank: r, width of its codes, and of the inputs of its output matrix.
        gru_size: width of Domino's recurrent state, 0 without.
        num_bare_slots: slots at the start of a block that Domino leaves alone.
        refiner_size: width of the feed-forward part of XPress, 0 without.
        confidence: the head gives the confidence of each slot.
        confidence_with_markov: the confidence head sees the Markov code of the token before, too.
        conv_kernel_size, conv_group_size: sizes of the convolutions over slots, 0 without.
        selector_rank, selector_top_k: sizes of the selector, 0 without.
        lattice: sizes of LiLiCorr's lattice, None without.
        own_embeddings: the file has embeddings and takes the output matrix from the target, so the embeddings are the
            head's own (Nemotron), not a copy of the target's.
        embedding_scale: factor of the block's embeddings.
        output_multiplier, softcap: logits are multiplied, then bent by `softcap * tanh(logits / softcap)`.
    """

    dialect: Dialect
    method: Method
    block_size: int
    mask_token_id: int
    feature_layers: tuple[int, ...]
    first_slot: Literal[0, 1]
    causal: tuple[bool, ...]
    qk_norm: bool = True
    attention_bias: bool = False
    adapts_features: bool = False
    window_from_anchor: bool = False
    attention_sinks: bool = False
    rope_interleaved: bool = False
    markov: MarkovKind | None = None
    markov_rank: int = 0
    gru_size: int = 0
    num_bare_slots: int = 0
    refiner_size: int = 0
    confidence: bool = False
    confidence_with_markov: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    lattice: Lattice | None = None
    own_embeddings: bool = False
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float | None = None

    @property
    def algorithm(self) -> str:
        return self.method

    @property
    def trains_embeddings(self) -> bool:
        return self.own_embeddings

    @property
    def num_features(self) -> int:
        return len(self.feature_layers)

    @property
    def scores_pairs(self) -> bool:
        """Whether a slot's scores depend on the token before it."""
        return self.markov is not None or self.selector_rank > 0 or self.lattice is not None

    @property
    def num_candidates(self) -> int:
        """Number of a slot's tokens that the head was trained to choose among; 0: any."""
        return self.selector_top_k if self.lattice is None else self.lattice.candidate_topk

    @property
    def reads_before_anchor(self) -> bool:
        """Whether scores depend on the token before the anchor: XPress refines the anchor's slot with it."""
        return self.markov == "xpress" and self.first_slot == 1

    @property
    def max_depth(self) -> int:
        """Depth of the deepest draft: the number of slots that propose."""
        return self.block_size - self.first_slot


@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """Options of drafting with one-pass heads.

    Attributes:
        max_nodes: draft nodes of a tree, the root not counted; they are the best ones that the head's scores have.
        top_k: most children of a node; 1 drafts a chain.
        depth: depth of a draft; None: as many slots as the head has.
    """

    max_nodes: int = 24
    top_k: int = 8
    depth: int | None = None

    def __post_init__(self) -> None:
        check_sizes("block", self, "max_nodes", "top_k", "depth")


@dataclass(frozen=True, kw_only=True)
class BlockConventions:
    """Overrides of how a head is read, for callers who know better than the checkpoint. None: as in the file.

    Attributes:
        feature_layers: indices into the target's `hidden_states`, in concatenation order.
        mask_token_id: token that is embedded in the slots after the anchor.
        first_slot: first slot that proposes: 0 for DeepSpec's heads, 1 for z-lab's.
        causal: whether slots see only slots up to their own, in all layers.
        rope_theta: base of the rotary embedding.
        rope_interleaved: whether RoPE turns neighbouring values (LFM2) instead of the two halves.
    """

    feature_layers: Sequence[int] | None = None
    mask_token_id: int | None = None
    first_slot: Literal[0, 1] | None = None
    causal: bool | None = None
    rope_theta: float | None = None
    rope_interleaved: bool | None = None

    def __post_init__(self) -> None:
        if self.feature_layers is not None:
            object.__setattr__(self, "feature_layers", tuple(self.feature_layers))
        if self.first_slot not in (None, 0, 1):
            raise OptionError(f"block: first_slot must be 0, 1 or None, got {self.first_slot!r}.")
