"""States of packed batches equal those of each document alone; targets that cannot be read are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AttentionInterface, GraniteConfig, GraniteForCausalLM, LlamaForCausalLM

from hf_speculate.drafting import RAW_LAST
from hf_speculate.errors import TargetMismatchError
from hf_speculate_training.data import Collator, make_row
from hf_speculate_training.states import TargetReader
from hf_speculate_training.target import without_wrappers
from tests.support.mtp import build
from tests.support.training import packed


LAYERS = (0, 1, 2, RAW_LAST)
# Documents of each row: one of a single token, a row that is padded, a row of one document.
ROW_LENGTHS = [(5, 1, 9), (4, 3), (15,)]


def packed_batch(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    rows = [[torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths] for lengths in ROW_LENGTHS]
    made = [make_row({"input_ids": ids, "loss_mask": [True] * len(ids)} for ids in row) for row in rows]
    return rows, Collator(pad_token_id=0)(made)


def plain_states(model, ids):
    """The stock forward of one document: hidden states by layer, last hidden state, logits."""
    raw = []
    hook = model.get_decoder().layers[-1].register_forward_hook(lambda _m, _i, output: raw.append(output))
    output = model(torch.tensor([ids]), output_hidden_states=True)
    hook.remove()
    states = dict(enumerate(output.hidden_states))
    return states | {RAW_LAST: raw[0]}, output.hidden_states[-1], output.logits


@torch.no_grad()
def worst_difference(model, reader) -> float:
    """Largest relative difference between packed and plain states, over all documents and layers."""
    rows, batch = packed_batch()
    states, worst = reader(batch), 0.0
    assert set(states.features) == set(LAYERS)
    for number, row in enumerate(rows):
        start = 0
        for ids in row:
            part = (number, slice(start, start + len(ids)))
            start += len(ids)
            expected, last, logits = plain_states(model, ids)
            pairs = [(states.features[layer][part], expected[layer][0]) for layer in LAYERS]
            pairs += [(states.last_hidden[part], last[0])]
            pairs += [(model.get_output_embeddings()(states.last_hidden[part]), logits[0])]
            for found, wanted in pairs:
                worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
    return worst


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_states_of_packed_documents_equal_documents_alone(tiny_model, architecture, attention):
    model = tiny_model(architecture, attention=attention)
    reader = TargetReader(model, LAYERS)
    assert reader.mask == "positions"
    assert worst_difference(model, reader) < 1e-5


@pytest.fixture
def attention_without_masks():
    """An attention that transformers makes no mask for: causal over the whole row unless it is given one."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("no_mask_maker", sdpa_attention_forward)
    yield "no_mask_maker"
    AttentionInterface._global_mapping.pop("no_mask_maker")


def test_mask_is_made_where_transformers_makes_none(tiny_model, attention_without_masks):
    model = copy.deepcopy(tiny_model(attention="sdpa"))
    model.set_attn_implementation(attention_without_masks)
    reader = TargetReader(model, LAYERS)
    assert reader.mask == "explicit"
    assert worst_difference(model, reader) < 1e-5


@pytest.mark.parametrize("is_causal", [True, False])
def test_where_masks_are_ignored_every_document_has_a_row(tiny_model, attention_without_masks, is_causal):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def deaf(module, query, key, value, attention_mask, **kwargs):
        return sdpa_attention_forward(module, query, key, value, None, **kwargs | {"is_causal": is_causal})

    AttentionInterface.register(attention_without_masks, deaf)
    model = copy.deepcopy(tiny_model(attention="sdpa"))
    model.set_attn_implementation(attention_without_masks)
    if is_causal:
        reader = TargetReader(model, LAYERS)
        assert reader.mask == "rows"
        assert worst_difference(model, reader) < 1e-5
        return
    with pytest.raises(TargetMismatchError, match="lets documents see each other"):
        TargetReader(model, LAYERS)


def test_documents_of_a_recurrent_target_have_rows_of_their_own():
    model = build("qwen3_5_text")
    reader = TargetReader(model, (1, 4))
    assert reader.mask == "rows"
    batch = packed([5, 4, -3], [12])
    states = reader(batch)
    for row, part in ((0, slice(0, 5)), (0, slice(5, 9)), (1, slice(0, 12))):
        alone = model(batch["input_ids"][row : row + 1, part], output_hidden_states=True)
        for layer, found in states.features.items():
            torch.testing.assert_close(found[row, part], alone.hidden_states[layer][0], rtol=1e-4, atol=1e-4)


def test_target_reader_applies_adapters(tiny_model):
    base = copy.deepcopy(tiny_model())
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    _, batch = packed_batch()
    target = without_wrappers(model)
    adapted = TargetReader(target, LAYERS)(batch).last_hidden
    assert worst_difference(model.get_base_model(), TargetReader(target, LAYERS)) < 1e-5
    with model.disable_adapter():
        assert (TargetReader(target, LAYERS)(batch).last_hidden - adapted).abs().max() > 1e-2


def test_output_matrix_is_not_run(tiny_model):
    model = tiny_model()
    reader = TargetReader(model, (2,))
    calls = []
    hook = model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    assert not reader(packed_batch()[1]).last_hidden.requires_grad
    hook.remove()
    assert not calls


def test_scaled_logits_are_refused():
    config = GraniteConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        logits_scaling=8.0,
    )
    with pytest.raises(TargetMismatchError, match="GraniteForCausalLM are not its output matrix times"):
        TargetReader(GraniteForCausalLM(config).eval(), (2,))


def test_layers_that_are_not_there_are_refused(tiny_model):
    with pytest.raises(TargetMismatchError, match="hidden state 3 was asked for, but LlamaForCausalLM has 2 layers"):
        TargetReader(tiny_model(), (1, 3))


def test_prompt_learning_is_refused(tiny_model):
    model = get_peft_model(copy.deepcopy(tiny_model()), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(TargetMismatchError, match="prompt-learning"):
        without_wrappers(model)


def test_target_reader_packs_documents_of_16_bit_targets(tiny_model):
    """Rounding of bf16 does not look like a leak between documents."""
    model = tiny_model(dtype=torch.bfloat16, attention="sdpa")
    reader = TargetReader(model, LAYERS)
    assert reader.mask == "positions"
    assert reader(packed_batch()[1]).last_hidden.dtype == torch.bfloat16
    assert isinstance(reader.target, LlamaForCausalLM)
