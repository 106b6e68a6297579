"""The setting of a phase: device, sizes, the time that is left, and where findings go. It measures nothing."""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_speculate.attention import backends
from hf_speculate.speculator import EngineOptions

from .supervisor import WAYS


# Name of each way to run a round -> value of `Speculator(compile=)`.
MODES: dict[str, bool | str | None] = dict(zip(WAYS, (False, None, True), strict=True))
_FRAMES = 12


@dataclass(frozen=True)
class Setting:
    """What a phase gets.

    Attributes:
        phase: name of the phase, which every finding has.
        device: device that is measured.
        is_tiny: whether sizes are tiny: the run only shows that everything works.
        until: end of the phase, in seconds of `time.monotonic`.
        write: function that takes one finding.
        ways: names of `MODES` to measure.
    """

    phase: str
    device: torch.device
    is_tiny: bool
    until: float
    write: Callable[[dict[str, Any]], None]
    ways: Sequence[str] = WAYS

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left(self) -> float:
        """Seconds until the end of the phase."""
        return self.until - time.monotonic()

    def report(self, **finding: Any) -> None:
        """Writes one finding."""
        self.write({"phase": self.phase, **rounded(finding)})

    def allows(self, seconds: float, what: str) -> bool:
        """Whether the phase has time for something. If not, it reports that this was left out."""
        if self.left >= seconds:
            return True
        self.report(left_out=what, seconds_left=self.left, seconds_needed=seconds)
        return False

    @contextmanager
    def guarded(self, **what: Any) -> Iterator[None]:
        """A block whose errors become a finding. An error of the device itself is raised, as nothing works after it."""
        try:
            yield
        except Exception as error:
            self.report(**what, error=describe(error), trace=trace(error))
            synchronize(self.device)

    def modes(self) -> dict[str, bool | str | None]:
        """The modes that this version has, by name. A finding names each that it lacks.

        The tiny run compiles with dynamo alone, since inductor takes longer on a CPU than the whole run may.
        """
        found = {name: value for name, value in MODES.items() if name in self.ways}
        if self.is_tiny and "compiled" in found:
            found["compiled"] = "eager"
        for name, value in list(found.items()):
            try:
                EngineOptions(compile=value)  # type: ignore[arg-type]
            except (TypeError, ValueError) as problem:
                self.report(mode=name, skipped=f"this version has no compile={value!r}: {describe(problem)[:80]}")
                del found[name]
        return found


def describe(error: BaseException) -> str:
    """Class and first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def trace(error: BaseException) -> list[str]:
    """Where an error came from, innermost last: file, line and function of its last frames."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return [f"{'/'.join(Path(each.filename).parts[-2:])}:{each.lineno} {each.name}" for each in frames]


def rounded(value: Any) -> Any:
    """The value with four significant digits in every float. JSON has no infinite numbers and no NaN: they are text."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


def synchronize(device: torch.device) -> None:
    """Waits for the work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    """Frees what the last phase or model has left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def cudnn_attention(allowed: bool) -> Iterator[None]:
    """A context in which attention may use cuDNN or not. It holds for our forwards, which do without it by default."""
    before, ours = torch.backends.cuda.cudnn_sdp_enabled(), backends._can_do_without_cudnn
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    backends._can_do_without_cudnn = lambda: False  # they change nothing then
    try:
        yield
    finally:
        backends._can_do_without_cudnn = ours
        torch.backends.cuda.enable_cudnn_sdp(before)
