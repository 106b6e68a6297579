"""Draft loss of the `speculators` package on the shapes of `train.py`: a script for that package's interpreter.

It wants another transformers than this project, so it is run by path (`--speculators-python`) and imports nothing of
ours. Called with the shape as JSON, it prints one JSON line.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time

import torch
from speculators.losses import eager  # pyright: ignore[reportMissingImports]


def main(shape: dict, kind: str, num_threads: int | None, repeats: int) -> dict:
    """Seconds and peak bytes of a forward and backward from head states: the work that our losses are timed on.

    Its kernels in Triton want a GPU; on a CPU the package has the eager form alone.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    loss = {"soft": eager.kl_div_loss, "hard": eager.ce_loss}[kind]
    step(inputs({**shape, "num_entries": 8, "num_positions": 8, "vocab_size": 64}), loss)
    tensors = inputs(shape)
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[1]) * resource.getpagesize()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        step(tensors, loss)
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"form": "speculators", "kind": kind, "seconds": statistics.median(seconds), "peak_bytes": peak - held}


def inputs(shape: dict) -> tuple[torch.Tensor, ...]:
    """States [E, H], output matrix [V, H], the teacher's states [T, H] and matrix [V, H], rows of the teacher [E]."""
    torch.manual_seed(0)
    options = {"dtype": getattr(torch, shape["dtype"])}
    entries, positions, hidden, vocab = (
        shape[name] for name in ("num_entries", "num_positions", "hidden_size", "vocab_size")
    )
    states = torch.randn(entries, hidden, **options).requires_grad_()
    output = torch.randn(vocab, hidden, **options).div_(hidden**0.5).requires_grad_(shape["train_output"])
    teacher = torch.randn(vocab, hidden, **options).div_(hidden**0.5)
    return states, output, torch.randn(positions, hidden, **options), teacher, torch.randint(positions, (entries,))


def step(tensors: tuple[torch.Tensor, ...], loss) -> None:
    states, output, hidden, teacher, rows = tensors
    states.grad = output.grad = None
    with torch.no_grad():
        targets = (hidden @ teacher.T)[rows]
    loss((states @ output.T)[None], targets[None]).mean().backward()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(**json.loads(sys.argv[1]))) + "\n")
