"""Static draft trees as lists of choices: one set of rules for every method that takes them.

A *choice* is the path of a node, the ranks of its tokens under their parents: `(0, 2)` is the third best child of the
root's best child. Source: Medusa (arXiv:2401.10774) and EAGLE-1 (arXiv:2401.15077), whose published lists these are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from hf_speculate.tree import ROOT_PARENT


Choices = tuple[tuple[int, ...], ...]


def checked_choices(choices: Iterable[Sequence[int]], method: str) -> Choices:
    """User's choices in canonical order: by depth, then by ranks.

    Args:
        method: whose option it is, for messages.
    Raises:
        ValueError: no choices, one twice, an empty one, ranks that are no integers from 0, or a choice without its
            parent.
    """
    try:
        paths = canonical(tuple(operator.index(rank) for rank in choice) for choice in choices)
    except TypeError as error:
        raise ValueError(f"{method}: a static tree is a list of choices such as (0, 1): {error}.") from error
    if not paths:
        raise ValueError(f"{method}: a static tree needs at least one choice, got an empty list.")
    known = {(), *paths}
    for previous, path in zip(((), *paths), paths, strict=False):
        if not path or min(path) < 0:
            raise ValueError(f"{method}: {path} is not a choice; a choice is a non-empty tuple of ranks from 0.")
        if path == previous:
            raise ValueError(f"{method}: the static tree has the choice {path} twice.")
        if path[:-1] not in known:
            raise ValueError(f"{method}: the static tree has the choice {path} but not its parent {path[:-1]}.")
    return paths


def canonical(paths: Iterable[tuple[int, ...]]) -> Choices:
    """By depth, then by ranks: parents before children, siblings in the order of their ranks."""
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def parents_of(choices: Choices) -> tuple[int, ...]:
    """Parent of every node of a tree whose node 0 is the root and whose node i + 1 is `choices[i]`; -1 for the root."""
    node_of = {(): 0, **{path: node for node, path in enumerate(choices, start=1)}}
    return (ROOT_PARENT, *(node_of[path[:-1]] for path in choices))
