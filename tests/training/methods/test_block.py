"""Training of one-pass heads: golden vectors, what a block sees, which proposals count, the loss and its gradients."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForCausalLM

from hf_speculate_plugins.block import load_head
from hf_speculate_training.data import NO_DOCUMENT
from hf_speculate_training.methods import Teacher
from hf_speculate_training.methods.block import (
    BlockTrainingOptions,
    DFlashMethod,
    DSparkMethod,
    DSparkTrainingOptions,
    TextBlocks,
)
from hf_speculate_training.methods.block import slots as slots_module
from hf_speculate_training.methods.block.slots import draft_logits
from hf_speculate_training.states import TargetStates
from tests.support.training import assert_nothing_learnt, assert_same_gradients, packed

from .block_cases import (
    KEPT,
    SHAPES,
    SLOTS,
    VOCAB,
    all_blocks,
    alone,
    method,
    proposals,
    run,
    slow_loss,
    states_of,
    target,
)


@pytest.mark.parametrize(
    ("folder", "kind", "options"),
    [
        ("dspark-deepspec-vanilla", DSparkMethod, DSparkTrainingOptions()),
        ("dflash-deepspec", DFlashMethod, BlockTrainingOptions()),
        ("dflash-deepspec", DFlashMethod, BlockTrainingOptions(l1_weight=1.0)),
    ],
)
def test_loss_equals_deepspecs_golden_vectors(golden_root, folder, kind, options):
    vectors = load_file(golden_root / folder / "vectors.safetensors")
    meta = json.loads((golden_root / folder / "meta.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(golden_root / meta["target"], dtype=torch.float32).eval()
    head = load_head(str(golden_root / folder / "head"), model).head
    made = kind(head, model, options=options).eval()
    # DeepSpec's teacher speaks through the head's copy of the output matrix, which the file has rounded to bfloat16.
    made.teacher = Teacher(head.lm_head, None, head.spec.vocab_size)
    ids = vectors["train_input_ids"][None]
    batch = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None], "document_ids": torch.zeros_like(ids)}
    batch["loss_mask"] = vectors["train_loss_mask"][None].bool()
    aux = dict(zip(head.spec.feature_layers, vectors["train_aux_hidden_states"][:, None], strict=True))
    states = TargetStates(aux, vectors["train_target_last_hidden"][None])
    blocks = TextBlocks.drawn(batch, 64, 7, at_random=False)
    assert torch.equal(blocks.anchors[0], vectors["train_anchor_positions"])
    assert torch.equal(blocks.labels[0], vectors["train_target_ids"])
    assert torch.equal(blocks.counted[0], vectors["train_eval_mask"])
    every = dataclasses.replace(blocks, counted=torch.ones_like(blocks.counted))
    slots = made.run(batch, states, blocks)
    rows = made.rows(every, slots, states)
    close = {"atol": 1e-4, "rtol": 1e-4}
    logits = draft_logits(head, rows.states, rows.markov).view(7, 7, -1)
    torch.testing.assert_close(logits, vectors["train_draft_logits"], **close)
    output, (entropy, distance, confidence, total) = made(batch, states), vectors["train_loss_terms"]
    torch.testing.assert_close(output.metrics["cross_entropy"], entropy, **close)
    if options.l1_weight:
        torch.testing.assert_close(output.metrics["l1"], distance, **close)
        total = total + (distance if kind is DFlashMethod else 0)
    if kind is DSparkMethod:
        torch.testing.assert_close(
            made.confidence(every, slots).view(7, 7), vectors["train_confidence_logits"], **close
        )
        torch.testing.assert_close(output.metrics["confidence"], confidence, **close)
        assert meta["train_loss_weights"] == {
            "ce_loss_alpha": options.ce_weight,
            "l1_loss_alpha": options.l1_weight,
            "confidence_head_alpha": options.confidence_weight,
            "loss_decay_gamma": options.decay,
        }
    torch.testing.assert_close(output.loss.detach(), total, **close)


class TestBlocks:
    def test_which_proposals_count_by_loops(self):
        batch = packed([9, 6, -3], [4, 14], masked=0.2)
        batch["loss_mask"][:, 2:6] = batch["loss_mask"][:, 8:11] = True  # across the edges of the documents
        blocks = TextBlocks.drawn(batch, 18, SLOTS, at_random=False)
        ids, documents, mask = (batch[name].tolist() for name in ("input_ids", "document_ids", "loss_mask"))
        for row in range(2):
            inside = [a for a in range(17) if documents[row][a] == documents[row][a + 1] != NO_DOCUMENT]
            anchors = [a for a in inside if mask[row][a] and mask[row][a + 1]]
            assert blocks.anchors[row][blocks.kept[row]].tolist() == anchors
            for a, anchor in enumerate(anchors):
                for k in range(SLOTS):
                    drafted = range(anchor + 1, anchor + k + 2)
                    same = drafted[-1] < 18 and all(documents[row][t] == documents[row][anchor] for t in drafted)
                    counts = same and all(mask[row][t] for t in drafted)
                    assert bool(blocks.counted[row, a, k]) == counts
                    if counts:
                        assert int(blocks.labels[row, a, k]) == ids[row][anchor + k + 1]
                        assert int(blocks.previous[row, a, k]) == ids[row][anchor + k]
                        assert int(blocks.teachers[row, a, k]) == row * 18 + anchor + k
        assert not blocks.counted[~blocks.kept].any()
        assert blocks.kept.sum(1).unique().numel() == 2, "one row has fewer, so that there are columns to leave out"
        assert blocks.counted.all(-1).any()

    def test_anchors_are_drawn_anew_and_all_are_as_likely(self):
        batch = packed([12, -4], [6, 10])
        torch.manual_seed(0)
        hits, draws = torch.zeros(2, 16), 400
        for _ in range(draws):
            blocks = TextBlocks.drawn(batch, 5, SLOTS, at_random=True)
            assert blocks.kept.all()
            assert (blocks.anchors.diff(dim=1) > 0).all()
            hits.scatter_add_(1, blocks.anchors, torch.ones(2, 5))
        possible = TextBlocks.drawn(batch, 16, SLOTS, at_random=False)
        for row in range(2):
            anchors = possible.anchors[row][possible.kept[row]]
            share = hits[row, anchors] / draws
            assert hits[row].sum() == 5 * draws == hits[row, anchors].sum()
            assert (share - 5 / len(anchors)).abs().max() < 0.1
        torch.manual_seed(3)
        first = TextBlocks.drawn(batch, 5, SLOTS, at_random=True)
        torch.manual_seed(3)
        assert torch.equal(first.anchors, TextBlocks.drawn(batch, 5, SLOTS, at_random=True).anchors)

    def test_an_evaluation_spreads_them_and_draws_nothing(self):
        batch, state = packed([31], [31]), torch.get_rng_state()
        batch["loss_mask"][1, 3:] = False
        blocks = TextBlocks.drawn(batch, 10, SLOTS, at_random=False)
        assert blocks.anchors.tolist() == [[*range(0, 30, 3)], [0, 1, *[0] * 8]]
        assert blocks.kept.sum(1).tolist() == [10, 2]
        assert torch.equal(torch.get_rng_state(), state)
        made = method(anchors=4).eval()
        states = states_of(made, batch)
        assert made(batch, states).loss == made(batch, states).loss
        assert made.train()(batch, states).loss != made(batch, states).loss


class TestWhatABlockSees:
    @pytest.mark.parametrize("name", SHAPES)
    def test_blocks_of_a_row_equal_each_block_alone(self, name):
        made = method(name)
        batch = packed([8, 5, -2], [6, 9])
        states = states_of(made, batch)
        features = [states.features[layer] for layer in made.head.spec.feature_layers]
        blocks = all_blocks(made, batch)
        together = made.run(batch, states, blocks)
        for row, column in blocks.kept.nonzero().tolist():
            expected = alone(made.head, features, batch, row, int(blocks.anchors[row, column]))
            torch.testing.assert_close(together[row, column], expected[made.head.spec.first_slot :], rtol=0, atol=1e-6)

    @pytest.mark.parametrize("name", ["dflash", "windows"])
    def test_block_sees_only_features_before_its_anchor_in_its_document(self, name):
        made = method(name)
        batch = packed([7, 8, -3])
        states, blocks = states_of(made, batch), all_blocks(made, batch)
        before = made.run(batch, states, blocks)
        for changed in (2, 5, 9, 14, 16):
            features = {layer: feature.clone() for layer, feature in states.features.items()}
            for feature in features.values():
                feature[0, changed] += 1
            after = made.run(batch, TargetStates(features, states.last_hidden), blocks)
            moved = (after - before).abs().amax((2, 3))[0]
            for anchor, kept, by in zip(blocks.anchors[0].tolist(), blocks.kept[0], moved.tolist(), strict=True):
                sees = changed < anchor and (anchor < 7 or changed >= 7)
                assert kept
                assert (by > 1e-3) == sees, (changed, anchor)
                assert sees or by < 1e-12

    def test_block_sees_the_token_of_its_anchor_only(self):
        made = method()
        batch = packed([12])
        states, blocks = states_of(made, batch), all_blocks(made, batch)
        other = {**batch, "input_ids": (batch["input_ids"] + 1) % VOCAB}
        other["input_ids"][0, 4] = batch["input_ids"][0, 4]
        moved = (made.run(batch, states, blocks) - made.run(other, states, blocks)).abs().amax((2, 3))[0]
        assert [anchor for anchor, by in enumerate(moved.tolist()) if by < 1e-12] == [4]

    def test_loss_of_packed_documents_equals_documents_alone(self):
        """The same blocks, hence the same loss but for the divisor; no gradient from what is padded."""
        made = method(decay=None)
        together = packed([7, 8, -3])
        parts = [{name: value[:, start:stop] for name, value in together.items()} for start, stop in ((0, 7), (7, 15))]
        parts[1]["document_ids"] = parts[1]["document_ids"] * 0
        sizes = [int(all_blocks(made, part).counted.sum()) for part in parts]
        loss, losses = run(made, together).loss, [run(made, part).loss for part in parts]
        expected = (losses[0] * sizes[0] + losses[1] * sizes[1]) / sum(sizes)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        assert_same_gradients(made, loss, expected, rtol=1e-5)


class TestLossAgainstLoops:
    @pytest.mark.parametrize("in_parts", [False, True])
    @pytest.mark.parametrize(
        ("name", "truncated", "options"),
        [
            ("dspark", False, {}),
            ("dspark", True, {"ce_weight": 1.0}),
            ("dspark-rnn", False, {}),
            ("dspark-gated", True, {}),
            ("dflash-zlab", False, {}),
            ("jetspec", False, {"loss": "kl", "decay": None}),
            ("dspark", True, {"loss": "kl"}),
            ("dflash", False, {"ce_weight": 0.0, "l1_weight": 1.0, "decay": 2.0}),
        ],
    )
    def test_loss_and_gradients_equal_loops(self, name, truncated, options, in_parts, monkeypatch):
        made = method(name, truncated=truncated, **options)
        if in_parts:  # of three proposals, made anew in the backward
            monkeypatch.setattr(slots_module, "CHUNK_BYTES", 4 * 8 * made.head.spec.draft_vocab_size * 3)
        batch = packed([8, 5, -2], [6, 9], masked=0.1)
        output = run(made, batch)
        expected, found = slow_loss(made, batch)
        assert len({k for _, k, *_ in found}) == SLOTS
        assert truncated == any(row[2] is None for row in found)
        torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=0)
        assert_same_gradients(made, output.loss, expected, rtol=1e-5)

    @pytest.mark.parametrize("truncated", [False, True])
    def test_metrics_by_depth_equal_loops(self, truncated):
        made = method("dspark", truncated=truncated)
        batch = packed([8, 5, -2], [6, 9])
        metrics = run(made, batch).metrics
        states = states_of(made, batch)
        best = target().lm_head(states.last_hidden).argmax(-1)
        hits: dict[int, list[bool]] = {}
        for (row, anchor), k, logits, *_ in proposals(made, batch):
            drafted = int(logits.argmax())
            drafted = int(KEPT[drafted]) if truncated else drafted
            hits.setdefault(k, []).append(drafted == int(best[row, anchor + k]))
        assert hits.keys() == set(range(SLOTS))
        for k, row in hits.items():
            assert float(metrics[f"accuracy_{k}"]) == pytest.approx(sum(row) / len(row))
        options, _, found = made.options, *slow_loss(made, batch)
        for k in range(SLOTS):
            mine = [row for row in found if row[1] == k]
            each = [
                options.ce_weight * (row[2] if row[2] is not None else 0)
                + options.l1_weight * row[3]
                + binary_cross_entropy_with_logits(row[5], 1 - row[3] / 2)
                for row in mine
            ]
            assert float(metrics[f"loss_{k}"]) == pytest.approx(float(sum(each).detach()) / len(mine), rel=1e-5)

    def test_loss_of_masked_documents_is_zero(self):
        for made in (method(), method(truncated=True)):
            batch = packed([7, 8, -3])
            batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
            assert_nothing_learnt(made, run(made, batch))
