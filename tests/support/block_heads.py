"""Random one-pass heads of every kind, for models of this width and vocabulary and at least two layers."""

from __future__ import annotations

import json
from functools import cache

import torch

from hf_speculate_plugins.block import BlockDrafter, BlockHead, BlockOptions, BlockSpec, LoadedHead
from hf_speculate_plugins.block.lattice import Lattice
from hf_speculate_plugins.checkpoints import LoadReport


HIDDEN, VOCAB = 32, 96
LATTICE = Lattice(
    **{"candidate_topk": 6, "hidden_size": 12, "num_layers": 2, "num_heads": 3, "mlp_ratio": 1.5},
    **{"factor_dim": 5, "vector_eps": 1e-6, "logit_scale": 12.0},
)
KINDS = {
    "dflash": {"dialect": "zlab", "method": "dflash", "first_slot": 1},
    "jetspec": {"dialect": "zlab", "method": "dflash", "first_slot": 1, "causal": (True, True)},
    "windows": {
        **{"dialect": "speculators", "method": "dflash", "first_slot": 0},
        **{"windows": (5, None), "causal": (True, False), "window_from_anchor": True},
    },
    "dspark": {
        **{"dialect": "deepspec", "method": "dspark", "first_slot": 0, "markov": "vanilla", "markov_rank": 4},
        **{"confidence": True, "confidence_with_markov": True},
    },
    "gated": {"dialect": "deepspec", "method": "dspark", "first_slot": 0, "markov": "gated", "markov_rank": 4},
    "rnn": {"dialect": "deepspec", "method": "dspark", "first_slot": 0, "markov": "rnn", "markov_rank": 4},
    "reduced": {
        **{"dialect": "speculators", "method": "dspark", "first_slot": 0, "markov": "vanilla", "markov_rank": 4},
        **{"draft_vocab_size": 40, "window_from_anchor": True},
    },
    "sinks": {
        **{"dialect": "modelopt", "method": "dflash", "first_slot": 1, "causal": (True, True)},
        **{"windows": (7, 7), "attention_sinks": True},
    },
    "modelopt": {
        **{"dialect": "modelopt", "method": "dspark", "first_slot": 0, "markov": "rnn", "markov_rank": 4},
        **{"confidence": True, "confidence_with_markov": True, "windows": (6, 6), "attention_sinks": True},
    },
    "domino": {
        **{"dialect": "modelopt", "method": "domino", "first_slot": 0, "markov": "domino", "markov_rank": 4},
        **{"gru_size": 6, "num_bare_slots": 1},
    },
    "xpress": {
        **{"dialect": "speculators", "method": "xpress", "first_slot": 1, "markov": "xpress", "markov_rank": 4},
        **{"refiner_size": 8, "window_from_anchor": True},
    },
    "dflash2": {
        **{"dialect": "zlab", "method": "dflash2", "first_slot": 1, "windows": (6, 6)},
        **{"selector_rank": 4, "selector_top_k": 6, "conv_kernel_size": 2, "conv_group_size": 8},
        **{"embedding_scale": 1.5, "output_multiplier": 0.5, "softcap": 20.0},
    },
    "lilicorr": {
        **{"dialect": "zlab", "method": "lilicorr", "first_slot": 1, "conv_kernel_size": 2, "conv_group_size": 8},
        "lattice": LATTICE,
    },
}


def edited(folder, change):
    """The folder with another config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    return str(folder)


def spec_of(kind, **changes) -> BlockSpec:
    fields = {"draft_vocab_size": VOCAB, "causal": (False, False), "windows": (None, None), **KINDS[kind], **changes}
    return BlockSpec(
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        vocab_size=VOCAB,
        num_layers=2,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        block_size=5,
        mask_token_id=VOCAB - 1,
        feature_layers=(0, 2),
        **fields,
    )


@cache
def loaded_block(kind, model) -> LoadedHead:
    """Uses the embeddings and, unless its vocabulary is its own, the output matrix of `model`."""
    spec, generator = spec_of(kind), torch.Generator().manual_seed(0)
    is_reduced = spec.draft_vocab_size != VOCAB
    head = BlockHead(spec, model.get_input_embeddings(), None if is_reduced else model.get_output_embeddings())
    for parameter in head.parameters():
        noise = 0.3 * torch.randn(parameter.shape, generator=generator)
        parameter.data = (noise + (parameter.dim() == 1)).to(model.dtype)
    ids = torch.randperm(VOCAB, generator=generator)[: spec.draft_vocab_size].sort().values if is_reduced else None
    ids = None if ids is None else ids.to(model.device)
    return LoadedHead(head.to(model.device).eval().requires_grad_(False), ids, LoadReport("made here"))


def random_block(kind, model, **options) -> BlockDrafter:
    return BlockDrafter(loaded_block(kind, model), model, BlockOptions(**{"max_nodes": 12, "top_k": 3, **options}))
