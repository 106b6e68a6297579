"""The prompt of a request: its forward, which fills the cache before the loop begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cache import TreeCache, cache_of
from ..errors import PromptError
from ..forward import Scorer
from ..verification import Sequences
from .stock_step import StockStep


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The prompt of a request.

    Attributes:
        forward: function that runs the prompt and returns the model's output. It takes further forward arguments, such
            as `output_hidden_states`.
        positions: position id of each row's last prompt token.
        num_expected: number of cache entries expected after the prompt; None if unknown.
        step: stock's step after the prompt.
        known_from: index of the first token whose hidden states the drafter gets.
    """

    forward: Callable[..., Any]
    positions: Sequence[int]
    num_expected: int | None
    step: StockStep
    known_from: int

    def run(self, scorer: Scorer, forward_kwargs: dict[str, Any]) -> Any:
        """Runs the prompt and returns the model's output. The scorer then has the filled cache.

        Raises:
            PromptError: the model continues this prompt in a way that trees cannot follow.
        """
        with scorer.backends:
            output = self.forward(**forward_kwargs)
        scorer.num_columns = output.logits.shape[-1]
        if cache_of(output) is not scorer.cache.cache:  # prefix tuning brings its own cache
            scorer.cache = TreeCache(cache_of(output), len(scorer.cache.lengths))
        # Masks, positions and paths address entries by index, so each token must have exactly one.
        num_cached = scorer.cache.cache.get_seq_length()
        if self.num_expected is not None and num_cached != self.num_expected:
            raise PromptError(
                f"{type(scorer.model).__name__} keeps {num_cached} cache entries of a prompt of {self.num_expected} "
                "tokens: which entry belongs to which token is not known. Possible causes: an attention mask that is "
                "longer than the text, a cache from which entries were taken, images in front of the text."
            )
        scorer.set_forward_kwargs(self.step.forward_kwargs(scorer.cache.cache))
        scorer.cache.commit_appended()
        return output

    def root_positions(self, sequences: Sequences) -> list[int]:
        """Position ids of the last emitted tokens. The first one is right after the prompt."""
        return [position + count for position, count in zip(self.positions, sequences.num_emitted, strict=True)]

    def known_tokens(self, sequences: Sequences) -> Tensor:
        """int64 [B, J], the token after each position whose states the drafter gets; the last is the prompt's next
        token."""
        first = torch.tensor([tokens[:1] for tokens in sequences.new_tokens], dtype=torch.long, device="cpu")
        return torch.cat([sequences.prompt[:, self.known_from + 1 :].cpu(), first], dim=1)
