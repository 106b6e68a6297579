"""Drafts of whole requests, to compare captured ones with plain ones round by round."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from hf_speculate import Speculator, transfers
from hf_speculate.tree import PADDING_PARENT

from .pretended_device import TYPE, PretendedDevice
from .replays import Replays, stand_in


class Place(NamedTuple):
    """Where requests are captured.

    Attributes:
        name: name of the device.
        put: function that places a copy of a module there.
        replays: what was captured.
    """

    name: str
    put: Any
    replays: Replays


@contextmanager
def place_of(kind: str, monkeypatch: Any):
    """The CPU, or the pretended device, where everything that CUDA forbids raises."""
    if kind == "cpu":
        yield Place("cpu", copy.deepcopy, stand_in(monkeypatch))
        return
    monkeypatch.setattr(transfers, "STAGED", transfers.STAGED | {TYPE})
    with PretendedDevice() as device:
        yield Place(device.name, device.place, stand_in(monkeypatch, device))


class Drafts(NamedTuple):
    """A request's text, and its drafts.

    Attributes:
        text: token ids of every row.
        rounds: (path, value) of the possible nodes of every unfinished row, in order, for each draft.
        stats: statistics of the request.
    """

    text: list[list[int]]
    rounds: list[list[list[tuple[tuple[int, ...], float]]]]
    stats: Any


def drafts_of(session: type, model: Any, drafter: Any, batch: Any, request: Any, compile: Any = None) -> Drafts:
    """Runs a request.

    Args:
        session: class of the drafter's sessions.
    """
    rounds: list[Any] = []

    def draft(self, state, original=session.draft):
        tree = original(self, state)
        rounds.append([nodes_of(tree, row) for row, is_active in enumerate(state.active) if is_active])
        return tree

    speculator = Speculator(drafter, adaptive=False, compile=compile)
    with mock.patch.object(session, "draft", draft):
        torch.manual_seed(5)
        placed = {
            name: each.to(model.device) if isinstance(each, torch.Tensor) else each for name, each in batch.items()
        }
        text = model.generate(**placed, **request, speculator=speculator)
    return Drafts(text.tolist(), rounds, speculator.stats)


def nodes_of(tree: Any, row: int) -> list[tuple[tuple[int, ...], float]]:
    """(path, value) of the nodes of a row that are possible, in their order."""
    host = tree.host
    paths: list[Any] = [()]
    for token, parent in list(zip(host.token_ids[row], host.parents[row], strict=True))[1:]:
        paths.append((*paths[parent], token) if parent != PADDING_PARENT else None)
    return [each for each in zip(paths, host.values[row], strict=True) if each[0] and each[1] > -math.inf]


def assert_alike(found: Drafts, expected: Drafts) -> None:
    """The same text from the same drafts, of which some were accepted."""
    assert found.text == expected.text
    assert_same_nodes(found.rounds, expected.rounds)
    assert sum(count for number, count in expected.stats.accepted_histogram.items() if number)
    assert not found.stats.fallbacks


def assert_same_nodes(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """The same drafts in every round, with values that differ by so much at the most."""
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for row, (nodes, wanted) in enumerate(zip(ours, theirs, strict=True)):
            assert [path for path, _ in nodes] == [path for path, _ in wanted], (number, row)
            values = [value for _, value in wanted]
            assert [value for _, value in nodes] == pytest.approx(values, rel=tolerance, abs=tolerance)


def unwrap_functions(patch: pytest.MonkeyPatch, modules: Iterable[ModuleType]) -> None:
    """Takes off the checks of shapes that only tests put around functions: dynamo cannot look into these."""
    for module in modules:
        for owner in (module, *(each for each in vars(module).values() if inspect.isclass(each))):
            for name, value in list(vars(owner).items()):
                if getattr(owner, "__module__", module.__name__) != module.__name__:
                    continue
                if isinstance(value, property) and value.fget is not None:
                    patch.setattr(owner, name, property(inspect.unwrap(value.fget)))
                elif isinstance(value, staticmethod):
                    patch.setattr(owner, name, staticmethod(inspect.unwrap(value.__func__)))
                elif inspect.isfunction(value) and (value.__module__ or "").startswith("hf_speculate"):
                    patch.setattr(owner, name, inspect.unwrap(value))
