"""Training of Medusa heads: losses against loops, agreement with the drafter, learning."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_speculate.drafting import DraftRequest
from hf_speculate_plugins.medusa import StaticTree
from hf_speculate_training.data import NO_DOCUMENT, Batch
from hf_speculate_training.methods.medusa import (
    MedusaMethod,
    MedusaShape,
    MedusaTrainingOptions,
    new_medusa,
    warm_medusa,
)
from hf_speculate_training.sections import RecipeError
from hf_speculate_training.states import TargetReader, TargetStates
from tests.support.models import VOCAB_SIZE, build_tiny_model
from tests.support.training import (
    assert_every_draft_is_accepted,
    assert_nothing_learnt,
    assert_same_gradients,
    learn_by_heart,
    own_text,
    packed,
)


HEADS = 3
KEPT = torch.arange(0, VOCAB_SIZE, 2)
SHAPES = {
    "shared": {},
    "own": {"shared_lm_head": False},
    "truncated": {},
    "two blocks": {"num_layers": 2},
}


def new_heads(target, shape: str):
    return new_medusa(target, MedusaShape(num_heads=HEADS, **SHAPES[shape]), KEPT if shape == "truncated" else None)


def method(shape: str = "shared", dtype: torch.dtype = torch.float64, **options) -> MedusaMethod:
    torch.manual_seed(1)
    target = build_tiny_model(dtype=dtype)
    heads = new_heads(target, shape)
    for parameter in heads.parameters():
        parameter.data = parameter.data.to(dtype) + 0.1 * torch.randn_like(parameter, dtype=dtype)
    return MedusaMethod(heads, target, options=MedusaTrainingOptions(**options)).train()


def states_of(method: MedusaMethod, batch: Batch, dtype: torch.dtype = torch.float64) -> TargetStates:
    return TargetReader(build_tiny_model(dtype=dtype), method.feature_layers)(batch)


def slow_loss(method: MedusaMethod, batch: Batch, decay: float = 0.8):
    """Position by position and head by head, blocks written out."""
    heads, target = method.head, build_tiny_model(dtype=method.head.dtype)
    hidden = states_of(method, batch, heads.dtype).last_hidden
    kept = list(range(VOCAB_SIZE)) if heads.token_ids is None else heads.token_ids.tolist()
    ids, documents, mask = (batch[name].tolist() for name in ("input_ids", "document_ids", "loss_mask"))
    total, hits, counts = 0.0, [0] * HEADS, [0] * HEADS
    for row in range(len(ids)):
        for t in range(len(ids[row])):
            for head in range(HEADS):
                drafted = range(t + 1, t + 3 + head)
                if drafted[-1] >= len(ids[row]) or any(documents[row][i] != documents[row][t] for i in drafted):
                    break
                if not all(mask[row][i] for i in drafted):
                    break
                state = hidden[row, t]
                for layer in range(heads.num_layers):
                    update = heads.block_weight[head, layer] @ state + heads.block_bias[head, layer]
                    state = state + update * torch.sigmoid(update)
                output = (
                    target.lm_head.weight
                    if heads.output_weight is None
                    else heads.output_weight[head % len(heads.output_weight)]
                )
                log_probs = (output @ state).log_softmax(-1)
                teacher = target.lm_head(hidden[row, t + 1 + head])
                counts[head] += 1
                hits[head] += kept[int(log_probs.argmax())] == int(teacher.argmax())
                label = ids[row][t + 2 + head]
                if (int(teacher.argmax()) if method.options.soft else label) not in kept:
                    continue
                soft_loss = -(teacher[kept].softmax(-1) * log_probs).sum()
                loss = soft_loss if method.options.soft else -log_probs[kept.index(label)]
                total = total + decay**head * loss / sum(each != NO_DOCUMENT for row in documents for each in row)
    return total, [h / c for h, c in zip(hits, counts, strict=True)]


class TestLossAgainstLoops:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("soft", [False, True])
    def test_loss_and_gradients_equal_loops(self, shape, soft):
        made = method(shape, soft=soft)
        batch = packed([8, 5, -2], [6, 9], masked=0.1)
        output = made(batch, states_of(made, batch))
        expected, accuracies = slow_loss(made, batch)
        torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=0)
        assert_same_gradients(made, output.loss, expected)
        assert [float(output.metrics[f"accuracy_{k}"]) for k in range(HEADS)] == pytest.approx(accuracies)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_loss_of_masked_documents_is_zero(self, shape):
        made = method(shape)
        batch = packed([7, 8, -3])
        batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
        assert_nothing_learnt(made, made(batch, states_of(made, batch)))


class TestDecodingComputesTheSame:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-6)], ids=str)
    def test_training_logits_equal_drafting(self, shape, dtype, tolerance):
        made, target = method(shape, dtype), build_tiny_model(dtype=dtype)
        batch = packed([14])
        tokens, hidden = batch["input_ids"], states_of(made, batch, dtype).last_hidden
        trained = made.head(hidden, target.lm_head).detach()
        drafter = made.drafter(target)
        for t in range(2, 12):
            session = drafter.start(DraftRequest(target=target, input_ids=tokens[:, : t + 1]))
            features = target(tokens[:, : t + 1], output_hidden_states=True).hidden_states
            layer = drafter.feature_layers[0]
            session.observe(tokens[:, 1 : t + 2], {layer: features[layer]}, torch.tensor([t + 1]))
            logits = session._steps._forward(session._seen.newest(), HEADS)
            worst = float((logits - trained[:, :, t]).abs().max() / trained.abs().max())
            assert worst <= tolerance, t


class TestLearning:
    @pytest.mark.parametrize("soft", [False, True])
    def test_overfitting_one_batch_accepts_every_draft(self, soft):
        target = copy.deepcopy(build_tiny_model())
        target.lm_head.weight *= 30 if soft else 1  # a distribution with a clear preference, for the soft loss
        prompts, batch = own_text(target, 22)
        batch["loss_mask"][:, :5] = False
        made = MedusaMethod(
            new_medusa(target, MedusaShape(num_heads=HEADS, num_layers=2, shared_lm_head=False)),
            target,
            options=MedusaTrainingOptions(soft=soft),
        )
        states = TargetReader(target, made.feature_layers)(batch)
        learn_by_heart(made, batch, states, HEADS, num_steps=200, lr=1e-2)
        drafter = made.drafter(target)
        drafter.tree = StaticTree.chain(3)
        speculator = assert_every_draft_is_accepted(target, drafter, prompts, batch["input_ids"])
        assert speculator.stats.rounds == 2 * 4  # 1 token of the prefill, then 4 rounds of 4 a row

    def test_a_fresh_head_says_what_the_target_says(self):
        target = build_tiny_model()
        hidden = torch.randn(5, target.config.hidden_size)
        for shape in ("shared", "own", "truncated"):
            logits, expected = new_heads(target, shape)(hidden, target.lm_head), target.lm_head(hidden)
            expected = expected[:, KEPT] if shape == "truncated" else expected
            torch.testing.assert_close(logits, expected.expand(HEADS, -1, -1))

    def test_saved_heads_continue_training(self, tmp_path):
        target = build_tiny_model()
        made = method("own", torch.float32)
        made.drafter(target).save_pretrained(tmp_path)
        again, _ = warm_medusa(tmp_path, target)
        for name, parameter in made.head.named_parameters():
            assert torch.equal(dict(again.named_parameters())[name], parameter)
            assert dict(again.named_parameters())[name].requires_grad
        extended = copy.deepcopy(target)
        extended.resize_token_embeddings(99, mean_resizing=False)
        with pytest.raises(RecipeError, match=r"knows 96 tokens, the target has 99"):
            warm_medusa(tmp_path, extended)
