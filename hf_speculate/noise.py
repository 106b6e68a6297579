"""Sampling noise that belongs to the step, not to the node.

`torch.multinomial(probs, 1)` is `argmax(probs / noise)` with `noise ~ Exp(1)`, bit for bit and with the same RNG
state afterwards. So the noise of step t can be drawn before the tokens of earlier steps are known: every node at
depth d of a draft tree is sampled with row t + d, drafters draft with the same rows (Gumbel top-k coupling), rows that
a round does not use wait for the next, and at the end the RNG is put where plain `generate` would have left it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Noise:
    """Rows of Exp(1) noise, one a decoding step, as stock `generate(do_sample=True)` would draw them.

    Args:
        batch_size: B, as stock draws the noise of all rows of the batch at once.
        vocab_size: V of the scores that are sampled from.
        device: device of the scores; the default generator of that device is used, as stock does.
    """

    def __init__(self, batch_size: int, vocab_size: int, device: torch.device):
        self._shape = (batch_size, vocab_size)
        self._device = device
        self._first_step = 0
        self._rows: deque[Tensor] = deque()
        self._states_before: deque[Tensor] = deque()
        self._logs: dict[int, dict[int | None, tuple[Tensor | None, Tensor]]] = {}
        self._pause: tuple[int, Tensor, Tensor] | None = None

    def row(self, step: int) -> Float[Tensor, "B V"]:
        """Noise of decoding step `step` (0 = the first new token). Draws up to it; does not consume."""
        if step < self._first_step:
            raise IndexError(f"noise of step {step} was released; the first kept step is {self._first_step}.")
        while len(self._rows) <= step - self._first_step:
            self._states_before.append(_get_rng_state(self._device))
            self._rows.append(torch.empty(self._shape, device=self._device).exponential_())
        return self._rows[step - self._first_step]

    def rows(self, steps: Sequence[int], rows: Sequence[int] | None = None) -> Float[Tensor, "R V"]:
        """Noise of `rows` (None: of every row of the batch), each at its own step.

        A row that has ended may ask for a step that was released; it gets the first one kept, as what is drafted or
        chosen for it is ignored.
        """
        chosen = range(len(steps)) if rows is None else rows
        return torch.stack(
            [self.row(max(step, self._first_step))[row] for row, step in zip(chosen, steps, strict=True)]
        )

    def log_rows(
        self, steps: Sequence[int], rows: Sequence[int] | None = None, columns: Int[Tensor, " W"] | None = None
    ) -> Float[Tensor, "R W"]:
        """`rows(steps, rows)[:, columns].log()`; what later calls ask for again is computed once."""
        chosen = range(len(steps)) if rows is None else rows
        logs = [self._log(max(step, self._first_step), columns)[row] for row, step in zip(chosen, steps, strict=True)]
        return logs[0][None] if len(logs) == 1 else torch.stack(logs)

    def _log(self, step: int, columns: Tensor | None) -> Float[Tensor, "B W"]:
        of_step = self._logs.setdefault(step, {})
        key = None if columns is None else id(columns)
        if key not in of_step:
            row = self.row(step)
            # With the columns themselves: their id is theirs as long as they are there.
            of_step[key] = columns, (row if columns is None else row[:, columns.to(row.device)]).log()
        return of_step[key][1]

    def release_before(self, step: int) -> None:
        """Forgets the rows of steps before `step`; they were used by every row of the batch."""
        while self._first_step < step and self._rows:
            self._rows.popleft()
            self._states_before.popleft()
            self._logs.pop(self._first_step, None)
            self._first_step += 1

    def pause(self, num_steps: int) -> None:
        """Puts the RNG where stock has it after `num_steps` sampled tokens, for a consumer that may draw from it."""
        num_used, drawn = max(num_steps - self._first_step, 0), _get_rng_state(self._device)
        if num_used < len(self._rows):
            _set_rng_state(self._states_before[num_used], self._device)
        self._pause = num_used, _get_rng_state(self._device), drawn

    def resume(self) -> None:
        """Goes on after `pause`. If the consumer has drawn, rows that no token used are drawn anew, as in stock."""
        assert self._pause is not None
        (num_used, left_at, drawn), self._pause = self._pause, None
        if torch.equal(_get_rng_state(self._device), left_at):
            _set_rng_state(drawn, self._device)
            return
        while len(self._rows) > num_used:
            self._rows.pop()
            self._states_before.pop()
            self._logs.pop(self._first_step + len(self._rows), None)

    def finish(self, num_steps: int) -> None:
        """Leaves the RNG where stock leaves it after `num_steps` sampled tokens; while paused it is there already."""
        if self._pause is None:
            self.pause(num_steps)
        self._pause = None
        self._rows.clear()
        self._states_before.clear()
        self._logs.clear()


def _get_rng_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set_rng_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
