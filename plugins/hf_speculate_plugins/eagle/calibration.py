"""An EAGLE head read in several ways, to find out how it was trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from hf_speculate.tree import additive

from ..check import Alternative, ConventionReader, Options, Text, accepted_lengths
from ..heads import CachedAttention, LoadedHead
from .head import EagleHead
from .saving import EagleFiles
from .spec import Conventions, EagleSpec


class EagleReader(ConventionReader[LoadedHead[EagleHead]]):
    """Reads an EAGLE head under any `Conventions`."""

    name = "eagle"

    def read(self, options: Options) -> LoadedHead[EagleHead]:
        return EagleFiles.load(self._folder, self._target, Conventions(**options))

    def depth(self, depth: int) -> int:
        return depth

    def accepted_in(self, loaded: LoadedHead[EagleHead], text: Text, depth: int) -> Int[Tensor, " P"]:
        layers = loaded.head.spec.entry_layers(self._num_layers)
        return _accepted(loaded, text, layers, depth)

    def alternatives(self, options: Options) -> list[Alternative]:
        """One change of every convention that `options` leave open: layers, norms, RoPE base, embeddings."""
        loaded = self.load(options)
        spec, found = loaded.head.spec, []
        if "feature_layers" not in options:
            found += self._other_layers(spec)
        if "rope_theta" not in options:
            found += self.other_bases(spec.rope)
        if spec.version == 3:
            for name, meaning in _SWITCHES.items():
                if name not in options and not (spec.parallel and name == "feed_back_normed"):
                    value = not getattr(spec, name)
                    found.append(Alternative({name: value}, meaning[value]))
        if "embeddings" not in options:
            found += _other_embeddings(loaded)
        return found

    def _other_layers(self, spec: EagleSpec) -> list[Alternative]:
        layers, depth = spec.resolved_layers(self._num_layers), self._num_layers
        choices = {tuple(layer + shift for layer in layers): f"layers {shift:+d}" for shift in (-1, 1)}
        if spec.version == 3 and spec.num_features == 3:
            choices[(2, depth // 2, depth - 3)] = "the default layers"
        return [
            Alternative({"feature_layers": list(other)}, f"{meaning}, hidden states {list(other)}")
            for other, meaning in choices.items()
            if other != layers and min(other) >= 0 and max(other) <= depth
        ]


_SWITCHES = {
    "norm_before_residual": {True: "the residual taken after the norm", False: "the residual taken before the norm"},
    "norm_logits": {True: "a norm before the output matrix", False: "no norm before the output matrix"},
    "feed_back_normed": {True: "the normed state fed back", False: "the state fed back before the norm"},
}


def _other_embeddings(loaded: LoadedHead[EagleHead]) -> list[Alternative]:
    """The embeddings that are not used now, if there are two kinds."""
    if "embed_tokens.weight" in loaded.report.used:
        return [Alternative({"embeddings": "target"}, "the target's embeddings")]
    if "random" in loaded.report.shared.get("embed_tokens.weight", ""):
        return [Alternative({"embeddings": "own"}, "the embeddings in the file")]
    return []


def _accepted(loaded: LoadedHead[EagleHead], text: Text, layers: Sequence[int], depth: int) -> Int[Tensor, " P"]:
    """Accepted tokens of the chains at all roots of a text."""
    roots = text.roots(depth)
    if not roots:
        return torch.zeros(0, dtype=torch.long)
    states = loaded.head.fuse([text.states[layer][None] for layer in layers])
    logits = chain_logits(loaded.head, text.token_ids, states, [root - 1 for root in roots], depth)
    drafted = logits.argmax(-1)
    if loaded.target_ids is not None:
        drafted = loaded.target_ids[drafted]
    return accepted_lengths(drafted, text, roots)


def chain_logits(
    head: EagleHead,
    token_ids: Int[Tensor, " S"],
    states: Float[Tensor, "1 S Hd"],
    entries: Sequence[int],
    depth: int,
) -> Float[Tensor, "P D Vd"]:
    """Draft logits of chains that start at each of P entries, all at once, fed with the text's own tokens.

    Entry i pairs the state at i with token i + 1, its first logits are for token i + 2. The chain of an entry sees the
    entries of the text up to its own, and its own additions: as a session that drafts there would. Fed with the
    text's tokens instead of its own, it is that session as long as it is right; what follows an error never counts.

    Args:
        token_ids: the text.
        states: states from `EagleHead.fuse`.
        entries: places of the entries, ascending; the last must leave `depth` tokens of the text after its own token.
    """
    count, device = len(token_ids) - 1, head.device
    tokens, starts = token_ids.to(device), torch.tensor(entries, device=device)
    cache: Any = DynamicCache()
    positions = torch.arange(count, device=device)[None]
    causal = positions[0, :, None] - positions
    masks = [_mask((causal >= 0) & (causal < (window or count)), head.dtype) for window in head.spec.windows]
    hidden = head(tokens[None, 1:], states[:, :count], positions, CachedAttention(cache, masks))[:, starts]
    logits, states = head.read(hidden)
    steps = [logits[0]]
    for step in range(1, depth):
        masks = [_step_mask(count, starts, step, window, head.dtype) for window in head.spec.windows]
        if head.spec.parallel:
            chosen, states = head.masks(1, len(entries))
        else:
            chosen = tokens[starts + 1 + step][None]
        hidden = head(chosen, states, (starts + step)[None], CachedAttention(cache, masks))
        logits, states = head.read(hidden)
        steps.append(logits[0])
    return torch.stack(steps, dim=1)


def _step_mask(count: int, starts: Tensor, step: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Mask of step `step` (from 1) of all chains: the text up to the own entry, and the chain's own steps."""
    places = torch.arange(count, device=starts.device)
    own = torch.eye(len(starts), dtype=torch.bool, device=starts.device)
    ends = starts[:, None] + step
    blocks = [(places <= starts[:, None]) & (ends - places < (window or count + step))]
    blocks += [own & (step - earlier < (window or count + step)) for earlier in range(1, step + 1)]
    return _mask(torch.cat(blocks, dim=1), dtype)


def _mask(visible: Bool[Tensor, "N M"], dtype: torch.dtype) -> Float[Tensor, "1 1 N M"]:
    return additive(visible, dtype)[None, None]
