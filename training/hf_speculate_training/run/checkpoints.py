"""Checkpoints of a run: which one is whole, and whether it is of the head that is to go on."""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors import safe_open
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_speculate.errors import SpeculateError


STATE_FILE = "trainer_state.json"  # the last file of a checkpoint that is written
_FILES = (SAFE_WEIGHTS_NAME, "optimizer.pt", "scheduler.pt")


def step_of(checkpoint: str | os.PathLike) -> int:
    """The optimizer step after which a checkpoint was written, from its name."""
    return int(Path(checkpoint).name.rpartition("-")[2])


def last_checkpoint(folder: str | os.PathLike | None) -> str | None:
    """The newest checkpoint in `folder` that was written completely; a run may have been killed while it wrote one."""
    root = Path(folder or ".")
    found = [path for path in root.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.rpartition("-")[2].isdigit()]
    for path in sorted(found, key=step_of, reverse=True):
        if _is_complete(path):
            return str(path)
    return None


def _is_complete(checkpoint: Path) -> bool:
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    has_files = all((checkpoint / name).is_file() for name in _FILES)
    return has_files and state.get("global_step") == step_of(checkpoint)


def check_checkpoint(checkpoint: str, method: nn.Module) -> None:
    """Raises `SpeculateError` unless the checkpoint holds exactly the tensors of `method`."""
    path = os.path.join(checkpoint, SAFE_WEIGHTS_NAME)
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, RuntimeError, ValueError) as error:
        raise SpeculateError(
            f"cannot resume from {checkpoint}: {SAFE_WEIGHTS_NAME} cannot be read ({error})."
        ) from error
    wanted = {name: tuple(tensor.shape) for name, tensor in method.state_dict().items()}
    different = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if different:
        name = different[0]
        raise SpeculateError(
            f"cannot resume from {checkpoint}: it holds another head. {len(different)} tensors differ, e.g. {name}: "
            f"{found.get(name, 'absent')} there, {wanted.get(name, 'absent')} in this one. Resume with the recipe that "
            "the run was started with, or start anew in another folder."
        )
