"""Fresh one-pass heads: shapes, what is shared, errors; that they learn, draft, are saved and gone on from."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_speculate import Speculator
from hf_speculate.errors import TargetMismatchError
from hf_speculate_training.methods.block import (
    BlockTrainingOptions,
    DFlashMethod,
    DFlashShape,
    DSparkMethod,
    DSparkShape,
    DSparkTrainingOptions,
    new_block,
    warm_block,
)
from hf_speculate_training.run.builder import build_method
from hf_speculate_training.run.optimizers import is_layer_matrix
from hf_speculate_training.run.recipe import MethodSection
from hf_speculate_training.sections import RecipeError, read_section
from hf_speculate_training.states import TargetReader
from tests.support.block_heads import random_block
from tests.support.models import build_tiny_model
from tests.support.training import assert_every_draft_is_accepted, learn_by_heart, own_text, packed

from .block_cases import DEPTH, KEPT, VOCAB, method, run, states_of, target


SMALL = {"markov_rank": 8, "block_size": 4}


class TestShapes:
    def test_the_targets_matrices_are_shared_and_not_trained(self):
        model = target(torch.float32)
        made = DSparkMethod.for_target(model, DSparkShape(), DSparkTrainingOptions(), pytest.fail)
        head = made.head
        assert head.shared == {"embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
        assert all(name.startswith("head.") for name in made.state_dict())
        assert not any("embed_tokens" in name or "lm_head" in name for name in made.state_dict())
        assert all(p.dtype == torch.float32 and p.requires_grad for p in made.parameters())
        assert not head.markov_head.markov_w2.weight.any()
        codes, rows = head.markov_head.markov_w1.weight[:, :32], model.get_input_embeddings().weight
        assert torch.allclose(codes @ codes.mT, (codes.norm() / rows.norm()).square() * (rows @ rows.mT), atol=1e-4)
        assert not head.confidence_head.proj.bias.any()
        run(made, packed([12])).loss.backward()
        assert all(p.grad is None for p in model.parameters())

    def test_a_draft_vocabulary_has_a_matrix_of_its_own(self):
        model, counts = target(torch.float32), torch.zeros(VOCAB, dtype=torch.long)
        counts[KEPT] = 1
        shape = DFlashShape(draft_vocab_size=len(KEPT))
        made = DFlashMethod.for_target(model, shape, BlockTrainingOptions(), lambda: counts)
        assert torch.equal(made.draft_vocabulary, KEPT)
        assert torch.equal(made.head.lm_head.weight, model.lm_head.weight[KEPT])
        assert made.head.lm_head.weight.requires_grad
        assert made.head.shared["lm_head"] is None

    def test_sizes_follow_the_target(self):
        spec = new_block(target(), DSparkShape()).spec
        config = target().config
        assert (spec.hidden_size, spec.intermediate_size, spec.num_heads) == (config.hidden_size, 48, 4)
        assert (spec.num_kv_heads, spec.head_dim, spec.rope) == (2, config.head_dim, config.rope_parameters)
        assert (spec.num_layers, spec.block_size, spec.first_slot, spec.max_depth) == (2, 7, 0, 7)
        assert (spec.markov_rank, spec.mask_token_id, spec.qk_norm) == (64, VOCAB - 1, True)
        assert new_block(target(), DFlashShape()).spec.markov is None

    @pytest.mark.parametrize(
        ("depth", "layers"),
        [(1, (0,)), (2, (0, 1)), (5, (2, 3, 4)), (6, (2, 3, 4)), (28, (2, 14, 26)), (36, (2, 18, 34))],
    )
    def test_new_block_reads_layers_by_the_targets_depth(self, depth, layers):
        """z-lab's rule holds from 6 layers on: outputs 1 to L - 3, whose hidden states have one more."""
        model = build_tiny_model(num_layers=depth)
        assert new_block(model, DFlashShape(num_layers=1)).spec.feature_layers == layers

    @pytest.mark.parametrize(
        ("shape", "truncated", "dialect"),
        [
            (DSparkShape(), False, "deepspec"),
            (DFlashShape(), False, "deepspec"),
            (DFlashShape(first_slot=1), False, "zlab"),
            (DFlashShape(first_slot=1, causal=True), False, "zlab"),
            (DSparkShape(first_slot=1), False, "speculators"),
            (DSparkShape(), True, "speculators"),
        ],
    )
    def test_new_block_has_a_layout_that_can_express_it(self, shape, truncated, dialect):
        model, ids = target(torch.float32), KEPT if truncated else None
        kind = DSparkMethod if isinstance(shape, DSparkShape) else DFlashMethod
        made = kind(new_block(model, shape, ids), model, ids)
        assert made.head.spec.dialect == dialect
        made.drafter(model).check_layout(dialect)

    def test_muon_does_not_take_a_row_a_token(self):
        names = dict(method("dspark").named_parameters())
        taken = {name for name, parameter in names.items() if is_layer_matrix(name, parameter)}
        assert "head.layers.0.self_attn.q_proj.weight" in taken
        assert not any("markov_w" in name for name in taken)


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("section", "message"),
        [
            ({"name": "dflash", "options": {"anchors": 0}}, "anchors must be at least 1, got 0"),
            ({"name": "dflash", "options": {"ce_weight": 0}}, "ce_weight and l1_weight are both 0"),
            ({"name": "dflash", "options": {"l1_weight": -1}}, "l1_weight must be at least 0"),
            ({"name": "dflash", "options": {"decay": 0}}, "decay must be above 0, or null for none, got 0"),
            ({"name": "dflash", "options": {"confidence_weight": 1}}, "the head has no confidence head"),
            ({"name": "dspark", "options": {"confidence_weight": 0}}, "set method.head.confidence to false"),
            ({"name": "dspark", "head": {"confidence": False}}, "the head has no confidence head"),
            ({"name": "dspark", "head": {"markov_rank": 0}}, "without one, train dflash"),
            ({"name": "dflash", "head": {"num_layers": 0}}, "num_layers must be at least 1"),
            ({"name": "dflash", "head": {"first_slot": 1, "block_size": 1}}, "block_size must be at least 2, got 1"),
            ({"name": "dflash", "head": {"causal": True}}, "causal heads must have first_slot 1"),
            ({"name": "dspark", "head": {"causal": True, "first_slot": 1}}, "causal must be false"),
            ({"name": "dflash", "head": {"mask_token_id": -1}}, "mask_token_id must be a token, got -1"),
            ({"name": "dflash", "head": {"feature_layers": []}}, "feature_layers must name at least one"),
        ],
    )
    def test_build_method_refuses_impossible_head_sections(self, section, message):
        with pytest.raises(RecipeError, match=message):
            build_method(read_section(MethodSection, section, "method"), target(torch.float32), data=None)

    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            (DFlashShape(feature_layers=(1, DEPTH + 1)), f"has {DEPTH} layers"),
            (DFlashShape(mask_token_id=VOCAB), f"mask token of this dflash head is {VOCAB}"),
        ],
    )
    def test_new_block_refuses_layers_and_tokens_that_the_target_lacks(self, shape, message):
        with pytest.raises(TargetMismatchError, match=message):
            new_block(target(), shape)

    def test_from_folder_refuses_a_dflash2_head(self, golden_root):
        folder = golden_root / "dflash2-zlab-base"
        meta = json.loads((folder / "meta.json").read_text())
        model = AutoModelForCausalLM.from_pretrained(golden_root / meta["target"])
        with pytest.raises(RecipeError, match="not trained here: selector"):
            DFlashMethod.from_folder(str(folder / "head"), model, BlockTrainingOptions())


class TestLearning:
    @pytest.mark.parametrize("name", ["dflash", "dspark"])
    def test_overfitting_one_batch_accepts_every_draft(self, name):
        """The text is the target's own greedy one, so a head that knows the batch drafts it to the last token."""
        model = copy.deepcopy(target(torch.float32))
        model.lm_head.weight *= 60  # a random target has no clear preferences, and whoever learns its distribution none
        prompts, batch = own_text(model, 29, VOCAB)
        batch["loss_mask"][:, :5] = False
        kind, shape = (DFlashMethod, DFlashShape) if name == "dflash" else (DSparkMethod, DSparkShape)
        head = shape(block_size=4, intermediate_size=128)
        made = kind.for_target(model, head, kind.options_class(ce_weight=1.0), pytest.fail).train()
        states = TargetReader(model, made.feature_layers)(batch)
        first = float(made(batch, states).loss.detach())
        output = learn_by_heart(made, batch, states, 4, num_steps=300, lr=5e-3)
        assert float(output.loss.detach()) < first / 2
        drafter = made.drafter(model, top_k=1)
        speculator = assert_every_draft_is_accepted(model, drafter, prompts, batch["input_ids"])
        assert speculator.stats.rounds == 2 * 5  # 1 token of the prefill, then rounds of 5 tokens and a last one of 3

    @pytest.mark.parametrize("truncated", [False, True])
    def test_a_16_bit_target_and_a_head_in_float32(self, truncated):
        model = target(torch.bfloat16)
        ids = KEPT if truncated else None
        made = DSparkMethod(new_block(model, DSparkShape(**SMALL), ids), model, ids)
        batch = packed([12])
        output = made(batch, TargetReader(model, made.feature_layers)(batch))
        output.loss.backward()
        assert {p.grad.dtype for p in made.parameters()} == {torch.float32}
        drafter = made.drafter(model)
        assert {p.dtype for p in drafter.head.parameters()} == {torch.bfloat16}
        prompt = packed([6])["input_ids"]
        plain = model.generate(prompt, max_new_tokens=8, do_sample=False)
        drafted = model.generate(prompt, max_new_tokens=8, do_sample=False, speculator=Speculator(drafter))
        assert drafted.shape == plain.shape

    def test_a_published_head_is_gone_on_from(self, golden_root):
        """DeepSpec's file with its own embeddings and output matrix, which stay as they are."""
        folder = golden_root / "dspark-deepspec-vanilla"
        meta = json.loads((folder / "meta.json").read_text())
        model = AutoModelForCausalLM.from_pretrained(golden_root / meta["target"], dtype=torch.float32).eval()
        made = DSparkMethod.from_folder(str(folder / "head"), model, DSparkTrainingOptions()).train()
        frozen = {name for name, parameter in made.named_parameters() if not parameter.requires_grad}
        assert frozen == {"head.embed_tokens.weight", "head.lm_head.weight"}
        batch = packed([12])
        run_states = TargetReader(model, made.feature_layers)(batch)
        made(batch, run_states).loss.backward()
        assert all(p.grad is not None and p.grad.any() for p in made.parameters() if p.requires_grad)

    @pytest.mark.parametrize(("kind", "part"), [("modelopt", "attention sinks"), ("lilicorr", "lattice")])
    def test_heads_with_other_parts_are_refused(self, tmp_path, kind, part):
        random_block(kind, target(torch.float32)).save_pretrained(tmp_path / "head")
        with pytest.raises(RecipeError, match=f"head has a part that is not trained here: {part}"):
            warm_block(tmp_path / "head", target(torch.float32))

    @pytest.mark.parametrize("truncated", [False, True])
    def test_saved_head_continues_training(self, tmp_path, truncated):
        model = target(torch.float32)
        made = method("dspark", torch.float32, truncated=truncated)
        made.save(tmp_path / "head", model)
        head, target_ids = warm_block(tmp_path / "head", model)
        assert (target_ids is None) != truncated
        mine, theirs = dict(made.head.named_parameters()), dict(head.named_parameters())
        assert {name for name, parameter in theirs.items() if parameter.requires_grad} == mine.keys()
        for name, parameter in mine.items():
            assert torch.equal(theirs[name], parameter), name
        again = DSparkMethod(head, model, target_ids).eval()
        batch = packed([12])
        ours, theirs = again(batch, states_of(again, batch)).loss, run(made.eval(), batch).loss
        torch.testing.assert_close(ours, theirs)
