"""Every key of a head's config is used, refused by name, or listed here as irrelevant: none is ignored in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen3Config

from hf_speculate.errors import SpeculateError
from hf_speculate_plugins.block import BlockFiles
from hf_speculate_plugins.checkpoints.config import NEUTRAL
from hf_speculate_plugins.eagle import EagleFiles
from hf_speculate_plugins.medusa.loading import read_heads

from ...support.block_heads import KINDS, random_block
from ...support.heads import EAGLE_LAYOUTS, MEDUSA_LAYOUTS, target, write_head, write_medusa_heads
from ...support.tiers import quick_quarter


# What says nothing of the forward pass over tokens.
BOOKKEEPING = {
    *("architectures", "auto_map", "model_type", "transformers_version", "_name_or_path", "name_or_path", "version"),
    *("dtype", "torch_dtype", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "chunk_size"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "problem_type", "id2label", "label2id"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "attn_implementation", "_attn_implementation"),
    *("initializer_range", "attention_dropout", "pretraining_tp", "num_anchors", "speculators_version"),
    *("speculators_config", "base_model_name_or_path", "num_target_layers", "parallel_draft_heads_num_layers"),
}
# What the tensors say, which are believed where the config differs.
BY_TENSORS = {
    *("num_hidden_layers", "head_dim", "num_key_value_heads", "tie_word_embeddings", "attention_bias", "mlp_bias"),
    *("bias", "qkv_bias", "fc_norm", "norm_before_fc", "enable_confidence_head", "own_output", "parallel_drafting"),
    "use_confidence_head",
    *("medusa_num_heads", "medusa_num_layers", "medusa_fc_bias", "topk", "max_paths", "original_lm_head"),
    *("use_input_layernorm_in_first_layer", "use_last_layernorm", "next_layer_regular", "parallel_draft_step"),
}
# Said of embeddings, not in the spec: `test_checkpoint` has the tests.
ELSEWHERE = {"embed_requires_grad"}
# Read where something else is so: windows, layers without norms of queries, a Markov head, no other flag of causality.
CONDITIONAL = {
    *("use_sliding_window", "sliding_window", "layer_types", "max_window_layers", "sliding_window_non_causal"),
    *("confidence_head_with_markov", "num_attention_heads", "is_causal"),
}
# Medusa heads without output matrices say them by their target alone.
SIZES_OF_THE_TARGET = {"vocab_size", "hidden_size"}
IRRELEVANT = BOOKKEEPING | BY_TENSORS | ELSEWHERE | CONDITIONAL
NESTED = ("transformer_layer_config", "eagle_config", "dflash_config", "rope_parameters", "rope_scaling")


def write_block(folder, kind):
    random_block(kind, target()).save_pretrained(folder)
    return folder


HEADS = {
    **{
        f"eagle {name}": (lambda folder, name=name: write_head(folder, name), EagleFiles.open) for name in EAGLE_LAYOUTS
    },
    **{f"block {name}": (lambda folder, name=name: write_block(folder, name), BlockFiles.open) for name in KINDS},
    **{
        f"medusa {name}": (lambda folder, name=name: write_medusa_heads(folder, name), read_heads)
        for name in MEDUSA_LAYOUTS
    },
}


def changed(value, key):
    """Another value of the same kind."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return value[::-1] if value != value[::-1] else [part + 1 if isinstance(part, int) else part for part in value]
    return "gelu" if key == "hidden_act" else f"{value}-other"


def places(config, path=()):
    """The objects of a config, and where they lie."""
    yield path, config
    for key in NESTED:
        if isinstance(config.get(key), dict):
            yield from places(config[key], (*path, key))


@pytest.fixture(scope="module", params=quick_quarter(HEADS))
def opened(request, tmp_path_factory):
    """A head's config, and what is read when it has another one."""
    write, read = HEADS[request.param]
    folder = write(tmp_path_factory.mktemp("checkpoint") / "head")
    path = Path(folder, "config.json")
    config = json.loads(path.read_text())

    def outcome(path_in_config, key, value):
        other = json.loads(json.dumps(config))
        place = other
        for part in path_in_config:
            place = place[part]
        place[key] = value
        path.write_text(json.dumps(other))
        try:
            found = read(str(folder))
        except (SpeculateError, ValueError) as error:
            return str(error)
        return getattr(found, "spec", None) or repr(found.heads)

    return request.param, config, outcome


def test_every_written_key_changes_the_head_or_is_refused(opened):
    name, config, outcome = opened
    as_it_is = outcome((), "_", None)
    silent = [
        (*path, key)
        for path, place in places(config)
        for key, value in place.items()
        if key not in IRRELEVANT and not isinstance(value, dict)
        if not (name.startswith("medusa") and key in SIZES_OF_THE_TARGET)
        if outcome(path, key, changed(value, key)) == as_it_is
    ]
    assert not silent


def test_every_unsupported_switch_is_refused(opened):
    name, config, outcome = opened
    as_it_is = outcome((), "_", None)
    if name.startswith("medusa"):  # no decoder layers: what a base model's config says is not theirs
        return
    for path, _ in places(config):
        for key, neutral in NEUTRAL.items():
            if key == "use_mtp_layernorm" and "eagle_config" in path:
                continue  # its presence tells that ModelOpt wrote the file
            if name.startswith("block") and key in BlockFiles.follows and path in ((), ("dflash_config",)):
                if key not in config.get("dflash_config", {}):
                    assert outcome(path, key, changed(neutral, key)) != as_it_is, (path, key)
                continue
            assert f"{key} in config.json is" in outcome(path, key, changed(neutral, key)), (path, key)
            if not path or not path[-1].startswith("rope"):  # these are handed on whole
                assert outcome(path, key, neutral) == as_it_is


def test_rope_switches_of_a_single_layer_type_are_refused(tmp_path):
    def change(config, _):
        one = {"rope_type": "default", "rope_theta": 1e4}
        config["rope_parameters"] = {"full_attention": one, "sliding_attention": {**one, "partial_rotary_factor": 0.5}}

    with pytest.raises(SpeculateError, match=r"partial_rotary_factor in config\.json is 0\.5, expected 1"):
        EagleFiles.open(write_head(tmp_path / "head", change=change))


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config])
def test_the_keys_of_transformers_layers_are_all_known(config_class, tmp_path):
    """What a release of transformers adds to the configs that heads are written with must be looked at here."""
    path = Path(write_head(tmp_path / "head", "speculators"), "config.json")
    ours = json.loads(path.read_text())["transformer_layer_config"]
    known = {*ours, *NEUTRAL, *IRRELEVANT, *NESTED, "hidden_act", "max_position_embeddings"}
    assert set(config_class().to_dict()) <= known
