"""A one-pass head read in several ways, to find out how it was trained."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..check import Alternative, ConventionReader, Options, Text, accepted_lengths
from ..heads import LoadedHead
from .head import BlockHead, block_masks
from .saving import BlockFiles
from .spec import Conventions


# Roots whose blocks are run at once: each has a copy of the text's keys and values.
_CHUNK = 32


class BlockReader(ConventionReader[LoadedHead[BlockHead]]):
    """Reads a one-pass head under any `Conventions`."""

    name = "block"

    def read(self, options: Options) -> LoadedHead[BlockHead]:
        return BlockFiles.load(self._folder, self._target, Conventions(**options))

    def depth(self, depth: int) -> int:
        # Read with another first slot it drafts one token less, or more.
        return min(depth, self._loaded.head.spec.block_size - 1)

    def accepted_in(self, loaded: LoadedHead[BlockHead], text: Text, depth: int) -> Int[Tensor, " P"]:
        return _accepted(loaded, text, depth)

    def alternatives(self, options: Options) -> list[Alternative]:
        """One change of every convention that `options` leave open: layers, first slot, causality, RoPE base."""
        spec, found = self.load(options).head.spec, []
        if "feature_layers" not in options:
            for shift in (-1, 1):
                layers = [layer + shift for layer in spec.feature_layers]
                if min(layers) >= 0 and max(layers) <= self._num_layers:
                    found.append(Alternative({"feature_layers": layers}, f"layers {shift:+d}, hidden states {layers}"))
        if "first_slot" not in options:
            places = {0: "the token behind its place (DeepSpec)", 1: "the token at its place (z-lab)"}
            other = 1 - spec.first_slot
            found.append(Alternative({"first_slot": other}, f"a slot that proposes {places[other]}"))
        if "causal" not in options:
            causal = not any(spec.causal)
            meaning = "slots that see only those before them" if causal else "slots that see all of their block"
            found.append(Alternative({"causal": causal}, meaning))
        if "rope_theta" not in options:
            found += self.other_bases(spec.rope)
        return found


def _accepted(loaded: LoadedHead[BlockHead], text: Text, depth: int) -> Int[Tensor, " P"]:
    """Accepted tokens of the greedy chains at all roots of a text."""
    roots = text.roots(depth)
    if not roots:
        return torch.zeros(0, dtype=torch.long)
    head, spec = loaded.head, loaded.head.spec
    context = head.fuse([text.states[layer][None] for layer in spec.feature_layers])
    drafted = []
    for start in range(0, len(roots), _CHUNK):
        anchors = torch.tensor(roots[start : start + _CHUNK], device=head.device)
        slots = block_states(head, text.token_ids, context, anchors)[:, spec.first_slot : spec.first_slot + depth]
        drafted.append(_greedy(loaded, slots, text.token_ids.to(head.device), anchors))
    return accepted_lengths(torch.cat(drafted), text, roots)


def block_states(
    head: BlockHead, token_ids: Int[Tensor, " S"], context: Float[Tensor, "1 S H"], anchors: Int[Tensor, " P"]
) -> Float[Tensor, "P B H"]:
    """States of the blocks at P places of a text, each of which sees the context before its anchor."""
    places = torch.arange(context.shape[1], device=head.device)[None]
    read: dict[int, tuple[Tensor, Tensor]] = {}
    head.read(context, places, lambda layer, keys, values: read.update({layer: (keys, values)}))
    positions = anchors[:, None] + torch.arange(head.spec.block_size, device=head.device)
    rows = places.expand(len(anchors), -1)
    masks = block_masks(head.spec, positions, rows, rows < anchors[:, None], head.dtype)

    def attend(layer: int, queries: Tensor, *own: Tensor) -> Tensor:
        earlier = (part.expand(len(anchors), -1, -1, -1) for part in read[layer])
        keys, values = (torch.cat(parts, dim=2) for parts in zip(earlier, own, strict=True))
        is_grouped = keys.shape[1] != queries.shape[1]
        return scaled_dot_product_attention(queries, keys, values, attn_mask=masks[layer], enable_gqa=is_grouped)

    return head(head.block_ids(token_ids.to(head.device)[anchors]), positions, attend)


def _greedy(
    loaded: LoadedHead[BlockHead],
    slots: Float[Tensor, "P D H"],
    token_ids: Int[Tensor, " S"],
    anchors: Int[Tensor, " P"],
) -> Int[Tensor, "P D"]:
    """The best token of every slot behind the text's own tokens instead of the chain's.

    This is the chain as long as the chain is right, and nothing behind an error counts.
    """
    head, spec = loaded.head, loaded.head.spec
    logits = head.logits(slots)
    previous = token_ids[anchors[:, None] + torch.arange(slots.shape[1], device=anchors.device)]
    if spec.markov is not None:
        codes = head.markov_head.codes(previous)
        carried, found = None, []
        for slot in range(slots.shape[1]):
            inputs, carried = head.markov_head.inputs(slots[:, slot], codes[:, slot], carried)
            found.append(inputs)
        logits = logits + head.markov_head.bias(torch.stack(found, dim=1))
    if spec.selector_rank:
        scores, candidates = logits.topk(spec.selector_top_k, dim=-1)
        selector = head.candidate_selector
        scores = scores + selector.bias(selector.inputs(slots, previous)[:, :, None], candidates)[:, :, 0]
        best = candidates.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
    else:
        best = logits.argmax(-1)
    drafted = best if loaded.target_ids is None else loaded.target_ids[best]
    return drafted.cpu()
