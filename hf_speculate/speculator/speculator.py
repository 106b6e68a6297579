"""The class that users pass to `generate`: a drafter with policy, options and statistics; and ways to make one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from logging import ERROR
from typing import Any

from huggingface_hub import CommitInfo
from torch import nn
from transformers import LogitsProcessorList

from ..drafting import CalibrationTable, Drafter
from ..errors import OptionError
from ..files import user_path
from ..messages import get_logger
from ..stats import SpeculationStats
from ..target import GenerativeModel, unwrap
from .options import EngineOptions
from .publishing import registered_publisher
from .registry import (
    SpeculatorSpec,
    installed_drafters,
    joined_sources,
    joining_drafters,
    load_drafter,
    union_drafter,
)
from .repositories import drafter_class_for, head_folder, local_folder


logger = get_logger(__name__)


@contextmanager
def without_verdicts() -> Iterator[None]:
    """Leaves out the warning that drafts do not pay: a head that is still being trained need not pay yet."""
    level = logger.level
    logger.setLevel(ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def refuse_model(value: Any, what: str) -> None:
    """Raises `OptionError` for a model in the place of a speculator, a drafter or a name; the message shows what to
    write.

    Args:
        value: object that a user gave.
        what: name of the argument or function that takes it, for the message.
    """
    if isinstance(value, nn.Module):
        raise OptionError(
            f"{what} takes no model, got {type(value).__name__}. To draft with it: "
            "AutoSpeculator.from_name('draft_model', target=..., model=...)."
        )


class Speculator:
    """The argument of `model.generate(..., speculator=...)`: a drafter, a policy and options.

    Args:
        drafter: drafter that proposes the draft trees; speculators may share it.
        options: options of the engine by name (`EngineOptions`).

    Attributes:
        options: options of the engine.
        typical: rule of lossy acceptance; None if the request's sampler decides.
        policy: policy that decides how much is drafted. It keeps what it has learnt.
        backend: name of the `torch.compile` backend; None if nothing is compiled.
        stats: cumulative `SpeculationStats` of all calls; `stats.reset()` clears them.
        adapter_stats: the same statistics by the target's active PEFT adapters, "" for none (`active_adapters`).
        lossless: whether the text is the target's own (see the docs, "Testing and losslessness"). False with "typical".
    """

    def __init__(self, drafter: Drafter, **options: Any):
        refuse_model(drafter, "Speculator")
        if not isinstance(drafter, Drafter):
            raise OptionError(
                f"Speculator takes a Drafter, got {type(drafter).__name__}. "
                "Use AutoSpeculator.from_name / from_pretrained to make one from a name or a checkpoint."
            )
        self.drafter = drafter
        self.options = EngineOptions.read(options)
        self.typical = self.options.typical_acceptance()
        self.policy = self.options.draft_policy()
        self.backend = self.options.backend()
        if self.options.ahead and not drafter.drafts_ahead:
            raise OptionError(
                f"ahead=True was asked for, and the drafter {drafter.name!r} drafts nothing ahead; of the built-in "
                "ones draft_model does."
            )
        self.stats = self.new_stats()
        self.adapter_stats: dict[str, SpeculationStats] = {}
        self._has_warned = False
        self._joined: dict[tuple[type[Drafter], ...], Speculator] = {}  # by the drafters that join a request

    def serving(self, processors: LogitsProcessorList, target: GenerativeModel) -> Speculator:
        """The speculator for a request with these processors: this one, or a union with the drafters that join it."""
        if not self.options.constraints or self.options.ahead:
            return self
        names = {part.name for part in self.drafter.parts}
        joining = tuple(kind for kind in joining_drafters() if kind.name not in names and kind.joins(processors))
        if joining and joining not in self._joined:
            union = union_drafter()
            parts = [*self.drafter.parts, *(kind.for_target(target) for kind in joining)]
            own = asdict(self.drafter.options) if isinstance(self.drafter, union) else {}  # type: ignore[attr-defined]
            drafter = union.for_target(target, parts=parts, **own)
            self._joined[joining] = Speculator(drafter, **vars(self.options))
        return self._joined[joining] if joining else self

    @property
    def lossless(self) -> bool:
        return self.typical is None

    def new_stats(self) -> SpeculationStats:
        """Statistics of this drafter, all zero."""
        return SpeculationStats(drafter=self.drafter.name, advice=self.drafter.advice)

    def count(self, stats: SpeculationStats, adapters: str = "") -> None:
        """Adds a call's statistics to the cumulative ones. Warns once if drafts have turned out not to pay.

        Args:
            adapters: names of the target's adapters during the call, "" for none.
        """
        self.stats.merge(stats)
        self.adapter_stats.setdefault(adapters, self.new_stats()).merge(stats)
        if not self._has_warned and (problem := self.stats.shortfall):
            self._has_warned = True
            logger.warning(f"drafter {self.drafter.name!r}: {problem}")

    def save_pretrained(
        self,
        path: str | os.PathLike,
        layout: str | None = None,
        *,
        custom_generate: bool = False,
        metrics: Mapping[str, Any] | None = None,
        notes: str = "",
        measured_on: str | None = None,
    ) -> None:
        """Writes the drafter's weights in a published layout, and a model card unless a person has written one.

        Args:
            path: folder, made if it does not exist.
            layout: layout of the drafter: for EAGLE-3 "speculators", "specforge" or "safeailab", for Medusa
                "fasterdecoding" or "vllm". None takes the drafter's default. No layout has the acceptance rule.
            custom_generate: whether to write a folder of that name too, with code for `model.generate(...,
                custom_generate=path, trust_remote_code=True)`.
            metrics, notes, measured_on: contents of the model card: measured figures by name; Markdown text; the name
                of the data that the figures were measured on.

        Raises:
            CheckpointError: the drafter has no weights, or the layout cannot express them. Nothing was written.
        """
        publisher = registered_publisher()
        path = user_path(path)
        saved = self.drafter.save_pretrained(path, layout)
        contents = {"metrics": metrics, "notes": notes, "measured_on": measured_on}
        publisher.write_card(path, saved, custom_generate=custom_generate, **contents)

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
        custom_generate: bool = False,
        metrics: Mapping[str, Any] | None = None,
        notes: str = "",
        measured_on: str | None = None,
    ) -> CommitInfo:
        """Saves as `save_pretrained` does and uploads the result to a Hub repository, which is made if it does not
        exist.

        Args:
            repo_id: "owner/name", or "name" for one of your own.
            private: whether a new repository is private; None takes the owner's setting.
            token, commit_message, revision, create_pr: options of the upload, with `huggingface_hub`'s meaning.
            custom_generate: whether to upload code too, so that `model.generate(..., custom_generate=repo_id,
                trust_remote_code=True)` works without importing this package, where it is installed.

        Raises:
            CheckpointError: see `save_pretrained`; or the repository has weights under other names, which readers could
                load instead. Nothing was uploaded.
        """
        publisher = registered_publisher()
        with tempfile.TemporaryDirectory() as folder:
            saved = self.drafter.save_pretrained(folder, layout)
            return publisher.upload(
                folder,
                saved,
                repo_id,
                private=private,
                token=token,
                commit_message=commit_message,
                revision=revision,
                create_pr=create_pr,
                custom_generate=custom_generate,
                metrics=metrics,
                notes=notes,
                measured_on=measured_on,
            )

    def __repr__(self) -> str:
        rule = "" if self.lossless else f", {self.typical}, lossy"
        return f"Speculator({self.drafter!r}{rule})"

    def _repr_html_(self) -> str:
        return self.stats._repr_html_()


class AutoSpeculator:
    """Makes a `Speculator` from the name of an installed drafter or from a checkpoint."""

    def __init__(self) -> None:
        raise TypeError("AutoSpeculator is not instantiated: use from_name(...) or from_pretrained(...).")

    @staticmethod
    def from_name(name: str, target: nn.Module, **options: Any) -> Speculator:
        """A speculator by drafter name, for example `from_name("prompt_lookup", target=model, max_ngram=4)`.

        Args:
            name: name of an installed drafter (`hf-speculate drafters` lists them), or a text as `speculator=` takes
                it, such as "draft_model:model=PATH+suffix".
            target: model to draft for; it may be wrapped by PEFT or compiled.
            options: options of the engine (`EngineOptions`: acceptance, policy, adaptive, compile, …) and of the
                drafter. Unknown ones raise `OptionError` with the nearest name.

        Raises:
            DrafterNotFoundError: there is no such drafter. The message has a suggestion.
            TargetMismatchError: the drafter does not fit the target.
        """
        refuse_model(name, "from_name")
        if name not in installed_drafters() and not {*name}.isdisjoint("+:"):
            return make_speculator(name, target, **options)
        engine, own = EngineOptions.split(options)  # check the options before weights are read
        target = unwrap(target)
        drafter = load_drafter(name).for_target(target, **own)
        drafter.check_target(target)
        return _prepared(drafter, target, engine)

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
        """A speculator from the folder or Hub repository of a head or draft model. The layout is recognised.

        Args:
            name_or_path: folder, Hub id, or GGUF file of a draft head; or the target's own, if it has a head in its
                subfolder `dspark`; or the name of a drafter, unless a folder has that name. Several of these, joined
                with "+", draft together. Options may follow, as in `generate(speculator=)`, and win over `options`.
            target: model to draft for.
            revision, token, cache_dir, local_files_only, subfolder: options of the download, with `huggingface_hub`'s
                meaning.
            options: options of the engine and of the drafter, see `from_name`.

        Raises:
            DrafterNotFoundError: there is no such folder, file or repository.
            CheckpointError: no installed drafter recognises the checkpoint, or it is broken.
            TargetMismatchError: the head belongs to another target. (If only weights, quantisation or adapters differ,
                it drafts with a warning.)
        """
        refuse_model(name_or_path, "from_pretrained")
        spec = SpeculatorSpec.parse(os.fspath(name_or_path))
        options |= spec.options
        if len(parts := joined_sources(spec.source)) > 1:
            return AutoSpeculator.from_name(union_drafter().name, target, parts=parts, **options)
        if spec.source in installed_drafters() and not os.path.isdir(spec.source):
            return AutoSpeculator.from_name(spec.source, target, **options)
        engine, own = EngineOptions.split(options)
        target = unwrap(target)
        folder = local_folder(
            spec.source,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            subfolder=subfolder,
        )
        folder = head_folder(spec.source, folder, target)
        drafter = drafter_class_for(folder).from_folder(folder, target, **own)
        drafter.check_target(target)
        drafter.calibration = CalibrationTable.load(folder)
        drafter.record = drafter.record_in(folder, target)
        return _prepared(drafter, target, engine)


def _prepared(drafter: Drafter, target: GenerativeModel, engine: EngineOptions) -> Speculator:
    """A speculator whose first request finds everything that it needs."""
    speculator = Speculator(drafter, **vars(engine))
    drafter.prepare(target)
    if engine.constraints:
        joining_drafters()  # imports them
    return speculator


def make_speculator(text: str, target: nn.Module, **options: Any) -> Speculator:
    """A speculator by `AutoSpeculator.from_name` or `from_pretrained`: the name of a drafter wins over a path.

    Args:
        text: name or path with options, `NAME_OR_PATH[:option=value,...]`. Options in it win over `options`.
    """
    if text in installed_drafters():
        return AutoSpeculator.from_name(text, target, **options)
    spec = SpeculatorSpec.parse(text)
    if spec.source in installed_drafters():
        return AutoSpeculator.from_name(spec.source, target, **(options | spec.options))
    return AutoSpeculator.from_pretrained(spec.source, target, **(options | spec.options))
