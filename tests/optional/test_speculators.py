"""The `speculators` package reads what we write: its own forward gives our draft logits (`make peers`).

It wants another transformers than we do, so it runs in an environment of its own: SPECULATORS_PYTHON names the
interpreter.
"""

from __future__ import annotations

import json
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_speculate_plugins.block.loading import DEFAULTS as OF_BLOCKS
from hf_speculate_plugins.checkpoints import ConfigValues
from hf_speculate_plugins.checkpoints.layer_config import layer_config
from hf_speculate_plugins.eagle import EagleHead, EagleSpec, write_head
from hf_speculate_plugins.eagle.loading import DEFAULTS as OF_EAGLE
from hf_speculate_tools.heads.convert import convert_checkpoint

from ..support.models import SIZES
from ..support.speculators_peer import PYTHON, assert_peer_agrees


HIDDEN, VOCAB, LAYERS = 32, 96, 7
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
HEADS = {
    "plain": {},
    "residual and own layers": {"norm_before_residual": True, "feature_layers": (1, 3, 6), "draft_vocab_size": VOCAB},
    "qwen3, two layers, 3.1": {
        "qk_norm": True,
        "num_layers": 2,
        "windows": (None, None),
        "head_dim": 16,
        "norm_before_fc": True,
        "feed_back_normed": True,
    },
    "four layers, norms of each, llama3": {
        "num_features": 4,
        "feature_layers": (1, 2, 4, 5),
        "fc_norm": True,
        "rope": LLAMA3 | {"original_max_position_embeddings": 64},
    },
}

pytestmark = pytest.mark.skipif(PYTHON is None, reason="SPECULATORS_PYTHON is not set: `make peers` sets it up")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny target on disk, and loaded."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=LAYERS)
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder, LlamaForCausalLM.from_pretrained(folder).eval()


def save_head(folder, target_folder, **changes) -> None:
    sizes = {"hidden_size": HIDDEN, "target_hidden_size": HIDDEN, "vocab_size": VOCAB, "draft_vocab_size": 40}
    sizes |= {"num_layers": 1, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    spec = EagleSpec(dialect="speculators", version=3, **{**sizes, **changes})
    head = EagleHead(spec)
    for parameter in head.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1)
    ids = torch.randperm(VOCAB)[: spec.draft_vocab_size].sort().values
    write_head(
        folder,
        head,
        ids if spec.draft_vocab_size < VOCAB else None,
        "speculators",
        num_target_layers=LAYERS,
        target_name=str(target_folder),
        target_architectures=["LlamaForCausalLM"],
    )


@pytest.mark.parametrize("name", HEADS)
def test_speculators_computes_the_logits_of_saved_heads(target, tmp_path, name):
    folder, model = target
    torch.manual_seed(1)
    save_head(tmp_path / "head", folder, **HEADS[name])
    assert_peer_agrees(tmp_path / "head", model, tmp_path)


def test_speculators_computes_the_logits_of_a_converted_head(target, tmp_path):
    """SpecForge's layout without embeddings, with default layers: the conversion adds the target's tensors."""
    folder, model = target
    torch.manual_seed(1)
    save_head(tmp_path / "source", folder, feature_layers=(2, 3, 4))
    convert_checkpoint(tmp_path / "source", tmp_path / "specforge", "specforge", folder)
    tensors = load_file(tmp_path / "specforge" / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, tmp_path / "specforge" / "model.safetensors")
    convert_checkpoint(tmp_path / "specforge", tmp_path / "head", "speculators", folder)
    assert_peer_agrees(tmp_path / "head", model, tmp_path)


_FIELDS = """
import json
from importlib.metadata import version
from speculators import SpeculatorModelConfig
found, common = {"version": version("speculators")}, SpeculatorModelConfig.model_fields
for kind in ("eagle3", "peagle", "dflash", "dspark", "dflash2"):
    fields = SpeculatorModelConfig.registry[kind].model_fields
    own = {name: field.default for name, field in fields.items() if name not in common}
    plain = {name: value for name, value in own.items() if isinstance(value, bool | int | float | str)}
    found[kind] = {**plain, "layers": fields["transformer_layer_config"].default_factory().model_type}
print(json.dumps(found))
"""
# Said by the tensors, not of the forward pass, or (embeddings) with a test of its own.
_ELSEWHERE = {
    *("draft_vocab_size", "norm_before_fc", "fc_norm", "enable_confidence_head", "embed_requires_grad"),
    "layers",
}


def test_defaults_equal_those_of_speculators_configs():
    """What absent keys mean to the classes that write the files; a key that a release adds must be looked at here."""
    run = subprocess.run([str(PYTHON), "-c", _FIELDS], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    ours = {**dict.fromkeys(("eagle3", "peagle"), OF_EAGLE["speculators"]), **OF_BLOCKS["speculators"]}
    for kind, defaults in ours.items():
        assert {key: value for key, value in found[kind].items() if key not in _ELSEWHERE} == dict(defaults), kind
        stated = {"speculators_model_type": kind, "speculators_version": found["version"]}
        layers = layer_config(ConfigValues("head", {**stated, "transformer_layer_config": {"hidden_size": 8}}), "")
        assert layers.text("model_type") == found[kind]["layers"]
