"""Runs in an environment that has the `speculators` package: reads a folder of data and hidden states with it.

    python read_features_with_speculators.py DATA OUTPUTS

DATA is what `datasets` saved, with `hidden_states/hs_<number>.safetensors` in it; OUTPUTS gets the tensors of every
sample, `<number>.<name>`.
"""

from __future__ import annotations

import sys

from safetensors.torch import save_file
from speculators.train.data import ArrowDataset


def main(data: str, outputs: str) -> None:
    samples = ArrowDataset(10_000, data, on_missing="raise")
    tensors = {}
    for number in range(len(samples)):
        for name, value in samples[number].items():
            tensors[f"{number}.{name}"] = value.clone().contiguous()
    save_file(tensors, outputs)


main(*sys.argv[1:])
