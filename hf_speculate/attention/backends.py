"""Backends of `scaled_dot_product_attention` in our forwards.

From torch 2.11 on it prefers cuDNN on Hopper and Blackwell GPUs. cuDNN builds a plan for every new length of the keys,
which takes 20 to 80 ms. Plain decoding meets a new length in each step, a round of ours several: that of the tree, and
one for each level of a draft; and each prompt has a length of its own. So our forwards do without cuDNN. The setting is
restored after each of them, and plain `generate` keeps what the user has set.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import torch


CHOOSING = frozenset({"cuda"})
"""Types of devices on which torch chooses between these backends."""


class _WithoutCudnn:
    """A context without cuDNN's attention. Several threads may be inside, each several times.

    The setting belongs to the process. The first one in switches cuDNN off, and the last one out restores it.

    With the math backend off, the user has chosen other backends than torch's defaults. Then cuDNN may be the only one
    that can run, so nothing is changed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside, self._switched_off = 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._switched_off = _can_do_without_cudnn()
                if self._switched_off:
                    torch.backends.cuda.enable_cudnn_sdp(False)
            self._num_inside += 1

    def __exit__(self, *_exception: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside and self._switched_off:
                torch.backends.cuda.enable_cudnn_sdp(True)


_NOTHING, _WITHOUT_CUDNN = nullcontext(), _WithoutCudnn()


def tree_backends(device: torch.device) -> AbstractContextManager[None]:
    """A context for forwards on `device`, in which attention does not use cuDNN. It also holds for a backward in it.

    It does nothing on devices other than CUDA's. Inside a function that torch compiles it does nothing either, so enter
    it before the call.
    """
    return _NOTHING if device.type not in CHOOSING or torch.compiler.is_compiling() else _WITHOUT_CUDNN


def backends_in_use(device: torch.device) -> str:
    """Names of the backends that attention may use in our forwards, for reports; "" where torch offers no choice.

    `exact=True` uses those of plain `generate`.
    """
    if device.type not in CHOOSING:
        return ""
    cuda = torch.backends.cuda
    enabled = {
        "cuDNN": cuda.cudnn_sdp_enabled() and not _can_do_without_cudnn(),
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    return ", ".join(name for name, is_enabled in enabled.items() if is_enabled)


def _can_do_without_cudnn() -> bool:
    """Whether cuDNN is on, and another backend can run whatever it would run."""
    return torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
