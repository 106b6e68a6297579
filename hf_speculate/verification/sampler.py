"""Verification: the request's own processors and sampler choose the token at a node; if it is a child, move there.

Lossless by construction: the target's sampler picks every emitted token, in order. Processors decide how widely the
sampler can be batched, see `processors`: three tiers with one result, of which the walk is the plain reference.

Batching costs a call over nodes that are never visited and saves host synchronisations, so it is used on accelerators;
on a CPU there is nothing to synchronise and the walk is always the cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList

from ..transfers import to_device
from ..tree import DraftTree, HostTree
from .noise import Noise
from .processors import Tier, processors_of_row, required_tier, see_rows_alone, without_inspection
from .records import Records
from .sequences import Sequences
from .stopping import Stopping


@dataclass
class Verdict:
    """The outcome of one round, lists over the rows of the batch.

    Attributes:
        paths: accepted nodes, root first; the entries that stay in the cache. Empty for rows that did not take part;
            of rows that have ended, those of padding go on here.
        tokens: emitted tokens; `tokens[r][j]` was chosen after node `paths[r][j]`. Padding is none.
        num_accepted: how many of the tokens were draft nodes.
    """

    paths: list[list[int]]
    tokens: list[list[int]]
    num_accepted: list[int]

    @classmethod
    def empty(cls, batch_size: int) -> Verdict:
        return cls([[] for _ in range(batch_size)], [[] for _ in range(batch_size)], [0] * batch_size)


_IMPOSSIBLE = -1  # instead of a token, where scores allow none


def _possible(tokens: list[int]) -> list[int]:
    if _IMPOSSIBLE in tokens:
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")  # as `torch.multinomial`
    return tokens


Choose = Callable[[Sequence[int], Sequence[int]], list[int]]


class Sampler:
    """The request's processors and its sampler.

    Args:
        processors: as prepared by `generate`.
        noise: the step noise when the request samples, None when it is greedy.
        records: collects scores and logits.
        tier: forces a tier (tests, measurements); by default the widest that the processors allow on accelerators,
            "walk" on the CPU.
    """

    def __init__(
        self, processors: LogitsProcessorList, noise: Noise | None, records: Records, tier: Tier | None = None
    ):
        self.processors = without_inspection(processors)
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
        """Forgets noise rows that every row has used; to be called when what they chose has been delivered."""
        if self.noise is not None:
            emitted = sequences.num_emitted
            running = (n for n, is_finished in zip(emitted, sequences.finished, strict=True) if not is_finished)
            self.noise.release_before(min(running, default=max(emitted)))

    def chooser(self, logits: Float[Tensor, "R N V"], tree: DraftTree, sequences: Sequences) -> Choose:
        """A function (rows, their nodes) -> the token the request's sampler chooses there.

        Args:
            logits: of the nodes of `tree`, which may be about some rows of the batch (`DraftTree.select`); the function
                takes rows of the batch.
        """
        tier = self.tier(logits.device)
        if tier == "walk":
            return lambda rows, nodes: self._choose_now(logits, tree, rows, nodes, sequences)
        scores = self._all_scores(logits, tree, sequences, tier)
        noise = self._tree_noise(tree, sequences, scores.shape[-1])
        table = tree.read_with(self._pick(scores.flatten(0, 1), noise).view(scores.shape[:2]))

        def look_up(rows: Sequence[int], nodes: Sequence[int]) -> list[int]:
            slots = [tree.slot(row) for row in rows]
            for row, slot, node in zip(rows, slots, nodes, strict=True):
                self._record(sequences, row, logits[slot, node], scores[slot, node])
            return _possible([table[slot][node] for slot, node in zip(slots, nodes, strict=True)])

        return look_up

    def _choose_now(
        self, logits: Tensor, tree: DraftTree, rows: Sequence[int], nodes: Sequence[int], sequences: Sequences
    ) -> list[int]:
        device, slots = sequences.prompt.device, [tree.slot(row) for row in rows]
        selected = logits[slots[0], nodes[0]][None] if len(rows) == 1 else logits[slots, list(nodes)]
        if not self.processors and self.noise is None and not self.records.of_sampler:
            return selected.float().argmax(-1).tolist()  # the operation of stock, and four times faster than in bf16
        selected = selected.to(copy=True, dtype=torch.float32, device=device)
        step = len(sequences.new_tokens[rows[0]])
        scores = self._processed(selected, rows, step, sequences)
        for index, row in enumerate(rows):
            self._record(sequences, row, selected[index], scores[index])
        noise = None
        if self.noise is not None:
            self.noise.fit(scores.shape[-1], step)
            noise = self.noise.rows([step] * len(rows), rows)
        return _possible(self._pick(scores, noise).tolist())

    def _processed(self, logits: Tensor, rows: Sequence[int], step: int, sequences: Sequences) -> Tensor:
        """The scores of the whole batch or of one row; what an unknown processor draws is drawn in its turn."""
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
    def _pick(scores: Float[Tensor, "R V"], noise: Float[Tensor, "R V"] | None) -> Tensor:
        """Greedy: argmax. Sampling: what `torch.multinomial(softmax(scores), 1)` picks when it draws `noise`."""
        if noise is None:
            return scores.argmax(-1)
        probs = torch.softmax(scores, dim=-1)
        # Where any score is NaN or +inf, or all are -inf, the whole row is NaN.
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
        for slot, row in enumerate(tree.rows):  # finished ones too: without EOS they write on
            for nodes, prefixes in self._prefixes_by_depth(tree, row, sequences):
                index = to_device(nodes, device)
                scores[slot, index] = self._processors_of_row(row, sequences)(prefixes, scores[slot, index])
        return scores

    @staticmethod
    def _prefixes_by_depth(tree: DraftTree, row: int, sequences: Sequences) -> Iterator[tuple[list[int], Any]]:
        """(nodes, int64 [n, T + d] text before the token that follows them) for every depth d."""
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
        """Noise of every node [R * N, V], V = `width`: the row of the step at which its child would be chosen."""
        if self.noise is None:
            return None
        levels, emitted = range(tree.max_depth + 1), [len(sequences.new_tokens[row]) for row in tree.rows]
        self.noise.fit(width, min(emitted))
        by_depth = torch.stack([self.noise.rows([n + d for n in emitted], tree.rows) for d in levels], dim=1)
        depths = to_device(tree.plan.depths, by_depth.device).expand(tree.batch_size, -1)
        rows = torch.arange(tree.batch_size, device=by_depth.device)[:, None]
        return by_depth[rows, depths].flatten(0, 1)


def verify(
    logits: Float[Tensor, "R N V"],
    tree: DraftTree,
    sampler: Sampler,
    stopping: Stopping,
    sequences: Sequences,
    *,
    lockstep: bool,
    pads_ended: bool = False,
    after_step: Callable[[], bool] | None = None,
    verdict: Verdict | None = None,
) -> Verdict:
    """Walks the tree as the request's sampler decides, appending to `sequences` and stopping where it must.

    Args:
        logits: of every node.
        tree: of all rows, or of those that are not finished.
        lockstep: all rows advance together, so that every processor and criterion is called in stock's order with the
            whole batch; otherwise each row advances alone.
        pads_ended: rows that have ended go on with padding, as far as the longest row.
        after_step: called after every step of a lock-step; False ends the round.
        verdict: an empty one to be filled, for a caller who wants what an interruption has left.
    Returns:
        The verdict; rows that were finished before the call emit nothing.
    """
    verdict = verdict or Verdict.empty(sequences.batch_size)
    choose = sampler.chooser(logits, tree, sequences)
    host = tree.host  # whoever drafted it has to answer for it before anything is emitted
    if lockstep:
        _Walk(choose, tree, host, sampler, stopping, sequences, verdict, after_step)(list(range(sequences.batch_size)))
        return verdict
    ended = sequences.finished_rows
    walk = _Walk(choose, tree, host, sampler, stopping, sequences, verdict)
    for row in range(sequences.batch_size):
        if row not in ended:
            walk([row])
    for row in ended if pads_ended else ():
        walk.pad(row, max(sequences.num_emitted))
    return verdict


@dataclass
class _Walk:
    """Down the tree, from the root to where nothing was drafted of what is chosen; see `verify`."""

    choose: Choose
    tree: DraftTree
    host: HostTree
    sampler: Sampler
    stopping: Stopping
    sequences: Sequences
    verdict: Verdict
    after_step: Callable[[], bool] | None = None

    def __call__(self, rows: list[int]) -> None:
        """Together, for rows of equal length; a row that ends on the way goes on with padding."""
        nodes: Sequence[int | None] = [0] * len(rows)
        can_go_on = True
        while can_go_on and None not in nodes:
            chosen = self.choose(rows, nodes)  # type: ignore[arg-type]
            running = [self.stopping.is_running(self.sequences, row) for row in rows]
            nodes = list(map(self._step, rows, nodes, chosen, running))
            can_go_on = self._goes_on_after_criteria(rows)
            if self.after_step is not None:
                can_go_on &= self.after_step()

    def pad(self, row: int, length: int) -> None:
        """A row that has ended, up to `length` new tokens: chooses only for the record."""
        node: int | None = 0
        while node is not None and len(self.sequences.new_tokens[row]) < length:
            self.choose([row], [node])
            node = self._step(row, node, 0, False)

    def _step(self, row: int, node: Any, chosen: int, is_running: bool) -> int | None:
        """Appends what was chosen at a node; returns the child with it."""
        token = chosen if is_running else self.sequences.pad_token_id
        self.sequences.append(row, token)
        child = self.host.child(self.tree.slot(row), node, token)
        self.verdict.paths[row].append(node)
        if is_running:
            self.verdict.tokens[row].append(token)
            self.verdict.num_accepted[row] += child is not None
        return child

    def _goes_on_after_criteria(self, rows: list[int]) -> bool:
        """Marks the rows that are finished; whether any is not, and all that was drawn ahead still holds."""
        was_disturbed = False
        if self.stopping.may_draw and self.sampler.noise is not None and len(rows) == self.sequences.batch_size:
            self.sampler.noise.pause(len(self.sequences.new_tokens[rows[0]]))
            self.stopping.update(rows, self.sequences, self.sampler.records)
            was_disturbed = self.sampler.noise.resume()
        else:
            self.stopping.update(rows, self.sequences, self.sampler.records)
        finished = self.sequences.finished
        return not was_disturbed and not all(finished[row] for row in rows)
