"""Training of Medusa heads: losses against loops, agreement with the drafter, learning; Medusa-2 with an adapter."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from hf_speculate import Speculator
from hf_speculate.drafting import DraftRequest
from hf_speculate.errors import TargetMismatchError
from hf_speculate_plugins.medusa import StaticTree
from hf_speculate_training.data import NO_DOCUMENT, Batch
from hf_speculate_training.methods.medusa import (
    Medusa2Method,
    Medusa2TrainingOptions,
    MedusaMethod,
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
    "truncated": {"target_ids": KEPT},
    "two blocks": {"num_layers": 2},
}


def method(shape: str = "shared", dtype: torch.dtype = torch.float64, **options) -> MedusaMethod:
    torch.manual_seed(1)
    target = build_tiny_model(dtype=dtype)
    heads = new_medusa(target, HEADS, **SHAPES[shape])
    for parameter in heads.parameters():
        parameter.data = parameter.data.to(dtype) + 0.1 * torch.randn_like(parameter, dtype=dtype)
    return MedusaMethod(heads, target, MedusaTrainingOptions(**options)).train()


def states_of(method: MedusaMethod, batch: Batch, dtype: torch.dtype = torch.float64) -> TargetStates:
    return TargetReader(build_tiny_model(dtype=dtype), method.feature_layers)(batch)


def slow_loss(method: MedusaMethod, batch: Batch, decay: float = 0.8):
    """Position by position and head by head, blocks written out."""
    heads, target = method.heads, build_tiny_model(dtype=method.heads.dtype)
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
    def test_value_and_gradients(self, shape, soft):
        made = method(shape, soft=soft)
        batch = packed([8, 5, -2], [6, 9], masked=0.1)
        output = made(batch, states_of(made, batch))
        expected, accuracies = slow_loss(made, batch)
        torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=0)
        assert_same_gradients(made, output.loss, expected)
        assert [float(output.metrics[f"accuracy_{k}"]) for k in range(HEADS)] == pytest.approx(accuracies)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_nothing_to_learn(self, shape):
        made = method(shape)
        batch = packed([7, 8, -3])
        batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
        assert_nothing_learnt(made, made(batch, states_of(made, batch)))


class TestDecodingComputesTheSame:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-6)], ids=str)
    def test_logits_at_every_token(self, shape, dtype, tolerance):
        made, target = method(shape, dtype), build_tiny_model(dtype=dtype)
        batch = packed([14])
        tokens, hidden = batch["input_ids"], states_of(made, batch, dtype).last_hidden
        trained = made.heads(hidden, target.lm_head).detach()
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
            new_medusa(target, HEADS, 2, shared_lm_head=False), target, MedusaTrainingOptions(soft=soft)
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
        for shape in ({}, {"shared_lm_head": False}, {"target_ids": KEPT}):
            logits = new_medusa(target, HEADS, **shape)(hidden, target.lm_head)
            expected = (
                target.lm_head(hidden)[:, shape["target_ids"]] if "target_ids" in shape else target.lm_head(hidden)
            )
            torch.testing.assert_close(logits, expected.expand(HEADS, -1, -1))

    def test_warm_start(self, tmp_path):
        target = build_tiny_model()
        made = method("own", torch.float32)
        made.drafter(target).save_pretrained(tmp_path)
        again = warm_medusa(tmp_path, target)
        for name, parameter in made.heads.named_parameters():
            assert torch.equal(dict(again.named_parameters())[name], parameter)
            assert dict(again.named_parameters())[name].requires_grad
        extended = copy.deepcopy(target)
        extended.resize_token_embeddings(99, mean_resizing=False)
        with pytest.raises(RecipeError, match=r"knows 96 tokens, the target has 99"):
            warm_medusa(tmp_path, extended)


def adapted(dtype: torch.dtype = torch.float32, sharp: float = 1.0) -> PeftModel:
    target = copy.deepcopy(build_tiny_model(dtype=dtype))
    target.lm_head.weight *= sharp
    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(target, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data *= 0.1
    return model.eval()


class TestMedusa2:
    def made(self, model, **options) -> Medusa2Method:
        heads = new_medusa(model.get_base_model(), HEADS)
        return Medusa2Method(heads, model, Medusa2TrainingOptions(**options)).train()

    def read(self, made: Medusa2Method, model: PeftModel, batch: Batch) -> TargetStates:
        return TargetReader(model, made.feature_layers, train_target=True)(batch)

    def test_checkpoints_hold_heads_and_adapter_only(self):
        model = adapted()
        made = self.made(model)
        trained = {id(p) for p in model.parameters() if p.requires_grad}
        assert trained
        assert {id(p) for p in made.adapter.values()} == trained, "the parameters themselves, not copies"
        assert all(name.startswith(("heads.", "adapter.")) for name in made.state_dict())
        name, parameter = next((name, p) for name, p in model.named_parameters() if p.requires_grad)
        state = {name: value + 1 for name, value in made.state_dict().items()}
        made.load_state_dict(state)
        assert torch.equal(parameter, state["adapter." + name.replace(".", "/")]), "loading reaches the target"

    def test_stages(self):
        model = adapted()
        made, batch = self.made(model, heads_share=0.5, warmup_share=0.25, head_weight=0.4), packed([9, 6])
        losses, gradients = {}, {}
        for step in (0, 4, 5, 6, 8, 9):
            made.on_step(step, 10)
            made.zero_grad()
            output = made(batch, self.read(made, model, batch))
            output.loss.backward()
            losses[step] = output
            gradients[step] = [p.grad.clone() for p in made.adapter.values()]
            assert all(p.grad is not None for p in made.parameters())
        heads = float(losses[0].loss)
        assert "distillation" not in losses[4].metrics
        assert all((g == 0).all() for g in gradients[4]), "stage one leaves the adapter alone"
        distillation = float(losses[5].metrics["distillation"])
        for step, weight in ((5, 0.0), (6, 0.16), (8, 0.4), (9, 0.4)):
            assert float(losses[step].loss) == pytest.approx(distillation + weight * heads, rel=1e-5)
        assert any((g != 0).any() for g in gradients[5])

    def test_distillation_is_towards_the_target_without_its_adapter(self):
        model = adapted(torch.float64)
        made, batch = (
            self.made(model, warmup_share=0.0, heads_share=0.0, head_weight=0.0),
            packed([9, 6, -3]),
        )
        made.heads.double()
        batch["loss_mask"][0, :4] = False
        loss = made(batch, self.read(made, model, batch)).loss
        total = 0.0
        for start, stop in ((0, 9), (9, 15)):
            ids = batch["input_ids"][:, start:stop]
            with torch.no_grad(), model.disable_adapter():
                wanted = model(ids).logits.softmax(-1)[0]
            found = model(ids).logits.log_softmax(-1)[0]
            for t in range(stop - start - 1):
                if batch["loss_mask"][0, start + t + 1]:
                    total = total - (wanted[t] * found[t]).sum() / 15
        torch.testing.assert_close(loss, total, rtol=1e-6, atol=0)
        parameters = tuple(made.adapter.values())
        for ours, theirs in zip(
            torch.autograd.grad(loss, parameters), torch.autograd.grad(total, parameters), strict=True
        ):
            assert float(theirs.abs().max()) > 0
            assert float((ours - theirs).abs().max()) <= 1e-6 * float(theirs.abs().max())

    def test_the_adapter_is_pulled_back_to_the_targets_text_and_the_heads_learn(self, tmp_path):
        model = adapted(sharp=8.0)
        with model.disable_adapter():
            prompts, batch = own_text(model, 22)
        made = self.made(model, heads_share=0.2, warmup_share=0.2)
        optimizer = torch.optim.Adam(made.parameters(), lr=3e-3)
        history = []
        for step in range(120):
            made.on_step(step, 120)
            optimizer.zero_grad()
            output = made(batch, self.read(made, model, batch))
            output.loss.backward()
            optimizer.step()
            history.append({name: float(value) for name, value in output.metrics.items()})
        assert history[-1]["distillation"] < history[24]["distillation"]
        assert history[-1]["agreement"] > 0.9 >= history[24]["agreement"]
        assert history[-1]["accuracy_0"] > history[0]["accuracy_0"] + 0.3
        target = model.get_base_model()
        speculator = Speculator(made.drafter(target))
        plain = target.generate(prompts, max_new_tokens=17, do_sample=False)
        assert torch.equal(plain, target.generate(prompts, max_new_tokens=17, do_sample=False, speculator=speculator))
        assert speculator.stats.mean_acceptance_length > 1.3

        made.save(tmp_path, target)
        base = copy.deepcopy(build_tiny_model())
        base.lm_head.weight *= 8.0
        again = PeftModel.from_pretrained(base, tmp_path / "target-adapter").eval()
        torch.testing.assert_close(again(prompts).logits, model(prompts).logits, rtol=1e-4, atol=1e-4)

    def test_targets_that_have_nothing_to_train(self):
        target = build_tiny_model()
        with pytest.raises(TargetMismatchError, match="get_peft_model"):
            Medusa2Method(new_medusa(target, HEADS), target)
        model = adapted().requires_grad_(False)
        with pytest.raises(TargetMismatchError, match="is_trainable"):
            self.made(model)

    def test_states_from_a_cache_are_refused_in_the_second_stage(self):
        model = adapted()
        made, batch = self.made(model), packed([9, 6])
        made.on_step(9, 10)
        states = self.read(made, model, batch)
        with pytest.raises(TargetMismatchError, match="feature cache"):
            made(batch, TargetStates(states.features, states.last_hidden.detach()))
