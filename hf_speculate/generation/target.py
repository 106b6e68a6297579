"""The target in one request: its prompt's forward, and its forwards over trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..cache import TreeCache, cache_of
from ..compilation import Compiler
from ..errors import PromptError
from ..models import GenerativeModel
from ..scoring import Scorer
from ..tree import DraftTree
from ..verification import Sequences
from .rows import Rows
from .stock_step import StockStep


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The prompt of a request, which runs before the loop begins.

    Attributes:
        forward: runs it, `hidden_states` layers given, and returns the model's output.
        positions: position id of each row's last token.
        num_expected: entries that the cache should have behind it, if that is known.
        step: what stock would hand the model behind it.
        known_from: index of the first token whose hidden states the drafter gets.
    """

    forward: Callable[..., Any]
    positions: Sequence[int]
    num_expected: int | None
    step: StockStep
    known_from: int

    def run(self, scorer: Scorer, forward_kwargs: dict[str, Any]) -> Any:
        """The model's output; the scorer then has the cache that the prompt has filled.

        Raises:
            PromptError: the model goes on behind it in a way that trees cannot follow.
        """
        output = self.forward(**forward_kwargs)
        if cache_of(output) is not scorer.cache.cache:  # prefix tuning brings its own
            scorer.cache = TreeCache(cache_of(output), len(scorer.cache.lengths))
        # Masks, positions and paths are laid over entries by their index: there has to be one for each token.
        found = scorer.cache.cache.get_seq_length()
        if self.num_expected is not None and found != self.num_expected:
            raise PromptError(
                f"{type(scorer.model).__name__} keeps {found} cache entries of a prompt of {self.num_expected} tokens "
                "(images in front of the text, as a rule): which entry belongs to which token is not known."
            )
        scorer.set_forward_kwargs(self.step.forward_kwargs(scorer.cache.cache))
        scorer.cache.commit_appended()
        return output

    def root_positions(self, sequences: Sequences) -> list[int]:
        """Position ids of the last emitted tokens: for the first of them one behind the prompt's last."""
        return [position + count for position, count in zip(self.positions, sequences.num_emitted, strict=True)]

    def known_tokens(self, sequences: Sequences) -> Tensor:
        """int64 [B, J]: what came after each position that the drafter is told of, the prompt's next token."""
        first = torch.tensor([tokens[:1] for tokens in sequences.new_tokens])
        return torch.cat([sequences.prompt[:, self.known_from + 1 :].cpu(), first], dim=1)


@dataclass(kw_only=True)
class Target:
    """The target in one request.

    Attributes:
        model: the model.
        prompt: its prompt, which has to run first.
        scorer: its forward over trees; owns the cache.
        forward_kwargs: further arguments of every forward: what drafter and records have to see of it.
        compiler: compiler of its forwards, and of the drafter's; None: nothing is compiled.
    """

    model: GenerativeModel
    prompt: Prompt
    scorer: Scorer
    forward_kwargs: dict[str, Any] = field(default_factory=dict)
    compiler: Compiler | None = None
    _num_compiled: int = field(default=0, init=False)

    @property
    def cache(self) -> TreeCache:
        return self.scorer.cache

    def begin_round(self, rows: Rows) -> None:
        """Takes finished rows out of the target's forwards from here on, as far as that is allowed."""
        if rows.can_leave:
            self.scorer.leave_out(rows.done(self.cache))
        self._num_compiled = self._count_compiled()

    @property
    def has_compiled(self) -> bool:
        """Whether something was compiled since the round began."""
        return self._count_compiled() != self._num_compiled

    def run_prompt(self) -> Any:
        """The output of the prompt's forward."""
        return self.prompt.run(self.scorer, self.forward_kwargs)

    def score(self, tree: DraftTree, sequences: Sequences) -> Any:
        """The output of a forward over a tree."""
        return self.scorer(tree, self.root_positions(sequences), forward_kwargs=self.forward_kwargs)

    def root_positions(self, sequences: Sequences) -> list[int]:
        """Position ids of the last emitted tokens."""
        return self.prompt.root_positions(sequences)

    def may_be_tainted(self, tree: DraftTree) -> bool:
        """Whether entries that a node must not see are part of its sums, times zero: NaN there would show."""
        return self.scorer.sums_masked and (tree.num_nodes > 1 or self.cache.is_ragged)

    def _count_compiled(self) -> int:
        return 0 if self.compiler is None else self.compiler.num_slow
