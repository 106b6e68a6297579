"""KV cache with append, keep and truncate.

The unit is a cache *layer* (`PreallocatedLayer`), placed in an ordinary transformers `Cache`: plain `generate`,
continuation, beams and stock assisted decoding work on it unchanged. `TreeCache` steers the layers of one cache during
speculation: a forward appends N entries a row behind a common index, `keep` moves the accepted ones behind each row's
own end, and one assignment of `lengths` commits; until then the old state is intact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from .errors import CacheStateError


_MIN_CAPACITY = 128
_GROWTH = 1.5


class PreallocatedLayer(DynamicLayer):
    """A `DynamicLayer` whose states live in a buffer that grows geometrically, so an append writes new entries only.

    `keys` and `values` are views `[B, heads, length, head_dim]` of the buffers; assigning to them (beams, batch
    selection, reset) adopts the assigned tensor as the new buffer.
    """

    def __init__(self, *args, **kwargs):
        self._buffers: dict[str, Tensor] = {}
        self._is_owned = False
        self.length = 0
        super().__init__()
        self.device: torch.device
        self.dtype: torch.dtype

    @classmethod
    def from_layer(cls, layer: DynamicLayer) -> PreallocatedLayer:
        """Takes over the states of a stock layer: read as they are, copied at the next append, never written."""
        new = cls()
        if layer.is_initialized and layer.keys is not None:
            new.dtype, new.device = layer.keys.dtype, layer.keys.device
            new.is_initialized = True
            if layer.keys.numel() > 0:
                new.keys, new.values = layer.keys, layer.values
        return new

    @property
    def keys(self) -> Tensor | None:
        return self._view("keys")

    @keys.setter
    def keys(self, states: Tensor | None) -> None:
        self._adopt("keys", states)

    @property
    def values(self) -> Tensor | None:
        return self._view("values")

    @values.setter
    def values(self, states: Tensor | None) -> None:
        self._adopt("values", states)

    def _view(self, name: str) -> Tensor | None:
        buffer = self._buffers.get(name)
        return None if buffer is None else buffer[:, :, : self.length]

    def _adopt(self, name: str, states: Tensor | None) -> None:
        self._is_owned = False
        if states is None:
            self._buffers.pop(name, None)
            self.length = 0
        else:
            self._buffers[name] = states
            self.length = states.shape[-2]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._buffers = {"keys": key_states[:, :, :0], "values": value_states[:, :, :0]}
        self._is_owned = False
        self.length = 0
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Appends states `[B, heads, n, head_dim]`; returns the views of everything up to and including them.

        Cost: the n new entries; a copy of the whole buffer only when it grows.
        """
        if not self.is_initialized or self.keys is None:
            self.lazy_initialization(key_states, value_states)
        if key_states.requires_grad and torch.is_grad_enabled():
            # Autograd needs the old states intact. Both first, then assign: the length is common.
            old_keys, old_values = (self._buffers[name][:, :, : self.length] for name in ("keys", "values"))
            keys, values = torch.cat([old_keys, key_states], -2), torch.cat([old_values, value_states], -2)
            self.keys, self.values = keys, values
            return keys, values
        end = self.length + key_states.shape[-2]
        self.reserve(end, key_states, value_states)
        self._buffers["keys"][:, :, self.length : end] = key_states
        self._buffers["values"][:, :, self.length : end] = value_states
        self.length = end
        return self._buffers["keys"][:, :, :end], self._buffers["values"][:, :, :end]

    def reserve(self, capacity: int, key_like: Tensor, value_like: Tensor) -> None:
        """Makes room for `capacity` entries a row; raises nothing, modifies no entry."""
        if self._is_owned and self._buffers["keys"].shape[-2] >= capacity and self._is_writable():
            return
        capacity = max(capacity, int(_GROWTH * self.length), _MIN_CAPACITY)
        for name, like in (("keys", key_like), ("values", value_like)):
            # An adopted buffer may hold a batch of another layout; the new states tell heads and head size.
            grown = like.new_empty(like.shape[0], like.shape[1], capacity, like.shape[3])
            if self.length:
                grown[:, :, : self.length] = self._buffers[name][:, :, : self.length]
            self._buffers[name] = grown
        self._is_owned = True

    def _is_writable(self) -> bool:
        """An inference tensor (from a call under `torch.inference_mode`) must not be written outside that mode."""
        return torch.is_inference_mode_enabled() or not self._buffers["keys"].is_inference()

    def get_seq_length(self) -> int:
        return self.length if self.is_initialized else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Stock contract: removes the last `-tokens_to_remove` entries. Here it is one integer."""
        if tokens_to_remove > 0:
            return super().crop(tokens_to_remove)
        self.length = max(self.length + tokens_to_remove, 0)

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copies entries within the buffers. Modifies nothing else; cost independent of the length.

        Args:
            sources, destinations: int64 [k] (all rows alike) or [B, k] (a row each), absolute entry indices.
        """
        for buffer in self._buffers.values():
            sources, destinations = sources.to(buffer.device), destinations.to(buffer.device)
            if sources.dim() == 1:
                buffer.index_copy_(2, destinations, buffer.index_select(2, sources))
            else:
                rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
                buffer[rows, :, destinations] = buffer[rows, :, sources]


def has_only_full_attention(cache: Cache) -> bool:
    """Whether every layer of `cache` keeps all entries, addressable by index (no sliding window, no SSM)."""
    replicated = cache.layer_class_to_replicate
    if replicated is not None and replicated not in (DynamicLayer, PreallocatedLayer):
        return False
    return not cache.offloading and all(type(layer) in (DynamicLayer, PreallocatedLayer) for layer in cache.layers)


class TreeCache:
    """Speculative bookkeeping over one `Cache`: per-row lengths, a common append index, append / keep / truncate.

    The object's `layers` are replaced in place by `PreallocatedLayer`s (the user's own cache object stays the one that
    is used and returned). Rows of a batch append at the common index `max(lengths)` and have their own lengths; the
    entries of row r in `[lengths[r], max(lengths))` are holes that a mask must hide.

    Args:
        cache: a `Cache` whose layers all keep every entry, see `has_only_full_attention`.
        batch_size: B.
    Raises:
        CacheStateError: layers that cannot be indexed.
    """

    def __init__(self, cache: Cache, batch_size: int):
        if not has_only_full_attention(cache):
            kinds = sorted({type(layer).__name__ for layer in cache.layers})
            raise CacheStateError(
                f"cannot keep entries by index in a {type(cache).__name__} with layers {kinds}; "
                "every layer must be a DynamicLayer without offloading."
            )
        for index, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer:
                cache.layers[index] = PreallocatedLayer.from_layer(layer)
        if cache.layer_class_to_replicate is not None:
            cache.layer_class_to_replicate = PreallocatedLayer
        self.cache = cache
        self.lengths: tuple[int, ...] = (cache.get_seq_length(),) * batch_size

    @property
    def append_index(self) -> int:
        """Where the next forward writes: the length of the longest row."""
        return max(self.lengths)

    @property
    def is_ragged(self) -> bool:
        return min(self.lengths) != max(self.lengths)

    def commit_appended(self) -> None:
        """Accepts everything that forwards have appended (prefill), all rows alike."""
        self.lengths = (self.cache.get_seq_length(),) * len(self.lengths)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the entries of one path a row out of the nodes appended by the last forward, and drops the others.

        Args:
            paths: for each row the accepted nodes in order (indices into the appended block; strictly increasing).
                An empty path leaves the row as it was.

        Moves at most `max(len(path))` entries a row behind the committed prefix; the prefix is never touched.
        """
        base = self.append_index
        lengths = tuple(length + len(path) for length, path in zip(self.lengths, paths, strict=True))
        self._move(base, paths)
        self.lengths = lengths
        self.restore()

    def truncate(self, lengths: Sequence[int]) -> None:
        """Cuts row r to its first `lengths[r]` entries. One assignment; raises `CacheStateError` beyond the end."""
        for row, (wanted, found) in enumerate(zip(lengths, self.lengths, strict=True)):
            if not 0 <= wanted <= found:
                raise CacheStateError(f"cannot truncate row {row} to {wanted} entries: it has {found}.")
        self.lengths = tuple(lengths)
        self.restore()

    def restore(self) -> None:
        """Makes the layers agree with `lengths`, dropping uncommitted entries of an interrupted forward."""
        length = self.append_index
        for layer in self._layers:
            layer.length = length

    def _move(self, base: int, paths: Sequence[Sequence[int]]) -> None:
        if not self.is_ragged and all(tuple(path) == tuple(paths[0]) for path in paths):
            self._move_shared(base, paths[0])
            return
        width = max(len(path) for path in paths)
        sources, destinations = [], []
        for length, path in zip(self.lengths, paths, strict=True):
            stay = range(length + len(path), length + width)
            sources.append([base + node for node in path] + list(stay))
            destinations.append(list(range(length, length + width)))
        if width and sources != destinations:
            self._move_layers(torch.tensor(sources), torch.tensor(destinations))

    def _move_shared(self, base: int, path: Sequence[int]) -> None:
        first = next((index for index, node in enumerate(path) if node != index), len(path))
        if first < len(path):
            sources = torch.tensor([base + node for node in path[first:]])
            self._move_layers(sources, torch.arange(base + first, base + len(path)))

    def _move_layers(self, sources: Tensor, destinations: Tensor) -> None:
        placed: dict[torch.device, tuple[Tensor, Tensor]] = {}
        for layer in self._layers:
            device = layer.device
            if device not in placed:
                placed[device] = (sources.to(device), destinations.to(device))
            layer.move(*placed[device])

    @property
    def _layers(self) -> Iterator[PreallocatedLayer]:
        """The layers that hold anything."""
        for layer in self.cache.layers:
            if isinstance(layer, PreallocatedLayer) and layer.is_initialized:
                yield layer
