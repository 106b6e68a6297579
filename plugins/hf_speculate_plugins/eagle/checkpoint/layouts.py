"""Which EAGLE layout a checkpoint has, and what it says: tensors first, config second.

Sources: the files written by SafeAILab/EAGLE, sgl-project/SpecForge, vllm-project/speculators, deepseek-ai/DeepSpec,
NVIDIA/Model-Optimizer and NVIDIA-NeMo/Automodel. Dialects name the same tensors differently (`midlayer.` /
`layers.0.`), count layers differently (outputs of layers / indices into `hidden_states`), and mean different things by
the same flag; all of that ends here, in one `EagleSpec`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

from hf_speculate.errors import CheckpointError

from ...checkpoints import (
    Checkpoint,
    ConfigValues,
    Shapes,
    attention_sizes,
    check_dimensions,
    check_stated_sizes,
    layer_config_of,
    listed,
    mask_token_of,
    num_layers_of,
    refuse_switches,
    rope_of,
    windows_of,
)
from ..spec import Dialect, EagleSpec


# Names of other dialects -> ours (those of speculators). ModelOpt numbers `midlayer` when there are several; old
# speculators files of EAGLE-1 say `fusion_fc` and `transformer`.
_RENAMES = (
    (re.compile(r"^midlayer\.(\d+\.)"), r"layers.\1"),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^transformer\."), "layers.0."),
    (re.compile(r"^fusion_fc\."), "fc."),
)
MASK = "mask_hidden"  # of P-EAGLE heads
_OUTPUT = "lm_head.weight"
_MAX_FEATURES = 256  # no published head has more than a handful
_Q_PROJ, _K_PROJ = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"
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


def canonical_name(name: str) -> str:
    """The name that this package uses for a tensor of any EAGLE dialect."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def eagle_version(shapes: Shapes) -> Literal[1, 3] | None:
    """Which generation tensors of these names and shapes are, None if they are no EAGLE head.

    The input width of the query projection tells: EAGLE-3 attends over [embedding; state], EAGLE-1 over their
    projection. (The width of `fc` does not: an EAGLE-3 head of two features has that of an EAGLE-1 head.)
    """
    canonical = {canonical_name(name): shape for name, shape in shapes.items()}
    if any(_OTHER_FAMILIES.match(name) for name in canonical):
        return None
    q_proj, o_proj = canonical.get(_Q_PROJ, ()), canonical.get("layers.0.self_attn.o_proj.weight", ())
    if len(q_proj) != 2 or len(o_proj) != 2 or "fc.weight" not in canonical:
        return None
    has_hidden_norm = "layers.0.hidden_norm.weight" in canonical
    if q_proj[1] == 2 * o_proj[0] and has_hidden_norm:
        return 3
    return 1 if q_proj[1] == o_proj[0] and not has_hidden_norm else None


def describe(checkpoint: Checkpoint) -> EagleSpec:
    """The spec of a checkpoint (names as in the file or canonical).

    Raises:
        CheckpointError: not an EAGLE head, or a config that lacks or contradicts what the tensors need.
    """
    shapes = {canonical_name(name): tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    version = eagle_version(shapes)
    if version is None:
        raise CheckpointError(f"{checkpoint.folder} holds no EAGLE head: {listed(sorted(shapes), 8)} …")
    if not checkpoint.config:  # RoPE and the number of heads are nowhere else
        raise CheckpointError(
            f"{checkpoint.folder} has no config.json, which says num_attention_heads and RoPE: copy it from where the "
            "head is from."
        )
    check_dimensions(checkpoint.folder, shapes)
    config = ConfigValues(checkpoint.folder, checkpoint.config)
    dialect = _dialect(config, checkpoint.tensors, version)
    layer_config = layer_config_of(config)
    refuse_switches(config, layer_config, config.inner("eagle_config"))
    num_layers = num_layers_of(checkpoint.folder, shapes)
    try:
        spec = EagleSpec(
            dialect=dialect,
            version=version,
            num_layers=num_layers,
            **_sizes(shapes, layer_config, config, version),
            **_features(shapes, config, dialect, version),
            **_switches(shapes, config, layer_config, dialect, version),
            **_mask(shapes, config),
            own_output=_own_output(shapes, config, dialect, version),
            hidden_act=layer_config.text("hidden_act") or "silu",
            rms_norm_eps=layer_config.number("rms_norm_eps", 1e-6),
            rope=_rope(layer_config, dialect),
            max_position_embeddings=layer_config.size("max_position_embeddings", 2048, most=1 << 40),
            windows=_windows(config, layer_config, num_layers),
        )
    except KeyError as error:
        raise CheckpointError(f"{checkpoint.folder}: the weights lack {error}.") from error
    check_stated_sizes(config, layer_config, spec, drafts_all=version == 1)
    return spec


def unclear(config: ConfigValues, spec: EagleSpec) -> dict[str, str]:
    """What the files leave open, by the option of `Conventions` that decides it."""
    if spec.version == 1:
        return {}
    if spec.dialect == "speculators" and not spec.parallel and "norm_before_residual" not in config:
        return {"norm_before_residual": "whether the residual is taken before or after the norm"}
    if _says_norm_output(config, spec.dialect) and not _has_vllms_meaning(config):
        return {"feed_back_normed": "whether norm_output means the state that is fed back (vLLM) or logits (SpecForge)"}
    return {}


def _dialect(config: ConfigValues, names: Iterable[str], version: int) -> Dialect:
    if version == 1:
        return "eagle1"
    if "speculators_model_type" in config or "transformer_layer_config" in config:
        if config.text("speculators_model_type", "eagle3") not in ("eagle3", "peagle"):
            raise config.wrong("speculators_model_type", "eagle3 or peagle")
        return "speculators"
    nested = config.inner("eagle_config").values
    if any(flag in nested for flag in _MODELOPT_FLAGS):
        return "modelopt"
    if not any(name.startswith("midlayer.") for name in names):
        return "deepspec" if "target_layer_ids" in config else "vllm"
    # SpecForge's exporters write transformers 5 configs; SafeAILab's own files are those of transformers 4.
    marks = ("norm_output", "fc_norm", "dtype", "rope_parameters", "eagle_config")
    return "specforge" if any(mark in config.values for mark in marks) else "safeailab"


def _says_norm_output(config: ConfigValues, dialect: str) -> bool:
    return dialect in ("vllm", "modelopt") and config.flag("norm_output", False)


def _has_vllms_meaning(config: ConfigValues) -> bool:
    """Whether `norm_output` has vLLM's meaning for sure. SpecForge's architecture decides nothing: others borrow it."""
    architectures = config.texts("architectures")
    return _by_automodel(config) or (bool(architectures) and "LlamaForCausalLMEagle3" not in architectures)


def _by_automodel(config: ConfigValues) -> bool:
    """Whether NeMo Automodel wrote the config: the target's own, with this key added."""
    return "parallel_drafting" in config


def _windows(config: ConfigValues, layer_config: ConfigValues, num_layers: int) -> tuple[int | None, ...]:
    """Automodel's layers have no windows, whatever the target's config says."""
    return (None,) * num_layers if _by_automodel(config) else windows_of(layer_config, num_layers)


def _own_output(shapes: Shapes, config: ConfigValues, dialect: str, version: int) -> bool:
    """Whether the output matrix is the head's own. Files that leave it out on purpose say so; ModelOpt's need not."""
    if version == 1 or _OUTPUT in shapes:
        return True
    is_own = config.flag("own_output", True)
    is_null = "draft_vocab_size" in config.values and "draft_vocab_size" not in config  # SGLang's way to say it
    if not is_own or is_null or dialect == "modelopt":
        return is_own
    raise CheckpointError(
        f"{config.where}: {_OUTPUT} is missing, which EAGLE-3 files of this layout ({dialect}) hold. With the target's "
        'matrix instead the head drafts badly. If that is what it was trained with, add "own_output": false to '
        "config.json."
    )


def _sizes(shapes: Shapes, layer_config: ConfigValues, config: ConfigValues, version: int) -> dict[str, int]:
    vocab_size = _vocab_size(shapes, layer_config, config)
    own_head = shapes.get("lm_head.weight") if version == 3 else None
    return {
        **attention_sizes(shapes, layer_config),
        "vocab_size": vocab_size,
        "draft_vocab_size": own_head[0] if own_head else shapes["d2t"][0] if "d2t" in shapes else vocab_size,
        "intermediate_size": shapes["layers.0.mlp.gate_proj.weight"][0],
    }


def _vocab_size(shapes: Shapes, layer_config: ConfigValues, config: ConfigValues) -> int:
    for name in ("t2d", "embed_tokens.weight"):
        if name in shapes:
            return shapes[name][0]
    return (layer_config if "vocab_size" in layer_config else config).size("vocab_size")


def _features(shapes: Shapes, config: ConfigValues, dialect: str, version: int) -> dict[str, Any]:
    """How many features, how wide, and which: ids in files are outputs of layers, or indices into `hidden_states`."""
    hidden_size, fc_size = shapes["fc.weight"][0], shapes["fc.weight"][1]
    if version == 1:
        if fc_size <= hidden_size:
            raise CheckpointError(f"fc.weight of EAGLE-1 takes {fc_size} inputs, the state alone has {hidden_size}.")
        return {"num_features": 1, "target_hidden_size": fc_size - hidden_size, "feature_layers": None}
    layers, target_hidden_size = _feature_layers(config), config.size("target_hidden_size", 0)
    if layers is not None:
        num_features = len(layers)
    elif target_hidden_size:
        num_features = fc_size // target_hidden_size
    else:
        num_features = fc_size // hidden_size if dialect == "deepspec" else 3
    if not 0 < num_features <= _MAX_FEATURES or fc_size % num_features:
        raise CheckpointError(
            f"fc.weight takes {fc_size} inputs, which is no multiple of the {num_features} target layers "
            f"that the config names ({layers or 'none; 3 by default'}; at most {_MAX_FEATURES})."
        )
    return {
        "num_features": num_features,
        "target_hidden_size": fc_size // num_features,
        "feature_layers": layers,
    }


def _feature_layers(config: ConfigValues) -> tuple[int, ...] | None:
    ids = config.indices("eagle_aux_hidden_state_layer_ids")
    if ids:
        return tuple(ids)
    ids = config.inner("eagle_config").indices("eagle_aux_hidden_state_layer_ids") or config.indices("target_layer_ids")
    return tuple(i + 1 for i in ids) if ids else None


def _switches(
    shapes: Shapes, config: ConfigValues, layer_config: ConfigValues, dialect: str, version: int
) -> dict[str, Any]:
    """Norms and biases. What the config announces is asked for: a tensor that is not there was lost."""
    nested = config.inner("eagle_config")

    def has(name: str) -> bool:
        return f"layers.0.{name}" in shapes

    has_qwen_layers = dialect in ("speculators", "deepspec") and layer_config.text("model_type") == "qwen3"
    switches = {
        "fc_bias": "fc.bias" in shapes or (version == 1 and config.flag("bias", False)),
        "qkv_bias": has("self_attn.q_proj.bias") or (version == 1 and config.flag("qkv_bias", False)),
        "o_bias": has("self_attn.o_proj.bias"),
        "mlp_bias": has("mlp.gate_proj.bias"),
        "qk_norm": has("self_attn.q_norm.weight") or has_qwen_layers,
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
    if dialect == "speculators":
        # The library's default is False, its trainer's and vLLM's True: files without the key are vLLM's business.
        switches["norm_before_residual"] = config.flag("norm_before_residual", True)
        switches["feed_back_normed"] = config.flag("norm_output", False)
    elif dialect == "specforge":
        # Here the flag means "norm before the output matrix"; what is fed back is never normed.
        switches["norm_logits"] = config.flag("norm_output", True)
    elif _says_norm_output(config, dialect):
        switches["feed_back_normed"] = _has_vllms_meaning(config)
    if "norm_before_residual" in config:
        switches["norm_before_residual"] = config.flag("norm_before_residual", False)
    if nested.flag("return_hidden_post_norm", False):
        switches["feed_back_normed"] = True
    return switches


def _mask(shapes: Shapes, config: ConfigValues) -> dict[str, Any]:
    is_said = config.text("speculators_model_type") == "peagle" or config.flag("parallel_drafting", False)
    return {"parallel": True, "mask_token_id": mask_token_of(config)} if is_said or MASK in shapes else {}


def _rope(layer_config: ConfigValues, dialect: str) -> dict[str, Any]:
    rope = rope_of(layer_config)
    if dialect in ("eagle1", "safeailab") and rope["rope_type"] in ("linear", "dynamic"):
        rope["rope_theta"] = 10000.0  # the reference code scales plain RoPE and drops the base
    return rope
