"""`check_drafter`: the conformance check that every drafter must pass, built-in or from a third party."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..drafting import Choices, DraftChecks, Drafter, DraftRequest, DraftSession, DraftState
from ..errors import DrafterError
from ..messages import get_logger
from ..speculator import Speculator
from ..target import GenerativeModel, unwrap
from ..tree import DraftTree
from .lossless import check_lossless, prompt_ids


logger = get_logger(__name__)

# Tolerance of values, for a drafter that has read the same text in other pieces.
_ROUNDING = 1e-3
_WHY_NONE = (
    "Does it find its place in the text? After the prompt, `observe` gets prompt[1:] and the first new token; the last "
    "token that it got is the root of the next draft."
)
# Drafts ahead are cancelled, and interrupted by an error, after 0, 1, … levels, below this number.
_LEVELS_CANCELLED = 3


def check_drafter(
    drafter: Drafter | Speculator,
    target: GenerativeModel,
    prompts: Sequence[Tensor | str],
    max_new_tokens: int = 24,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> DrafterReport:
    """Checks that `drafter` keeps the contract of `hf_speculate.drafting` on a small target.

    It checks:
    - the tree of every draft: root, parents, siblings, token range, depth budget;
    - one `close` per session, whatever happens, and two sessions open at once;
    - greedy and sampled requests, left-padded batches whose rows end at different steps, a budget of one token, a
      prompt of one token, targets that take chains only;
    - for a drafter with `drafts_ahead`: a draft ahead (right, wrong, cancelled between any two levels, interrupted by
      an error) changes no later draft;
    - the text, which must stay the target's own.

    Args:
        drafter: drafter to check, or a speculator with it. It must fit `target`.
        target: small model; the check generates a few hundred tokens.
        prompts: at least two prompts of different lengths, int64 [S] each, or texts.
        max_new_tokens: length of the generated texts, in tokens.
        tokenizer: tokenizer for prompts that are texts; None if all are token ids.

    Returns:
        Counts of drafts. A drafter that drafted nothing at all gets a warning, because none of its drafts was tested.

    Raises:
        DrafterError: the contract was broken; the message names the call.
        LosslessnessError: the text is not the target's.
        TypeError: `drafter` is neither a drafter nor a speculator, or texts came without a tokenizer.
    """
    drafter = drafter.drafter if isinstance(drafter, Speculator) else drafter
    if not isinstance(drafter, Drafter):
        raise TypeError(f"check_drafter takes a Drafter or a Speculator, got {type(drafter).__name__}.")
    prompts = prompt_ids(prompts, tokenizer)
    if len(prompts) < 2:
        raise ValueError("check_drafter needs at least two prompts, to make a batch of them.")
    target = unwrap(target)
    watched = _Watched(drafter, target.config.get_text_config(decoder=True).vocab_size)
    speculator = Speculator(watched, adaptive=False)
    prompts = [prompt.to(target.device) for prompt in prompts]
    request: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": max_new_tokens}
    sampled: dict[str, Any] = {"do_sample": True, "seeds": (0, 1)}
    check_lossless(target, speculator, prompts, **request)
    check_lossless(target, speculator, prompts, **request, **sampled)
    check_lossless(target, speculator, [prompts[0][:1]], **request)
    for few in (1, 2):
        short: dict[str, Any] = {**request, "max_new_tokens": few}
        check_lossless(target, speculator, prompts[:1], **short)
    watched.chains_only = True
    check_lossless(target, speculator, prompts[:1], **request)
    watched.chains_only = False
    if drafter.drafts_ahead:
        looking_ahead = Speculator(watched, adaptive=False, ahead=True)
        watched.compares = True
        check_lossless(target, looking_ahead, prompts, **request)
        check_lossless(target, looking_ahead, prompts[:1], **request, **sampled)
        watched.compares = False
    batch = _left_padded(prompts)
    plain = target.generate(**batch, speculator=None, **request)
    ends_first_row = plain[0, batch["input_ids"].shape[1] + max_new_tokens // 2].item()
    for sampling in ({}, {"do_sample": True}):
        for eos in (None, ends_first_row):
            target.generate(**batch, speculator=speculator, **request | {"eos_token_id": eos} | sampling)
    watched.expect_all_closed()
    report = DrafterReport(watched.num_asked, watched.num_drafted, speculator.stats.mean_acceptance_length)
    if not report.num_drafts:
        asked = f"the drafter {drafter.name!r} was asked for {report.num_asked} drafts and made none."
        logger.warning(f"{asked} {_WHY_NONE}")
    return report


@dataclass(frozen=True)
class DrafterReport:
    """The counts of a conformance check.

    Attributes:
        num_asked: number of drafts that were asked for.
        num_drafts: drafts with at least one node below the root.
        tokens_per_round: tokens that a round with a draft emitted on average; None without such rounds.
    """

    num_asked: int
    num_drafts: int
    tokens_per_round: float | None


def _left_padded(prompts: Iterable[Tensor]) -> dict[str, Tensor]:
    prompts = list(prompts)
    width = max(len(prompt) for prompt in prompts)
    rows = [torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts]
    masks = [torch.nn.functional.pad(torch.ones_like(prompt), (width - len(prompt), 0)) for prompt in prompts]
    return {"input_ids": torch.stack(rows), "attention_mask": torch.stack(masks)}


class _Watched(Drafter):
    """A drafter around another one, which passes everything on and checks it."""

    def __init__(self, drafter: Drafter, vocab_size: int):
        self.inner = drafter
        self.vocab_size = vocab_size
        self.feature_layers = drafter.feature_layers
        self.name = drafter.name  # type: ignore[misc]
        self.drafts_ahead = drafter.drafts_ahead
        self.chains_only = self.compares = False
        self.sessions: list[_WatchedSession] = []
        self.num_asked = self.num_drafted = 0

    @classmethod
    def for_target(cls, target: GenerativeModel, **options: Any):
        raise NotImplementedError

    def check_target(self, target: GenerativeModel) -> None:
        self.inner.check_target(target)

    def start(self, request: DraftRequest) -> DraftSession:
        idle = self.inner.start(request)  # a second session of the same request must not disturb the first
        session = _WatchedSession(self, self.inner.start(request), self.inner.start(request) if self.compares else None)
        idle.close()
        self.sessions.append(session)
        return session

    def expect_all_closed(self) -> None:
        for session in self.sessions:
            if session.num_closed != 1:
                raise DrafterError(f"a session of {self.name!r} was closed {session.num_closed} times, not once.")


class _WatchedSession(DraftSession):
    def __init__(self, watched: _Watched, inner: DraftSession, twin: DraftSession | None = None):
        self.watched = watched
        self.inner = inner
        self.twin = twin  # a session that never looks ahead
        self.carries_over, self.num_choices = inner.carries_over, inner.num_choices
        self.num_closed = 0

    def draft(self, state: DraftState) -> DraftTree:
        if self.watched.chains_only:
            state = DraftState(**{**vars(state), "chains_only": True})
        tree = self.inner.draft(state)
        self.watched.num_asked += 1
        self.watched.num_drafted += tree.num_nodes > 1
        if self.twin is not None:
            self._compare(tree, self.twin.draft(state))
        self._check(tree, state)
        return tree

    def ahead(self, state: DraftState, path: Sequence[int]) -> DraftTree:
        """The draft made ahead, after others that must leave no trace."""
        self._cancelled(state, path)
        for levels in range(_LEVELS_CANCELLED):
            with suppress(_BrokenOff):
                self.inner.ahead(replace(state, cancelled=None, early_stopping=_BreaksOff(levels)), path)
            self.inner.ahead(replace(state, cancelled=None, early_stopping=_SaysNo(levels)), path)
        wrong = [*path[:-1], (path[-1] + 1) % self.watched.vocab_size] if path else []
        self.inner.ahead(
            replace(
                state, root_ids=torch.tensor(wrong[-1:] or state.root_ids.tolist(), dtype=torch.long, device="cpu")
            ),
            wrong,
        )
        tree = self.inner.ahead(state, path)
        self._check(tree, state)
        return tree

    def _cancelled(self, state: DraftState, path: Sequence[int]) -> None:
        cancelled = Event()
        cancelled.set()
        self.inner.ahead(replace(state, cancelled=cancelled), path)

    def _compare(self, tree: DraftTree, other: DraftTree) -> None:
        """Raises if a draft differs, beyond rounding, from one without any drafting ahead."""
        if tree.host.token_ids == other.host.token_ids:
            return
        mine, its = (sorted((each.host.values or [[]])[0]) for each in (tree, other))
        is_close = all(abs(a - b) < _ROUNDING for a, b in zip(mine, its, strict=False))
        if len(mine) != len(its) or not mine or not is_close:
            raise DrafterError(f"{self.watched.name!r}: drafting ahead changed the session: the next draft differs.")

    def _check(self, tree: DraftTree, state: DraftState) -> None:
        name = self.watched.name
        checks = DraftChecks(name, self.watched.vocab_size)
        _ = checks.admit(tree, state.root_ids.tolist()).host  # a tree on a device is checked when it is read
        for row, root in enumerate(state.root_ids.tolist()):
            if tree.host.token_ids[row][0] != root:
                raise DrafterError(
                    f"{name!r}: node 0 of row {row} is {tree.host.token_ids[row][0]}, the root is {root}."
                )
            if state.active[row] and tree.host.depth(row) > state.max_depth:
                raise DrafterError(
                    f"{name!r}: row {row} is {tree.host.depth(row)} deep, the budget is {state.max_depth}."
                )

    def observe(self, tokens, features, lengths) -> None:
        for session in filter(None, (self.inner, self.twin)):
            session.observe(tokens, features, lengths)

    def observe_choices(self, choices: Choices) -> None:
        for session in filter(None, (self.inner, self.twin)):
            session.observe_choices(choices)

    def close(self) -> None:
        self.num_closed += 1
        for session in filter(None, (self.inner, self.twin)):
            session.close()


class _SaysNo:
    """An `EarlyStopping` that agrees to some levels and then refuses."""

    def __init__(self, levels: int):
        self._left = levels

    def __call__(self, values: Tensor, previous: Tensor | None = None) -> bool:
        self._left -= 1
        return self._left >= 0


class _BrokenOff(Exception):
    """An error in the middle of a draft."""


class _BreaksOff(_SaysNo):
    """An `EarlyStopping` that agrees to some levels and then raises."""

    def __call__(self, values: Tensor, previous: Tensor | None = None) -> bool:
        if not super().__call__(values, previous):
            raise _BrokenOff
        return True
