"""Runs in several processes: prints what each holds of the layers of a sharded target, and how its logits differ.

torchrun sharded_layers.py TARGET
"""

from __future__ import annotations

import json
import sys

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from hf_speculate_training.target import TargetSection, load_target, mesh_of_processes, shard_layers


def main(path: str) -> None:
    distributed.init_process_group("gloo")
    cpu, section = torch.device("cpu"), TargetSection(path=path)
    target, whole = load_target(section, cpu), load_target(section, cpu)
    shard_layers(target, mesh_of_processes(cpu))
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        difference = (target(ids).logits - whole(ids).logits).abs().max().item()
    parts = [each for each in target.parameters() if isinstance(each, DTensor)]
    found = {
        "held": sum(part.to_local().numel() for part in parts),
        "layers": sum(each.numel() for each in whole.get_decoder().layers.parameters()),
        "difference": difference,
    }
    sys.stdout.write(json.dumps(found) + "\n")
    distributed.destroy_process_group()


main(sys.argv[1])
