"""The prompt of a request: its one forward, and what has to be true of it before anything is built on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cache import TreeCache, cache_of
from ..errors import PromptError
from ..target import Scorer
from ..verification import Sequences
from .stock_step import StockStep


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What has run when the loop begins.

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
        """Of the last emitted tokens: for the first of them one behind the prompt's last."""
        return [position + count for position, count in zip(self.positions, sequences.num_emitted, strict=True)]

    def known_tokens(self, sequences: Sequences) -> Tensor:
        """int64 [B, J]: what came after each position that the drafter is told of, the prompt's next token."""
        first = torch.tensor([tokens[:1] for tokens in sequences.new_tokens])
        return torch.cat([sequences.prompt[:, self.known_from + 1 :].cpu(), first], dim=1)
