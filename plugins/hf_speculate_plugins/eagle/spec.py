"""Spec of an EAGLE head, one for all generations and dialects, and the options of drafting with it.

`loading` derives an `EagleSpec` from files; `head` builds the module from it and reads nothing else, so whatever
differs between published files is visible here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hf_speculate.drafting import RAW_LAST
from hf_speculate.errors import OptionError
from hf_speculate.speculator import check_sizes

from ..checkpoints import HeadSpec


Dialect = Literal["eagle1", "safeailab", "specforge", "speculators", "deepspec", "modelopt", "vllm", "llama.cpp"]

# Noise makes the target choose tokens that the head finds less probable. So sampled requests gain from more children
# (SmolLM2, 48 held-out questions, 8 / 16 / 32 nodes: 1 %, 1.5 %, 4 % more tokens per round), and greedy ones do not.
_GREEDY_WIDTH, _SAMPLED_WIDTH = 4, 8
# If the policy scores few nodes, a narrow draft has enough of them. With 3 to 6 nodes, as many tokens are accepted from
# two branches as from eight, in three quarters of the time (Qwen2.5-Coder-0.5B, packed, T=1: 4 to 6 % faster; greedy
# 2 %).
_LEAST_WIDTH, _NODES_OF_BRANCH = 2, 3


@dataclass(frozen=True, kw_only=True)
class EagleSpec(HeadSpec):
    """Shapes and switches of a head.

    Attributes:
        dialect: project whose layout the checkpoint follows. "vllm": vLLM's names with a flat config, as NeMo Automodel
            and SpecForge's P-EAGLE write.
        version: 1 (EAGLE-1 and -2, which share files) or 3.
        own_output: the output matrix is the head's own. If not, its rows are the target's for the draft vocabulary
            ("frequency-ranked", FR-Spec, arXiv:2502.14856), and no file needs to hold them.
        num_layers: number of decoder layers; the first is special, see `head`.
        feature_layers: see `HeadSpec`; None is the default, which depends on the target's depth (`resolved_layers`).
        num_features: number of features that the first projection takes (1 for EAGLE-1).
        fc_bias, qkv_bias, o_bias: biases in these projections.
        norm_before_fc: one RMSNorm over the concatenated features.
        fc_norm: one RMSNorm for each feature.
        norm_before_residual: the first layer's residual is the normed state instead of the state itself.
        norm_embedding: the first layer norms the token embedding (not so in some ModelOpt heads).
        norm_logits: RMSNorm before the output matrix.
        feed_back_normed: the next draft step gets the normed state ("norm_output" of speculators and vLLM).
        parallel: P-EAGLE: a forward after the last entry takes masks instead of tokens and states, one for each deeper
            draft token, so that a draft takes no forward a level.
        mask_token_id: token whose embedding these masks have. None: the file does not name it (SpecForge's do not).
    """

    dialect: Dialect
    version: Literal[1, 3]
    feature_layers: tuple[int, ...] | None = None
    num_features: int = 3
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
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

    @property
    def kind(self) -> str:
        return "P-EAGLE" if self.parallel else f"EAGLE-{self.version}"

    @property
    def algorithm(self) -> Literal["eagle", "eagle3", "peagle"]:
        if self.parallel:
            return "peagle"
        return "eagle3" if self.version == 3 else "eagle"

    @property
    def trains_embeddings(self) -> bool:
        return self.parallel

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

        EAGLE-3 wants every layer's own output; for the last one `hidden_states` ends with something else.
        """
        layers = self.resolved_layers(num_target_layers)
        return tuple(RAW_LAST if self.version == 3 and layer == num_target_layers else layer for layer in layers)


@dataclass(frozen=True, kw_only=True)
class EagleConventions:
    """Overrides of how a head is read, for callers who know better than the checkpoint. None: as in the file.

    Files of mis-labelled heads load and draft badly; these switches are the known ambiguities (see the table of
    dialects in the documentation).

    Attributes:
        feature_layers: indices into the target's `hidden_states`, in concatenation order.
        rope_theta: base of the rotary embedding.
        norm_before_residual, norm_logits, feed_back_normed: see `EagleSpec`.
        mask_token_id: mask token of P-EAGLE heads, see `EagleSpec`.
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
            raise OptionError(f"eagle: embeddings must be 'own', 'target' or None, got {self.embeddings!r}.")


@dataclass(frozen=True)
class TreeSize:
    """Size of one dynamic tree.

    Attributes:
        depth: number of levels, at least 1.
        width: nodes of a level that are run, and children of each.
        max_nodes: draft nodes, the root not counted.
    """

    depth: int
    width: int
    max_nodes: int


@dataclass(frozen=True, kw_only=True)
class EagleOptions:
    """Options of EAGLE drafting.

    Attributes:
        depth: tokens drafted along a branch; each costs one forward of the head.
        top_k: branches of a level; 1 drafts a chain. None: 4, and 8 for requests that sample; fewer, down to 2, while
            the policy finds that few nodes pay.
        max_nodes: draft nodes of a tree, the root not counted. (SafeAILab's `total_token` counts it, and its
            `depth` counts the levels below the first: total_token=60, depth=7 are max_nodes=59, depth=8 here.)
    """

    depth: int = 8
    top_k: int | None = None
    max_nodes: int = 24

    def __post_init__(self) -> None:
        check_sizes("eagle", self, "depth", "top_k", "max_nodes")

    def width(self, samples: bool, num_nodes: float | None = None) -> int:
        """Branches of a level, for a request that samples or not.

        Args:
            num_nodes: number of draft nodes that pay (`DraftState.num_nodes`); None if unknown.
        """
        if self.top_k is not None:
            return self.top_k
        most = _SAMPLED_WIDTH if samples else _GREEDY_WIDTH
        return most if num_nodes is None else min(max(math.ceil(num_nodes / _NODES_OF_BRANCH), _LEAST_WIDTH), most)
