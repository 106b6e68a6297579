"""Absent keys mean what the code that writes a layout means by them: every default of every layout, tried."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch

from hf_speculate.errors import CheckpointError
from hf_speculate_plugins.block import BlockConventions, BlockFiles, BlockHead
from hf_speculate_plugins.block.defaults import DEFAULTS as OF_BLOCKS
from hf_speculate_plugins.checkpoints import GGUF_ARCHITECTURE, Checkpoint, ConfigValues, read_checkpoint
from hf_speculate_plugins.checkpoints.layer_config import layer_config
from hf_speculate_plugins.eagle import EagleConventions, EagleFiles
from hf_speculate_plugins.eagle.loading import DEFAULTS as OF_EAGLE
from hf_speculate_plugins.eagle.loading import UNSIGNED
from hf_speculate_plugins.medusa.loading import read_heads

from ...support.block_heads import spec_of
from ...support.heads import MEDUSA_LAYOUTS, target, write_head, write_medusa_heads


NESTED = "dflash_config"
WITHOUT_MARKOV = {"markov": None, "markov_rank": 0, "confidence": False, "confidence_with_markov": False}
NO_SCALES = {"embedding_scale": 1.0, "output_multiplier": 1.0, "softcap": None}
BY_ANCHOR = {"dialect": "speculators", "windows": (6, None), "window_from_anchor": True}
# A head for each layout and method: kind, changes of its spec, layout to write it in.
HEADS = {
    ("zlab", "dflash"): ("dflash", {}, "zlab"),
    ("zlab", "dspark"): ("dspark", {}, "deepspec"),
    ("zlab", "dflash2"): ("dflash2", NO_SCALES, "zlab"),
    ("zlab", "lilicorr"): ("lilicorr", {}, "zlab"),
    ("deepspec", "dflash"): ("dspark", {"method": "dflash", **WITHOUT_MARKOV}, "deepspec"),
    ("deepspec", "dspark"): ("dspark", {}, "deepspec"),
    ("specforge", "dflash"): ("dspark", {"method": "dflash", **WITHOUT_MARKOV}, "deepspec"),
    ("specforge", "dspark"): ("dspark", {}, "deepspec"),
    ("modelopt", "dflash"): ("sinks", {"windows": (64, 64)}, "modelopt"),
    ("modelopt", "dspark"): ("modelopt", {}, "modelopt"),
    ("modelopt", "domino"): ("domino", {}, "modelopt"),
    ("speculators", "xpress"): ("xpress", BY_ANCHOR, "speculators"),
    ("speculators", "dflash"): ("dflash", BY_ANCHOR, "speculators"),
    ("speculators", "dspark"): ("dspark", BY_ANCHOR, "speculators"),
    ("speculators", "dflash2"): ("dflash2", {**BY_ANCHOR, **NO_SCALES}, "speculators"),
    ("llama.cpp", "dflash"): ("dflash", {}, "llama.cpp"),
    ("llama.cpp", "dspark"): ("dspark", {}, "llama.cpp"),
}
BLOCK_KEYS = [(*of, key) for of in HEADS for key in OF_BLOCKS[of[0]][of[1]]]
EAGLE_KEYS = [(dialect, key) for dialect, keys in OF_EAGLE.items() for key in keys]
# Keys without an effect on a head that lacks what they are about.
NEED_MARKOV = ("markov_head_type", "confidence_head_with_markov")


def block_checkpoint(dialect, method) -> Checkpoint:
    """A head of that layout and method, as `read_checkpoint` gives it."""
    kind, changes, layout = HEADS[dialect, method]
    spec = replace(spec_of(kind), **changes)
    model = target()
    head = BlockHead(spec, model.get_input_embeddings(), model.get_output_embeddings())
    _, tensors, config = BlockFiles.written(head, None, layout, {})
    if dialect == "specforge" or (dialect, method) == ("zlab", "dspark"):
        names = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "confidence_head_with_markov")
        config[NESTED] = {name: config.pop(name) for name in names if name in config}
        config["architectures"] = ["DFlashDraftModel"]
        if dialect == "specforge":
            config[NESTED]["projector_type"] = "dspark"
    return Checkpoint("head", config, tensors, [])


def block_spec(checkpoint, **changes):
    return BlockFiles.describe(changed(checkpoint, changes), BlockConventions())


def changed(checkpoint, changes):
    """The checkpoint with other values of keys, wherever they lay; `...` removes a key."""
    config = copy.deepcopy(checkpoint.config)
    for key, value in changes.items():
        config.get(NESTED, {}).pop(key, None)
        config.pop(key, None)
        if value is not ...:
            config[key] = value
    return replace(checkpoint, config=config)


def others(value):
    """Other values of the kind of a default."""
    if value is None:
        return [True, False]
    if isinstance(value, bool):
        return [not value]
    return ["gated"] if isinstance(value, str) else [2 * value or 3]


def test_all_layouts_and_methods_have_a_head_here():
    assert set(HEADS) == {(dialect, method) for dialect, methods in OF_BLOCKS.items() for method in methods}


@pytest.mark.parametrize(("dialect", "method", "key"), BLOCK_KEYS)
def test_absent_key_of_a_block_head_means_its_default(dialect, method, key):
    checkpoint, default = block_checkpoint(dialect, method), OF_BLOCKS[dialect][method][key]
    absent = block_spec(checkpoint, **{key: ...})
    assert (absent.dialect, absent.method) == (dialect, method) or key == "markov_rank"
    assert block_spec(checkpoint, **{key: default}) == absent
    assert block_spec(checkpoint, **{key: None}) == absent
    if not (key in NEED_MARKOV and method != "dspark"):
        assert any(block_spec(checkpoint, **{key: value}) != absent for value in others(default))


@pytest.mark.parametrize(
    ("of", "key", "message"),
    [
        (("deepspec", "dspark"), "block_size", "lacks block_size"),
        (("specforge", "dspark"), "block_size", "lacks block_size"),
        (("deepspec", "dspark"), "target_layer_ids", "lacks the target layers"),
        (("speculators", "dflash"), "aux_hidden_state_layer_ids", "lacks the target layers"),
        (("llama.cpp", "dspark"), "aux_hidden_state_layer_ids", "lacks the target layers"),
        (("llama.cpp", "dspark"), "block_size", "lacks block_size"),
    ],
)
def test_required_keys_of_a_layout_are_named(of, key, message):
    with pytest.raises(CheckpointError, match=message):
        block_spec(block_checkpoint(*of), **{key: ...})


@pytest.mark.parametrize(
    ("flags", "causal"),
    [
        ({}, (True, False)),
        ({"is_causal": True}, (True, True)),
        ({"is_causal": False}, (False, False)),
        ({"causal": True, "is_causal": False}, (True, True)),  # NeMo Automodel's JetSpec
        ({"causal": False}, (False, False)),  # ModelOpt
        ({"causal_head": False}, (False, False)),  # JetSpec
        ({"use_sliding_window": False}, (True, False)),  # by kind of layer, with a window or without
    ],
)
def test_one_flag_decides_for_all_layers(flags, causal):
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
    assert block_spec(block_checkpoint("zlab", "dflash"), **(sliding | flags)).causal == causal


@pytest.mark.parametrize("windows", [(4, None), (4, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_windows_that_are_written_are_read(windows, causal):
    spec = spec_of("dflash", windows=windows, causal=tuple(causal and window is not None for window in windows))
    head = BlockHead(spec, target().get_input_embeddings(), target().get_output_embeddings())
    _, tensors, config = BlockFiles.written(head, None, "zlab", {})
    assert block_spec(Checkpoint("head", config, tensors, [])) == spec


def test_windows_need_their_switch(tmp_path):
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": ...}
    with pytest.raises(CheckpointError, match=r'not use_sliding_window.*Add "use_sliding_window": true'):
        block_spec(block_checkpoint("zlab", "dflash"), **sliding)
    assert eagle_spec(eagle_checkpoint(tmp_path, "safeailab"), **sliding).windows == (4,)  # Llama has no switch
    sliding |= {"use_sliding_window": True, "sliding_window": ...}
    assert block_spec(block_checkpoint("zlab", "dflash"), **sliding).windows == (4096, None)


def test_a_dspark_class_is_a_dspark_projector():
    checkpoint = block_checkpoint("specforge", "dspark")
    whole = block_spec(checkpoint)
    assert block_spec(checkpoint, projector_type=..., architectures=["DSparkDraftModel"]) == whole
    assert block_spec(checkpoint, projector_type=..., architectures=["Lfm2DSparkDraftModel"]) == whole


def eagle_checkpoint(folder, dialect, **changes) -> Checkpoint:
    """An EAGLE head of that layout, as `read_checkpoint` gives it."""
    written = {"modelopt": "specforge", "llama.cpp": "safeailab"}.get(dialect, dialect)
    found = read_checkpoint(write_head(folder / "head", written))
    config = dict(found.config)
    if dialect == "modelopt":
        config["eagle_config"] = {**config["eagle_config"], "use_last_layernorm": True}
        config["architectures"] = ["Eagle3"]  # that of SpecForge leaves the meaning of norm_output open
    if dialect == "llama.cpp":
        config |= {GGUF_ARCHITECTURE: "eagle3", "eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
    return changed(replace(found, config=config), changes)


def eagle_spec(checkpoint, **changes):
    return EagleFiles.describe(changed(checkpoint, changes), EagleConventions())


@pytest.mark.parametrize(("dialect", "key"), EAGLE_KEYS)
def test_absent_key_of_an_eagle_head_means_its_default(tmp_path, dialect, key):
    checkpoint, default = eagle_checkpoint(tmp_path, dialect), OF_EAGLE[dialect][key]
    absent = eagle_spec(checkpoint, **{key: ...})
    assert absent.dialect == dialect
    assert eagle_spec(checkpoint, **{key: default}) == eagle_spec(checkpoint, **{key: None}) == absent
    changes = {key: not default}
    if key == "return_hidden_post_norm":  # ModelOpt's own object holds it
        changes = {"eagle_config": {**checkpoint.config["eagle_config"], **changes}}
    assert eagle_spec(checkpoint, **changes) != absent


@pytest.mark.parametrize(
    ("layout", "version", "before_residual"),
    [
        ("speculators", "0.9.0", False),
        ("speculators", "0.1.0.dev21", False),
        ("speculators", ..., UNSIGNED["norm_before_residual"]),
        ("speculators", "unknown", True),
        ("speculators-parallel", "0.9.0", False),
        ("speculators-parallel", ..., False),
    ],
)
def test_defaults_of_the_program_that_wrote_a_file(tmp_path, layout, version, before_residual):
    checkpoint = eagle_checkpoint(tmp_path, layout)
    spec = eagle_spec(checkpoint, norm_before_residual=..., speculators_version=version)
    assert spec.norm_before_residual == before_residual


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"speculators_model_type": "eagle3", "speculators_version": "0.9.0"}, "qwen3"),
        ({"speculators_model_type": "peagle", "speculators_version": "0.7.0"}, "qwen3"),
        ({"speculators_model_type": "eagle3", "speculators_version": "0.6.0.2"}, "llama"),
        ({"speculators_model_type": "eagle3"}, "llama"),
        ({"speculators_model_type": "dflash", "speculators_version": "0.5.0"}, "qwen3"),
        ({"speculators_model_type": "dspark"}, "qwen3"),
        ({}, "llama"),
    ],
)
def test_layer_config_knows_the_class_of_nested_layers(config, expected):
    layers = layer_config(ConfigValues("head", {**config, "transformer_layer_config": {"hidden_size": 8}}), "llama")
    assert layers.text("model_type") == expected


LLAMA = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "num_attention_heads": 32}
QWEN = {"max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}


@pytest.mark.parametrize(("model_type", "expected"), [("llama", LLAMA), ("qwen3", {**LLAMA, **QWEN})])
def test_defaults_of_classes_of_layers(model_type, expected):
    nested = ConfigValues("head", {"transformer_layer_config": {"model_type": model_type}})
    common = {"model_type": model_type, "default_rope_theta": 10000.0}
    assert layer_config(nested, "").values == {**expected, **common}
    expected = {key: value for key, value in expected.items() if key != "num_attention_heads"}  # flat configs have it
    assert layer_config(ConfigValues("head", {}), model_type).values == {**expected, **common}


@pytest.mark.parametrize("name", MEDUSA_LAYOUTS)
def test_absent_key_of_medusa_heads_changes_no_tensor(tmp_path, name):
    """The tensors say everything but that one matrix serves all heads, which is not so by default."""
    path = write_medusa_heads(tmp_path / "head", name) / "config.json"
    config, whole = json.loads(path.read_text()), read_heads(str(path.parent)).heads.state_dict()
    for key in config:
        path.write_text(json.dumps({other: value for other, value in config.items() if other != key}))
        if key == "original_lm_head" and config[key]:
            with pytest.raises(CheckpointError, match=r"missing: lm_heads\.1\.weight"):
                read_heads(str(path.parent))
            continue
        found = read_heads(str(path.parent)).heads.state_dict()
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[tensor], whole[tensor]) for tensor in whole)
