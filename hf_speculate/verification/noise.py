"""Sampling noise that belongs to the step, not to the node.

`torch.multinomial(probs, 1)` is `argmax(probs / noise)` with `noise ~ Exp(1)`, bit for bit and with the same RNG
state afterwards. So the noise of step t can be drawn before the tokens of earlier steps are known: every node at
depth d of a draft tree is sampled with row t + d, drafters draft with the same rows (Gumbel top-k coupling), and rows
that a round does not use wait for the next.

Rows are drawn from a generator of their own, which begins where the global one is. The global one is put where plain
`generate` would have it whenever code of somebody else runs that may draw from it (`pause`), and in the end (`finish`);
what such code draws counts as in stock: rows that no token has used yet are drawn anew behind it (`resume`).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .natively import exponential


Method = TypeVar("Method", bound=Callable[..., Any])


def _one_at_a_time(method: Method) -> Method:
    @functools.wraps(method)
    def locked(self: Noise, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked  # type: ignore[return-value]


class Noise:
    """Rows of Exp(1) noise, one a decoding step, as stock `generate(do_sample=True)` would draw them. Whoever asks for
    a row first, and on whichever thread: they are drawn in the order of their steps.

    Args:
        batch_size: B, as stock draws the noise of all rows of the batch at once.
        width: V of the scores that are sampled from, see `fit`.
        device: device of the scores; the default generator of that device is continued, as stock does.
    """

    def __init__(self, batch_size: int, width: int, device: torch.device):
        self.width = width
        self.was_disturbed = False
        """Whether somebody drew from the global generator during a `pause`."""
        self._batch_size = batch_size
        self._device = device
        self._lock = RLock()
        self._generator = torch.Generator(device)
        self._generator.set_state(_get_rng_state(device))
        self._first_step = 0
        self._rows: deque[Tensor] = deque()
        self._states_before: deque[Tensor] = deque()
        self._logs: dict[int, dict[int | None, tuple[Tensor | None, Tensor]]] = {}
        self._paused_at: int | None = None

    @_one_at_a_time
    def row(self, step: int) -> Float[Tensor, "B V"]:
        """Noise of decoding step `step` (0 = the first new token). Draws up to it; does not consume."""
        if step < self._first_step:
            raise IndexError(f"noise of step {step} was released; the first kept step is {self._first_step}.")
        while len(self._rows) <= step - self._first_step:
            self._states_before.append(self._generator.get_state())
            row = torch.empty(self._batch_size, self.width, device=self._device)
            self._rows.append(exponential(row, self._generator))
        return self._rows[step - self._first_step]

    def rows(self, steps: Sequence[int], rows: Sequence[int] | None = None) -> Float[Tensor, "R V"]:
        """Noise of `rows` (None: of every row of the batch), each at its own step.

        A row that has ended may ask for a step that was released; it gets the first one kept, as what is drafted or
        chosen for it is ignored.
        """
        chosen = range(len(steps)) if rows is None else rows
        found = [self.row(max(step, self._first_step))[row] for row, step in zip(chosen, steps, strict=True)]
        return found[0][None] if len(found) == 1 else torch.stack(found)

    def log_rows(
        self, steps: Sequence[int], rows: Sequence[int] | None = None, columns: Int[Tensor, " W"] | None = None
    ) -> Float[Tensor, "R W"]:
        """`rows(steps, rows)[:, columns].log()`; what later calls ask for again is computed once."""
        chosen = range(len(steps)) if rows is None else rows
        logs = [self._log(max(step, self._first_step), columns)[row] for row, step in zip(chosen, steps, strict=True)]
        return logs[0][None] if len(logs) == 1 else torch.stack(logs)

    @_one_at_a_time
    def _log(self, step: int, columns: Tensor | None) -> Float[Tensor, "B W"]:
        of_step = self._logs.setdefault(step, {})
        key = None if columns is None else id(columns)
        if key not in of_step:
            row = self.row(step)
            # With the columns themselves: their id is theirs as long as they are there.
            of_step[key] = columns, (row if columns is None else row[:, columns.to(row.device)]).log()
        return of_step[key][1]

    @_one_at_a_time
    def fit(self, width: int, step: int) -> None:
        """Sets the number of columns from `step` on: a processor or an output matrix may have its own idea of V. Rows
        that were drawn for another width are drawn anew."""
        if width != self.width:
            self._drop_from(step)
            self.width = width

    @_one_at_a_time
    def release_before(self, step: int) -> None:
        """Forgets the rows of steps before `step`; they were used by every row of the batch."""
        while self._first_step < step and self._rows:
            self._rows.popleft()
            self._states_before.popleft()
            self._logs.pop(self._first_step, None)
            self._first_step += 1

    @_one_at_a_time
    def pause(self, num_steps: int) -> None:
        """Puts the RNG where stock has it after `num_steps` sampled tokens, for code that may draw from it."""
        _set_rng_state(self._state_after(num_steps), self._device)
        self._paused_at = num_steps

    @_one_at_a_time
    def resume(self) -> bool:
        """Goes on after `pause`. Returns whether anything was drawn meanwhile; then rows that no token has used are
        drawn anew, as in stock."""
        assert self._paused_at is not None
        num_steps, self._paused_at = self._paused_at, None
        state = _get_rng_state(self._device)
        if torch.equal(state, self._state_after(num_steps)):
            return False
        self._drop_from(num_steps)
        self._generator.set_state(state)
        self.was_disturbed = True
        return True

    @_one_at_a_time
    def finish(self, num_steps: int) -> None:
        """Leaves the RNG where stock leaves it after `num_steps` sampled tokens; while paused it is there already."""
        if self._paused_at is None:
            self.pause(num_steps)
        self._rows.clear()
        self._states_before.clear()
        self._logs.clear()

    def _state_after(self, num_steps: int) -> Tensor:
        """The state of the generator after the rows of so many steps."""
        index = max(num_steps - self._first_step, 0)
        return self._states_before[index] if index < len(self._rows) else self._generator.get_state()

    def _drop_from(self, step: int) -> None:
        """Takes back the rows of `step` and later ones."""
        self._generator.set_state(self._state_after(step))
        while len(self._rows) > max(step - self._first_step, 0):
            self._rows.pop()
            self._states_before.pop()
            self._logs.pop(self._first_step + len(self._rows), None)


class RngState:
    """The states of the global generators of the CPU and of a device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._cpu = torch.get_rng_state()
        self._other = None if device.type == "cpu" else _get_rng_state(device)

    def put_back(self) -> None:
        """Leaves no trace of what was drawn since."""
        torch.set_rng_state(self._cpu)
        if self._other is not None:
            _set_rng_state(self._other, self._device)


def _get_rng_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set_rng_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
