"""Typical acceptance: a lossy alternative to matching the request's sampler.

Source: Cai et al., "Medusa" (arXiv:2401.10774), section 2.3.1. A drafted token is accepted if the target finds it
probable enough, even if the target would have sampled another token. The threshold falls with the target's entropy.
More tokens are accepted, but the text is *not* distributed as the target's. A speculator with this rule has `lossless
== False`, its repr shows this, and `stats.lossy_calls` counts its calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList

from ..errors import OptionError
from ..transfers import to_device
from ..tree import DraftTree
from .records import Records
from .sampler import Choose, Sampler
from .sequences import Sequences


@dataclass(frozen=True, kw_only=True)
class TypicalAcceptance:
    """The thresholds of typical acceptance.

    Attributes:
        posterior_threshold: epsilon: a token of at least this probability is always accepted.
        posterior_alpha: delta: factor of the threshold that falls with the entropy. The paper suggests sqrt(epsilon).
    """

    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value <= 1:
                raise OptionError(f"typical acceptance: {name} must be above 0 and at most 1, got {value}.")

    def thresholds(self, probs: Float[Tensor, "*lead V"]) -> tuple[Float[Tensor, "*lead"], Float[Tensor, "*lead"]]:
        """(thresholds, entropies). A token is accepted if its probability is *above* min(epsilon, delta *
        exp(-entropy))."""
        # The reference implementation has this 1e-5 too; it changes the thresholds slightly and keeps p = 0 finite.
        entropies = -(probs * (probs + 1e-5).log()).sum(-1)
        return (torch.exp(-entropies) * self.posterior_alpha).clamp(max=self.posterior_threshold), entropies

    def last_nodes(self, scores: Float[Tensor, "R N V"], tree: DraftTree) -> Int[Tensor, " R"]:
        """The last node of each row's accepted path: the deepest accepted node, on the most likely path.

        Args:
            scores: scores of every node, after the request's processors (temperature among them).
        """
        device = scores.device
        probs = torch.softmax(scores.float(), dim=-1)
        parents = to_device(tree.parents, device).expand(tree.batch_size, -1)
        is_draft = parents >= 0
        above = parents.clamp(min=0)
        rows = torch.arange(tree.batch_size, device=device, dtype=torch.long)[:, None]
        token_probs = probs[rows, above, to_device(tree.token_ids, device)]  # [B, N], at the parent
        is_typical = token_probs > self.thresholds(probs)[0].gather(1, above)
        is_typical = torch.where(is_draft, is_typical, parents == -1)  # the root is accepted, padding is not
        ancestors = to_device(tree.plan.ancestors, device)
        is_accepted = (is_typical[:, None, :] | ~ancestors).all(-1)
        likelihoods = torch.where(is_draft, token_probs, 1.0).clamp(min=1e-38).log()
        likelihoods = (likelihoods[:, None, :] * ancestors).sum(-1)
        depths = torch.where(is_accepted, to_device(tree.plan.depths, device), -1)
        deepest = depths == depths.amax(-1, keepdim=True)
        return likelihoods.masked_fill(~deepest, -torch.inf).argmax(-1)


class TypicalSampler(Sampler):
    """Chooses the tokens along the path of typical acceptance, then the most probable token.

    As in the reference this is deterministic: no noise is drawn.

    Args:
        rule: thresholds of typical acceptance.
        processors: logits processors as `generate` prepared them. They must be row-wise: all nodes are scored before a
            path is known.
        records: receives scores and logits.
    """

    def __init__(self, rule: TypicalAcceptance, processors: LogitsProcessorList, records: Records):
        super().__init__(processors, None, records)
        self.rule = rule

    def chooser(
        self, logits: Float[Tensor, "R N V"], tree: DraftTree, sequences: Sequences, *, may_be_tainted: bool = False
    ) -> Choose:
        scores = self._all_scores(logits, tree, sequences, "scores" if self.required_tier == "scores" else "prefix")
        last_nodes = self.rule.last_nodes(scores, tree).to(scores.device)
        picked = torch.cat([scores.argmax(-1), last_nodes[:, None]], dim=1)
        table = self._read(tree, picked, logits if may_be_tainted else None)
        next_nodes = [_next_on_path(tree.host.parents[slot], row[-1]) for slot, row in enumerate(table)]

        def choose(rows: Sequence[int], nodes: Sequence[int]) -> list[int]:
            tokens = []
            for row, node in zip(rows, nodes, strict=True):
                slot = tree.slot(row)
                self._record(sequences, row, logits[slot, node], scores[slot, node])
                child = next_nodes[slot].get(node)
                tokens.append(table[slot][node] if child is None else tree.host.token_ids[slot][child])
            return tokens

        return choose


def _next_on_path(parents: Sequence[int], last: int) -> dict[int, int]:
    """A mapping from each node above `last` to its child on the path."""
    children = {}
    while last > 0:
        children[parents[last]] = last
        last = parents[last]
    return children
