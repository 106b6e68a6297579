"""EAGLE checkpoints of every published layout, read: tensors first, config second.

Sources: the files written by SafeAILab/EAGLE, sgl-project/SpecForge, vllm-project/speculators, deepseek-ai/DeepSpec,
NVIDIA/Model-Optimizer, NVIDIA-NeMo/Automodel and llama.cpp. Dialects name the same tensors differently (`midlayer.` /
`layers.0.`), count layers differently (outputs of layers / indices into `hidden_states`), and mean different things by
the same flag. This module makes one `EagleSpec` of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from hf_speculate.errors import CheckpointError, OptionError, TargetMismatchError
from hf_speculate.target import GenerativeModel

from ..checkpoints import (
    GGUF_ARCHITECTURE,
    ConfigValues,
    HeadFacts,
    OpenedHead,
    Shapes,
    mask_token_of,
    rope_of,
    speculators_version,
    windows_of,
)
from ..heads import HeadFiles
from .head import EagleHead
from .spec import Dialect, EagleConventions, EagleSpec


# Names of other dialects -> ours (those of speculators). ModelOpt numbers `midlayer` when there are several; old
# speculators files of EAGLE-1 have the names `fusion_fc` and `transformer`, some EAGLE-4 ones `fc.linear`.
_RENAMES = (
    (re.compile(r"^midlayer\.(\d+\.)"), r"layers.\1"),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^transformer\."), "layers.0."),
    (re.compile(r"^fusion_fc\."), "fc."),
    (re.compile(r"^fc\.linear\."), "fc."),
)
# EAGLE-4 heads are EAGLE-3.1 heads that choose candidates by a matrix of low rank; all logits are exact without it.
_EAGLE4 = {"efficient_lm_head.weight", "efficient_lm_head_down_proj.weight"}
_MASK, _OUTPUT = "mask_hidden", "lm_head.weight"
_MAX_FEATURES = 256  # no published head has more than a handful
# Tensors that only heads of other families have: DFlash / DSpark / Domino, MTP.
_OTHER_FAMILIES = re.compile(r"^(hidden_norm\.|markov_head\.|logit_head\.|prefix_gru\.|mtp)")
_MODELOPT_FLAGS = (
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
    "use_mtp_layernorm",
    "next_layer_regular",
    "parallel_draft_step",
    "return_hidden_post_norm",
)
# Fields of `EagleSpec` that conventions replace.
_OVERRIDES = ("feature_layers", "norm_before_residual", "norm_logits", "feed_back_normed", "mask_token_id")

# Meanings of absent keys in configs, by layout. Each is that of the code that writes a layout, or of its first reader:
# SafeAILab's EAGLE at cb7e0841, speculators 0.1 to 0.9 (the fields of its config classes, alike in all versions that
# have them), vLLM for configs of speculators' layout that other programs wrote, SpecForge 0.2.0, DeepSpec, ModelOpt
# 0.47.0, NeMo Automodel at 36044ad3, llama.cpp b11549. Keys that a layout must have are not listed. The tensors decide
# biases, norms of the features, and whether the output matrix is the head's own.
Defaults = Mapping[str, Any]

_PLAIN: Defaults = {"norm_before_residual": False}
_SPECULATORS: Defaults = {"norm_before_residual": False, "norm_output": False}

DEFAULTS: Mapping[Dialect, Defaults] = {
    "eagle1": {},
    "safeailab": _PLAIN,
    "specforge": {**_PLAIN, "norm_output": True},
    "speculators": _SPECULATORS,
    "deepspec": _PLAIN,
    "modelopt": {**_PLAIN, "norm_output": False, "return_hidden_post_norm": False},
    "vllm": {**_PLAIN, "norm_output": False},
    "llama.cpp": {**_PLAIN, "norm_before_fc": False},
}
# EAGLE-3 in speculators' layout by another program.
UNSIGNED: Defaults = {**_SPECULATORS, "norm_before_residual": True}


class EagleReading(HeadFiles[EagleSpec, EagleHead]):
    """The reading half of `EagleFiles`."""

    name, kind, section, layer_type = "eagle", "EAGLE head", "eagle_config", "llama"
    head_class, conventions_class = EagleHead, EagleConventions
    config_says = "num_attention_heads and RoPE"

    @classmethod
    def recognizes(cls, shapes: Shapes) -> bool:
        return eagle_version(shapes) is not None

    @classmethod
    def canonical(cls, tensors: Mapping[str, Tensor], spec: EagleSpec | None = None) -> dict[str, Tensor]:
        renamed = {canonical_name(name): tensor for name, tensor in tensors.items()}
        if _MASK in renamed:  # some have one dimension less
            renamed[_MASK] = renamed[_MASK].reshape(1, 1, -1)
        return renamed

    @classmethod
    def open(
        cls, folder: str, conventions: EagleConventions | None = None, target: GenerativeModel | None = None
    ) -> OpenedHead[EagleSpec]:
        opened = super().open(folder, conventions, target)
        if target is not None and opened.spec.parallel and opened.spec.mask_token_id is None:
            raise CheckpointError(
                f"{folder} is a P-EAGLE head whose config.json does not name its mask token (SpecForge's do not): pass "
                "mask_token_id=, the token used in training. If unknown, try the tokenizer's mask token."
            )
        return opened

    @classmethod
    def spec_of(cls, stated: HeadFacts, conventions: EagleConventions) -> EagleSpec:
        version = eagle_version(stated.shapes)
        assert version is not None
        dialect = _dialect(stated, version)
        fields = {**stated.layer_fields(), "rope": _rope(stated.layers, dialect)}
        if dialect in ("speculators", "deepspec") and stated.layers.text("model_type") == "qwen3":
            fields["qk_norm"] = True
        # Automodel's layers have no windows, whatever the target's config holds.
        depth = fields["num_layers"]
        windows = (None,) * depth if _by_automodel(stated.config) else windows_of(stated.layers, depth)
        spec = EagleSpec(
            dialect=dialect,
            version=version,
            windows=windows,
            **fields,
            **stated.vocabularies(("t2d", "embed_tokens.weight"), (_OUTPUT, "d2t") if version == 3 else ("d2t",)),
            **_features(stated, dialect, version),
            **_switches(stated, dialect, version),
            **_mask(stated),
            own_output=_own_output(stated, dialect, version),
        )
        stated.check_sizes(spec, drafts_all=version == 1)
        spec = spec.overridden(conventions, _OVERRIDES)
        if spec.mask_token_id is not None and not spec.parallel:
            raise OptionError(f"eagle: mask_token_id is for P-EAGLE heads; the head in {stated.folder} is {spec.kind}.")
        return spec

    @classmethod
    def check_sizes(cls, spec: EagleSpec, config: Any, name: str) -> None:
        super().check_sizes(spec, config, name)
        layers = spec.resolved_layers(config.num_hidden_layers)
        if len(layers) != spec.num_features:
            raise TargetMismatchError(
                f"this {spec.kind} head takes features of {spec.num_features} target layers, but {len(layers)} are "
                f"named: {list(layers)}."
            )

    @classmethod
    def unclear(cls, stated: HeadFacts, spec: EagleSpec) -> dict[str, str]:
        config = stated.config
        if spec.version == 1:
            return {}
        if spec.dialect == "speculators" and not spec.parallel and "norm_before_residual" not in config:
            return {"norm_before_residual": "whether the residual is taken before or after the norm"}
        if _says_norm_output(config, spec.dialect) and not _has_vllms_meaning(config):
            meanings = "whether norm_output means the state that is fed back (vLLM) or logits (SpecForge)"
            return {"feed_back_normed": meanings}
        return {}

    @classmethod
    def ignore_leftovers(cls, opened: OpenedHead[EagleSpec]) -> None:
        spec, keys = opened.spec, opened.keys
        for name in opened.checkpoint.tensors:
            if name.startswith("parallel_draft_heads."):
                keys.ignore(name, "ModelOpt's parallel heads are not used")
            elif name in _EAGLE4:
                keys.ignore(name, "chooses candidates for EAGLE-4's output matrix, which is computed whole")
            elif name.startswith("verifier_"):
                keys.ignore(name, "a copy of the target's")
        if not (spec.norm_logits or spec.feed_back_normed):
            keys.ignore("norm.weight", "norm_output is false: logits come from the state as it is")
        if spec.version == 3 and not spec.norm_embedding:
            keys.ignore("layers.0.input_layernorm.weight", "use_input_layernorm_in_first_layer is false")


def canonical_name(name: str) -> str:
    """The name that this package uses for a tensor of any EAGLE dialect."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def eagle_version(shapes: Shapes) -> Literal[1, 3] | None:
    """The generation of a head with tensors of these names and shapes; None if they are not an EAGLE head.

    The input width of the query projection decides: EAGLE-3 attends over [embedding; state], EAGLE-1 over their
    projection. (The width of `fc` does not: an EAGLE-3 head of two features has that of an EAGLE-1 head.)
    """
    canonical = {canonical_name(name): shape for name, shape in shapes.items()}
    if any(_OTHER_FAMILIES.match(name) for name in canonical):
        return None
    q_proj, o_proj = (canonical.get(f"layers.0.self_attn.{name}_proj.weight", ()) for name in "qo")
    if len(q_proj) != 2 or len(o_proj) != 2 or "fc.weight" not in canonical:
        return None
    has_hidden_norm = "layers.0.hidden_norm.weight" in canonical
    if q_proj[1] == 2 * o_proj[0] and has_hidden_norm:
        return 3
    return 1 if q_proj[1] == o_proj[0] and not has_hidden_norm else None


def _dialect(stated: HeadFacts, version: int) -> Dialect:
    config = stated.config
    if version == 1:
        return "eagle1"
    if GGUF_ARCHITECTURE in config:
        return "llama.cpp"
    if "speculators_model_type" in config or "transformer_layer_config" in config:
        if config.text("speculators_model_type", "eagle3") not in ("eagle3", "peagle"):
            raise config.wrong("speculators_model_type", "eagle3 or peagle")
        return "speculators"
    if any(flag in stated.nested.values for flag in _MODELOPT_FLAGS):
        return "modelopt"
    if not any(name.startswith("midlayer.") for name in stated.names):
        return "deepspec" if "target_layer_ids" in config else "vllm"
    # SpecForge's exporters write transformers 5 configs; SafeAILab's own files are those of transformers 4.
    marks = ("norm_output", "fc_norm", "dtype", "rope_parameters", "eagle_config")
    return "specforge" if any(mark in config.values for mark in marks) else "safeailab"


def _says_norm_output(config: ConfigValues, dialect: str) -> bool:
    return dialect in ("vllm", "modelopt") and config.flag("norm_output", False)


def _has_vllms_meaning(config: ConfigValues) -> bool:
    """Whether `norm_output` has vLLM's meaning for sure. SpecForge's architecture decides nothing: others borrow it.
    EAGLE-4's files do not state which meaning theirs has."""
    architectures, unclear = config.texts("architectures"), {"LlamaForCausalLMEagle3", "LlamaForCausalLMEagle4"}
    return _by_automodel(config) or (bool(architectures) and unclear.isdisjoint(architectures))


def _by_automodel(config: ConfigValues) -> bool:
    """Whether NeMo Automodel wrote the config: the target's own, with this key added."""
    return "parallel_drafting" in config


def _own_output(stated: HeadFacts, dialect: str, version: int) -> bool:
    """Whether the output matrix is the head's own. Files that leave it out on purpose state this; ModelOpt's need
    not."""
    config = stated.config
    if version == 1 or _OUTPUT in stated.shapes:
        return True
    is_own = config.flag("own_output", True)
    is_null = "draft_vocab_size" in config.values and "draft_vocab_size" not in config  # SGLang's way to state it
    if not is_own or is_null or dialect == "modelopt":
        return is_own
    raise CheckpointError(
        f"{config.where}: {_OUTPUT} is missing, which EAGLE-3 files of this layout ({dialect}) hold. With the target's "
        'matrix instead the head drafts badly. If that is what it was trained with, add "own_output": false to '
        "config.json."
    )


def _features(stated: HeadFacts, dialect: str, version: int) -> dict[str, Any]:
    """Number, width and indices of the features: ids in files are outputs of layers, or `hidden_states` indices."""
    hidden_size, fc_size = stated.shapes["fc.weight"][0], stated.shapes["fc.weight"][1]
    if version == 1:
        if fc_size <= hidden_size:
            raise CheckpointError(f"fc.weight of EAGLE-1 takes {fc_size} inputs, the state alone has {hidden_size}.")
        return {"num_features": 1, "target_hidden_size": fc_size - hidden_size}
    layers, target_hidden_size = _feature_layers(stated), stated.config.size("target_hidden_size", 0)
    if layers is not None:
        num_features = len(layers)
    elif target_hidden_size:
        num_features = fc_size // target_hidden_size
    else:
        num_features = fc_size // hidden_size if dialect == "deepspec" else 3
    if not 0 < num_features <= _MAX_FEATURES or fc_size % num_features:
        raise CheckpointError(
            f"fc.weight takes {fc_size} inputs, which is not a multiple of the {num_features} target layers "
            f"that the config names ({layers or 'none; 3 by default'}; at most {_MAX_FEATURES})."
        )
    target_hidden_size = fc_size // num_features
    return {"num_features": num_features, "target_hidden_size": target_hidden_size, "feature_layers": layers}


def _feature_layers(stated: HeadFacts) -> tuple[int, ...] | None:
    config, key = stated.config, "eagle_aux_hidden_state_layer_ids"
    if ids := config.indices(key):
        return tuple(ids)
    ids = stated.nested.indices(key) or config.indices("target_layer_ids")
    return tuple(i + 1 for i in ids) if ids else None


def _switches(stated: HeadFacts, dialect: Dialect, version: int) -> dict[str, Any]:
    """Norms and biases. If the config announces one, its tensor must be there: a missing one was lost."""
    shapes, config, nested = stated.shapes, stated.config, stated.nested

    def has(name: str) -> bool:
        return f"layers.0.{name}" in shapes

    switches = {
        "fc_bias": "fc.bias" in shapes or (version == 1 and config.flag("bias", False)),
        "qkv_bias": has("self_attn.q_proj.bias") or (version == 1 and config.flag("qkv_bias", False)),
        "o_bias": has("self_attn.o_proj.bias"),
        "norm_before_fc": "input_norm.weight" in shapes or config.flag("norm_before_fc", False),
        "fc_norm": "fc_norm.0.weight" in shapes or config.flag("fc_norm", False),
    }
    if version == 1:
        return {**switches, "norm_logits": False}
    # Only ModelOpt's heads may lack these norms.
    is_free = dialect == "modelopt"
    norms_embedding = has("input_layernorm.weight") if is_free else True
    switches["norm_embedding"] = nested.flag("use_input_layernorm_in_first_layer", norms_embedding)
    switches["norm_logits"] = nested.flag("use_last_layernorm", "norm.weight" in shapes if is_free else True)
    filled = config.with_defaults(_defaults(stated, dialect))
    switches["norm_before_residual"] = filled.flag("norm_before_residual", False)
    if dialect == "speculators":
        switches["feed_back_normed"] = filled.flag("norm_output", False)
    elif dialect == "specforge":
        # Here the flag means "norm before the output matrix"; what is fed back is never normed.
        switches["norm_logits"] = filled.flag("norm_output", False)
    elif _says_norm_output(config, dialect):
        switches["feed_back_normed"] = _has_vllms_meaning(config)
    if nested.flag("return_hidden_post_norm", False):
        switches["feed_back_normed"] = True
    return switches


def _defaults(stated: HeadFacts, dialect: Dialect) -> Mapping[str, Any]:
    is_parallel = bool(_mask(stated))
    is_unsigned = dialect == "speculators" and speculators_version(stated.config) is None
    return UNSIGNED if is_unsigned and not is_parallel else DEFAULTS[dialect]


def _mask(stated: HeadFacts) -> dict[str, Any]:
    config = stated.config
    is_said = config.text("speculators_model_type") == "peagle" or config.flag("parallel_drafting", False)
    return {"parallel": True, "mask_token_id": mask_token_of(config)} if is_said or _MASK in stated.shapes else {}


def _rope(layers: ConfigValues, dialect: str) -> dict[str, Any]:
    rope = rope_of(layers)
    if dialect in ("eagle1", "safeailab") and rope["rope_type"] in ("linear", "dynamic"):
        rope["rope_theta"] = 10000.0  # the reference code scales plain RoPE and drops the base
    return rope
