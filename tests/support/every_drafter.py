"""A request of every drafter, on plain and packed targets, hybrids and models with draft layers of their own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_speculate import AutoSpeculator
from hf_speculate_gguf import load_model
from hf_speculate_gguf.native import has_kernel

from .hybrid_gguf import TILED, write_hybrid
from .mtp import load_target, write_target
from .packed import shape_of, write_model
from .paths import REPOSITORY


EXAMPLES = REPOSITORY / "examples"
PYCODER = str(EXAMPLES / "pycoder")
HEADS = [str(EXAMPLES / f"pycoder-{name}") for name in ("eagle3", "dspark", "medusa")]
# Name of a target -> drafters for it.
DRAFTERS = {
    "pycoder": [*HEADS, "suffix", "prompt_lookup", "draft_model", f"{HEADS[0]}+suffix"],
    "qwen3_5_text": ["mtp"],
    "deepseek_v3": ["mtp"],
    "packed": ["suffix", "prompt_lookup"],
    "packed hybrid": ["suffix"],
}
CASES = [(target, drafter) for target, drafters in DRAFTERS.items() for drafter in drafters]


class Targets:
    """The targets, each loaded once.

    Args:
        folder: empty folder for their files.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.load = cache(self._load)

    def _load(self, name: str) -> Any:
        folder = self._folder / name.replace(" ", "-")
        folder.mkdir()
        if name == "pycoder":
            model: Any = AutoModelForCausalLM.from_pretrained(PYCODER, dtype=torch.float32).eval()
        elif not name.startswith("packed"):
            model = load_target(write_target(folder, name))
        elif not has_kernel():
            pytest.skip("no native kernel")
        elif name == "packed":
            model = load_model(write_model(folder / "model.gguf", shape_of("llama")), dtype=torch.float32)
        else:
            model = load_model(write_hybrid(folder / "model.gguf", TILED), dtype=torch.float32)
        model.generation_config.pad_token_id = 0
        return model

    def speculator(self, name: str, drafter: str) -> Any:
        """The speculator of a case. What transformers loads is loaded here: two loads at once disturb each other."""
        model = self.load(name)
        if drafter == "draft_model":
            return AutoSpeculator.from_name("draft_model", target=model, model=str(EXAMPLES / "pycoder-draft"))
        return AutoSpeculator.from_name("mtp", target=model) if drafter == "mtp" else drafter

    def inputs(self, name: str, is_alone: bool = False) -> dict[str, Any]:
        """A padded batch of code, or its first row alone; or random tokens."""
        if name == "pycoder":
            tokenizer = AutoTokenizer.from_pretrained(PYCODER)
            texts = ["import argparse\n\n\ndef main():\n", "x = 1\n"][: 1 if is_alone else None]
            return dict(tokenizer(texts, return_tensors="pt", padding=True, padding_side="left"))
        ids = torch.randint(3, 60, (1, 20), generator=torch.Generator().manual_seed(0), dtype=torch.long, device="cpu")
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def text(
        self, name: str, sample: bool, speculator: Any = None, *, is_alone: bool = False, **more: Any
    ) -> torch.Tensor:
        """The text of a request, always with the same seed."""
        model, options = self.load(name), {"max_new_tokens": 32, "do_sample": sample, "speculator": speculator}
        torch.manual_seed(5)
        return model.generate(**self.inputs(name, is_alone), **(options | more))
