"""Tiny models that see pictures and count their positions apart from those of texts (M-RoPE), and prompts for them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from .models import SIZES


IMAGE = 95
# Kind -> options of its text model.
QWENS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {},
    "qwen2_5_vl": {},
    "qwen3_vl": {},
    "qwen3_5": {
        "rope": {"partial_rotary_factor": 1.0, "mrope_interleaved": True},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    },
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_VISION = {
    **{"depth": 1, "hidden_size": 16, "embed_dim": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "out_hidden_size": 32},
    **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]},
}


def qwen(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A random model, and a batch of two rows with pictures of two sizes."""
    options = dict(QWENS[kind])
    rope = {**_ROPE, **options.pop("rope", {})}
    text = {**SIZES, "num_hidden_layers": 4, "head_dim": 8, "rope_parameters": rope, **options}
    vision = {**_VISION, **({"hidden_size": 32} if kind == "qwen2_vl" else {})}
    tokens = {"image_token_id": IMAGE, "vision_start_token_id": 93, "vision_end_token_id": 94, "video_token_id": 92}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, **tokens)
    ids = torch.tensor([[5, 93, *[IMAGE] * 6, 94, 6, 7, 8], [0, 0, 9, 93, IMAGE, IMAGE, 94, 3, 4, 5, 6, 7]])
    return AutoModelForImageTextToText.from_config(config), {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 4]]),
        "pixel_values": torch.randn(24 + 8, 3 * 2 * 4 * 4),
    }
