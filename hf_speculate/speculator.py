"""The user-facing object: a drafter with its statistics, and how to get one."""

from __future__ import annotations

import os
import weakref
from typing import Any, Literal, cast

from torch import nn
from transformers import PreTrainedModel

from .acceptance import TypicalAcceptance
from .drafter import Drafter
from .errors import SpeculateError
from .hub import drafter_class_for, local_folder
from .models import GenerativeModel
from .registry import installed_drafters, load_drafter
from .stats import SpeculationStats


class Speculator:
    """What `model.generate(..., speculator=...)` takes.

    Args:
        drafter: proposes the draft trees; may be shared.
        acceptance: "match": the target's own sampler chooses every token. "typical" is **lossy**: in requests that
            sample, a drafted token is accepted if the target finds it probable enough (Medusa, arXiv:2401.10774), and
            where none is, the most probable token is taken; nothing is drawn.
        posterior_threshold, posterior_alpha: epsilon and delta of typical acceptance, see `TypicalAcceptance`.

    Attributes:
        stats: cumulative `SpeculationStats` of all calls; `stats.reset()` clears them.
        lossless: True: the text is the target's own (see README, "What lossless means"). False with "typical".
    """

    def __init__(
        self,
        drafter: Drafter,
        acceptance: Literal["match", "typical"] = "match",
        *,
        posterior_threshold: float | None = None,
        posterior_alpha: float | None = None,
    ):
        if not isinstance(drafter, Drafter):
            raise TypeError(
                f"Speculator takes a Drafter, got {type(drafter).__name__}. "
                "Use AutoSpeculator.from_name / from_pretrained to make one from a name or a checkpoint."
            )
        self.drafter = drafter
        self.typical = _typical_rule(
            acceptance, posterior_threshold=posterior_threshold, posterior_alpha=posterior_alpha
        )
        self.stats = SpeculationStats()

    @property
    def lossless(self) -> bool:
        return self.typical is None

    def __repr__(self) -> str:
        rule = "" if self.lossless else f", {self.typical}, lossy"
        return f"Speculator({self.drafter!r}{rule})"


def _typical_rule(acceptance: str, **thresholds: float | None) -> TypicalAcceptance | None:
    given = {name: value for name, value in thresholds.items() if value is not None}
    if acceptance == "typical":
        return TypicalAcceptance(**given)
    if acceptance != "match":
        raise ValueError(f"acceptance must be 'match' or 'typical', got {acceptance!r}.")
    if given:
        raise ValueError(f"{', '.join(given)} are thresholds of acceptance='typical', which was not asked for.")
    return None


class AutoSpeculator:
    """Makes a `Speculator` from the name of an installed drafter or from a checkpoint."""

    def __init__(self) -> None:
        raise TypeError("AutoSpeculator is not instantiated: use from_name(...) or from_pretrained(...).")

    @staticmethod
    def from_name(name: str, target: nn.Module, **options: Any) -> Speculator:
        """A speculator by drafter name, e.g. `from_name("prompt_lookup", target=model, max_ngram=4)`.

        Args:
            name: an installed drafter, see `hf-speculate drafters`.
            target: the model that it will draft for (PEFT-wrapped and compiled models are looked through).
            options: the drafter's options; unknown ones raise `TypeError`.
        Raises:
            DrafterNotFoundError: no such drafter (with a suggestion).
            TargetMismatchError: it does not fit the target.
        """
        target = unwrap(target)
        drafter = load_drafter(name).for_target(target, **options)
        drafter.check_target(target)
        return Speculator(drafter)

    @staticmethod
    def from_pretrained(
        name_or_path: str | os.PathLike,
        target: nn.Module,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike | None = None,
        local_files_only: bool = False,
        subfolder: str | None = None,
        **options: Any,
    ) -> Speculator:
        """A speculator from the folder or Hub repository of a head or draft model; the layout is recognised.

        Args:
            name_or_path: folder, or Hub id.
            target: the model that it will draft for.
            revision, token, cache_dir, local_files_only, subfolder: as everywhere on the Hub.
            options: the drafter's options.
        Raises:
            DrafterNotFoundError: neither a folder nor a repository that can be had.
            CheckpointError: no installed drafter recognises it, or it is broken.
            TargetMismatchError: it belongs to another target.
        """
        target = unwrap(target)
        folder = local_folder(
            name_or_path,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            subfolder=subfolder,
        )
        drafter = drafter_class_for(folder).from_folder(folder, target, **options)
        drafter.check_target(target)
        return Speculator(drafter)


def unwrap(model: nn.Module) -> GenerativeModel:
    """The transformers model inside `torch.compile` and PEFT wrappers; raises `TypeError` if there is none."""
    seen: Any = model
    while not isinstance(seen, PreTrainedModel):
        inner = getattr(seen, "_orig_mod", None)
        if inner is None and hasattr(seen, "get_base_model"):
            inner = seen.get_base_model()
        if inner is None or inner is seen:
            raise TypeError(f"expected a transformers model (or a PEFT / compiled one), got {type(model).__name__}.")
        seen = inner
    return cast(GenerativeModel, seen)


_resolved: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, Speculator]] = weakref.WeakKeyDictionary()
_attached: weakref.WeakKeyDictionary[PreTrainedModel, Speculator] = weakref.WeakKeyDictionary()


def resolve(speculator: Speculator | Drafter | str | os.PathLike, model: GenerativeModel) -> Speculator:
    """What a `speculator=` argument means for `model`. Strings: once per model, a name wins over a path."""
    if isinstance(speculator, Speculator):
        return speculator
    if isinstance(speculator, Drafter):
        raise TypeError("speculator= takes a Speculator, got a Drafter: wrap it, Speculator(drafter).")
    if not isinstance(speculator, str | os.PathLike):
        raise TypeError(
            f"speculator= takes a Speculator, the name of a drafter ({', '.join(installed_drafters())}) or the path / "
            f"Hub id of a head; got {type(speculator).__name__}."
        )
    key = os.fspath(speculator)
    known = _resolved.setdefault(model, {})
    if key not in known:
        make = AutoSpeculator.from_name if key in installed_drafters() else AutoSpeculator.from_pretrained
        known[key] = make(key, target=model)
    return known[key]


def attach(model: nn.Module, speculator: Speculator | str | os.PathLike) -> Speculator:
    """Makes every later `model.generate(...)` use `speculator`, for code that calls `generate` itself.

    Requests that cannot run with a speculator (beams, …) warn once and run plain; `generate(..., speculator=None)`
    runs plain too. Nothing is stored on the model. Undo with `detach`.

    Returns:
        The resolved speculator.
    """
    model = unwrap(model)
    resolved = resolve(speculator, model)
    resolved.drafter.check_target(model)
    _attached[model] = resolved
    return resolved


def detach(model: nn.Module) -> Speculator:
    """Undoes `attach`; returns what was attached. Raises `SpeculateError` if nothing was."""
    found = _attached.pop(unwrap(model), None)
    if found is None:
        raise SpeculateError(f"no speculator is attached to this {type(model).__name__}.")
    return found


def attached(model: GenerativeModel) -> Speculator | None:
    """The speculator attached to `model`, if any."""
    return _attached.get(model)
