"""Short names for what a file was made from, so that it is never used with something else."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_speculate.models import unwrap
from hf_speculate.target import sample_bytes


def target_fingerprint(target: nn.Module) -> str:
    """sha256 over a model's configuration and a sample of every tensor of it, adapters included.

    Values are sampled evenly, see `sample_bytes`: any training changes some of them, and reading all of a large model
    would take longer than what the fingerprint protects.
    """
    model = unwrap(target)
    digest = hashlib.sha256(json.dumps(_shape_of(model), sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(sample_bytes(tensor))
    return digest.hexdigest()


def content_fingerprint(content: Any) -> str:
    """sha256 over something JSON-serialisable."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _shape_of(model: PreTrainedModel) -> dict[str, Any]:
    """What of the configuration changes the states; paths, versions and generation defaults do not."""
    config = model.config.get_text_config(decoder=True).to_dict()
    unrelated = ("_name_or_path", "transformers_version", "use_cache", "output_attentions", "output_hidden_states")
    return {"class": type(model).__name__} | {key: value for key, value in config.items() if key not in unrelated}
