"""Installed drafters by name, and speculators in one line of text.

Drafters are found through the entry-point group `hf_speculate.drafters`, built-in ones like those of third parties.
Listing them imports nothing. A drafter is imported when it is first asked for, so a broken optional dependency of one
does not hide the others. Those that draft together with others stand in the group `hf_speculate.joining_drafters` too.
Training methods are found by the same functions.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import DrafterNotFoundError, SpeculateError
from ..files import user_path


if TYPE_CHECKING:  # imported where a class is loaded: names are looked up without torch
    from ..drafting import Drafter


GROUP = "hf_speculate.drafters"
JOINING_GROUP = "hf_speculate.joining_drafters"

Member = TypeVar("Member")


@lru_cache(maxsize=1)
def installed_drafters() -> dict[str, EntryPoint]:
    """Name -> entry point of every installed drafter. Raises `SpeculateError` if two distributions claim a name."""
    return find_installed(GROUP, "drafter")


def load_drafter(name: str) -> type[Drafter]:
    """The drafter class installed under `name`; raises `DrafterNotFoundError` with a suggestion."""
    drafters = installed_drafters()
    if name not in drafters:
        raise DrafterNotFoundError(unknown_drafter_message(name))
    from ..drafting import Drafter

    return load_installed(drafters[name], Drafter)


@lru_cache(maxsize=1)
def joining_drafters() -> list[type[Drafter]]:
    """The installed drafters that draft together with others: for "a+b", or for requests that they join."""
    from ..drafting import Drafter

    return [load_installed(point, Drafter) for point in find_installed(JOINING_GROUP, "drafter").values()]


def union_drafter() -> type[Drafter]:
    """The drafter that drafts with several others; raises `DrafterNotFoundError` if none is installed."""
    for drafter in joining_drafters():
        if drafter.takes_parts:
            return drafter
    raise DrafterNotFoundError(
        f"no installed drafter drafts with several others (entry points {JOINING_GROUP!r}). "
        "Entry points are read from installed metadata: `pip install -e .` again, after adding one."
    )


def unknown_drafter_message(name: str) -> str:
    """The message for a name without a drafter: the nearest one, or where heads of that kind are."""
    message = unknown_name_message(name, installed_drafters(), "drafter")
    if not name:
        return f"{message} An empty name: write NAME or NAME+NAME."
    subject = "A trained head"
    if kind := _kind_of_head(name):  # no slip: "eagle3" for "eagle", which drafts with nothing without a head
        message, subject = message.replace(f" Did you mean {kind!r}?", ""), f"A trained head of this kind ({kind!r})"
    heads = [str(path.parent) for path in sorted(Path("examples").glob("*/provenance.json"))]
    near = [head for head in heads if name in head]
    if not near and "Did you mean" not in message:
        near = heads
    return f"{message} {subject} is given by its folder or Hub id{': ' if near else ''}{', '.join(near)}."


def _kind_of_head(name: str) -> str:
    """The installed drafter of checkpoints whose name `name` begins with; "" if there is none."""
    for drafter in filter(name.startswith, installed_drafters()):
        with suppress(Exception):  # another drafter that cannot be imported changes nothing
            from ..drafting import Drafter

            if load_drafter(drafter).recognizes.__func__ is not Drafter.recognizes.__func__:
                return drafter
    return ""


def check_local(path: str, cache_dir: str | None = None) -> None:
    """Raises `DrafterNotFoundError` for a head's name that is meant as a path, but is not a folder (`path_problem`)."""
    if problem := path_problem(path, cache_dir):
        raise DrafterNotFoundError(f"{path!r} {problem} A head is a folder, a GGUF file or a Hub id 'owner/name'.")


def path_problem(name: str, cache_dir: str | None = None) -> str:
    """A clause on a name that is meant as a path and is not a folder, so that the Hub is not asked for it; else "".

    A name is meant as a path if it cannot be the id of a repository, or if it begins with a folder that is here and the
    Hub's cache has no repository of that name.

    Args:
        name: folder or Hub id, "~" expanded.
        cache_dir: folder of the Hub's cache; None: the default one.
    """
    if os.path.isdir(name):
        return ""
    if os.path.exists(name):
        return f"is not a folder: {os.path.abspath(name)} is a file."
    parent, last = os.path.split(name)
    may_be_id = name.count("/") <= 1 and not name.startswith((".", "/", "~"))
    if may_be_id and (not os.path.isdir(parent) or os.path.isdir(_cached_repository(name, cache_dir))):
        return ""
    absent = f"is not a folder here{_did_you_mean(parent, last)}: there is no {os.path.abspath(name)}."
    return f"{absent} (A repository of the Hub: run `hf download {name}` first.)" if may_be_id else absent


def _cached_repository(name: str, cache_dir: str | None) -> str:
    """The folder of a repository in the Hub's cache, which exists once something of it was downloaded."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return os.path.join(cache_dir or constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"))


def _did_you_mean(parent: str, name: str) -> str:
    """The entry of a folder with the nearest name, in words: " (Did you mean 'examples/pycoder'?)"; else ""."""
    near = difflib.get_close_matches(name, os.listdir(parent) if os.path.isdir(parent) else [], n=1)
    return f" (Did you mean {os.path.join(parent, near[0])!r}?)" if near else ""


def find_installed(group: str, what: str) -> dict[str, EntryPoint]:
    """Name -> entry point of all members of an entry-point group.

    Args:
        group: name of the group.
        what: noun for a member, in messages.
    Raises:
        SpeculateError: two distributions claim a name.
    """
    points: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        other = points.get(point.name)
        if other is not None and other.value != point.value:
            raise SpeculateError(
                f"two installed {what}s are called {point.name!r}: {_origin(other)} and {_origin(point)}. "
                "Uninstall one of them."
            )
        points[point.name] = point
    return points


def load_installed(point: EntryPoint, kind: type[Member]) -> type[Member]:
    """The class of an entry point; raises `SpeculateError` if it is not a subclass of `kind`."""
    loaded = point.load()
    if not (isinstance(loaded, type) and issubclass(loaded, kind)):
        raise SpeculateError(
            f"entry point {point.name!r} ({_origin(point)}) is {loaded!r}, not a {kind.__name__} class."
        )
    return loaded


def unknown_name_message(name: str, installed: Iterable[str], what: str, where: str = "") -> str:
    """The message for a name that is not installed, with a suggestion.

    Args:
        name: the unknown name.
        installed: the names that there are.
        what: noun for a member of the group, see `find_installed`.
        where: place of the name in what was read, such as " in method.name".
    """
    names = list(installed)
    if not names:
        noun = what.split()[-1]
        return (
            f"unknown {what} {name!r}: no {noun} is installed. Entry points are read from installed metadata: "
            "`pip install -e .` (again, after adding one)."
        )
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown {what} {name!r}{where}.{hint} Installed: {', '.join(names)}."


def _origin(point: EntryPoint) -> str:
    return f"{point.value} of {point.dist.name if point.dist else 'an unknown distribution'}"


@dataclass(frozen=True)
class SpeculatorSpec:
    """`NAME_OR_PATH[:option=value,...]`, e.g. `draft_model:model=PATH,depth=4,top_k=2`.

    Several are joined by "+", e.g. `draft_model:model=PATH+suffix:compile=true`. Options after the last one are those
    of the whole. Options before a "+" are those of the one part.

    Attributes:
        text: the whole line.
        source: name, folder or Hub id; or several, joined by "+", each but the last perhaps with options.
        options: options by name; numbers and booleans are parsed, other values are text.
    """

    text: str
    source: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> SpeculatorSpec:
        """Reads a line; raises `SpeculateError` if it cannot be read. An existing path is a path, whatever its name."""
        *before, last = joined_sources(text)
        if not before and os.path.exists(last):
            return cls(text, last, {})
        source, separator, rest = last.partition(":")
        if separator and "=" not in rest:
            raise SpeculateError(
                f"cannot read speculator {text!r}: options are NAME:key=value,key=value, "
                "e.g. draft_model:model=PATH,depth=4."
            )
        options = {}
        for pair in filter(None, rest.split(",")):
            key, equals, value = pair.partition("=")
            if not equals or not key:
                raise SpeculateError(f"cannot read option {pair!r} of speculator {text!r}: it must be key=value.")
            options[key.strip()] = _value(value.strip())
        return cls(text, "+".join([*before, source]), options)

    def with_option(self, name: str, value: Any) -> SpeculatorSpec:
        """The same with one option added, or with another value of it."""
        options = self.options | {name: value}
        pairs = (f"{key}={given if isinstance(given, str) else json.dumps(given)}" for key, given in options.items())
        return SpeculatorSpec(f"{self.source}:{','.join(pairs)}", self.source, options)

    def check_source(self) -> None:
        """Raises `DrafterNotFoundError` for a source that is neither installed, nor on the disk, nor a Hub id."""
        for part in joined_sources(self.source):
            source = SpeculatorSpec.parse(part).source
            if source not in installed_drafters() and not os.path.exists(source) and "/" not in source:
                raise DrafterNotFoundError(unknown_drafter_message(source))
            if not source.endswith(".gguf"):
                check_local(source)

    @property
    def label(self) -> str:
        """The text with paths cut to their last part."""
        options = ",".join(f"{k}={Path(v).name if isinstance(v, str) else v}" for k, v in self.options.items())
        parts = joined_sources(self.source)
        names = [Path(part).name if len(parts) == 1 else SpeculatorSpec.parse(part).label for part in parts]
        source = "+".join(names)
        return f"{source}:{options}" if options else source


def joined_sources(source: str) -> list[str]:
    """The drafters and heads that "a+b" or "a + b" joins, with their options; a folder of that name is one.

    Hub ids have no "+". In the value of an option, "+" is a character unless a drafter's name or a folder follows.
    """
    if os.path.exists(path := user_path(source)):
        return [path]
    parts: list[str] = []
    for piece in source.split("+"):
        if parts and ":" in parts[-1] and not _begins_source(parts[-1], piece):
            parts[-1] += f"+{piece}"
        else:
            parts.append(piece)
    return [user_path(part.strip()) for part in parts]


def _begins_source(before: str, piece: str) -> bool:
    """Whether the text after a "+" names a drafter or folder, and is not a part of a folder's name itself."""
    name = piece.partition(":")[0].strip()
    value = f"{before}+{piece}".rpartition("=")[2]
    is_source = name in installed_drafters() or os.path.exists(user_path(name))
    return is_source and not os.path.exists(user_path(value))


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value if isinstance(value, int | float | bool) else text
