"""Models that run the whole text anew at one place: where RoPE changes from short to long factors (Phi-3, PhiMoE).

Their `prepare_inputs_for_generation` drops the cache there. Up to that place trees are scored as everywhere; its step
is the one that stock makes, by the same method; behind it trees are scored on the cache that this step has filled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..cache import TreeCache, cache_of
from ..models import GenerativeModel, has_own_method
from ..target import Scorer, longrope_switch
from ..tree import DraftTree
from .stock_step import StockStep


def recomputing(scorer: Scorer, model: GenerativeModel, step: StockStep) -> Scorer:
    """A scorer that makes stock's step where `model` may drop its cache; `scorer` itself where it never does."""
    switch = longrope_switch(model.config)
    has_own = has_own_method(model, "prepare_inputs_for_generation")
    return RecomputingScorer(scorer, switch, step) if has_own and switch is not None else scorer


class RecomputingScorer(Scorer):
    """A `Scorer` that makes one step as stock does.

    Args:
        scorer: whose work it does.
        switch: entries of the cache at which the model may drop it.
        step: makes it.

    Attributes:
        whole_output: of the step in which everything was run again; None after any other.
    """

    def __init__(self, scorer: Scorer, switch: int, step: StockStep):
        self.__dict__.update(vars(scorer))
        self._switch = switch
        self._step = step

    @property
    def takes_root_only(self) -> bool:
        return self.cache.append_index == self._switch

    def __call__(
        self,
        tree: DraftTree,
        root_positions: Sequence[int],
        *,
        num_cached: int = 0,
        forward_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.num_rerun, self.whole_output = 0, None
        if not self.takes_root_only:
            return super().__call__(tree, root_positions, num_cached=num_cached, forward_kwargs=forward_kwargs)
        inputs = {**self._step.inputs(self.cache.cache), **(forward_kwargs or {})}
        output = self.model(**inputs, return_dict=True)
        if cache_of(output) is not self.cache.cache:
            self._adopt(output)
        output.logits = output.logits[:, -1:]
        return output

    def _adopt(self, output: Any) -> None:
        """Goes on with the model's new cache, in which the root's entry is yet to be kept."""
        length, self.num_rerun = self.cache.append_index, self.cache.append_index
        self.cache.restore()
        self.cache.release()
        self.cache = TreeCache(cache_of(output), len(self.cache.lengths))
        self.cache.lengths = (length,) * len(self.cache.lengths)
        self.whole_output = type(output)(hidden_states=output.hidden_states, attentions=output.attentions)
        for name in ("hidden_states", "attentions"):
            if (states := getattr(output, name, None)) is not None:
                output[name] = tuple(None if state is None else state[..., -1:, :] for state in states)
