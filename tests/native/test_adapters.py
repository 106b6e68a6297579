"""LoRA on packed GGUF targets: what the dequantised model computes with it, lossless, or a clear refusal."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.target import outdated_peft
from hf_speculate.testing import ScriptedDrafter, check_lossless
from hf_speculate_gguf import load_model
from hf_speculate_gguf.native.binding import native_problem
from hf_speculate_gguf.native.modules import PackedMatrix

from ..support.adapters import perturbed
from ..support.packed import ids as token_ids
from ..support.packed import relative_error
from ..support.random_gguf import FileShape, one_type, q4_k_m, write_random_file
from ..support.tiny_heads import write_eagle_head


peft = pytest.importorskip("peft")
pytestmark = pytest.mark.rest

VOCAB = 96
NEW_TOKENS = 16
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORAS = {
    "values": {"target_modules": ["v_proj"]},
    "projections": {"target_modules": PROJECTIONS},
    "all-linear": {"target_modules": "all-linear"},
    "rslora": {"target_modules": ["q_proj", "up_proj"], "use_rslora": True},
    "embeddings": {"target_modules": ["k_proj", "embed_tokens", "lm_head"]},
}


@pytest.fixture(params=["llama", "qwen2"])
def path(request, tmp_path):
    """An untied and a tied file; in the first one, types of a layer differ."""
    is_llama = request.param == "llama"
    shape = FileShape(request.param, VOCAB, 256, 256, 4, 4, 2, 256, is_tied=not is_llama, embedding_std=0.02)
    write_random_file(tmp_path / "model.gguf", shape, q4_k_m(4) if is_llama else one_type("Q4_0"))
    return str(tmp_path / "model.gguf")


def lora(**options):
    return peft.LoraConfig(**({"task_type": "CAUSAL_LM", "r": 4} | options))


def load(path: str, backend: str = "auto", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return load_model(path, dtype=dtype, backend=backend)  # type: ignore[return-value]


def save_adapter(path: str, folder, seed: int = 0, **options) -> str:
    """Of the dequantised model, as it is trained; returns its folder."""
    model = peft.get_peft_model(load(path, "dense"), lora(**options))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    perturbed(model, seed).save_pretrained(folder, save_embedding_layers=False)
    return str(folder)


def backends() -> list[str]:
    return [name for name in ("native", "dequantize") if name != "native" or not native_problem()]


@pytest.mark.parametrize("kind", LORAS)
def test_packed_model_with_lora_gives_logits_of_the_dequantised_model(path, kind, tmp_path):
    """Each projection of a fused product has its own, and one for each row works too."""
    folder, ids = save_adapter(path, tmp_path / "adapter", **LORAS[kind]), token_ids(2, 9)
    dense = peft.PeftModel.from_pretrained(load(path, "dense"), folder)
    expected, plain = dense(ids).logits, load(path, "dense")(ids).logits
    names = ["default", "__base__"]
    assert relative_error(plain, expected) > 1e-2, "the adapter does nothing"
    for backend in backends():
        model = peft.PeftModel.from_pretrained(load(path, backend), folder)
        assert relative_error(model(ids).logits, expected) < 1e-5, backend
        assert relative_error(model(ids, adapter_names=names).logits, dense(ids, adapter_names=names).logits) < 1e-5, (
            backend
        )
        with model.disable_adapter():
            assert relative_error(model(ids).logits, plain) < 1e-5, backend
        assert relative_error(model.unload()(ids).logits, plain) < 1e-5, backend
        half = peft.PeftModel.from_pretrained(load(path, backend, torch.bfloat16), folder)
        assert half(ids).logits.dtype == torch.bfloat16
        assert relative_error(half(ids).logits, expected) < 5e-2, backend


def lora_layers(model: torch.nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)}


def test_peft_adapts_the_layers_that_it_adapts_in_the_dequantised_model(path):
    """Nothing inside a fused projection, whatever the pattern."""
    for target_modules in ("all-linear", r".*_proj", ["q_proj", "down_proj"]):
        adapted = lora(target_modules=target_modules)
        found, expected = (
            lora_layers(peft.get_peft_model(load(path, kind), copy.deepcopy(adapted)))
            for kind in ("dequantize", "dense")
        )
        assert found == expected
        assert found


@pytest.mark.skipif(bool(outdated_peft()), reason=outdated_peft())
def test_load_adapter_of_transformers_loads_and_switches_lora(path, tmp_path):
    folder, ids = save_adapter(path, tmp_path / "adapter", target_modules=PROJECTIONS), token_ids(1, 9)
    found, expected = load(path), load(path, "dense")
    for model in (found, expected):
        model.load_adapter(folder, adapter_name="one")
    assert relative_error(found(ids).logits, expected(ids).logits) < 1e-5
    with_it = found(ids).logits
    found.disable_adapters()
    assert relative_error(found(ids).logits, with_it) > 1e-2
    found.enable_adapters()
    assert torch.equal(found(ids).logits, with_it)


def check(model, ids: torch.Tensor, speculator: Speculator) -> torch.Tensor:
    """Greedy and sampled text is the target's own, as it computes now; returns the greedy one."""
    report = check_lossless(model, speculator, [ids], max_new_tokens=NEW_TOKENS)
    sampled = check_lossless(model, speculator, [ids], max_new_tokens=NEW_TOKENS, seeds=(3,), do_sample=True)
    assert report.num_identical + sampled.num_identical == 2, report.ties + sampled.ties
    return model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS)


def test_text_is_plain_while_adapters_are_switched_and_disabled(path, tmp_path):
    first = save_adapter(path, tmp_path / "first", 1, target_modules=["q_proj", "v_proj", "lm_head"])
    second = save_adapter(path, tmp_path / "second", 2, target_modules=PROJECTIONS)
    model = peft.PeftModel.from_pretrained(load(path), first, adapter_name="first")
    model.load_adapter(second, adapter_name="second")
    ids, texts = token_ids(1, 9), {}
    head = write_eagle_head(tmp_path / "head", 256, VOCAB)
    eagle = AutoSpeculator.from_pretrained(head, target=model, feature_layers=(0, 1, 2))
    for name in ("first", "second", "first"):
        model.set_adapter(name)
        text = check(model, ids, eagle)
        assert torch.equal(texts.setdefault(name, text), text), "what was learnt of another adapter changed the text"
        scripted = Speculator(ScriptedDrafter(text[:, 9:], (2, 2, 1), accuracy=0.8, vocab_size=VOCAB))
        check(model, ids, scripted)
        assert list(scripted.adapter_stats) == [name]
    with model.disable_adapter():
        texts["none"] = check(model, ids, eagle)
    assert set(eagle.adapter_stats) == {"first", "second", ""}
    assert len({tuple(text[0].tolist()) for text in texts.values()}) == 3, "the adapters do nothing"


@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload", "safe"])
def test_merging_an_adapter_is_refused_and_changes_nothing(path, merge, tmp_path):
    folder, ids = (
        save_adapter(path, tmp_path / "adapter", target_modules=[*PROJECTIONS, "embed_tokens"]),
        token_ids(1, 9),
    )
    model = peft.PeftModel.from_pretrained(load(path), folder)
    expected, weights = model(ids).logits, copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedRequestError, match=r"packed.*unmerged.*backend='dense'"):
        model.merge_and_unload(safe_merge=True) if merge == "safe" else getattr(model, merge)()
    assert torch.equal(model(ids).logits, expected)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"], "use_dora": True},
        {"target_modules": ["down_proj"], "use_dora": True},
        {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["v_proj"], "trainable_token_indices": [5, 6]},
    ],
    ids=["dora", "dora alone", "output", "embeddings", "tokens"],
)
def test_adapters_that_change_weights_are_refused(path, options, tmp_path):
    folder = save_adapter(path, tmp_path / "adapter", **options)
    for backend in backends():
        with pytest.raises(UnsupportedRequestError, match=r"packed.*backend='dense'"):
            peft.PeftModel.from_pretrained(load(path, backend), folder)
    peft.PeftModel.from_pretrained(load(path, "dense"), folder)


def test_packed_weights_refuse_everything_but_their_description(path):
    model = load(path)
    for layer in (model.lm_head, model.model.embed_tokens, model.model.layers[0].self_attn.q_proj):
        weight = layer.weight
        assert weight.device == torch.device("cpu")
        assert (weight.dtype, weight.is_floating_point()) == (torch.uint8, False)
        assert "PackedBytes" in repr(weight)
        with pytest.raises(UnsupportedRequestError, match="'float' was asked of the weights"):
            weight.float()
        with pytest.raises(UnsupportedRequestError, match="'data' was asked of the weights"):
            weight.data += 1
        with pytest.raises(UnsupportedRequestError, match="is to be loaded into a GGUF layer"):
            layer.load_state_dict({"weight": torch.zeros(2, 2)}, strict=False)
    assert not any(type(module) is PackedMatrix and isinstance(module, torch.nn.Linear) for module in model.modules())
