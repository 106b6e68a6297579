"""Heads, batches and slow recomputations for the tests of one-pass training."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import DynamicCache

from hf_speculate_plugins.block import BlockHead, block_masks
from hf_speculate_plugins.heads import CachedAttention
from hf_speculate_training.data import Batch
from hf_speculate_training.methods.block import (
    BlockTrainingOptions,
    DFlashMethod,
    DFlashShape,
    DSparkMethod,
    DSparkShape,
    DSparkTrainingOptions,
    TextBlocks,
    new_block,
)
from hf_speculate_training.methods.block.method import BlockMethod
from hf_speculate_training.states import TargetReader, TargetStates
from tests.support import heads


VOCAB, DEPTH, SLOTS = heads.VOCAB, heads.DEPTH, 4
KEPT = torch.arange(0, VOCAB, 2)
# Name -> fields of the shape, switches of the spec that only published heads have.
SHAPES = {
    "dflash": ({"kind": "dflash"}, {}),
    "dflash-zlab": ({"kind": "dflash", "first_slot": 1, "block_size": SLOTS + 1}, {}),
    "jetspec": ({"kind": "dflash", "causal": True, "num_layers": 3, "first_slot": 1, "block_size": SLOTS + 1}, {}),
    "windows": ({"kind": "dflash"}, {"windows": (None, 3), "causal": (False, True)}),
    "windows-from-anchor": ({"kind": "dflash"}, {"windows": (2, None), "window_from_anchor": True}),
    "dspark": ({"kind": "dspark"}, {}),
    "dspark-gated": ({"kind": "dspark", "markov": "gated", "first_slot": 1, "block_size": SLOTS + 1}, {}),
    "dspark-rnn": ({"kind": "dspark", "markov": "rnn", "confidence_with_markov": False}, {}),
}


def target(dtype: torch.dtype = torch.float64):
    return heads.target(dtype=dtype, initializer_range=0.15)


def method(name: str = "dspark", dtype=torch.float64, truncated: bool = False, **options) -> BlockMethod:
    """A method around a head that has learnt something: no weight of it is 0."""
    fields, switches = SHAPES[name]
    fields = dict(fields)
    is_dspark = fields.pop("kind") == "dspark"
    extra = {"markov_rank": 8} if is_dspark else {}
    shape = (DSparkShape if is_dspark else DFlashShape)(**{"block_size": SLOTS, **extra, **fields})
    torch.manual_seed(1)
    ids, model = (KEPT if truncated else None), target(dtype)
    head = new_block(model, shape, ids)
    if switches:
        spec = dataclasses.replace(head.spec, **switches)
        head = BlockHead(spec, head.shared["embed_tokens"], head.shared["lm_head"])
    for parameter in head.parameters():
        parameter.data = parameter.data.to(dtype) + 0.1 * torch.randn_like(parameter, dtype=dtype)
    if is_dspark:
        return DSparkMethod(head, model, ids, DSparkTrainingOptions(**options)).train()
    return DFlashMethod(head, model, ids, BlockTrainingOptions(**options)).train()


def states_of(made: BlockMethod, batch: Batch) -> TargetStates:
    return TargetReader(target(made.head.dtype), made.feature_layers)(batch)


def run(made: BlockMethod, batch: Batch):
    return made(batch, states_of(made, batch))


def all_blocks(made: BlockMethod, batch: Batch) -> TextBlocks:
    """At every possible anchor."""
    return TextBlocks.drawn(batch, batch["input_ids"].shape[1], made.head.spec.max_depth, at_random=False)


def alone(head: BlockHead, features, batch: Batch, row: int, anchor: int) -> torch.Tensor:
    """The states [S, H] of one block, run as decoding runs it: over a cache of what its document had before."""
    documents = batch["document_ids"][row].tolist()
    start = documents.index(documents[anchor])
    context = head.fuse([feature[row : row + 1, start:anchor] for feature in features])
    cache, read = DynamicCache(), torch.arange(anchor - start)[None]
    head.read(context, read, lambda layer, keys, values: cache.update(keys, values, layer))
    positions = anchor - start + torch.arange(head.spec.block_size)[None]
    masks = block_masks(head.spec, positions, read, None, context.dtype)
    return head(head.block_ids(batch["input_ids"][row, anchor, None]), positions, CachedAttention(cache, masks))[0]


def proposals(made: BlockMethod, batch: Batch):
    """Every proposal that counts, one after the other, by loops: `(block, k, draft logits, target logits, label,
    confidence logit)`, logits over the draft vocabulary and the label a token."""
    head, states = made.head, states_of(made, batch)
    features = [states.features[layer] for layer in head.spec.feature_layers]
    ids, documents, mask = (batch[name].tolist() for name in ("input_ids", "document_ids", "loss_mask"))
    kept = list(range(VOCAB)) if made.target_ids is None else made.target_ids.tolist()
    for row in range(len(ids)):
        size = len(ids[row])
        for anchor in range(size - 1):
            if not (
                mask[row][anchor] and mask[row][anchor + 1] and documents[row][anchor] == documents[row][anchor + 1]
            ):
                continue
            slots = alone(head, features, batch, row, anchor)[head.spec.first_slot :]
            carried = None
            for k, slot in enumerate(slots):
                place = anchor + k + 1
                if place >= size or not mask[row][place] or documents[row][place] != documents[row][anchor]:
                    break
                previous = torch.tensor(ids[row][place - 1])
                logits = head.output(slot)
                if head.spec.markov:
                    markov = head.markov_head
                    code = markov.markov_w1.weight[previous]
                    carried = torch.zeros_like(code) if carried is None else carried
                    inputs, carried = markov.inputs(slot, code, carried)
                    logits = logits + markov.markov_w2.weight @ inputs
                sure = head.confidence(slot[None], previous[None])[0] if head.spec.confidence else None
                wanted = target(head.dtype).lm_head(states.last_hidden[row, place - 1])[kept]
                yield (row, anchor), k, logits, wanted, ids[row][place], sure


def slow_loss(made, batch):
    """The loss proposal by proposal, and its terms."""
    options, kept = made.options, (range(VOCAB) if made.target_ids is None else made.target_ids.tolist())
    found = []
    for block, k, logits, wanted, label, sure in proposals(made, batch):
        q, p = logits.softmax(-1), wanted.softmax(-1)
        entropy = -q[list(kept).index(label)].log() if label in kept else None
        distance = sum(abs(a - b) for a, b in zip(p, q, strict=True))
        found.append((block, k, entropy, distance, (p * (p.log() - q.log())).sum(), sure))
    weights = [1.0 if options.decay is None else math.exp(-k / options.decay) for _, k, *_ in found]
    with_label = [(w, row[2]) for w, row in zip(weights, found, strict=True) if row[2] is not None]

    def mean(pairs):
        return sum(w * x for w, x in pairs) / sum(w for w, _ in pairs)

    if options.loss == "kl":
        total = mean([(w, row[4]) for w, row in zip(weights, found, strict=True)])
    else:
        total = options.ce_weight * mean(with_label) if options.ce_weight else 0
        total = total + options.l1_weight * mean([(w, row[3]) for w, row in zip(weights, found, strict=True)])
    if options.confidence_weight:
        rows = [(w, row) for w, row in zip(weights, found, strict=True)]
        sure = [(w, binary_cross_entropy_with_logits(row[5], 1 - row[3].detach() / 2)) for w, row in rows]
        total = total + options.confidence_weight * mean(sure)
    return total, found
