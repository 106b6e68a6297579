"""Decoder layers and target of a head, as configs describe them: read, compared with the tensors, written."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate.target import GenerativeModel

from ..origin import check_stated_name
from .accounting import num_indexed
from .config import ConfigValues, refuse_switches
from .files import Checkpoint
from .layer_config import layer_config, nested_layers, rope_of
from .target_files import TargetFiles


if TYPE_CHECKING:
    from typing_extensions import Self


Shapes = Mapping[str, tuple[int, ...]]

_ATTENTION = "layers.0.self_attn."
_LAYER = re.compile(r"^layers\.(\d+)\.")
_MAX_LAYERS = 64  # no published head has more than a handful; one is built before its tensors are asked for
# Dimensions of the tensors whose sizes define the head; other tensors are compared with these.
_DIMENSIONS = {
    "fc.weight": 2,
    "embed_tokens.weight": 2,
    "lm_head.weight": 2,
    "layers.0.self_attn.k_proj.weight": 2,
    "layers.0.self_attn.q_norm.weight": 1,
    "layers.0.mlp.gate_proj.weight": 2,
    "d2t": 1,
    "t2d": 1,
}


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """Shapes and switches that every head of decoder layers has.

    Attributes:
        dialect: project whose file layout and conventions the checkpoint follows.
        hidden_size: H, width of the head's states.
        target_hidden_size: Ht, width of one target feature.
        vocab_size: V, size of the target's vocabulary.
        draft_vocab_size: Vd, rows of the head's output matrix.
        num_layers: number of decoder layers.
        intermediate_size, num_heads, num_kv_heads, head_dim, hidden_act, rms_norm_eps: sizes of every layer.
        feature_layers: indices into the target's `hidden_states`, in concatenation order; None: the method's default.
        mask_token_id: token whose embedding stands for tokens not known yet; None: the head has none.
        windows: length of the sliding attention window of each layer, None for full attention.
        mlp_bias: biases in the feed-forward projections.
        qk_norm: RMSNorm of queries and keys per head, before RoPE.
        rope: `rope_parameters` as transformers 5 has them (`rope_type`, `rope_theta`, …).
        max_position_embeddings: text length that the head was configured for; only some RoPE types use it.
        own_output: the head's output matrix is its own. If not, its rows are the target's.
    """

    dialect: str
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    feature_layers: tuple[int, ...] | None
    mask_token_id: int | None
    windows: tuple[int | None, ...]
    qk_norm: bool
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    mlp_bias: bool = False
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    own_output: bool = True

    @property
    def algorithm(self) -> str:
        """The Hub's name of the method."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """The name that people know such heads by."""
        return self.algorithm

    @property
    def trains_embeddings(self) -> bool:
        """Whether such heads train their embeddings unless the config states otherwise."""
        return False

    def overridden(self, conventions: Any, names: Sequence[str], **changes: Any) -> Self:
        """The spec with the conventions for `names` and `rope_theta` that are not None."""
        changes |= {name: value for name in names if (value := getattr(conventions, name)) is not None}
        if conventions.rope_theta is not None:
            changes["rope"] = {**self.rope, "rope_theta": float(conventions.rope_theta)}
        return replace(self, **changes)

    def resolved_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """`feature_layers` for a target of this many layers."""
        assert self.feature_layers is not None
        return self.feature_layers


@dataclass(frozen=True)
class HeadFacts:
    """Everything that the files of a head state about it.

    Attributes:
        folder: folder of the files.
        names: names of the tensors, as in the file.
        shapes: shape of each tensor, by its canonical name.
        config: top level of the config.
        nested: object of the config that the method keeps its own keys in.
        layers: config of the decoder layers, its absent keys filled by their class (`layer_config`).
    """

    folder: str
    names: tuple[str, ...]
    shapes: Shapes
    config: ConfigValues
    nested: ConfigValues
    layers: ConfigValues

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, shapes: Shapes, section: str, layer_type: str, follows: Collection[str] = ()
    ) -> HeadFacts:
        """The statements of a checkpoint.

        Raises:
            CheckpointError: tensors of other dimensions, or a key of the config that no head here follows.
        """
        for name, shape in shapes.items():
            wanted = _DIMENSIONS.get(name, len(shape))
            if len(shape) != wanted:
                raise CheckpointError(f"{checkpoint.folder}: {name} has shape {shape}, expected {wanted} dimensions.")
        config = ConfigValues(checkpoint.folder, checkpoint.config)
        nested, layers = config.inner(section), layer_config(config, layer_type)
        refuse_switches(config, nested, follows=follows)
        refuse_switches(*nested_layers(config))
        return cls(checkpoint.folder, tuple(checkpoint.tensors), shapes, config, nested, layers)

    def check_sizes(self, spec: HeadSpec, *, drafts_all: bool = False) -> None:
        """Compares the sizes in the config with those of the tensors, as far as the config has them.

        Args:
            drafts_all: such heads draft the whole vocabulary, so the config's `draft_vocab_size` does not count.
        Raises:
            CheckpointError: a size that differs, with both numbers.
        """
        check_stated_size(self.layers, "hidden_size", spec.hidden_size)
        check_stated_size(self.layers, "intermediate_size", spec.intermediate_size)
        check_stated_size(self.layers, "vocab_size", spec.vocab_size)
        if not drafts_all:
            check_stated_size(self.config, "draft_vocab_size", spec.draft_vocab_size)
        check_stated_size(self.config, "target_hidden_size", spec.target_hidden_size)

    def vocabularies(self, sized: Sequence[str], drafted: Sequence[str]) -> dict[str, int]:
        """`vocab_size` and `draft_vocab_size` of a `HeadSpec`.

        Args:
            sized: tensors with a row for each of the target's tokens; the config counts if the file has none of them.
            drafted: tensors with a row for each draft token; the whole vocabulary is drafted if there are none.
        """
        place = self.layers if "vocab_size" in self.layers else self.config
        known = [self.shapes[name][0] for name in sized if name in self.shapes]
        vocab_size = known[0] if known else place.size("vocab_size")
        rows = [self.shapes[name][0] for name in drafted if name in self.shapes]
        return {"vocab_size": vocab_size, "draft_vocab_size": rows[0] if rows else vocab_size}

    def layer_fields(self) -> dict[str, Any]:
        """The fields of a `HeadSpec` that its decoder layers decide.

        Raises:
            CheckpointError: sizes that no attention has.
            KeyError: a tensor is missing.
        """
        shapes, layers = self.shapes, self.layers
        return {
            **_attention_sizes(shapes, layers),
            # A gap in the names is a missing tensor, not a smaller head.
            "num_layers": num_indexed(
                self.folder, "layer", (match[1] for name in shapes if (match := _LAYER.match(name))), _MAX_LAYERS
            ),
            "intermediate_size": shapes["layers.0.mlp.gate_proj.weight"][0],
            "hidden_act": layers.text("hidden_act") or "silu",
            "rms_norm_eps": layers.number("rms_norm_eps", 1e-6),
            "mlp_bias": "layers.0.mlp.gate_proj.bias" in shapes,
            "qk_norm": f"{_ATTENTION}q_norm.weight" in shapes,
            "rope": rope_of(layers),
            "max_position_embeddings": layers.size("max_position_embeddings", 2048, most=1 << 40),
        }


def _attention_sizes(shapes: Shapes, layer_config: ConfigValues) -> dict[str, int]:
    """`hidden_size`, `num_heads`, `num_kv_heads` and `head_dim` by the tensors of the first layer.

    Raises:
        CheckpointError: sizes that no attention has.
        KeyError: a tensor is missing.
    """
    q_size, hidden_size = shapes[f"{_ATTENTION}q_proj.weight"][0], shapes[f"{_ATTENTION}o_proj.weight"][0]
    kv_size = shapes[f"{_ATTENTION}k_proj.weight"][0]
    q_norm = shapes.get(f"{_ATTENTION}q_norm.weight")
    # `head_dim` of configs is not always there and not always right: the tensors decide with the number of heads.
    head_dim = q_norm[0] if q_norm else q_size // layer_config.size("num_attention_heads")
    if not head_dim or q_size % head_dim or kv_size % head_dim:
        raise CheckpointError(
            f"q_proj has {q_size} rows and k_proj {kv_size}, which {layer_config.values.get('num_attention_heads')} "
            "heads (num_attention_heads in config.json) do not divide."
        )
    num_heads, num_kv_heads = q_size // head_dim, kv_size // head_dim
    if head_dim % 2 or num_heads % num_kv_heads:
        raise CheckpointError(
            f"{num_heads} heads of {head_dim} values, {num_kv_heads} of keys: RoPE turns pairs of values, and as many "
            "heads must share each head of keys."
        )
    return {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


def check_stated_size(config: ConfigValues, key: str, size: int) -> None:
    """Raises `CheckpointError` if the config states another size than `found`, that of the weights."""
    if key in config and (stated := config.size(key)) != size:
        raise CheckpointError(
            f"{config.where}: {key} in {config.file} is {stated}, that of the weights {size}: they do not belong "
            "together, or one of them was changed."
        )


def stated_sizes(spec: HeadSpec) -> dict[str, Any]:
    """The sizes that every config gives of a head's layers, under transformers' names."""
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "num_hidden_layers": spec.num_layers,
        "head_dim": spec.head_dim,
        "hidden_act": spec.hidden_act,
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": False,
    }


def check_stated_target(folder: str, config: Mapping[str, Any], target: GenerativeModel) -> None:
    """Compares depth, name and class of the target with the config's: `num_target_layers` (SpecForge, DeepSpec),
    `base_model_name_or_path` (Medusa) and `verifier` (speculators). Another name or class is logged, once.

    Raises:
        TargetMismatchError: a target of another depth.
        CheckpointError: values of these keys that are not of their types.
    """
    values = ConfigValues(folder, config)
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    if "num_target_layers" in values and (stated := values.size("num_target_layers")) != depth:
        raise TargetMismatchError(
            f"the head {folder} was made for a target of {stated} layers (num_target_layers in config.json), but this "
            f"{type(target).__name__} has {depth}."
        )
    check_stated_name(folder, stated_name(values), _verifier(values).texts("architectures"), target)


def stated_name(values: ConfigValues) -> str | None:
    """Hub id or path of the target; None if the config does not name it."""
    return _verifier(values).text("name_or_path") or values.text("base_model_name_or_path")


def facts_of_target(values: ConfigValues, target: TargetFiles | None) -> dict[str, Any]:
    """`target_name`, `target_architectures` and `num_target_layers` for another file of the same head: from the
    target's files, else from the config of the head."""
    if target is not None:
        depth = target.text_config.num_hidden_layers
        return {"target_name": target.name, "target_architectures": target.architectures, "num_target_layers": depth}
    return {
        "target_name": stated_name(values),
        "target_architectures": _verifier(values).texts("architectures"),
        "num_target_layers": values.size("num_target_layers") if "num_target_layers" in values else None,
    }


def speculators_section(
    algorithm: str, num_tokens: int, target_name: str | None, target_architectures: list[str] | None
) -> dict[str, Any]:
    """`speculators_config` of vllm-project/speculators."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
        "verifier": {"name_or_path": target_name, "architectures": target_architectures or []},
    }


def _verifier(values: ConfigValues) -> ConfigValues:
    return values.inner("speculators_config").inner("verifier")
