"""How fast training is and how much memory it takes, for `hf-speculate train-bench`.

`bench_train` measures whole steps of the methods and the forms of the loss at a large vocabulary, beside them the loss
of another package. Every figure comes from a process of its own, so that a peak is never that of something else.
"""

from .losses import LossShape, loss_inputs, measure_peer_loss
from .steps import TrainBenchSettings, bench_train, tables


__all__ = [
    "LossShape",
    "TrainBenchSettings",
    "bench_train",
    "loss_inputs",
    "measure_peer_loss",
    "tables",
]
