"""Inputs that several test modules share: a tokenizer without a file, a left-padded batch, a random head."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def character_tokenizer(**special_tokens: str) -> PreTrainedTokenizerFast:
    """The printable ASCII characters and the newline, one token each (as byte-level BPE spells them)."""
    characters = [chr(code) if code != 32 else "\u0120" for code in range(32, 127)] + ["\u010a"]
    raw = Tokenizer(models.BPE({character: i for i, character in enumerate(characters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special_tokens)


def padded_batch(prompt, lengths):
    """Prompts of `lengths` tokens (fixture `prompt`), left padded, as arguments of `generate`."""
    width = max(lengths)
    rows = [torch.nn.functional.pad(prompt(n, seed=i)[0], (width - n, 0)) for i, n in enumerate(lengths)]
    mask = torch.stack([(torch.arange(width) >= width - n).long() for n in lengths])
    return {"input_ids": torch.stack(rows), "attention_mask": mask}


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
