"""Random heads for the tiny models: an EAGLE-3 head in a folder, drafters without one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

from hf_speculate_plugins.checkpoints import LoadReport
from hf_speculate_plugins.eagle import EagleDrafter, EagleHead, EagleOptions, EagleSpec, LoadedHead
from hf_speculate_plugins.medusa import MedusaDrafter, MedusaHeads, StaticTree

from .models import VOCAB_SIZE


HIDDEN = 32


def write_eagle_head(folder: Path, hidden: int, vocab_size: int) -> str:
    """Writes a random EAGLE-3 head without embeddings and output matrix of its own; returns its folder.

    Args:
        hidden: of the target, and the head's own; a multiple of 8.
    """
    generator = torch.Generator().manual_seed(0)
    inner = 3 * hidden // 2
    shapes = {"self_attn.q_proj": (hidden, 2 * hidden), "self_attn.o_proj": (hidden, hidden)}
    shapes |= {f"self_attn.{name}_proj": (hidden // 2, 2 * hidden) for name in "kv"}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    tensors = {f"midlayer.{name}.weight": torch.randn(size, generator=generator) * 0.3 for name, size in shapes.items()}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    tensors["fc.weight"] = torch.randn(hidden, 3 * hidden, generator=generator) * 0.1
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "vocab_size": vocab_size,
        "draft_vocab_size": vocab_size,
        "own_output": False,
        "intermediate_size": inner,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@cache
def random_eagle(depth, top_k, max_nodes, model, parallel=False):
    spec = EagleSpec(
        parallel=parallel,
        mask_token_id=1 if parallel else None,
        dialect="specforge",
        version=3,
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        vocab_size=VOCAB_SIZE,
        draft_vocab_size=VOCAB_SIZE,
        num_layers=1,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        feature_layers=(0, 1, 2),
    )
    torch.manual_seed(0)
    head = EagleHead(spec).eval().requires_grad_(False)
    if parallel:
        torch.nn.init.normal_(head.mask_hidden)
    options = EagleOptions(depth=depth, top_k=top_k, max_nodes=max_nodes)
    return EagleDrafter(LoadedHead(head, None, LoadReport("made here")), model, options)


@cache
def random_medusa(choices, model):
    generator = torch.Generator().manual_seed(0)
    weights = [0.3 * torch.randn(*size, generator=generator) for size in ((3, 1, HIDDEN, HIDDEN), (3, 1, HIDDEN))]
    output = 0.3 * torch.randn(3, VOCAB_SIZE, HIDDEN, generator=generator)
    return MedusaDrafter(MedusaHeads(*weights, output), model, tree=StaticTree.of(choices))
