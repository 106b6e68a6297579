"""The user-facing object: a drafter with its statistics, and how to get one."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal, cast

from huggingface_hub import CommitInfo
from torch import nn
from transformers import PreTrainedModel

from .compilation import find_backend
from .drafting import Drafter
from .errors import SpeculateError
from .hub import (
    Metric,
    clean_folder,
    drafter_class_for,
    local_folder,
    make_repository,
    upload_head,
    warn_of_other_adapters,
    write_card,
)
from .models import GenerativeModel
from .policy import Experience
from .registry import installed_drafters, load_drafter
from .stats import SpeculationStats
from .verification import TypicalAcceptance


class Speculator:
    """What `model.generate(..., speculator=...)` takes.

    Args:
        drafter: proposes the draft trees; may be shared.
        acceptance: "match": the target's own sampler chooses every token. "typical" is **lossy**: in requests that
            sample, a drafted token is accepted if the target finds it probable enough (Medusa, arXiv:2401.10774), and
            where none is, the most probable token is taken; nothing is drawn.
        posterior_threshold, posterior_alpha: epsilon and delta of typical acceptance, see `TypicalAcceptance`.
        adaptive: every round drafts what measured costs and acceptance say pays best, at most what its options
            allow, and nothing where nothing pays (see `tuning`). False: always what the options say; then rounds, and
            with them 16-bit ties, do not depend on the clock. None: True unless the environment variable
            HF_SPECULATE_ADAPTIVE is 0.
        compile: forwards of the target over trees, and of heads, go through `torch.compile` with static shapes (see
            `static`), on GPUs as CUDA graphs: each (at most 8 of a function) takes seconds to minutes when it is first
            needed, and is kept as long as the model, as are the buffers of up to 4 requests. Nobody may change the
            model during a call. A string names a backend of `torch.compile`. What cannot be compiled runs as always,
            and `stats.fallbacks` says why.

    Attributes:
        experience: what `adaptive` has learnt, None if it is off.
        backend: of `torch.compile`; None if nothing is compiled.
        stats: cumulative `SpeculationStats` of all calls; `stats.reset()` clears them.
        adapter_stats: the same by the target's PEFT adapters in effect ("" for none, see `active_adapters`).
        lossless: True: the text is the target's own (see README, "What lossless means"). False with "typical".
    """

    def __init__(
        self,
        drafter: Drafter,
        acceptance: Literal["match", "typical"] = "match",
        *,
        posterior_threshold: float | None = None,
        posterior_alpha: float | None = None,
        adaptive: bool | None = None,
        compile: bool | str = False,
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
        if adaptive is None:
            adaptive = os.environ.get("HF_SPECULATE_ADAPTIVE", "1") != "0"
        self.experience = Experience() if adaptive else None
        self.backend = find_backend(compile)
        self.stats = SpeculationStats()
        self.adapter_stats: dict[str, SpeculationStats] = {}

    @property
    def lossless(self) -> bool:
        return self.typical is None

    def save_pretrained(
        self,
        path: str | os.PathLike,
        layout: str | None = None,
        *,
        metrics: Mapping[str, Metric] | None = None,
        notes: str = "",
        measured_on: str | None = None,
    ) -> None:
        """Writes the drafter's weights in a published layout, and a model card unless the folder has a person's.

        Args:
            path: folder, made if it is absent.
            layout: one of the drafter's, e.g. "speculators", "specforge", "safeailab" for EAGLE-3 and "fasterdecoding",
                "vllm" for Medusa; None: the drafter's default. (The acceptance rule is not part of any.)
            metrics, notes, measured_on: for the card, see `hf_speculate.hub.card.write_card`.
        Raises:
            CheckpointError: the drafter has no weights, or the layout cannot express them; nothing is written then.
        """
        saved = self.drafter.save_pretrained(path, layout)
        write_card(path, **asdict(saved), metrics=metrics, notes=notes, measured_on=measured_on)

    def push_to_hub(
        self,
        repo_id: str,
        layout: str | None = None,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        metrics: Mapping[str, Metric] | None = None,
        notes: str = "",
        measured_on: str | None = None,
    ) -> CommitInfo:
        """Saves as `save_pretrained` does and uploads the result to a Hub repository, which is made if it is absent.

        Args:
            repo_id: "owner/name", or "name" for one of your own.
            private: of a new repository; None leaves that to the owner's settings.
            token, commit_message, revision, create_pr: as everywhere on the Hub.
        Raises:
            CheckpointError: as `save_pretrained`; or the repository holds weights under other names, which readers
                could take for this head's. Nothing is uploaded then.
        """
        with tempfile.TemporaryDirectory() as folder:
            saved = self.drafter.save_pretrained(
                folder, layout
            )  # what cannot be saved fails before a repository is made
            repo_id = make_repository(repo_id, private=private, token=token)
            write_card(folder, **asdict(saved), metrics=metrics, notes=notes, measured_on=measured_on, repo_id=repo_id)
            clean_folder(folder)
            return upload_head(
                folder,
                repo_id,
                token=token,
                commit_message=commit_message or f"Upload {saved.algorithm} head ({saved.layout} layout)",
                revision=revision,
                create_pr=create_pr,
            )

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
    def from_name(
        name: str,
        target: nn.Module,
        *,
        acceptance: Literal["match", "typical"] = "match",
        posterior_threshold: float | None = None,
        posterior_alpha: float | None = None,
        adaptive: bool | None = None,
        compile: bool | str = False,
        **options: Any,
    ) -> Speculator:
        """A speculator by drafter name, e.g. `from_name("prompt_lookup", target=model, max_ngram=4)`.

        Args:
            name: an installed drafter, see `hf-speculate drafters`.
            target: the model that it will draft for (PEFT-wrapped and compiled models are looked through).
            acceptance, posterior_threshold, posterior_alpha, adaptive, compile: see `Speculator`.
            options: the drafter's options; unknown ones raise `TypeError`.
        Raises:
            DrafterNotFoundError: no such drafter (with a suggestion).
            TargetMismatchError: it does not fit the target.
        """
        rule = {"posterior_threshold": posterior_threshold, "posterior_alpha": posterior_alpha}
        _typical_rule(acceptance, **rule)  # what it refuses is refused before weights are read
        target = unwrap(target)
        method = load_drafter(name)
        drafter = method.for_target(target, **options)
        drafter.check_target(target)
        return Speculator(drafter, acceptance, **rule, adaptive=adaptive, compile=compile)

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
        acceptance: Literal["match", "typical"] = "match",
        posterior_threshold: float | None = None,
        posterior_alpha: float | None = None,
        adaptive: bool | None = None,
        compile: bool | str = False,
        **options: Any,
    ) -> Speculator:
        """A speculator from the folder or Hub repository of a head or draft model; the layout is recognised.

        Args:
            name_or_path: folder, or Hub id; several, or names of drafters, joined with "+" draft together.
            target: the model that it will draft for.
            revision, token, cache_dir, local_files_only, subfolder: as everywhere on the Hub.
            acceptance, posterior_threshold, posterior_alpha, adaptive, compile: see `Speculator`.
            options: the drafter's options.
        Raises:
            DrafterNotFoundError: neither a folder nor a repository that can be had.
            CheckpointError: no installed drafter recognises it, or it is broken.
            TargetMismatchError: it belongs to another target.
        """
        if parts := _parts(name_or_path):
            return AutoSpeculator.from_name(
                "combined",
                target,
                acceptance=acceptance,
                posterior_threshold=posterior_threshold,
                posterior_alpha=posterior_alpha,
                adaptive=adaptive,
                compile=compile,
                parts=parts,
                **options,
            )
        rule = {"posterior_threshold": posterior_threshold, "posterior_alpha": posterior_alpha}
        _typical_rule(acceptance, **rule)
        target = unwrap(target)
        folder = local_folder(
            name_or_path,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            subfolder=subfolder,
        )
        method = drafter_class_for(folder)
        drafter = method.from_folder(folder, target, **options)
        drafter.check_target(target)
        if drafter.feature_layers:  # it was trained on the target's states
            warn_of_other_adapters(folder, target)
        return Speculator(drafter, acceptance, **rule, adaptive=adaptive, compile=compile)


def _parts(name_or_path: str | os.PathLike) -> list[str]:
    """The drafters that "a+b" names; none if that is a folder. (Hub ids have no "+".)"""
    name = os.fspath(name_or_path)
    return name.split("+") if "+" in name and not os.path.exists(name) else []


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


def make_speculator(name_or_path: str, target: nn.Module, **options: Any) -> Speculator:
    """`AutoSpeculator.from_name` or `from_pretrained`: the name of a drafter wins over a path."""
    if name_or_path in installed_drafters():
        return AutoSpeculator.from_name(name_or_path, target, **options)
    return AutoSpeculator.from_pretrained(name_or_path, target, **options)


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
        known[key] = make_speculator(key, model)
    return known[key]


def attach(model: nn.Module, speculator: Speculator | str | os.PathLike) -> Speculator:
    """Makes every later `model.generate(...)` use `speculator`, for code that calls `generate` itself.

    Requests that cannot run with a speculator (beams, …) warn once and run plain; `generate(..., speculator=None)`
    runs plain too. Nothing is stored on the model. Undo with `detach`.

    Args:
        model: also one that has a model inside generate for it (image and speech models): then that one is sped up.
    Returns:
        The resolved speculator.
    Raises:
        SpeculateError: a model that generates nothing.
    """
    model = unwrap(model)
    generating = _generating(model)
    resolved = resolve(speculator, generating[-1])
    for part in generating:
        resolved.drafter.check_target(part)
    _attached.update(dict.fromkeys(generating, resolved))
    return resolved


def _generating(model: GenerativeModel) -> list[GenerativeModel]:
    """The models that `model.generate` may run in: itself; where it has a method of its own for that, also the models
    inside that have transformers'."""
    if _generates_as_stock(model):
        return [model]
    inner = [m for m in model.modules() if m is not model and isinstance(m, PreTrainedModel) and _generates_as_stock(m)]
    if not inner and not hasattr(model, "generate"):
        raise SpeculateError(
            f"{type(model).__name__} has no `generate`, nor has a model inside it: nothing to speed up."
        )
    return [model, *cast(list[GenerativeModel], inner)]


def _generates_as_stock(model: PreTrainedModel) -> bool:
    return getattr(getattr(type(model), "generate", None), "__hf_speculate__", False)


def detach(model: nn.Module) -> Speculator:
    """Undoes `attach`; returns what was attached. Raises `SpeculateError` if nothing was."""
    found = None
    for part in _generating(unwrap(model)):
        found = _attached.pop(part, None) or found
    if found is None:
        raise SpeculateError(f"no speculator is attached to this {type(model).__name__}.")
    return found


def attached(model: GenerativeModel) -> Speculator | None:
    """The speculator attached to `model`, if any."""
    return _attached.get(model)
