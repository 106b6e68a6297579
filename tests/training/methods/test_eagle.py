"""Training of EAGLE heads: alignment, the unrolled mask, agreement with the drafter, learning, fresh heads, EAGLE-1."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.drafting import RAW_LAST, DraftRequest
from hf_speculate.errors import TargetMismatchError
from hf_speculate.tree import TreePlan
from hf_speculate_training.data import NO_DOCUMENT, Batch
from hf_speculate_training.methods import Entries, count_tokens
from hf_speculate_training.methods.eagle import (
    Eagle1Method,
    Eagle1TrainingOptions,
    Eagle3Method,
    Eagle3Shape,
    Eagle3TrainingOptions,
    new_eagle1,
    new_eagle3,
    warm_eagle,
)
from hf_speculate_training.methods.entries import counted_entries
from hf_speculate_training.methods.heads import draft_vocabulary
from hf_speculate_training.sections import RecipeError
from hf_speculate_training.states import TargetReader
from tests.support import heads
from tests.support.models import build_tiny_model
from tests.support.tiny_heads import random_eagle
from tests.support.training import (
    assert_every_draft_is_accepted,
    assert_nothing_learnt,
    assert_same_gradients,
    learn_by_heart,
    own_text,
    packed,
)


VOCAB, DEPTH, STEPS = heads.VOCAB, heads.DEPTH, 4
KEPT = torch.arange(0, VOCAB, 2)
# What published heads differ in, as far as training can make them.
SHAPES = {
    "plain": {},
    "two layers, window": {"num_layers": 2, "windows": (None, 2), "qk_norm": True},
    "normed": {"fc_norm": True, "norm_before_residual": True, "feed_back_normed": True, "norm_before_fc": True},
    "five features": {"feature_layers": (0, 1, 3, 6, DEPTH), "norm_logits": False},
}


def target(architecture: str = "llama", dtype: torch.dtype = torch.float64):
    return heads.target(architecture, dtype=dtype, initializer_range=0.15)


def method(shape: str = "plain", dtype: torch.dtype = torch.float64, truncated: bool = True, **options) -> Eagle3Method:
    model = target(dtype=dtype)  # the first call of the cached function draws, too
    torch.manual_seed(1)
    ids = KEPT if truncated else None
    given = dict(SHAPES[shape])
    fields = {name: given.pop(name) for name in ("num_layers", "feature_layers") if name in given}
    head = new_eagle3(model, Eagle3Shape(**fields), ids, **given)
    for parameter in head.parameters():
        parameter.data = parameter.data.to(dtype) + 0.1 * torch.randn_like(parameter, dtype=dtype)
    options = Eagle3TrainingOptions(**{"steps": STEPS, **options})
    return Eagle3Method(head, model, ids, options).train()


def states_of(method: Eagle3Method, batch: Batch):
    model = target(dtype=method.head.dtype)
    return TargetReader(model, method.feature_layers)(batch)


def run(method: Eagle3Method, batch: Batch):
    return method(batch, states_of(method, batch))


class TestEntries:
    def test_counted_entries_equal_loops(self):
        batch = packed([9, 6, -3], [4, 14], masked=0.2)
        batch["loss_mask"][:, 2:6] = batch["loss_mask"][:, 8:11] = True  # across the edges of the documents
        mask, documents = batch["loss_mask"].tolist(), batch["document_ids"].tolist()
        counted = counted_entries(batch, STEPS)
        for step in range(STEPS):
            for row in range(2):
                for i in range(18):
                    drafted = range(i + 1, i + 3 + step)
                    inside = drafted[-1] < 18 and all(documents[row][t] == documents[row][i] for t in drafted)
                    expected = inside and all(mask[row][t] for t in drafted)
                    assert bool(counted[step, row, i]) == expected, (step, row, i)
        assert counted.any(-1).any(-1).all()

    def test_entries_have_labels_and_teacher_rows(self):
        batch = packed([9, 6, -3], [4, 14], masked=0.2)
        entries = Entries.of(batch, STEPS, torch.device("cpu"))
        needed = entries.teacher_positions.nonzero().tolist()
        expected = entries.counted.nonzero().tolist()
        assert len(entries) == len(expected) > 20
        for e, (step, row, i) in enumerate(expected):
            assert int(entries.step[e]) == step
            assert int(entries.label[e]) == int(batch["input_ids"][row, i + 2 + step])
            assert needed[int(entries.teacher_row[e])] == [row, i + 1 + step]
        assert {int(r) for r in entries.teacher_row} == set(range(len(needed))), "no teacher is made in vain"

    def test_counted_entries_leave_out_steps_past_the_row(self):
        assert not counted_entries(packed([1, 1], [2]), 5).any()
        assert counted_entries(packed([3]), 5).sum() == 1

    def test_entries_weights_decay_by_step(self):
        entries = Entries.of(packed([9, 6, -3], [4, 14], masked=0.2), STEPS, torch.device("cpu"))
        weights = entries.weights(0.5)
        for step in range(STEPS):
            torch.testing.assert_close(weights[entries.step == step].unique(), torch.tensor([0.5**step / (36 - 3)]))


def slow_loss(method: Eagle3Method, batch: Batch, decay: float = 0.8):
    """The loss entry by entry: every step of every entry is run anew over its own sequence, with a plain causal mask.

    Entry i of a document drafts as decoding does: target-made entries 0 to i, then its own k drafted ones.
    """
    head, states = method.head, states_of(method, batch)
    model = target(dtype=head.dtype)
    kept = list(range(VOCAB)) if method.target_ids is None else method.target_ids.tolist()
    logits = model.lm_head(states.last_hidden)
    fused = head.fuse([states.features[layer] for layer in method.entry_layers])
    ids, documents, mask = (batch[name].tolist() for name in ("input_ids", "document_ids", "loss_mask"))
    total, losses, num_tokens = 0.0, {}, int((batch["document_ids"] != NO_DOCUMENT).sum())
    for row in range(len(ids)):
        for i in range(len(ids[row])):
            start = documents[row].index(documents[row][i])
            sequence, tokens = fused[row, start : i + 1], ids[row][start + 1 : i + 1]
            for step in range(method.options.steps):
                last = i + 2 + step
                drafted = range(i + 1, last + 1)
                if last >= len(ids[row]) or any(documents[row][t] != documents[row][i] for t in drafted):
                    break
                if documents[row][i] == NO_DOCUMENT or not all(mask[row][t] for t in drafted):
                    break
                tokens = [*tokens, ids[row][i + 1 + step]]
                hidden = causal_forward(head, tokens, sequence)
                draft_logits, fed_back = head.read(hidden[-1:])
                sequence = torch.cat([sequence, fed_back])
                teacher = logits[row, i + 1 + step]
                if int(teacher.argmax()) not in kept:
                    continue
                target_probs = teacher[kept].softmax(-1)
                loss = -sum(p * q for p, q in zip(target_probs, draft_logits[0].log_softmax(-1), strict=True))
                losses[step, row, i] = loss
                total = total + decay**step * loss / num_tokens
    return total, losses


def causal_forward(head, tokens: list[int], sequence: torch.Tensor) -> torch.Tensor:
    """The head over one sequence with plain masks and repeated keys; [n, Hd]."""
    count = len(tokens)
    distance = torch.arange(count)[:, None] - torch.arange(count)

    def attend(layer, queries, keys, values):
        groups = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        hidden = distance < 0
        if head.spec.windows[layer] is not None:
            hidden = hidden | (distance >= head.spec.windows[layer])
        scores = (queries @ keys.mT / math.sqrt(queries.shape[-1])).masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ values

    return head(torch.tensor([tokens]), sequence[None], torch.arange(count)[None], attend)[0]


class TestLossAgainstRecomputation:
    @pytest.mark.parametrize(
        ("shape", "options"),
        [
            *((shape, {}) for shape in SHAPES),
            ("two layers, window", {"checkpoint_steps": True}),
        ],
    )
    def test_loss_and_gradients_equal_recomputation(self, shape, options):
        made = method(shape, **options)
        batch = packed([8, 5, -2], [6, 9], masked=0.1)
        output = run(made, batch)
        expected, losses = slow_loss(made, batch)
        assert len({step for step, _, _ in losses}) == STEPS
        torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=0)
        assert_same_gradients(made, output.loss, expected)
        for step in range(STEPS):
            mean = torch.stack([loss for key, loss in losses.items() if key[0] == step]).mean()
            torch.testing.assert_close(output.metrics[f"loss_{step}"].double(), mean, rtol=1e-5, atol=0)

    def test_accuracy_counts_drafts_that_the_target_would_accept(self):
        made = method(truncated=False)
        batch = packed([8, 5, -2], [6, 9])
        states = states_of(made, batch)
        metrics, outputs = made(batch, states).metrics, made.unroll(batch, states)
        best = target().lm_head(states.last_hidden).argmax(-1)
        for step in range(STEPS):
            drafted = made.head.output(outputs[step]).argmax(-1)
            entries = counted_entries(batch, STEPS)[step].nonzero().tolist()
            hits = [drafted[row, i] == best[row, i + 1 + step] for row, i in entries]
            assert float(metrics[f"accuracy_{step}"]) == pytest.approx(sum(map(float, hits)) / len(hits))


class TestDocuments:
    def test_no_document_changes_another(self):
        made = method("two layers, window")
        one = packed([7, 8, -3])
        other = {**one, "input_ids": one["input_ids"].clone()}
        other["input_ids"][0, :7] = (other["input_ids"][0, :7] + 11) % VOCAB
        first, second = (made.unroll(batch, states_of(made, batch)) for batch in (one, other))
        for step, (a, b) in enumerate(zip(first, second, strict=True)):
            inside = slice(7, 15 - 1 - step)  # from entry 15 - 1 - step on, no token of the document is left
            torch.testing.assert_close(a[0, inside], b[0, inside], rtol=0, atol=1e-12)
            assert (a[0, :6] - b[0, :6]).abs().max() > 1e-3

    @pytest.mark.parametrize("shape", ["plain", "two layers, window"])
    def test_loss_of_packed_documents_equals_documents_alone(self, shape):
        """The same loss, and nothing learnt from padding or across an edge."""
        made = method(shape)
        together = packed([7, 8, -3])
        parts = [{name: value[:, start:stop] for name, value in together.items()} for start, stop in ((0, 7), (7, 15))]
        parts[1]["document_ids"] = parts[1]["document_ids"] * 0
        loss, alone = run(made, together).loss, [run(made, part).loss for part in parts]
        torch.testing.assert_close(loss * 15, alone[0] * 7 + alone[1] * 8, rtol=1e-7, atol=0)  # weights are fp32
        assert_same_gradients(made, loss * 15, alone[0] * 7 + alone[1] * 8)

    def test_loss_of_masked_documents_is_zero(self):
        made = method()
        batch = packed([7, 8, -3])
        batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
        assert_nothing_learnt(made, run(made, batch))


class TestDecodingComputesTheSame:
    """Teacher-forced: the drafter is told the text, and drafts its next tokens at every place of it."""

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_unrolled_steps_equal_drafting(self, shape, dtype):
        made = method(shape, dtype).eval()
        model = target(dtype=dtype)
        batch = packed([14])
        states = states_of(made, batch)
        trained = made.unroll(batch, states)
        tokens = batch["input_ids"]
        drafter = made.drafter(model)
        tolerance = 1e-6 if dtype == torch.float64 else 1e-5
        for i in range(2, 14 - 1 - STEPS):
            session = drafter.start(DraftRequest(target=model, input_ids=tokens[:, : i + 1]))
            hidden_states = model(tokens[:, : i + 1], output_hidden_states=True).hidden_states
            features = {layer: hidden_states[layer] for layer in drafter.feature_layers if layer != RAW_LAST}
            if RAW_LAST in drafter.feature_layers:
                features[RAW_LAST] = states.features[RAW_LAST][:, : i + 1]
            session.observe(tokens[:, 1 : i + 2], features, torch.tensor([i + 1]))
            logits, fed_back = drafter.head.read(session._root_hidden[:, None])
            for step in range(STEPS):
                expected = made.head.output(trained[step][:, i : i + 1]).detach()
                worst = float((logits - expected).abs().max() / expected.abs().max())
                assert worst <= tolerance, (i, step)
                plan = TreePlan.from_parents([range(-1, step)])
                logits, fed_back = session._steps.level(tokens[:, i + 2 + step, None], fed_back, plan)


class TestLearning:
    def test_overfitting_one_batch_accepts_every_draft(self):
        """The text is the target's own greedy one, so a head that knows the batch drafts it to the last token."""
        model = copy.deepcopy(target(dtype=torch.float32))
        model.lm_head.weight *= 60  # a random target has no clear preferences, and whoever learns its distribution none
        prompts, batch = own_text(model, 29, VOCAB)
        made = Eagle3Method(new_eagle3(model), model, options=Eagle3TrainingOptions(steps=4)).train()
        states = TargetReader(model, made.feature_layers)(batch)
        learn_by_heart(made, batch, states, 4, num_steps=150, lr=3e-3)
        drafter = made.drafter(model, depth=4, top_k=1)
        speculator = assert_every_draft_is_accepted(model, drafter, prompts, batch["input_ids"])
        assert speculator.stats.rounds == 2 * 5  # 1 token of the prefill, then rounds of 5 tokens and a last one of 3

    def test_a_drafter_has_the_targets_dtype_and_training_goes_on(self):
        made = method(dtype=torch.float32)
        drafter = made.drafter(target(dtype=torch.float32))
        assert not any(p.requires_grad for p in drafter.head.parameters())
        with torch.no_grad():
            made.head.fc.weight += 1
        assert torch.equal(drafter.head.fc.weight, made.head.fc.weight), "same memory where the dtypes agree"
        drafter = made.drafter(target(dtype=torch.bfloat16))
        assert {p.dtype for p in drafter.head.parameters()} == {torch.bfloat16}
        assert {p.dtype for p in made.parameters() if p.requires_grad} == {torch.float32}
        assert all(p.requires_grad for p in made.parameters())
        assert made.head.training
        prompt = packed([6])["input_ids"]
        target(dtype=torch.bfloat16).generate(prompt, max_new_tokens=8, speculator=Speculator(drafter))
        assert all(name.startswith("head.") and "embed_tokens" not in name for name in made.state_dict())

    def test_noise_is_for_training_only(self):
        batch = packed([12])
        noisy, plain = method(noise=0.5), method()
        states = states_of(plain, batch)
        assert noisy(batch, states).loss != plain(batch, states).loss
        assert noisy.eval()(batch, states).loss == plain.eval()(batch, states).loss


SOME = torch.arange(1, 96, 3)


def small_target(dtype: torch.dtype = torch.float32):
    return build_tiny_model(dtype=dtype)


def row(length: int = 14) -> dict:
    return dict(packed([length]))


class TestEagle3Heads:
    def test_output_and_embeddings_begin_as_the_targets(self):
        model = small_target()
        head = new_eagle3(model, target_ids=SOME)
        assert torch.equal(head.lm_head.weight, model.lm_head.weight[SOME])
        assert head.shared["embed_tokens"] is model.get_input_embeddings()
        own = new_eagle3(model, Eagle3Shape(own_embeddings=True))
        assert torch.equal(own.embed_tokens.weight, model.get_input_embeddings().weight)
        assert own.embed_tokens.weight.requires_grad
        assert all(p.dtype == torch.float32 and p.requires_grad for p in own.parameters())

    def test_new_eagle3_chooses_or_checks_feature_layers(self):
        assert new_eagle3(small_target()).spec.feature_layers == (1, 2, 2), "of two layers there are no three"
        assert new_eagle3(small_target(), Eagle3Shape(feature_layers=(0, 2))).spec.num_features == 2
        with pytest.raises(TargetMismatchError, match="2 layers"):
            new_eagle3(small_target(), Eagle3Shape(feature_layers=(1, 2, 3)))

    @pytest.mark.parametrize("qk_norm", [False, True])
    def test_the_targets_rows_as_output_are_not_trained(self, tmp_path, qk_norm):
        model = small_target()
        shape = Eagle3Shape(own_output=False, qk_norm=qk_norm)
        method = Eagle3Method(new_eagle3(model, shape, SOME), model, SOME)
        assert any("q_norm" in name for name, _ in method.named_parameters()) == qk_norm
        assert torch.equal(method.head.output.weight, model.lm_head.weight[SOME])
        assert not any("lm_head" in name for name, _ in method.named_parameters())
        states = TargetReader(model, method.feature_layers)(row())
        method(row(), states).loss.backward()
        assert all(parameter.grad is not None for parameter in method.parameters())
        assert method.head.output.weight.grad is None
        method.save(tmp_path, model, "compact")
        again, target_ids = warm_eagle(tmp_path, model)
        assert torch.equal(target_ids, SOME)
        assert again.fc.weight.requires_grad
        assert not again.output.weight.requires_grad
        for name, parameter in method.head.named_parameters():
            assert torch.equal(dict(again.named_parameters())[name], parameter), name
        assert new_eagle3(model, Eagle3Shape(own_output=False)).output is model.get_output_embeddings(), (
            "without a draft vocabulary"
        )

    @pytest.mark.parametrize("layout", ["speculators", "specforge"])
    @pytest.mark.parametrize("shape", [{}, {"own_embeddings": True}])
    def test_saved_head_is_loaded_by_from_pretrained(self, tmp_path, layout, shape):
        model = small_target()
        layers = (0 if layout == "speculators" else 1, 1, 2)
        head = new_eagle3(model, Eagle3Shape(feature_layers=layers, **shape), SOME)
        if "own_embeddings" in shape:
            head.embed_tokens.weight.data += 0.1  # learnt something: else the loader would take the target's
        method = Eagle3Method(head, model, SOME)
        method.drafter(model).save_pretrained(tmp_path, layout)
        AutoSpeculator.from_pretrained(tmp_path, target=model)
        again, target_ids = warm_eagle(tmp_path, model)
        assert torch.equal(target_ids, SOME)
        parameters = dict(again.named_parameters())
        assert parameters.keys() == dict(method.head.named_parameters()).keys()
        for name, parameter in method.head.named_parameters():
            assert torch.equal(parameters[name], parameter), name
            assert parameters[name].requires_grad

    def test_parallel_heads_are_not_gone_on_from(self, tmp_path):
        random_eagle(2, 2, 4, small_target(), parallel=True).save_pretrained(tmp_path / "head")
        with pytest.raises(RecipeError, match=r"method\.start_from: this is a P-EAGLE head"):
            warm_eagle(tmp_path / "head", small_target())

    def test_targets_with_added_tokens_are_not_gone_on_with(self, tmp_path):
        model = copy.deepcopy(small_target())
        Eagle3Method(new_eagle3(model), model, None).save(tmp_path, model)
        model.resize_token_embeddings(model.config.vocab_size + 3, mean_resizing=False)
        with pytest.raises(RecipeError, match=r"knows 96 tokens, the target has 99"):
            warm_eagle(tmp_path, model)


class TestEagle1:
    def test_eagle1_loss_equals_loops(self):
        model = small_target(torch.float64)
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


class TestDraftVocabulary:
    def test_draft_vocabulary_takes_the_most_frequent_then_the_lowest(self):
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
