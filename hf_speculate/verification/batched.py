"""The choice of every node's token as a function of tensors, so that it can be a part of a captured forward.

The result is that of `Sampler`. A captured function must not read values on the host, and must not draw random numbers.
So noise is drawn before and passed in by depth. Only one processor that reads the text is supported, the repetition
penalty, because many instruct models set it by default. A table marks the tokens of each row's text for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.generation import logits_process as lp

from ..transfers import copy_to_device, to_device
from ..tree import DraftTree, TreePlan
from .nucleus import top_p
from .processors import KnownProcessors
from .sampler import Choose, Sampler, TaintedScores, are_tainted, possible
from .sequences import Sequences


# Deepest level for which noise is passed in, plus one. Noise of a level is as large as the vocabulary.
_NOISE_LEVELS = 16

# Processors that read no values on the host. (Eta and others check whether probabilities are valid.)
_CAPTURABLE = (
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.MinPLogitsWarper,
    lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper,
    lp.InfNanRemoveLogitsProcessor,
    lp.LogitNormalization,
)
_PENALTY = lp.RepetitionPenaltyLogitsProcessor

MakeBuffer = Callable[[Hashable, Sequence[int], torch.dtype], Tensor]
"""(name, shape, dtype) -> the tensor of this name, at an address that stays."""


def reason_for_host(sampler: Sampler) -> str:
    """The reason why the host must choose the tokens of a request; "" if `BatchedChoice` can."""
    if type(sampler) is not Sampler:
        return "typical acceptance"
    if sampler.records.of_sampler:
        return "scores are recorded"
    processors = sampler.processors
    if processors and type(processors) is not KnownProcessors:
        return "unknown logits processors"
    others = {type(processor).__name__ for processor in processors if not _can_capture(processor)}
    return f"logits processors {sorted(others)}" if others else ""


def _can_capture(processor: Any) -> bool:
    if type(processor) is _PENALTY:
        return True
    has_tensors = any(isinstance(value, Tensor) for value in vars(processor).values())  # keys do not hold their values
    return type(processor) in _CAPTURABLE and not has_tensors


class BatchedChoice:
    """Chooses the tokens after all nodes of a tree at once.

    Args:
        processors: processors of the request, for which `reason_for_host` finds nothing.
        samples: whether the request samples; else it is greedy.

    Attributes:
        key: equal for choices that launch the same kernels.
        has_penalty: whether tokens of the text are penalised.
    """

    def __init__(self, processors: Sequence[Any], samples: bool):
        self._processors, self.samples = tuple(processors), samples
        self.has_penalty = any(type(processor) is _PENALTY for processor in processors)
        facts = [(type(p).__name__, p.penalty if type(p) is _PENALTY else vars(p)) for p in processors]
        self.key: Hashable = samples, repr(facts)

    def __call__(
        self,
        logits: Float[Tensor, "B N V"],
        tokens: Int[Tensor, "B N"],
        tree: TreePlan,
        inputs: Mapping[str, Tensor],
    ) -> tuple[Int[Tensor, "B N"], Bool[Tensor, " B"]]:
        """The chosen tokens, and whether all scores of a node are NaN, for each row.

        Args:
            tokens: tokens of the nodes.
            tree: their depths and ancestors.
            inputs: tensors from `ChoiceInputs.fill`.
        """
        if not self._processors and not self.samples:
            return logits.argmax(-1), are_tainted(logits).any(-1)
        scores = logits.to(copy=True, dtype=torch.float32).flatten(0, 1)
        no_text: Any = scores.new_empty(len(scores), 0, dtype=torch.long)
        for processor in self._processors:
            if type(processor) is _PENALTY:
                seen = _seen_by_nodes(inputs["seen"], inputs["recent"], tokens, tree)
                scores = _penalised(scores, seen.flatten(0, 1), processor.penalty)
            elif type(processor) is lp.TopPLogitsWarper:
                scores = top_p(processor, scores)
            else:
                scores = processor(no_text, scores)
        noise = None
        if self.samples:
            rows, levels = torch.arange(len(tokens), device=tokens.device, dtype=torch.long)[:, None], inputs["noise"]
            noise = levels[tree.depths.clamp(max=len(levels) - 1), rows].flatten(0, 1)
        return Sampler.pick(scores, noise).view(tokens.shape), are_tainted(logits).any(-1)


def _seen_by_nodes(
    seen: Bool[Tensor, "B S"], recent: Int[Tensor, "B R"], tokens: Int[Tensor, "B N"], tree: TreePlan
) -> Bool[Tensor, "B N V"]:
    """Whether each token of the vocabulary is in the text that ends at a node.

    Args:
        seen: tokens of the texts so far, S = V + 1; marks of `recent` tokens are added.
    """
    seen.scatter_(1, recent, True)
    last = seen.shape[1] - 1  # stands for tokens that have no score
    paths = torch.where(tree.ancestors, tokens[:, None], tokens[..., None]).clamp(max=last)
    return seen[:, None].expand(-1, tokens.shape[1], -1).scatter(2, paths, True)[..., :last]


def _penalised(scores: Float[Tensor, "R V"], seen: Bool[Tensor, "R V"], penalty: float) -> Float[Tensor, "R V"]:
    """The scores that `RepetitionPenaltyLogitsProcessor` returns for texts with these tokens."""
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


class ChoiceInputs:
    """The inputs of a `BatchedChoice` in one request: noise, and the tokens of the text.

    Args:
        choice: choice of the request.
        sampler: sampler of the request.
        sequences: text of every row.
    """

    def __init__(self, choice: BatchedChoice, sampler: Sampler, sequences: Sequences):
        self._choice, self._sampler, self._sequences = choice, sampler, sequences
        self._marked = 0, [0] * sequences.batch_size  # address of the table, and new tokens of each row in it

    def fit(self, tree: DraftTree) -> bool:
        """Whether noise can be passed in for a tree of this depth."""
        return not self._choice.samples or tree.max_depth < _NOISE_LEVELS

    def fill(self, make: MakeBuffer, tree: DraftTree, width: int, num_columns: int) -> dict[str, Tensor]:
        """The inputs in buffers.

        Args:
            tree: tree of the round.
            width: number of nodes that the forward runs.
            num_columns: width of the scores, V.
        """
        inputs, num_rows = {}, self._sequences.batch_size
        if self._choice.samples:
            levels = min(width, _NOISE_LEVELS)
            shape = levels, num_rows, num_columns
            inputs["noise"] = noise = make(("noise", levels), shape, torch.float32)
            fill_noise(self._sampler, self._sequences.num_emitted, tree.max_depth + 1, noise)
        if self._choice.has_penalty:
            inputs["seen"] = seen = make("seen", (num_rows, num_columns + 1), torch.bool)
            inputs["recent"] = make(("recent", width), (num_rows, width), torch.long)
            self._mark(seen, inputs["recent"])
        return inputs

    def _mark(self, seen: Tensor, recent: Tensor) -> None:
        """Updates the table of tokens. The forward itself marks the tokens since the last round."""
        address, counts = self._marked
        emitted = self._sequences.new_tokens
        if address != seen.data_ptr():
            counts = [0] * len(emitted)
            self._mark_prompt(seen)
        news = [tokens[count:] for tokens, count in zip(emitted, counts, strict=True)]
        if max(map(len, news)) > recent.shape[1]:
            widest = max(map(len, news))
            rows = [[*new, *[tokens[-1]] * (widest - len(new))] for new, tokens in zip(news, emitted, strict=True)]
            seen.scatter_(1, to_device(rows, seen.device).clamp(max=seen.shape[1] - 1), True)
            news = [[] for _ in emitted]
        last = seen.shape[1] - 1
        rows = [
            [min(token, last) for token in (*new, *[tokens[-1]] * (recent.shape[1] - len(new)))]
            for new, tokens in zip(news, emitted, strict=True)
        ]
        copy_to_device(rows, recent)
        self._marked = seen.data_ptr(), [len(tokens) for tokens in emitted]

    def _mark_prompt(self, seen: Tensor) -> None:
        prompt, last = self._sequences.prompt.long(), seen.shape[1] - 1
        (penalty,) = (processor for processor in self._sampler.processors if type(processor) is _PENALTY)
        ignored = penalty.prompt_ignore_length
        if isinstance(ignored, Tensor):
            ignored = ignored.to(prompt.device)[:, None]
        places = torch.arange(prompt.shape[1], device=prompt.device, dtype=torch.long)
        counted = prompt if ignored is None else prompt.masked_fill(places < ignored, last)
        seen.zero_().scatter_(1, counted.clamp(max=last), True)


def fill_noise(sampler: Sampler, num_emitted: Sequence[int], count: int, out: Float[Tensor, "D B V"]) -> None:
    """Writes the noise of the next `count` steps of every row to `out[:count]`, in one copy."""
    assert sampler.noise is not None
    rows = [row for depth in range(count) for row in sampler.noise.rows_of([step + depth for step in num_emitted])]
    torch.stack(rows, out=out[:count].view(len(rows), -1))


@dataclass(frozen=True)
class ScoredTable:
    """The result of a forward with a choice, in the form that the host reads at once.

    Attributes:
        words: int64 [B, 4 W + 1] on the device: chosen tokens, whether a row's scores cannot be trusted, and the tree's
            tokens, parents and values (as 32 bits) as they came in.
        width: W, the number of nodes that the forward ran.
    """

    words: Int[Tensor, "B K"]
    width: int

    def read(self) -> tuple[list[list[int]], list[bool], list[list[list[Any]]]]:
        """Chosen tokens, marks of rows, and tokens, parents and values of the tree. Waits for the device."""
        words, width = self.words.cpu(), self.width
        chosen, tainted, tokens, parents, bits = words.split([width, 1, width, width, width], dim=1)
        tree = [tokens.tolist(), parents.tolist(), bits.int().view(torch.float32).tolist()]
        return chosen.tolist(), tainted[:, 0].bool().tolist(), tree


def look_up(table: ScoredTable, tree: DraftTree, *, may_be_tainted: bool) -> Choose:
    """`Sampler.chooser` for tokens that the forward has chosen; reads them together with the tree, in one transfer.

    Raises:
        TaintedScores: scores of a node are NaN, and may be tainted.
    """
    chosen, are_marked, lists = table.read()
    if tree.unread is not None:
        tree.host_copy.supply(lists, tree.num_nodes)
    if may_be_tainted and any(are_marked):
        raise TaintedScores

    def of(rows: Sequence[int], nodes: Sequence[int]) -> list[int]:
        return possible([chosen[tree.slot(row)][node] for row, node in zip(rows, nodes, strict=True)])

    return of
