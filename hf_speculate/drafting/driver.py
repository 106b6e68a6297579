"""The driver of a drafter: it calls the drafter of one request, checks its drafts and names it in errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from threading import Event
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..errors import DrafterError, SpeculateError
from ..target import GenerativeModel, num_embeddings
from ..tree import DraftTree, Round
from ..verification import RngState, Sampler, Sequences
from .ahead import Pending, Worker
from .checks import MAX_NODES, DraftChecks
from .choices import Choices
from .contract import Drafter, DraftSession
from .features import FeatureTaps
from .observations import Observation, Observations
from .requests import DraftRequest, DraftState, EarlyStopping


Answer = TypeVar("Answer")

# Longest prompt, in tokens, whose states are kept until the first draft.
_MOST_KEPT = 2048


class Drafting:
    """A drafter at work on one request: its session, and the taps that get the target's hidden states.

    Args:
        drafter: drafting method.
        request: facts of the request for its session.
        max_nodes: largest number of nodes, root included, that the target can score at once.
    """

    def __init__(self, drafter: Drafter, request: DraftRequest, max_nodes: int = MAX_NODES):
        self.drafter = drafter
        self.request = request
        self._taps = FeatureTaps(cast(GenerativeModel, request.target), drafter.feature_layers)
        self._prompt: Observation | None = None
        self._unobserved = Observations()
        self._open_session: DraftSession | None = None
        self._vocab_size = request.target.config.get_text_config(decoder=True).vocab_size
        self._num_ids = num_embeddings(request.target)
        self._checks = DraftChecks(drafter.name, self._num_ids, max_nodes)
        self._worker: Worker | None = None
        self._pending: Pending | None = None
        self._is_asked = False  # whether a draft was asked for in this round

    def start(self) -> None:
        self._open_session = self._ask(lambda: self.drafter.start(self.request))

    @property
    def _session(self) -> DraftSession:
        assert self._open_session is not None
        return self._open_session

    @property
    def forward_kwargs(self) -> dict[str, Any]:
        """Arguments that the target's forwards need for this drafter."""
        return self._taps.forward_kwargs

    def listening(self) -> AbstractContextManager[None]:
        """A context for the forwards whose hidden states the drafter gets."""
        return self._taps.listening()

    def observe_prompt(self, tokens: Tensor, hidden_states: Any) -> None:
        """Stores the prompt until the first draft. A long prompt goes to the drafter now, to free its states.

        Args:
            tokens: int64 [B, J], the token after each known position (`DraftSession.observe`).
        """
        features = self._taps.last(hidden_states, tokens.shape[1])
        self._prompt = Observation(
            tokens, features, torch.full((tokens.shape[0],), tokens.shape[1], dtype=torch.long, device="cpu")
        )
        if tokens.numel() > _MOST_KEPT:
            self.read_prompt()

    @property
    def num_unread(self) -> int:
        """Number of tokens of the prompt, in all rows, that the drafter reads before its first draft."""
        return 0 if self._prompt is None else self._prompt.tokens.numel()

    def read_prompt(self) -> None:
        """Gives the prompt to the drafter, once."""
        prompt, self._prompt = self._prompt, None
        if prompt is not None:
            self._ask(lambda: self._session.observe(*prompt))

    def observe(self, round: Round, hidden_states: Any, along: Any = None) -> None:
        """Stores a round and its forward's states, which the drafter gets before its next draft.

        Args:
            along: states along the accepted paths, if the forward has gathered them (`FeatureTaps.at`).
        """
        if any(round.tokens):
            paths = [path[: len(emitted)] for path, emitted in zip(round.paths, round.tokens, strict=True)]
            self._unobserved.add(round.tokens, self._taps.at(hidden_states, paths, round.tree.rows, along))

    def note(self, output: Any, num_rerun: int) -> None:
        """Stores states that a forward returned itself, and drops those of the `num_rerun` tokens that it ran again
        before the nodes."""
        self._taps.note(output)
        self._taps.skip(num_rerun)

    def sources(self, round: Round) -> Iterator[str]:
        """The names of the drafters of each accepted token, if several drafters draft together."""
        if len(self.drafter.parts) > 1 and round.num_nodes:
            for row, (tokens, number) in enumerate(zip(round.tokens, round.num_accepted, strict=True)):
                yield from self._session.sources(row, tokens[:number])

    def observe_choices(self, round: Round, logits: Tensor, sampler: Sampler) -> None:
        """Gives the drafter the target's most probable tokens of a round, if its session uses them.

        It skips rounds without a draft, because they must not become slower.

        Args:
            logits: the target's logits at the nodes of the round, [R, N, V].
        """
        count, is_asked, self._is_asked = self._session.num_choices, self._is_asked, False
        if count and is_asked and any(round.tokens):
            # Only tokens with an embedding can be drafted.
            known = logits if logits.shape[-1] <= self._num_ids else logits[..., : self._num_ids]
            choices = Choices.of(round.tree, known, sampler.warpers, count)
            self._ask(lambda: self._session.observe_choices(choices))

    def state(
        self,
        sampler: Sampler,
        sequences: Sequences,
        active: tuple[bool, ...],
        max_depth: int,
        *,
        chains_only: bool,
        early_stopping: EarlyStopping | None = None,
        num_nodes: float | None = None,
    ) -> DraftState:
        """The situation before a round."""
        # Other code that has drawn from the same RNG will probably draw again, and so change the noise of later steps.
        # Then drafters get no noise. The noise must also be as wide as the vocabulary that they draft from.
        noise = sampler.noise
        shares_noise = noise is not None and not noise.was_disturbed and noise.width == self._vocab_size
        return DraftState(
            root_ids=sequences.last_tokens,
            active=active,
            max_depth=max_depth,
            chains_only=chains_only,
            num_emitted=tuple(sequences.num_emitted),
            early_stopping=early_stopping,
            num_nodes=num_nodes,
            _noise=noise if shares_noise else None,
            _warpers=sampler.warpers,
        )

    def draft(self, state: DraftState) -> DraftTree:
        """A checked tree that the target can score, with all rows of the request."""
        self.read_prompt()
        observation, session = self._unobserved.take(), self._session
        roots = state.root_ids.tolist()  # copied before the drafter can change them
        self._is_asked = True

        def draft() -> DraftTree:
            if observation is not None:
                session.observe(*observation)
            return session.draft(state)

        tree = self._checks.admit(self._ask(draft), roots)
        return self.as_scored(tree, state)

    def as_scored(self, tree: DraftTree, state: DraftState) -> DraftTree:
        """The part of a tree that the target can score."""
        return _first_branch(tree) if state.chains_only and not _is_chain(tree) else tree

    def ahead(self, state: DraftState, path: Sequence[int]) -> Pending:
        """Begins a draft on the worker's thread (`DraftSession.ahead`). Nothing else may use the session until it has
        ended."""
        self.read_prompt()
        observation, session = self._unobserved.take(), self._session
        if observation is not None:
            self._ask(lambda: session.observe(*observation))
        self._is_asked = True
        self._worker = self._worker or Worker(self.request.target.device)
        cancelled, roots = Event(), state.root_ids.tolist()
        state = replace(state, cancelled=cancelled)
        self._pending = Pending(
            self._worker, lambda: self._checks.admit(session.ahead(state, path), roots), cancelled, path
        )
        return self._pending

    def made_ahead(self, pending: Pending) -> DraftTree:
        """The result of a draft made ahead; waits until the draft has ended."""
        return self._ask(pending.result)

    def close(self) -> None:
        """Closes the session. One that carries over gets the last rounds first."""
        try:
            if self._pending is not None:
                self._pending.cancel()
        finally:
            if self._worker is not None:
                self._worker.close()
            self._close()

    def _close(self) -> None:
        self._taps.close()
        session, self._open_session = self._open_session, None
        if session is None:
            return
        self._unnoticed(lambda: self._end(session))

    def _end(self, session: DraftSession) -> None:
        try:
            told = (self._prompt, self._unobserved.take()) if session.carries_over else ()
            for observation in filter(None, told):
                session.observe(*observation)
        finally:
            session.close()

    def _unnoticed(self, call: Callable[[], Answer]) -> Answer:
        """Calls the drafter and restores RNG and grad mode, which it may change."""
        rng, has_gradients = RngState(self.request.input_ids.device), torch.is_grad_enabled()
        try:
            return call()
        finally:
            rng.put_back()
            if torch.is_grad_enabled() != has_gradients:
                torch.set_grad_enabled(has_gradients)

    def _ask(self, call: Callable[[], Answer]) -> Answer:
        try:
            return self._unnoticed(call)
        except SpeculateError:
            raise
        except Exception as error:
            raise DrafterError(
                f"drafter {self.drafter.name!r} raised {type(error).__name__}: {error}. The text emitted so far and "
                "the cache are valid; to continue, generate without `speculator=`."
            ) from error


def _is_chain(tree: DraftTree) -> bool:
    parents = tree.parents
    rows = tree.host.parents if isinstance(parents, Tensor) else parents
    return all(list(row) == list(range(-1, len(row) - 1)) for row in rows)


def _first_branch(tree: DraftTree) -> DraftTree:
    """The chain of first children of every row, for targets that cannot score branches."""
    rows: list[tuple[Sequence[int], Sequence[int]]] = []
    for tokens, parents in zip(tree.host.token_ids, tree.host.parents, strict=True):
        branch, last = [tokens[0]], 0
        for node in range(1, len(tokens)):
            if parents[node] == last:
                branch.append(tokens[node])
                last = node
        rows.append((branch, range(-1, len(branch) - 1)))
    return DraftTree.from_rows(rows)
