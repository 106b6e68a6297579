"""The target's hidden states at every token of a batch, from which a head learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hf_speculate.attention import tree_backends
from hf_speculate.drafting import FeatureTaps, check_taps
from hf_speculate.errors import TargetMismatchError
from hf_speculate.target import GenerativeModel, decoder_of, output_layer, takes_position_ids

from ..data import Batch


# Largest difference of equal states, as a share of the largest value. Rounding lies far below, another document's
# tokens far above.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE_TOLERANCE = 0.1


@dataclass(frozen=True)
class TargetStates:
    """Hidden states of the target, in its dtype and where it left them.

    Attributes:
        features: states [B, S, H] by layer, the keys of `Drafter.feature_layers` (`RAW_LAST` included).
        last_hidden: states [B, S, H] after the final norm, from which the output matrix makes the logits.
    """

    features: dict[int, Float[Tensor, "B S H"]]
    last_hidden: Float[Tensor, "B S H"]


class TargetReader:
    """Runs the target's decoder over packed batches; its output matrix is not run.

    Args:
        target: the model, without wrappers; layers of PEFT adapters and quantised weights are in it.
        feature_layers: layers as in `Drafter.feature_layers`.

    Attributes:
        mask: "positions" if the model itself keeps packed documents apart by their position ids, "explicit" if it needs
            an additive mask [B, 1, S, S], "rows" if neither helps, as with recurrent layers: then every document runs
            in a row of its own.

    Raises:
        TargetMismatchError: there is no such layer; the logits are more than the output matrix times the last hidden
            state (soft caps, scales), which a head with that matrix would miss; documents see each other even so.
    """

    def __init__(self, target: GenerativeModel, feature_layers: Sequence[int]):
        self.target = target
        self.feature_layers = tuple(feature_layers)
        self.mask = "positions"
        self._check_layers()
        with torch.no_grad(), tree_backends(self.target.device):
            self._check_output_matrix()
            self._choose_mask()

    def __call__(self, batch: Batch) -> TargetStates:
        """The states at every token of a batch; those from a cache unchanged."""
        if "last_hidden" in batch and "features" in batch:
            features = batch["features"]
            return TargetStates({layer: features[layer] for layer in self.feature_layers}, batch["last_hidden"])
        with torch.no_grad():
            if self.mask == "rows":
                return self._run_apart(batch["input_ids"], batch["document_ids"])
            mask = self._explicit_mask(batch["document_ids"]) if self.mask == "explicit" else None
            return self._run(batch["input_ids"], batch["position_ids"], mask)

    def _run_apart(self, input_ids: Int[Tensor, "B S"], document_ids: Int[Tensor, "B S"]) -> TargetStates:
        """The states of documents that run in rows of their own. Padding after a document changes nothing in it."""
        input_ids, document_ids = input_ids.cpu(), document_ids.cpu()
        new = torch.ones_like(document_ids, dtype=torch.bool)
        new[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        rows = new.flatten().cumsum(0) - 1  # the number of each token's document
        counts = rows.bincount()
        places = torch.arange(len(rows), dtype=torch.long, device="cpu") - (counts.cumsum(0) - counts)[rows]
        texts = torch.zeros(len(counts), int(counts.max()), dtype=torch.long, device="cpu")
        texts[rows, places] = input_ids.flatten()
        found = self._run(texts, torch.arange(texts.shape[1], dtype=torch.long, device="cpu")[None].expand_as(texts))

        def packed(states: Tensor) -> Tensor:
            where = rows.to(states.device), places.to(states.device)
            return states[where].unflatten(0, input_ids.shape)

        return TargetStates({layer: packed(each) for layer, each in found.features.items()}, packed(found.last_hidden))

    def _run(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor | None = None) -> TargetStates:
        device = self.target.device
        taps = FeatureTaps(self.target, self.feature_layers)
        try:
            decoder: Any = decoder_of(self.target)
            with taps.listening(), tree_backends(device):
                output = decoder(
                    input_ids=input_ids.to(device),
                    position_ids=position_ids.to(device),
                    attention_mask=mask,
                    use_cache=False,
                    **taps.forward_kwargs,
                )
            features = dict(taps.last(output.get("hidden_states"), input_ids.shape[1]))
        finally:
            taps.close()
        return TargetStates(features, output.last_hidden_state)

    def _explicit_mask(self, document_ids: Int[Tensor, "B S"]) -> Float[Tensor, "B 1 S S"]:
        hidden = ~visible(document_ids.to(self.target.device))
        mask = torch.zeros(hidden.shape, dtype=self.target.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)[:, None]

    def _check_layers(self) -> None:
        num_layers = self.target.config.get_text_config(decoder=True).num_hidden_layers
        unknown = [layer for layer in self.feature_layers if not -1 <= layer <= num_layers]
        if unknown:
            raise TargetMismatchError(
                f"hidden state {unknown[0]} was asked for, but {type(self.target).__name__} has {num_layers} layers: "
                f"possible are 0 (embeddings) to {num_layers} (after the final norm), and -1 (before it)."
            )
        check_taps(self.target, self.feature_layers, "the head")

    def _check_output_matrix(self) -> None:
        ids, positions = self._probe(6)
        expected = self.target(input_ids=ids, position_ids=positions, use_cache=False).logits
        found = output_layer(self.target)(self._run(ids, positions).last_hidden)
        if not self._equal(found, expected):
            raise TargetMismatchError(
                f"the logits of {type(self.target).__name__} are not its output matrix times its last hidden state (a "
                "soft cap or a scale comes after it). Heads read that matrix, so this target is not supported."
            )

    def _choose_mask(self) -> None:
        """Chooses the mask with which two documents in a row have the states of each alone."""
        ids, positions = self._probe(6)
        alone = [self._run(part, positions[:, :3]).last_hidden for part in ids.split(3, dim=1)]
        expected = torch.cat([torch.cat(alone, dim=1), self._run(ids, positions).last_hidden])
        packed_ids, packed_positions = ids.expand(2, -1), torch.cat([positions % 3, positions])
        documents = (torch.arange(6, device=ids.device, dtype=torch.long) // 3) * torch.tensor(
            [[1], [0]], device=ids.device, dtype=torch.long
        )
        if self._equal(self._run(packed_ids, packed_positions).last_hidden, expected):
            return
        if takes_position_ids(self.target):  # others take no mask of their callers' either
            self.mask = "explicit"
            packed = self._run(packed_ids, packed_positions, self._explicit_mask(documents)).last_hidden
            if self._equal(packed, expected):
                return
        self.mask = "rows"
        if not self._equal(self._run_apart(packed_ids, documents).last_hidden, expected):
            raise TargetMismatchError(
                f"{type(self.target).__name__} with attention "
                f"{self.target.config._attn_implementation!r} lets documents see each other. Possible: load it with "
                "attn_implementation='sdpa' or 'eager'."
            )

    def _probe(self, length: int) -> tuple[Tensor, Tensor]:
        vocab_size = self.target.config.get_text_config(decoder=True).vocab_size
        ids = torch.arange(1, length + 1, device=self.target.device, dtype=torch.long)[None] * 7 % vocab_size
        return ids, torch.arange(length, device=self.target.device, dtype=torch.long)[None]

    def _equal(self, found: Tensor, expected: Tensor) -> bool:
        if found.shape != expected.shape:
            return False
        found, expected = found.float(), expected.float().to(found.device)
        tolerance = _TOLERANCES.get(self.target.dtype, _COARSE_TOLERANCE)
        return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def visible(document_ids: Int[Tensor, "B S"]) -> Bool[Tensor, "B S S"]:
    """Mask of the keys (last axis) that a query sees: earlier tokens of its own document, and itself."""
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril()
