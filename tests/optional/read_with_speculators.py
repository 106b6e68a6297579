"""Runs in an environment that has the `speculators` package: loads a head with it and writes its draft logits.

    python read_with_speculators.py HEAD INPUTS OUTPUTS

INPUTS is a safetensors file with `states` [1, N, n * Ht] and `token_ids` [1, N]; OUTPUTS gets `logits` [steps, N, Vd]
of a teacher-forced pass and its unrolled steps, and nothing if the package cannot read the head.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig


STEPS = 3


def main(head: str, inputs: str, outputs: str) -> None:
    config = SpeculatorModelConfig.from_pretrained(head)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(head, config=config, dtype=torch.float32).eval()
    given, logits = load_file(inputs), []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0].clone()))
    with torch.no_grad():
        model(given["states"], given["token_ids"], document_ids=torch.zeros_like(given["token_ids"]), ttt_steps=STEPS)
    tensors = {"logits": torch.stack(logits), "embeddings": model.embed_tokens.weight.detach().clone()}
    for name in ("d2t", "t2d"):
        if getattr(model, name, None) is not None:
            tensors[name] = getattr(model, name).clone()
    save_file(tensors, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
