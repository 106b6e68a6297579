"""Models that recompute the whole text at one position, where RoPE changes from short to long factors (Phi-3, PhiMoE).

Their `prepare_inputs_for_generation` drops the cache there. The step at that position is stock's own, by the same
method. Before and after it trees are scored as usual.
"""

from __future__ import annotations

from typing import Any

from ..cache import TreeCache, cache_of
from ..forward import Forward, Nodes, Scorer
from ..target import GenerativeModel, has_own_method, longrope_switch
from .stock_step import StockStep


def recomputing_switch(model: GenerativeModel) -> int | None:
    """Number of cache entries at which `model` may drop its cache; None if it never does."""
    return longrope_switch(model.config) if has_own_method(model, "prepare_inputs_for_generation") else None


def follow_recomputing(scorer: Scorer, model: GenerativeModel, step: StockStep) -> Scorer:
    """The scorer, changed to make stock's step where `model` may drop its cache."""
    if (switch := recomputing_switch(model)) is not None:
        scorer.forward = RecomputingForward(scorer.forward, switch, step)
    return scorer


class RecomputingForward(Forward):
    """A forward that makes one step as stock does.

    Args:
        others: forward for all other steps.
        switch: number of cache entries at which the model may drop its cache.
        step: next step of the request as stock makes it.
    """

    def __init__(self, others: Forward, switch: int, step: StockStep):
        super().__init__()
        self._others, self._switch, self._step = others, switch, step

    def takes_root_only(self, scorer: Scorer) -> bool:
        return scorer.cache.append_index == self._switch

    def finish(self, scorer: Scorer) -> None:
        self._others.finish(scorer)

    def run(self, scorer: Scorer, nodes: Nodes) -> Any:
        """The output for the nodes. If everything was recomputed, `whole_output` of the scorer has that step's
        output."""
        scorer.num_rerun, scorer.whole_output = 0, None
        if not self.takes_root_only(scorer):
            return self._others.run(scorer, nodes)
        inputs = {**self._step.inputs(scorer.cache.cache), **nodes.forward_kwargs}
        output: Any = scorer.call_model(**inputs)
        if cache_of(output) is not scorer.cache.cache:
            _adopt(scorer, output)
        output.logits = output.logits[:, -1:]
        return output


def _adopt(scorer: Scorer, output: Any) -> None:
    """Continues with the model's new cache, in which the root's entry is not kept yet."""
    old = scorer.cache
    length = scorer.num_rerun = old.append_index
    old.restore()
    old.release()
    scorer.cache = TreeCache(cache_of(output), len(old.lengths))
    scorer.cache.lengths = (length,) * len(old.lengths)
    scorer.whole_output = type(output)(hidden_states=output.hidden_states, attentions=output.attentions)
    for name in ("hidden_states", "attentions"):
        if (states := getattr(output, name, None)) is not None:
            output[name] = tuple(None if state is None else state[..., -1:, :] for state in states)
