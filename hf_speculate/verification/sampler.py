"""The request's own processors and sampler, which choose the token at a node of a draft tree.

Processors decide how widely sampling can be batched: three tiers with one result (`processors`). The walk, with one
call for each emitted token, is the plain reference.

Batching runs the processors on nodes that are never visited, but saves host synchronisations. So it is used on
accelerators; on a CPU the walk is always faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList

from ..transfers import to_device
from ..tree import DraftTree
from .natively import argmax
from .noise import Noise
from .processors import Tier, processors_of_row, required_tier, score_only, see_rows_alone, without_inspection
from .records import Records
from .sequences import Sequences


# Markers in place of a token: no token has a probability, or the scores cannot be trusted.
_IMPOSSIBLE, _TAINTED = -1, -2


class TaintedScores(Exception):
    """Scores of a forward over several nodes are NaN: masked entries may have got into the sums."""


def are_tainted(logits: Float[Tensor, "R N V"]) -> Tensor:
    """bool [R, N]: whether all logits of a node are NaN. A few columns are checked."""
    return logits[..., :: max(logits.shape[-1] // 3, 1)].isnan().all(-1)


def possible(tokens: list[int]) -> list[int]:
    if _IMPOSSIBLE in tokens:
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")  # as `torch.multinomial`
    return tokens


Choose = Callable[[Sequence[int], Sequence[int]], list[int]]


class Sampler:
    """The request's processors and sampler.

    Args:
        processors: logits processors as `generate` prepared them.
        noise: noise of the steps if the request samples; None if it is greedy.
        records: receives scores and logits.
        tier: tier to use, for tests and measurements. None chooses "walk" on the CPU and the widest possible one
            elsewhere.

    Attributes:
        warpers: processors that can also warp a drafter's logits.
    """

    def __init__(
        self, processors: LogitsProcessorList, noise: Noise | None, records: Records, tier: Tier | None = None
    ):
        self.processors = without_inspection(processors)
        self.warpers = score_only(processors)
        self.noise = noise
        self.records = records
        self.required_tier: Tier = required_tier(processors)
        self.row_wise = see_rows_alone(processors)
        self._forced_tier: Tier | None = tier
        self._row_processors: dict[int, LogitsProcessorList] = {}

    def tier(self, device: torch.device) -> Tier:
        if self._forced_tier is None and device.type == "cpu":
            return "walk"
        return self._forced_tier or self.required_tier

    def release_noise(self, sequences: Sequences) -> None:
        """Drops noise rows that every row has used. Call it once their tokens have been delivered."""
        if self.noise is not None:
            emitted = sequences.num_emitted
            running = (n for n, is_finished in zip(emitted, sequences.finished, strict=True) if not is_finished)
            self.noise.release_before(min(running, default=max(emitted)))

    def chooser(
        self, logits: Float[Tensor, "R N V"], tree: DraftTree, sequences: Sequences, *, may_be_tainted: bool = False
    ) -> Choose:
        """A function that maps rows and one node in each to the tokens that the request's sampler chooses there.

        Args:
            logits: logits of the nodes of `tree`, which may have only some rows of the batch (`DraftTree.select`). The
                function takes row indices of the whole batch.
            may_be_tainted: whether the forward had masked entries, so that a NaN may not come from the text itself.
        Raises:
            TaintedScores: scores of a node are NaN, and may be tainted.
        """
        tier = self.tier(logits.device)
        if tier == "walk":
            if may_be_tainted and bool(are_tainted(logits).any()):
                raise TaintedScores
            return lambda rows, nodes: self._choose_now(logits, tree, rows, nodes, sequences)
        scores = self._all_scores(logits, tree, sequences, tier)
        noise = self._tree_noise(tree, sequences, scores.shape[-1])
        picked = self.pick(scores.flatten(0, 1), noise).view(scores.shape[:2])
        table = self._read(tree, picked, logits if may_be_tainted else None)

        def look_up(rows: Sequence[int], nodes: Sequence[int]) -> list[int]:
            slots = [tree.slot(row) for row in rows]
            for row, slot, node in zip(rows, slots, nodes, strict=True):
                self._record(sequences, row, logits[slot, node], scores[slot, node])
            return possible([table[slot][node] for slot, node in zip(slots, nodes, strict=True)])

        return look_up

    @staticmethod
    def _read(tree: DraftTree, table: Tensor, logits: Tensor | None) -> list[list[int]]:
        """`table` [R, N or more] as lists, read with the tree. Raises `TaintedScores` if `logits` are tainted."""
        if logits is None:
            return tree.host_copy.read_with(table)
        rows = tree.host_copy.read_with(table.masked_fill(are_tainted(logits).any(-1, keepdim=True), _TAINTED))
        if any(_TAINTED in row for row in rows):
            raise TaintedScores
        return rows

    def _choose_now(
        self, logits: Tensor, tree: DraftTree, rows: Sequence[int], nodes: Sequence[int], sequences: Sequences
    ) -> list[int]:
        slots = [tree.slot(row) for row in rows]
        selected = logits[slots[0], nodes[0], None] if len(rows) == 1 else logits[slots, list(nodes)]
        if not self.processors and self.noise is None and not self.records.of_sampler:
            return argmax(selected)
        selected = selected.to(copy=True, dtype=torch.float32, device=sequences.prompt.device)
        step = len(sequences.new_tokens[rows[0]])
        scores = self._processed(selected, rows, step, sequences)
        for index, row in enumerate(rows):
            self._record(sequences, row, selected[index], scores[index])
        if self.noise is None:
            return argmax(scores)
        self.noise.fit(scores.shape[-1], step)
        return possible(self.pick(scores, self.noise.rows([step] * len(rows), rows)).tolist())

    def _processed(self, logits: Tensor, rows: Sequence[int], step: int, sequences: Sequences) -> Tensor:
        """The processed scores of the whole batch or of one row.

        What an unknown processor draws from the RNG is drawn in stock's order.
        """
        is_whole = len(rows) == sequences.batch_size
        processors = self.processors if is_whole else self._processors_of_row(rows[0], sequences)
        if not processors:
            return logits
        if self.noise is None or self.row_wise:
            return processors(sequences.view(rows), logits)  # type: ignore[arg-type]
        self.noise.pause(step)
        scores = processors(sequences.view(rows), logits)  # type: ignore[arg-type]
        self.noise.resume()
        return scores  # type: ignore[return-value]

    def _processors_of_row(self, row: int, sequences: Sequences) -> LogitsProcessorList:
        if row not in self._row_processors:
            self._row_processors[row] = processors_of_row(self.processors, row, sequences.batch_size)
        return self._row_processors[row]

    @staticmethod
    def pick(scores: Float[Tensor, "R V"], noise: Float[Tensor, "R V"] | None) -> Tensor:
        """The argmax when greedy; else what `torch.multinomial(softmax(scores), 1)` picks when it draws `noise`."""
        if noise is None:
            return scores.argmax(-1)
        probs = torch.softmax(scores, dim=-1)
        # If any score is NaN or +inf, or all are -inf, the whole row of `probs` is NaN.
        return (probs / noise).argmax(-1).masked_fill_(probs[:, 0].isnan(), _IMPOSSIBLE)

    def _record(self, sequences: Sequences, row: int, logits: Tensor, scores: Tensor) -> None:
        if self.records.of_sampler:
            self.records.add(len(sequences.new_tokens[row]), row, logits, scores)

    def _all_scores(self, logits: Tensor, tree: DraftTree, sequences: Sequences, tier: Tier) -> Tensor:
        device = sequences.prompt.device
        scores = logits.to(copy=True, dtype=torch.float32, device=device)
        if not self.processors:
            return scores
        if tier == "scores":
            flat = scores.flatten(0, 1)
            no_text: Any = flat.new_empty(len(flat), 0, dtype=torch.long)
            return self.processors(no_text, flat).view(scores.shape)
        for slot, row in enumerate(tree.rows):  # finished rows too: without EOS they continue
            for nodes, prefixes in self._prefixes_by_depth(tree, row, sequences):
                index = to_device(nodes, device)
                scores[slot, index] = self._processors_of_row(row, sequences)(prefixes, scores[slot, index])
        return scores

    @staticmethod
    def _prefixes_by_depth(tree: DraftTree, row: int, sequences: Sequences) -> Iterator[tuple[list[int], Any]]:
        """Pairs of nodes and their texts, int64 [n, T + d], for every depth d."""
        text = sequences.view([row])
        slot = tree.slot(row)
        tokens, parents = tree.host.token_ids[slot], tree.host.parents[slot]
        level, paths = [0], {0: []}
        while level:
            suffix = to_device([paths[node] for node in level], text.device, text.dtype)
            yield level, torch.cat([text.expand(len(level), -1), suffix.view(len(level), -1)], dim=1)
            parents_of_level = set(level)
            level = [node for node, parent in enumerate(parents) if parent in parents_of_level]
            paths = {node: [*paths[parents[node]], tokens[node]] for node in level}

    def _tree_noise(self, tree: DraftTree, sequences: Sequences, width: int) -> Tensor | None:
        """The noise of every node, [R * N, V] with V = `width`: that of the step at which its child would be chosen."""
        if self.noise is None:
            return None
        levels, emitted = range(tree.max_depth + 1), [len(sequences.new_tokens[row]) for row in tree.rows]
        self.noise.fit(width, min(emitted))
        by_depth = torch.stack([self.noise.rows([n + d for n in emitted], tree.rows) for d in levels], dim=1)
        depths = to_device(tree.plan.depths, by_depth.device).expand(tree.batch_size, -1)
        rows = torch.arange(tree.batch_size, device=by_depth.device, dtype=torch.long)[:, None]
        return by_depth[rows, depths].flatten(0, 1)
