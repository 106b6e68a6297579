"""Hidden states of the target, for drafters that use them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..compatibility.stock import states_option
from ..errors import DrafterError, UnsupportedRequestError
from ..target import GenerativeModel, decoder_of
from ..transfers import to_device
from .contract import RAW_LAST


def finite(states: Tensor) -> Tensor:
    """float16 states without infinities and NaN: overflows become the largest number, NaN becomes 0.

    One infinite value at the first token would spread to every later state of a drafter that attends to it.
    Transformers clamps fp16 states for the same reason. Other dtypes do not overflow, and training must see when it
    diverges.
    """
    if states.dtype != torch.float16 or states.requires_grad:
        return states
    return torch.nan_to_num(states, nan=0.0)


def check_taps(target: GenerativeModel, layers: Sequence[int], drafter: str) -> None:
    """Raises `UnsupportedRequestError` if the states that the drafter needs cannot be tapped."""
    if RAW_LAST in layers and last_layer(target) is None:
        raise UnsupportedRequestError(
            f"the drafter {drafter!r} reads the output of the last decoder layer, which is not to be found in "
            f"{type(target).__name__}."
        )


def last_layer(target: GenerativeModel) -> nn.Module | None:
    """The last decoder layer: that of `layers`, or of the only module list with the config's number of layers."""
    decoder, count = decoder_of(target), target.config.get_text_config(decoder=True).num_hidden_layers
    lists = {name: child for name, child in decoder.named_children() if isinstance(child, nn.ModuleList)}
    stacks = [lists["layers"]] if "layers" in lists else [child for child in lists.values() if len(child) == count]
    return stacks[0][-1] if len(stacks) == 1 else None


def _gathered(states: Float[Tensor, "B N H"], paths: Sequence[Sequence[int]]) -> Float[Tensor, "B J H"]:
    if len(paths) == 1:
        return states.index_select(1, to_device(paths[0], states.device))
    width = max(map(len, paths))
    nodes = to_device([[*path, *[0] * (width - len(path))] for path in paths], states.device)
    return states.gather(1, nodes[..., None].expand(-1, -1, states.shape[-1]))


class FeatureTaps:
    """Collects the hidden states of the layers that a drafter asked for, during one request.

    Args:
        target: model to tap.
        layers: layer indices, `Drafter.feature_layers`. `RAW_LAST` is read by a hook, because `hidden_states` has the
            last layer's output only after the final norm. The others need a forward argument.
    """

    def __init__(self, target: GenerativeModel, layers: Sequence[int]):
        self.layers = tuple(layers)
        self._target = target
        self._raw_last: Tensor | None = None
        self._listening = False
        self._hook: RemovableHandle | None = None

    @property
    def forward_kwargs(self) -> dict[str, list[int] | range]:
        """Arguments that the target's forward needs."""
        indices = [layer for layer in self.layers if layer != RAW_LAST]
        return {"output_hidden_states": states_option(indices)} if indices else {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A context for the forwards to tap: processors, criteria and consumers may run the target too."""
        if RAW_LAST in self.layers and self._hook is None:
            self._hook = self._tap_raw_last()
        self._listening = True
        try:
            yield
        finally:
            self._listening = False

    def skip(self, count: int) -> None:
        """Drops the first `count` positions of the last forward's raw states. The forward itself cuts
        `hidden_states`."""
        if count and self._raw_last is not None:
            self._raw_last = self._raw_last[:, count:]

    def last(self, hidden_states: Any, width: int) -> Mapping[int, Float[Tensor, "B J H"]]:
        """The states of the last `width` positions of the forward that returned `hidden_states`."""
        return {layer: self._states(hidden_states, layer)[:, -width:] for layer in self.layers}

    def at(
        self, hidden_states: Any, paths: Sequence[Sequence[int]], rows: Sequence[int], along: Any = None
    ) -> Mapping[int, Float[Tensor, "B J H"]]:
        """The states at the nodes of one path for each row. Shorter paths are padded with node 0.

        Args:
            along: states along these paths, or longer ones, by layer, if the forward has gathered them
                (`tree_forward`). The next forward overwrites them.
            rows: indices of the batch rows that the forward ran. Other rows have empty paths and get states of another
                row.
        """
        if not self.layers:
            return {}
        if along is not None:
            return self._copied(along, max(map(len, paths)))
        slots = None
        if len(rows) < len(paths):
            slot_of = {row: slot for slot, row in enumerate(rows)}
            slots = torch.tensor([slot_of.get(row, 0) for row in range(len(paths))], dtype=torch.long, device="cpu")
        features = {}
        for layer in self.layers:
            states = self._states(hidden_states, layer)
            if slots is not None:
                states = states.index_select(0, to_device(slots, states.device))
            features[layer] = states if states.shape[1] == 1 else _gathered(states, paths)
        return features

    def _copied(self, along: Mapping[Any, Tensor], width: int) -> Mapping[int, Float[Tensor, "B J H"]]:
        """Copies of the first `width` states, made at once."""
        parts = [finite(along["last" if layer == RAW_LAST else layer][:, :width]) for layer in self.layers]
        sizes = [part.shape[-1] for part in parts]
        copies = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0].clone()
        return dict(zip(self.layers, copies.split(sizes, dim=-1), strict=True))

    def note(self, output: Any) -> None:
        """Takes the last layer's output from a forward that has read it itself."""
        if (last := getattr(output, "last", None)) is not None:
            self._raw_last = last

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._raw_last = None

    def _tap_raw_last(self) -> RemovableHandle:
        thread = threading.get_ident()

        def keep(_module, _inputs, output) -> None:
            if self._listening and threading.get_ident() == thread:  # other threads may run the same model
                self._raw_last = output[0] if isinstance(output, tuple) else output

        layer = last_layer(self._target)
        assert layer is not None, "see check_taps"
        return layer.register_forward_hook(keep)

    def _states(self, hidden_states: Any, layer: int) -> Tensor:
        if layer == RAW_LAST:
            states = self._raw_last
        else:
            states = hidden_states[layer] if hidden_states is not None and layer < len(hidden_states) else None
        if states is None:
            raise DrafterError(f"the target shows no hidden state {layer}, which the drafter's `feature_layers` name.")
        if states.dim() != 3:
            raise DrafterError(
                f"the target's hidden state {layer} has the shape {list(states.shape)}; drafters take [B, T, H]."
            )
        return finite(states)
