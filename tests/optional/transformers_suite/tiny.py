"""A model tester for the mixins of transformers, for tiny causal LMs of any type."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig


COMMON = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Windows are shorter than what the tests generate.
WINDOW = {"sliding_window": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "mistral": WINDOW,
    "gemma2": WINDOW | {"query_pre_attn_scalar": 8},
    "gemma3_text": WINDOW | {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": WINDOW,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "mixtral": WINDOW | {"num_local_experts": 4},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
}


class TinyModel:
    """A model tester. The sizes are attributes because the mixins read them there."""

    batch_size, seq_length, is_training = 4, 7, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def __init__(self, model_type: str):
        self.model_type = model_type
        config = self.get_config()
        self.causal_lm_class = AutoModelForCausalLM._model_mapping[type(config)]
        self.base_model_class = AutoModel._model_mapping[type(config)]

    def get_config(self) -> PreTrainedConfig:
        options = COMMON | MODELS[self.model_type]
        if "n_embd" in options:  # it computes them
            options = {key: value for key, value in options.items() if key not in ("head_dim", "num_key_value_heads")}
        return AutoConfig.for_model(self.model_type, **options)

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
        config = self.get_config()
        ids = torch.randint(3, config.vocab_size, (self.batch_size, self.seq_length))
        return config, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
