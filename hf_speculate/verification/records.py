"""Records for `output_scores`, `output_logits`, `output_hidden_states` and `output_attentions`.

A round emits several steps, and rows are at different steps. So values are stored by (step, row) and assembled at the
end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..tree import Round


class StepRecord:
    """One tensor for each step, filled row by row.

    Args:
        batch_axis: axis of the batch in the results, counted from the end; None means the first axis.
    """

    def __init__(self, batch_axis: int | None = None) -> None:
        self._batch_axis = batch_axis
        self._rows: list[dict[int, Tensor]] = []
        self._complete: tuple[Tensor, ...] = ()

    def add(self, step: int, row: int, value: Tensor) -> None:
        while len(self._rows) <= step:
            self._rows.append({})
        self._rows[step][row] = value

    def complete(self, batch_size: int) -> tuple[Tensor, ...]:
        """The tensors of all steps so far, in the form of stock's `scores`. Rows that have not reached a step are 0."""
        axis = 0 if self._batch_axis is None else self._batch_axis
        for rows in self._rows[len(self._complete) :]:
            blank = torch.zeros_like(next(iter(rows.values())))
            self._complete += (torch.stack([rows.get(row, blank) for row in range(batch_size)], dim=axis),)
        return self._complete


class LayerRecord:
    """One tuple of layer tensors for each step: first the whole prompt's, then one position per step.

    Args:
        batch_axis: axis of the batch in the results, counted from the end.
    """

    def __init__(self, batch_axis: int) -> None:
        self._batch_axis = batch_axis
        self._prompt: tuple[Tensor, ...] = ()
        self._layers: list[StepRecord] = []

    def add_prompt(self, layers: Sequence[Tensor]) -> None:
        self._prompt = tuple(layers)
        self._layers = [StepRecord(self._batch_axis) for _ in layers]

    def add(self, step: int, row: int, layers: Sequence[Tensor]) -> None:
        """Stores the tensors of one row, without a batch axis; `step` 1 is the first after the prompt."""
        for record, value in zip(self._layers, layers, strict=True):
            record.add(step - 1, row, value)

    def complete(self, batch_size: int, num_steps: int) -> tuple[tuple[Tensor, ...], ...]:
        """Tensors by step and layer, in the form of stock's `hidden_states` and `attentions`."""
        if not self._layers:  # for example attentions of an implementation that returns none: stock has empty tuples
            return (self._prompt,) * num_steps
        later = zip(*(record.complete(batch_size) for record in self._layers), strict=True)
        return (self._prompt, *later)


@dataclass(frozen=True)
class Records:
    """The records of one request; None where nothing was asked for."""

    scores: StepRecord | None = None
    logits: StepRecord | None = None
    hidden_states: LayerRecord | None = None
    attentions: LayerRecord | None = None

    @property
    def are_kept(self) -> bool:
        """Whether anything is recorded."""
        return any(record is not None for record in vars(self).values())

    @property
    def of_sampler(self) -> bool:
        """Whether the sampler has anything to record."""
        return self.scores is not None or self.logits is not None

    @property
    def forward_kwargs(self) -> dict[str, bool]:
        """Arguments that every forward of the target needs for the records."""
        wanted = {"output_hidden_states": self.hidden_states, "output_attentions": self.attentions}
        return {name: True for name, record in wanted.items() if record is not None}

    def add(self, step: int, row: int, logits: Tensor, scores: Tensor) -> None:
        """Records the logits and scores of one row at one step, as copies.

        A view would keep the logits of the whole tree alive.
        """
        if self.logits is not None:
            self.logits.add(step, row, logits.to(torch.float32, copy=True))
        if self.scores is not None:
            self.scores.add(step, row, scores.clone())

    def add_prompt(self, output: Any) -> None:
        """Records the prefill's output (of its last chunk, as in stock)."""
        if self.hidden_states is not None:
            self.hidden_states.add_prompt(output.hidden_states)
        if self.attentions is not None:
            self.attentions.add_prompt(output.attentions or ())

    def add_round(
        self, round: Round, output: Any, num_new: Sequence[int], windows: Sequence[int | None], whole: Any
    ) -> None:
        """Records the accepted paths of a round, if hidden states or attentions were asked for.

        Args:
            output: output of the round's forward.
            num_new: number of new tokens of each row, those of this round included.
            windows: sliding window of every layer, in entries; None for a layer without one (`layer_windows`).
            whole: states and attentions of a forward that ran the whole text; None if the forward ran only the tree.
        """
        for slot, row in enumerate(round.tree.rows):
            path = round.paths[row]
            first_step = num_new[row] - len(path)
            if whole is not None:
                self.add_whole(whole, row, first_step)
            else:
                self.add_path(output, slot, row, path, first_step, round.lengths[row], round.context, windows)

    def add_path(
        self,
        output: Any,
        slot: int,
        row: int,
        path: Sequence[int],
        first_step: int,
        length: int,
        num_prefix: int,
        windows: Sequence[int | None],
    ) -> None:
        """Records one row's accepted path from a forward over a tree.

        Args:
            output: output of the model: one tensor for each layer, hidden states [..., R, N, H] and attentions [R,
                heads, N, M + N].
            slot: index of the row in these tensors.
            path: nodes of the path, root first; step `first_step + j` was computed from node `path[j]`.
            length: number of committed entries of the row.
            num_prefix: number of cache entries before the nodes, M. Entries in [length, M) belong to other rows.
            windows: sliding window of every layer, in entries; None for a layer without one (`layer_windows`). The
                attentions of such a layer have only the last columns of M + N that it shows.
        """
        for index, node in enumerate(path):
            if self.hidden_states is not None:
                states = [layer[..., slot, node, None, :].clone() for layer in output.hidden_states]
                self.hidden_states.add(first_step + index, row, states)
            if self.attentions is not None:
                keys = [*range(length), *(num_prefix + ancestor for ancestor in path[: index + 1])]
                weights = []
                for layer, window in zip(output.attentions or (), windows, strict=False):
                    hidden = num_prefix + layer.shape[2] - layer.shape[3]
                    seen = [key - hidden for key in keys[-(window or 0) :]]
                    weights.append(layer[slot, :, node, seen][:, None])
                self.attentions.add(first_step + index, row, weights)

    def add_whole(self, output: Any, row: int, step: int) -> None:
        """Records one row of a forward that ran the whole text for one step, as stock does."""
        if self.hidden_states is not None:
            self.hidden_states.add(step, row, [layer[..., row, :, :] for layer in output.hidden_states])
        if self.attentions is not None:
            self.attentions.add(step, row, [layer[row] for layer in output.attentions or ()])

    def complete(self, batch_size: int, num_steps: int) -> dict[str, Any]:
        """The records by the names and in the shapes of `GenerateDecoderOnlyOutput`."""
        by_step = {"scores": self.scores, "logits": self.logits}
        by_layer = {"hidden_states": self.hidden_states, "attentions": self.attentions}
        return {
            **{name: record.complete(batch_size) for name, record in by_step.items() if record is not None},
            **{name: record.complete(batch_size, num_steps) for name, record in by_layer.items() if record is not None},
        }
