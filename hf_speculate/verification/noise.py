"""Sampling noise that belongs to the step, not to the node.

`torch.multinomial(probs, 1)` is `argmax(probs / noise)` with `noise ~ Exp(1)`, bit for bit and with the same RNG state
afterwards. So the noise of step t can be drawn before earlier tokens are known. Every node at depth d of a tree is
sampled with row t + d, and drafters draft with the same rows (Gumbel top-k coupling). Rows that a round does not use
wait for the next.

Rows come from a separate generator that begins in the state of the global one. Other code may draw from the global
generator. Before such code runs, `pause` puts the global generator where plain `generate` would have it, and `finish`
does so at the end. If such code draws, `resume` draws unused rows again after it, as in stock.
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


NoiseMethod = TypeVar("NoiseMethod", bound=Callable[..., Any])


def _one_at_a_time(method: NoiseMethod) -> NoiseMethod:
    @functools.wraps(method)
    def locked(self: Noise, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked  # type: ignore[return-value]


class Noise:
    """Rows of Exp(1) noise, one for each decoding step, as stock `generate(do_sample=True)` would draw them.

    Rows are drawn in the order of their steps, whichever is requested first and on whichever thread.

    Args:
        batch_size: number of rows, B: stock draws the noise of the whole batch at once.
        width: number of columns, V, of the scores to sample from (`fit` changes it).
        device: device of the scores. Like stock, the noise continues the default generator of that device.
    """

    def __init__(self, batch_size: int, width: int, device: torch.device):
        self.width = width
        self.was_disturbed = False
        """Whether anything drew from the global generator during a `pause`."""
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
        """The noise of step `step` (0 is the first new token). Draws rows up to it and keeps them."""
        if step < self._first_step:
            raise IndexError(f"noise of step {step} was released; the first kept step is {self._first_step}.")
        while len(self._rows) <= step - self._first_step:
            self._states_before.append(self._generator.get_state())
            row = torch.empty(self._batch_size, self.width, device=self._device, dtype=torch.float32)
            self._rows.append(exponential(row, self._generator))
        return self._rows[step - self._first_step]

    def rows(self, steps: Sequence[int], rows: Sequence[int] | None = None) -> Float[Tensor, "R V"]:
        """The noise of `rows`, each at its own step; None means every row of the batch.

        A finished row may request a step that was released. It gets the first step kept, as its tokens are ignored.
        """
        row_noise = self.rows_of(steps, rows)
        return row_noise[0][None] if len(row_noise) == 1 else torch.stack(row_noise)

    def rows_of(self, steps: Sequence[int], rows: Sequence[int] | None = None) -> list[Float[Tensor, " V"]]:
        """The same rows, each a view of what was drawn."""
        chosen = range(len(steps)) if rows is None else rows
        return [self.row(max(step, self._first_step))[row] for row, step in zip(chosen, steps, strict=True)]

    def log_rows(
        self, steps: Sequence[int], rows: Sequence[int] | None = None, columns: Int[Tensor, " W"] | None = None
    ) -> Float[Tensor, "R W"]:
        """`rows(steps, rows)[:, columns].log()`, cached."""
        chosen = range(len(steps)) if rows is None else rows
        logs = [self._log(max(step, self._first_step), columns)[row] for row, step in zip(chosen, steps, strict=True)]
        return logs[0][None] if len(logs) == 1 else torch.stack(logs)

    @_one_at_a_time
    def _log(self, step: int, columns: Tensor | None) -> Float[Tensor, "B W"]:
        of_step = self._logs.setdefault(step, {})
        key = None if columns is None else id(columns)
        if key not in of_step:
            row = self.row(step)
            # Keep the columns too: their id is unique only while they exist.
            of_step[key] = columns, (row if columns is None else row[:, columns.to(row.device)]).log()
        return of_step[key][1]

    @_one_at_a_time
    def fit(self, width: int, step: int) -> None:
        """Sets the number of columns from `step` on, and draws rows of another width again.

        A processor or an output matrix may change the width of the scores.
        """
        if width != self.width:
            self._drop_from(step)
            self.width = width

    @_one_at_a_time
    def release_before(self, step: int) -> None:
        """Drops the rows of steps before `step`, which every row of the batch has used."""
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
        """Continues after `pause`; returns whether anything was drawn meanwhile.

        If so, rows that no token has used are drawn again, as in stock.
        """
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
        """Leaves the RNG where stock leaves it after `num_steps` sampled tokens. During a pause it is already there."""
        if self._paused_at is None:
            if num_steps > self._first_step:
                self.row(num_steps - 1)  # stock may have drawn for a token that it dropped
            self.pause(num_steps)
        self._rows.clear()
        self._states_before.clear()
        self._logs.clear()

    def _state_after(self, num_steps: int) -> Tensor:
        """The state of the generator after the rows of `num_steps` steps."""
        index = max(num_steps - self._first_step, 0)
        return self._states_before[index] if index < len(self._rows) else self._generator.get_state()

    def _drop_from(self, step: int) -> None:
        """Undoes the drawing of `step` and all later steps."""
        self._generator.set_state(self._state_after(step))
        while len(self._rows) > max(step - self._first_step, 0):
            self._rows.pop()
            self._states_before.pop()
            self._logs.pop(self._first_step + len(self._rows), None)


class RngState:
    """The states of the global generators of the CPU and of one device, to be restored later."""

    def __init__(self, device: torch.device):
        self._device = device
        self._cpu = torch.get_rng_state()
        self._other = None if device.type == "cpu" else _get_rng_state(device)

    def put_back(self) -> None:
        """Restores the states, undoing whatever was drawn since."""
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
