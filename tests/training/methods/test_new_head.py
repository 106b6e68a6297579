"""Fresh heads and draft vocabularies; EAGLE-1; what training makes is what other engines' layouts hold."""

from __future__ import annotations

import pytest
import torch

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.errors import TargetMismatchError
from hf_speculate_training.methods import count_tokens, counted_entries, draft_vocabulary
from hf_speculate_training.methods.eagle import (
    Eagle1Method,
    Eagle1TrainingOptions,
    Eagle3Method,
    new_eagle1,
    new_eagle3,
    warm_eagle,
)
from hf_speculate_training.sections import RecipeError
from hf_speculate_training.states import TargetReader
from tests.support.models import build_tiny_model
from tests.support.tiny_heads import random_eagle


KEPT = torch.arange(1, 96, 3)


def target(dtype: torch.dtype = torch.float32, **changes):
    return build_tiny_model(dtype=dtype, **changes)


def row(length: int = 14) -> dict:
    torch.manual_seed(0)
    zeros = torch.zeros(1, length, dtype=torch.long)
    return {
        "input_ids": torch.randint(3, 96, (1, length)),
        "position_ids": torch.arange(length)[None],
        "document_ids": zeros,
        "loss_mask": torch.ones_like(zeros, dtype=torch.bool),
    }


class TestEagle3Heads:
    def test_output_and_embeddings_begin_as_the_targets(self):
        model = target()
        head = new_eagle3(model, KEPT)
        assert torch.equal(head.lm_head.weight, model.lm_head.weight[KEPT])
        assert head.shared["embed_tokens"] is model.get_input_embeddings()
        own = new_eagle3(model, own_embeddings=True)
        assert torch.equal(own.embed_tokens.weight, model.get_input_embeddings().weight)
        assert own.embed_tokens.weight.requires_grad
        assert all(p.dtype == torch.float32 and p.requires_grad for p in own.parameters())

    @pytest.mark.parametrize("width", [16, 48])
    def test_of_another_width(self, width):
        """Narrow: the projection that keeps most of the target's matrix. Wide: nothing of it is lost."""
        model = target()
        head = new_eagle3(model, hidden_size=width)
        theirs, ours = model.lm_head.weight, head.lm_head.weight.detach()[:, : min(width, 32)]
        singular = torch.linalg.svdvals(theirs)
        kept = float(ours.square().sum() / theirs.square().sum())
        assert kept == pytest.approx(float(singular[:width].square().sum() / singular.square().sum()), rel=1e-4)
        assert (head.spec.hidden_size, head.spec.head_dim, head.spec.num_heads) == (width, 8, width // 8)
        assert head.shared["embed_tokens"] is None

    def test_layers(self):
        assert new_eagle3(target()).spec.feature_layers == (1, 2, 2), "of two layers there are no three"
        assert new_eagle3(target(), feature_layers=(0, 2)).spec.num_features == 2
        with pytest.raises(TargetMismatchError, match="2 layers"):
            new_eagle3(target(), feature_layers=(1, 2, 3))

    def test_sizes_that_do_not_fit(self):
        with pytest.raises(TargetMismatchError, match="leave own_embeddings out"):
            new_eagle3(target(), hidden_size=48, own_embeddings=False)
        with pytest.raises(TargetMismatchError, match="even size"):
            new_eagle3(target(), hidden_size=48, num_heads=16)

    def test_the_targets_rows_as_output_are_not_trained(self, tmp_path):
        model = target()
        method = Eagle3Method(new_eagle3(model, KEPT, own_output=False), model, KEPT)
        assert torch.equal(method.head.output.weight, model.lm_head.weight[KEPT])
        assert not any("lm_head" in name for name, _ in method.named_parameters())
        states = TargetReader(model, method.feature_layers)(row())
        method(row(), states).loss.backward()
        assert all(parameter.grad is not None for parameter in method.parameters())
        assert method.head.output.weight.grad is None
        method.save(tmp_path, model, "compact")
        again, target_ids = warm_eagle(tmp_path, model)
        assert torch.equal(target_ids, KEPT)
        assert again.fc.weight.requires_grad
        assert not again.output.weight.requires_grad
        for name, parameter in method.head.named_parameters():
            assert torch.equal(dict(again.named_parameters())[name], parameter), name
        assert new_eagle3(model, own_output=False).output is model.get_output_embeddings(), "without a draft vocabulary"
        with pytest.raises(TargetMismatchError, match="leave own_output out"):
            new_eagle3(model, KEPT, own_output=False, hidden_size=48)

    @pytest.mark.parametrize("layout", ["speculators", "specforge"])
    @pytest.mark.parametrize("shape", [{}, {"hidden_size": 48}, {"own_embeddings": True}])
    def test_saved_and_loaded_by_everyones_path(self, tmp_path, layout, shape):
        model = target()
        head = new_eagle3(model, KEPT, feature_layers=(0 if layout == "speculators" else 1, 1, 2), **shape)
        if "own_embeddings" in shape:
            head.embed_tokens.weight.data += 0.1  # learnt something: else the loader would take the target's
        method = Eagle3Method(head, model, KEPT)
        method.drafter(model).save_pretrained(tmp_path, layout)
        loaded = AutoSpeculator.from_pretrained(tmp_path, target=model)
        prompt = row(9)["input_ids"]
        plain = model.generate(prompt, max_new_tokens=8, do_sample=False)
        assert torch.equal(plain, model.generate(prompt, max_new_tokens=8, do_sample=False, speculator=loaded))
        again, target_ids = warm_eagle(tmp_path, model)
        assert torch.equal(target_ids, KEPT)
        parameters = dict(again.named_parameters())
        assert parameters.keys() == dict(method.head.named_parameters()).keys()
        for name, parameter in method.head.named_parameters():
            assert torch.equal(parameters[name], parameter), name
            assert parameters[name].requires_grad

    def test_parallel_heads_are_not_gone_on_from(self, tmp_path):
        random_eagle(2, 2, 4, target(), parallel=True).save_pretrained(tmp_path / "head")
        with pytest.raises(RecipeError, match=r"method\.start_from: this is a P-EAGLE head"):
            warm_eagle(tmp_path / "head", target())


class TestEagle1:
    def test_loss_against_loops(self):
        model = target(torch.float64)
        torch.manual_seed(1)
        head = new_eagle1(model).double()
        head.rotary.float()
        method = Eagle1Method(head, model, options=Eagle1TrainingOptions(noise=0, steps=2, step_decay=0.5)).train()
        batch = row()
        states = TargetReader(model, method.feature_layers)(batch)
        output = method(batch, states)
        features = states.features[method.feature_layers[0]][0]
        total, outputs = 0.0, method.unroll(batch, states)
        for step, entries in enumerate(counted_entries(batch, 2)):
            for i in entries[0].nonzero().flatten().tolist():
                predicted, wanted = outputs[step][0, i], features[i + 1 + step]
                difference = (predicted - wanted).abs()
                regression = torch.where(difference < 1, difference**2 / 2, difference - 0.5).mean()
                target_probs, log_probs = model.lm_head(wanted).softmax(-1), model.lm_head(predicted).log_softmax(-1)
                total = total + 0.5**step * (regression - 0.1 * (target_probs * log_probs).sum()) / 14
        torch.testing.assert_close(output.loss, total, rtol=1e-5, atol=0)
        assert set(output.metrics) == {"loss_0", "loss_1", "accuracy_0", "accuracy_1", "regression"}
        output.loss.backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in method.parameters())

    def test_learns_and_is_saved(self, tmp_path):
        model = target()
        method = Eagle1Method(new_eagle1(model), model, options=Eagle1TrainingOptions(noise=0)).train()
        batch = row()
        batch["input_ids"] = model.generate(batch["input_ids"][:, :4], max_new_tokens=10, do_sample=False)
        states = TargetReader(model, method.feature_layers)(batch)
        optimizer = torch.optim.Adam(method.parameters(), lr=3e-3)
        for _ in range(200):
            optimizer.zero_grad()
            output = method(batch, states)
            output.loss.backward()
            optimizer.step()
        assert float(output.metrics["accuracy_0"]) > 0.9, output.metrics  # what is left differs from CPU to CPU
        method.drafter(model).save_pretrained(tmp_path)
        loaded = AutoSpeculator.from_pretrained(tmp_path, target=model, depth=1, top_k=1)
        assert isinstance(loaded, Speculator)
        prompt = batch["input_ids"][:, :4]
        text = model.generate(prompt, max_new_tokens=10, do_sample=False, speculator=loaded)
        assert torch.equal(text, batch["input_ids"])
        assert set(loaded.stats.acceptance_rate_by_depth.values()) == {1.0}


class TestDraftVocabulary:
    def test_the_most_frequent_then_the_lowest(self):
        batch = row(8)
        batch["input_ids"] = torch.tensor([[7, 7, 7, 50, 50, 3, 90, 90]])
        batch["loss_mask"][0, 5:] = False
        counts = count_tokens([batch, batch], 96)
        assert counts.nonzero().flatten().tolist() == [7, 50]
        assert counts[7] == 6
        assert draft_vocabulary(counts, 1).tolist() == [7]
        assert draft_vocabulary(counts, 5).tolist() == [0, 1, 2, 7, 50]
        with pytest.raises(ValueError, match="1 to 96"):
            draft_vocabulary(counts, 97)
