"""Phase `training`: one step of EAGLE-3's trainer modules with cuDNN's attention allowed and not.

On H100 and H200, cuDNN's attention with a mask gave NaN gradients for lengths that are 64 more than a multiple of 128
(pytorch#196678). So one of the lengths is such a length, and the rows hold several documents, which needs a mask.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch

from hf_speculate_tools.commands import timed

from .models import TINY_SHAPE, build, shape_of
from .setting import Setting, cudnn_attention, describe


LENGTHS, ROWS, LAYERS, STEPS = (512, 576), 4, 6, 3
_TINY_LENGTHS = (16,)


def measure(setting: Setting) -> None:
    """Writes a finding for each length and each state of cuDNN's attention."""
    try:
        from hf_speculate_training.methods import load_method
    except ImportError as error:
        setting.report(skipped=f"the trainer needs a package that is not here: {describe(error)}")
        return
    target = build(TINY_SHAPE if setting.is_tiny else shape_of("0.5B", False).with_layers(LAYERS), setting.device)
    method_class: Any = load_method("eagle3")
    for length in _TINY_LENGTHS if setting.is_tiny else LENGTHS:
        for allowed in (True, False) if setting.on_cuda else (True,):
            name = {"length": length, "cudnn_allowed": allowed}
            if setting.allows(0.0 if setting.is_tiny else 3.0, str(name)):
                with setting.guarded(**name), cudnn_attention(allowed):
                    setting.report(**name, **_steps(setting, method_class, target, length))


def _steps(setting: Setting, method_class: Any, target: Any, length: int) -> dict[str, Any]:
    """Median milliseconds of a step, its loss, and whether all gradients were finite."""
    from hf_speculate_training.states import TargetReader

    torch.manual_seed(0)
    options = method_class.options_class(steps=3)
    method = method_class.for_target(target, method_class.head_class(), options, lambda: None)
    reader = TargetReader(target, method.feature_layers)
    trained = [each for each in method.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    batch = _batch(length, target.config.vocab_size)
    method.train()
    seconds, broken, loss = [], [], torch.tensor(math.nan)
    for _ in range(1 + (1 if setting.is_tiny else STEPS)):

        def step() -> None:
            nonlocal loss
            with torch.autocast(setting.device.type, torch.bfloat16):
                loss = method(batch, reader(batch)).loss
            loss.backward()

        taken, _ = timed(step, setting.device)
        broken += [name for name, each in method.named_parameters() if not _is_finite(each.grad)]
        more, _ = timed(lambda: (optimizer.step(), optimizer.zero_grad()), setting.device)
        seconds.append(taken + more)
    return {
        "ms": 1e3 * statistics.median(seconds[1:]),
        "first_ms": 1e3 * seconds[0],
        "loss": loss.item(),
        "finite": not broken and math.isfinite(loss.item()),
        "not_finite": sorted(set(broken))[:8],
        "mask": reader.mask,
    }


def _batch(length: int, vocab_size: int) -> Any:
    """Rows of two documents of random tokens each."""
    from hf_speculate_training.data import Collator, make_row

    draws = torch.Generator().manual_seed(0)
    first = length // 3
    rows = []
    for _ in range(ROWS):
        documents = [torch.randint(vocab_size, (size,), generator=draws) for size in (first, length - first)]
        rows.append(make_row([{"input_ids": ids, "loss_mask": [True] * len(ids)} for ids in documents]))
    return Collator()(rows)


def _is_finite(gradient: torch.Tensor | None) -> bool:
    return gradient is None or bool(gradient.isfinite().all())
