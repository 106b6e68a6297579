"""Runs in one or several processes: writes the states of a target at rows of random tokens, two rows a shard.

torchrun cached_features.py TARGET FOLDER [KILLED]: the process of that number ends by SIGKILL after its first shard.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from datasets import Dataset
from torch import distributed

from hf_speculate_training.data import RowDataset
from hf_speculate_training.states import TargetReader, feature_cache, write_features
from hf_speculate_training.target import TargetSection, load_target


def kill_after_first_shard() -> None:
    write = feature_cache.replace_files

    def killed(folder, files):
        write(folder, files)
        if "cache.json" not in files:
            os.kill(os.getpid(), signal.SIGKILL)

    feature_cache.replace_files = killed


def main(target: str, folder: str, killed: str = "") -> None:
    distributed.init_process_group("gloo")
    if killed == os.environ["RANK"]:
        kill_after_first_shard()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 20, (15,), generator=generator).tolist()
    documents = {
        "input_ids": [torch.randint(3, 250, (length,), generator=generator).tolist() for length in lengths],
        "loss_mask": [[True] * length for length in lengths],
        "length": lengths,
    }
    rows = RowDataset(Dataset.from_dict(documents), max_length=20, packing=False)
    reader = TargetReader(load_target(TargetSection(path=target), torch.device("cpu")), (1, 2))
    cache = write_features(folder, reader, rows, rows_per_shard=2, batch_size=2)
    sys.stdout.write(f"{len(cache)}\n")
    distributed.destroy_process_group()


main(*sys.argv[1:])
