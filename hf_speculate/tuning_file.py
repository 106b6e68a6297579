"""What `hf-speculate tune` measured, as files: costs of a target in the cache, `tuning.json` beside a head.

Costs hold in one setting only (target, device, dtype, batch size, versions, threads): where another one reads them, it
says so in the log and measures its own. What was learnt about acceptance is used everywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub import constants
from transformers import PreTrainedModel
from transformers.utils import logging

from .adapters import active_adapters
from .costs import CostSurface
from .devices import device_name, input_device
from .errors import CheckpointError
from .files import json_writer, read_json, replace_files
from .models import GenerativeModel
from .reach import Acceptance


logger = logging.get_logger(__name__)

TUNING_FILE = "tuning.json"

_FORMAT, _VERSION = "hf_speculate.tuning", 1
_COSTS_FORMAT = "hf_speculate.costs"
_MAX_OPTION = 4096  # of what a drafter may be told to draft
_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)


@dataclass(frozen=True)
class Setting:
    """What costs depend on.

    Attributes:
        target: class, shape and adapters in effect; weights do not matter.
        threads: of torch on a CPU, None elsewhere.
    """

    target: Mapping[str, Any]
    device: str
    dtype: str
    attention: str
    batch_size: int
    threads: int | None
    torch: str
    transformers: str

    @classmethod
    def of(cls, target: PreTrainedModel, batch_size: int) -> Setting:
        """The setting that a request with this target would run in now."""
        device = input_device(target)
        return cls(
            target=_fingerprint(target),
            device=device_name(device),
            dtype=str(target.dtype).removeprefix("torch."),
            attention=str(target.config._attn_implementation),
            batch_size=batch_size,
            threads=torch.get_num_threads() if device.type == "cpu" else None,
            torch=torch.__version__,
            transformers=transformers.__version__,
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Setting:
        """Raises `TypeError` for what `asdict` cannot have written."""
        setting = cls(**value)
        if not isinstance(setting.target, dict) or type(setting.batch_size) is not int:
            raise TypeError("a setting needs a target by name and a number of rows")
        return setting

    def differences(self, other: Setting) -> list[str]:
        """In words, what `other` has otherwise; the batch size, which options do not depend on, is left out."""
        mine, its = ({**asdict(s), **{f"target's {k}": v for k, v in s.target.items()}} for s in (self, other))
        names = [name for name in mine | its if name not in ("target", "batch_size")]
        return [f"{name} {mine.get(name)} / {its.get(name)}" for name in names if mine.get(name) != its.get(name)]

    @property
    def key(self) -> str:
        """Short and the same for equal settings: the name of a file."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TargetCosts:
    """Seconds of one target in one setting.

    Attributes:
        rounds: of a whole round without the draft, by nodes (root included) and context.
        plain: of one token of stock `generate`, by context (one size).
    """

    setting: Setting
    rounds: CostSurface
    plain: CostSurface

    def to_json(self) -> dict[str, Any]:
        return {
            "setting": asdict(self.setting),
            "rounds": self.rounds.to_json(),
            "plain": self.plain.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TargetCosts:
        surfaces = (CostSurface.from_json(value[name]) for name in ("rounds", "plain"))
        return cls(Setting.from_json(value["setting"]), *surfaces)


@dataclass(frozen=True, kw_only=True)
class TuningFile:
    """Options that were found best for a drafter, and what is needed to choose from the first round on.

    Attributes:
        drafter: entry point name.
        options: of the drafter.
        costs: of the target, with what this drafter's feature taps cost it.
        drafting: seconds of a draft by depth and context.
        acceptance: what the tuner begins with.
        ranks: `ranks[d][k]`, how often the node of rank k was right where the path was right to depth d.
        predicted: figures for people: tokens a round, speed-up, on which prompts.
        path: where it was read from.
    """

    drafter: str
    options: Mapping[str, Any]
    costs: TargetCosts
    drafting: CostSurface
    acceptance: Acceptance
    ranks: list[list[float]] = field(default_factory=list)
    predicted: Mapping[str, Any] = field(default_factory=dict)
    path: str = "(not saved)"

    def options_for(self, target: PreTrainedModel, given: Collection[str], knobs: Collection[str]) -> dict[str, Any]:
        """The options to load the drafter with, beside those that a user gave.

        Args:
            given: names of the user's options; where one of them is about size, all of these are the user's.
            knobs: names of the drafter's options about size.
        Raises:
            CheckpointError: an option that `tune` does not write.
        """
        differences = self.costs.setting.differences(Setting.of(target, self.costs.setting.batch_size))
        if differences:
            logger.info(
                f"{self.path} was measured in another setting ({'; '.join(differences)}): its costs and options are "
                "not used, what it says of acceptance is. `hf-speculate tune` measures anew."
            )
            return {}
        for name, value in self.options.items():
            if name not in knobs or not _is_size(value):
                raise CheckpointError(
                    f"{self.path}: option {name!r} is {str(value)[:80]}; possible: {', '.join(knobs)}, each null, an "
                    f"integer from 1 to {_MAX_OPTION} or lists of numbers. Load with tuning=False, or tune anew."
                )
        return {} if set(given) & set(knobs) else dict(self.options)

    def save(self, path: str | os.PathLike) -> Path:
        """Writes the file; `path` may be a folder, which then gets a `tuning.json`. Never half a file."""
        where = Path(path) / TUNING_FILE if Path(path).is_dir() else Path(path)
        value = {
            "format": _FORMAT,
            "version": _VERSION,
            "drafter": self.drafter,
            "options": dict(self.options),
            "predicted": dict(self.predicted),
            "ranks": self.ranks,
            "costs": self.costs.to_json(),
            "drafting": self.drafting.to_json(),
            "acceptance": self.acceptance.to_json(),
        }
        _write(where, value)
        return where

    @classmethod
    def read(cls, path: str | os.PathLike) -> TuningFile:
        """Reads what `save` wrote.

        Raises:
            CheckpointError: no such file, not of this format or version, or a broken one.
        """
        where = Path(path) / TUNING_FILE if Path(path).is_dir() else Path(path)
        value = _read(where, _FORMAT)
        try:
            return cls(
                drafter=str(value["drafter"]),
                options=_named(value["options"]),
                costs=TargetCosts.from_json(value["costs"]),
                drafting=CostSurface.from_json(value["drafting"]),
                acceptance=Acceptance.from_json(value["acceptance"]),
                ranks=[[float(share) for share in row] for row in value["ranks"]],
                predicted=_named(value["predicted"]),
                path=str(where),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise _broken(where, f"{type(error).__name__}: {error}") from error


def find_tuning(source: str | os.PathLike | bool | None, folder: str | None, drafter: str) -> TuningFile | None:
    """The tuning that a speculator is made with.

    Args:
        source: a file, or a folder with one; None: what the head's folder has, if anything; False: none.
        folder: of the head.
        drafter: that it must be for.
    Raises:
        CheckpointError: it cannot be read, or is another drafter's.
    """
    if source is None or source is True:
        if folder is None or not (Path(folder) / TUNING_FILE).is_file():
            if source:
                raise CheckpointError(f"tuning=True, but {folder or 'this drafter'} has no {TUNING_FILE}.")
            return None
        source = folder
    elif source is False:
        return None
    tuning = TuningFile.read(source)
    if tuning.drafter != drafter:
        raise CheckpointError(
            f"{tuning.path} was measured with the drafter {tuning.drafter!r}, this one is {drafter!r}: choose another "
            "file, or tuning=False."
        )
    return tuning


def cached_costs(setting: Setting) -> TargetCosts | None:
    """What was measured in this very setting on this machine; None if nothing, or if the file is of no use."""
    path = _cache_path(setting)
    if not path.is_file():
        return None
    try:
        costs = TargetCosts.from_json(_read(path, _COSTS_FORMAT)["costs"])
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError) as error:
        logger.warning(f"{path} is not used: {error}. `hf-speculate tune` writes it anew.")
        return None
    return costs if costs.setting == setting else None


def cache_costs(costs: TargetCosts) -> Path:
    """Keeps costs for later calls on this machine, in the Hugging Face cache."""
    path = _cache_path(costs.setting)
    _write(path, {"format": _COSTS_FORMAT, "version": _VERSION, "costs": costs.to_json()})
    return path


def _cache_path(setting: Setting) -> Path:
    return Path(constants.HF_ASSETS_CACHE) / "hf_speculate" / "costs" / f"{setting.key}.json"


def _fingerprint(target: PreTrainedModel) -> dict[str, Any]:
    config = target.config.get_text_config(decoder=True)
    shape = {name: getattr(config, name) for name in _SHAPE if getattr(config, name, None) is not None}
    quantization = getattr(target.config, "quantization_config", None)
    if quantization is not None:
        shape["quantization"] = str(getattr(quantization, "quant_method", quantization))
    if adapters := active_adapters(cast(GenerativeModel, target)):
        shape["adapters"] = adapters
    return {"class": type(target).__name__, **shape, "parameters": sum(p.numel() for p in target.parameters())}


def _is_size(value: Any, depth: int = 0) -> bool:
    """Of a knob: a number, or the paths of a tree, or shares of its ranks."""
    if isinstance(value, list):
        return 0 < len(value) <= _MAX_OPTION and depth < 2 and all(_is_size(item, depth + 1) for item in value)
    if depth:
        return depth == 2 and type(value) in (int, float) and 0 <= value <= _MAX_OPTION
    return value is None or (type(value) is int and 1 <= value <= _MAX_OPTION)


def _named(options: Any) -> dict[str, Any]:
    if not isinstance(options, dict):
        raise TypeError(f"options must be an object, got {type(options).__name__}")
    return options


def _write(path: Path, value: Mapping[str, Any]) -> None:
    replace_files(path.parent, {path.name: json_writer(value, indent=1)})


def _read(path: Path, wanted: str) -> dict[str, Any]:
    try:
        value = read_json(path)
    except CheckpointError as error:
        raise _broken(path, str(error)) from error
    found = value.get("format")
    if found != wanted:
        raise _broken(path, f"its format is {found!r}, not {wanted!r}")
    if value.get("version") != _VERSION:
        raise _broken(path, f"its version is {value.get('version')!r}; this release reads version {_VERSION}")
    return value


def _broken(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"cannot read the tuning {path}: {why}. Write it anew with `hf-speculate tune`, or load with tuning=False."
    )
