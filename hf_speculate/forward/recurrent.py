"""Models with recurrent layers (SSM, linear attention, short convolutions) besides attention: chains and a snapshot.

A recurrent state is a summary: nothing can be removed from it, and it has no branches. So drafts are chains, and the
states are copied before a chain is run. The copy's size does not depend on the text. To reject tokens the copy is put
back. The accepted tokens then run once more, before the next chain in the same forward, or alone if there are many. A
fully accepted chain needs no rerun, nor do layers that can repeat what they did with the first tokens of a forward
(`replay`, of packed models). Rows of a batch advance together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionAndFullAttentionLayer

from ..cache import INDEXABLE, TreeCache, as_cache
from ..compatibility.stock import RECURRENT_LAYERS, SLIDING_RECURRENT_LAYERS
from ..errors import CacheStateError
from ..stats import RunnerRecord
from ..target import GenerativeModel, Shape, supported_shape
from ..transfers import to_device
from .scorer import Forward, Nodes, Scorer


# Most accepted tokens to run again with the next chain; more run alone, once.
MAX_RERUN = 16


def has_recurrent_layers(cache: Cache) -> bool:
    """Whether `cache` has recurrent and attention layers, all of kinds whose states can be put back."""
    layers = cache.layers
    known = all(type(layer) in (*INDEXABLE, *RECURRENT_LAYERS) for layer in layers)
    has_attention = any(isinstance(layer, CacheLayerMixin) for layer in layers)
    return known and has_attention and not cache.offloading and any(type(layer) in RECURRENT_LAYERS for layer in layers)


@dataclass
class _LayerStates:
    """The states of a recurrent layer: copies of tensors that forwards overwrite, references to those that they
    replace."""

    states: dict[tuple[str, int], Tensor | None]
    has_previous: dict[int, bool]
    attention: tuple[Tensor | None, Tensor | None, int] | None

    @classmethod
    def of(cls, layer: Any) -> _LayerStates:
        states = {
            (kind, index): None if state is None else state.clone()
            for kind in ("conv_states", "recurrent_states")
            for index, state in getattr(layer, kind).items()
        }
        attention = None
        if isinstance(layer, SLIDING_RECURRENT_LAYERS):
            attention = layer.keys, layer.values, layer.cumulative_length
        return cls(states, dict(layer.has_previous_state), attention)

    def put_back(self, layer: Any, length: int) -> None:
        """Restores the states in `layer`, with `length` entries of attention states."""
        for (kind, index), state in self.states.items():
            present = getattr(layer, kind)[index]
            if state is None:
                if present is not None:
                    present.zero_()
            elif present.shape == state.shape:
                present.copy_(state)  # in place: captured graphs hold the address
            else:
                getattr(layer, kind)[index] = state.clone()
        layer.has_previous_state.update(self.has_previous)
        if self.attention is not None:
            layer.keys, layer.values, layer.cumulative_length = self.attention
        elif isinstance(layer, LinearAttentionAndFullAttentionLayer) and layer.get_seq_length():
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]

    @property
    def num_bytes(self) -> int:
        return sum(state.nbytes for state in self.states.values() if state is not None)


class RecurrentCache(TreeCache):
    """A `TreeCache` whose recurrent states may lag behind: they cover `state_length` tokens unless they are current.

    `rerun` [B, n] are the committed tokens after those. All rows have the same length.
    """

    def __init__(self, cache: Cache, batch_size: int):
        super().__init__(cache, batch_size)
        self._recurrent = [layer for layer in cache.layers if type(layer) in RECURRENT_LAYERS]
        self.state_length = self.append_index
        self.rerun = torch.empty(batch_size, 0, dtype=torch.long, device="cpu")
        self.is_current = False  # until the prompt is committed an interruption restores the old states
        self._snapshot = self._take()
        self._chain = self.rerun

    @staticmethod
    def accepts(cache: Cache) -> bool:
        return has_recurrent_layers(cache)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the copy of all recurrent states."""
        return sum(states.num_bytes for states in self._snapshot)

    @property
    def shortest_length(self) -> int:
        return self.state_length

    def commit_appended(self) -> None:
        self.lengths = (self.cache.get_seq_length(),) * len(self.lengths)
        self.advance()

    def advance(self) -> None:
        """Makes the present states the snapshot. They must cover all committed tokens."""
        self.state_length, self.is_current = self.append_index, True
        self.rerun = self.rerun[:, :0]
        self._snapshot = self._take()
        self._before_prompt = []
        self._pin_windows()

    def begin(self, token_ids: Tensor) -> Tensor:
        """Prepares the states for a chain [B, N]; returns the tokens to run before it [B, n]."""
        if self.is_current and self.rerun.shape[1]:
            self.advance()
        elif not self.is_current:
            self.restore()
        self.is_current, self._chain = False, token_ids
        return self.rerun

    def keep(self, paths: Sequence[Sequence[int]], ended: Collection[int] = ()) -> None:
        """Keeps the first nodes of the last chain, as many as the longest path has; `ended` rows do the same."""
        num_kept, num_rerun = max(map(len, paths)), self.rerun.shape[1]
        self.rerun = torch.cat([self.rerun, self._chain[:, :num_kept].to(self.rerun.device)], dim=1)
        self.lengths = (self.append_index + num_kept,) * len(self.lengths)
        self.is_current = num_kept == self._chain.shape[1] or self._replay(num_rerun + num_kept)

    def _replay(self, count: int) -> bool:
        """Advances the snapshot by the first `count` tokens of the last forward, if every recurrent layer offers to
        repeat that without the rest of the model (`replay`); returns whether they did."""
        replays: list[Any] = [getattr(layer, "replay", None) for layer in self._recurrent]
        if not all(replays):
            return False
        for layer, states, replay in zip(self._recurrent, self._snapshot, replays, strict=True):
            states.put_back(layer, self.append_index)
            replay(count)
        for layer in self._layers:
            layer.length = self.append_index
        return True

    def truncate(self, lengths: Sequence[int]) -> None:
        length = max(lengths)
        if not self.state_length <= length <= self.append_index:
            raise CacheStateError(
                f"cannot truncate rows to {length} entries: recurrent states are known for {self.state_length} to "
                f"{self.append_index}."
            )
        if length < self.append_index:
            self.is_current = False
            self.rerun = self.rerun[:, : length - self.state_length]
            self.lengths = (length,) * len(self.lengths)
        self.restore()

    def restore(self) -> None:
        """Restores the snapshot unless the states are current."""
        if self.is_current:
            return
        for layer, checkpoint in zip(self._sliding, self._before_prompt, strict=False):
            layer.revert(checkpoint)
        for layer, states in zip(self._recurrent, self._snapshot, strict=True):
            states.put_back(layer, self.state_length)
        for layer in self._layers:
            layer.length = self.state_length
        self._pin_windows()

    def _take(self) -> list[_LayerStates]:
        return [_LayerStates.of(layer) for layer in self._recurrent]

    def _pin_windows(self) -> None:
        for layer in self._sliding:
            layer.pinned_from = layer.window_start(self.state_length)


class RecurrentForward(Forward):
    """A forward over chains on a `RecurrentCache`, which first reruns the tokens that its states lack."""

    needs_equal_rows = True

    def __init__(self) -> None:
        super().__init__()
        # position minus index of each row's entries; finished rows keep theirs
        self._shifts: Sequence[int] | None = None

    def run(self, scorer: Scorer, nodes: Nodes) -> Any:
        """The output for the nodes only, without the tokens that were rerun. `num_cached` must be 0."""
        tree, cache = nodes.tree, _cache(scorer)
        if self._shifts is None:
            self._shifts = [position - cache.append_index for position in nodes.root_positions]
        if not cache.is_current and cache.rerun.shape[1] > MAX_RERUN:
            self._advance(scorer)
        rerun = cache.begin(tree.token_ids)
        scorer.num_rerun = rerun.shape[1]
        token_ids = torch.cat([rerun, tree.token_ids.to(rerun.device)], dim=1)
        output = self._run(scorer, token_ids, nodes.forward_kwargs)
        output.logits = output.logits[:, -tree.num_nodes :]
        for name in ("hidden_states", "attentions"):
            if (states := getattr(output, name, None)) is not None:
                output[name] = tuple(None if state is None else state[..., scorer.num_rerun :, :] for state in states)
        return output

    def finish(self, scorer: Scorer) -> None:
        self._advance(scorer)
        super().finish(scorer)

    def _advance(self, scorer: Scorer) -> None:
        """Advances the states to everything committed."""
        cache = _cache(scorer)
        if not cache.is_current:
            rerun = cache.begin(cache.rerun[:, :0])
            if rerun.shape[1]:
                with torch.no_grad():
                    self._run(scorer, rerun, {})
            cache.advance()

    def _run(self, scorer: Scorer, token_ids: Tensor, forward_kwargs: Mapping[str, Any]) -> Any:
        """One forward over tokens [B, n], which follow the states."""
        count, device, start = token_ids.shape[1], scorer.device, _cache(scorer).state_length
        assert self._shifts is not None
        shifts = to_device(self._shifts, device)
        positions = shifts[:, None] + torch.arange(start, start + count, device=device, dtype=torch.long)
        mask = None
        if scorer.prompt_mask is not None:
            mask = torch.ones(len(token_ids), start + count, dtype=torch.long, device=device)
            width = min(scorer.prompt_mask.shape[1], start)
            mask[:, :width] = scorer.prompt_mask[:, :width]
        return scorer.call_model(
            input_ids=to_device(token_ids, device),
            attention_mask=mask,
            **as_cache(scorer.cache.cache),
            use_cache=True,
            logits_to_keep=count,
            **({"position_ids": scorer.of_all_kinds(positions)} if scorer.takes_position_ids else {}),
            **scorer.for_tokens(count),
            **scorer.forward_kwargs,
            **forward_kwargs,
        )


def _cache(scorer: Scorer) -> RecurrentCache:
    assert isinstance(scorer.cache, RecurrentCache)
    return scorer.cache


def target_shape(model: GenerativeModel, cache: Cache) -> tuple[Shape, str]:
    """The result of `supported_shape`, but chains for models with recurrent layers."""
    if not has_recurrent_layers(cache):
        return supported_shape(model, cache)
    return "chain", "recurrent layers: chains only, rejected tokens are undone by a copy of the states"


def target_scorer(
    model: GenerativeModel,
    cache: Cache,
    batch_size: int,
    prompt_mask: Tensor | None = None,
    shape: Shape = "tree",
    token_kwargs: Mapping[str, Tensor] | None = None,
    record: RunnerRecord | None = None,
) -> Scorer:
    """The scorer and cache that fit the layers of `cache`."""
    options: dict[str, Any] = {"token_kwargs": token_kwargs, "record": record}
    if has_recurrent_layers(cache):
        own = RecurrentCache(cache, batch_size)
        return Scorer(model, own, prompt_mask, shape, forward=RecurrentForward(), **options)
    return Scorer(model, TreeCache(cache, batch_size), prompt_mask, shape, **options)
