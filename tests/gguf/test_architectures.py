"""Architectures beside Llama and Qwen: packed models compute what transformers' models compute."""

from __future__ import annotations

from typing import Any

import gguf
import pytest
import torch
from transformers import DynamicCache, GraniteConfig, GraniteForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from hf_speculate import Speculator
from hf_speculate.cache import as_cache
from hf_speculate.errors import CheckpointError
from hf_speculate.testing import RandomDrafter, check_lossless
from hf_speculate_gguf import load_model, plan_model
from hf_speculate_gguf.native import binding as native
from hf_speculate_gguf.reading import read_header
from hf_speculate_plugins.prompt_lookup import PromptLookupDrafter, PromptLookupOptions

from ..support.models import VOCAB_SIZE
from ..support.packed import available, dequantised, ids, padded, relative_error
from ..support.random_gguf import FileShape


WINDOW = 8
OF_GEMMA3 = {".attention.sliding_window": WINDOW, ".rope.freq_base": 1e6}
OF_GRANITE = {
    ".attention.scale": 0.02,
    ".embedding_scale": 12.0,
    ".residual_scale": 0.22,
    ".logit_scale": 8.0,
}


def shape_of(architecture: str, layers: int = 6, embedding_std: float = 1.0, head_dim: int | None = 32) -> FileShape:
    return FileShape(architecture, VOCAB_SIZE, 64, 96, layers, 4, 2, 256, True, embedding_std, head_dim)


@pytest.fixture
def gemma3(write):
    """A model whose first five of six layers see eight entries."""
    return write(shape_of("gemma3"), "Q8_0", metadata=OF_GEMMA3)


def expected_of_gemma(path):
    """What transformers makes of the file. It does not know by what scores are divided."""
    model = dequantised(path)
    for layer in model.model.layers:
        layer.self_attn.scaling = 32**-0.5
    return model


@pytest.fixture
def steps(monkeypatch):
    """Which calls of the whole model there were."""
    found: list[int] = []
    if available("native"):
        library = native.library()
        step = library.step
        monkeypatch.setattr(library, "step", lambda address: found.append(step(address)) or found[-1])
    return found


@pytest.mark.parametrize("architecture", ["gemma3", "gemma2"])
def test_logits_of_gemma_are_those_of_transformers(architecture, write, steps):
    """Windows, two bases of RoPE, norms around each part, GELU, scaled embeddings; caps of Gemma 2."""
    path, text = write(shape_of(architecture), "Q8_0", metadata=OF_GEMMA3), ids(2, 3 * WINDOW)
    expected = expected_of_gemma(path)(text).logits
    for backend in available("native", "dequantize", "dense"):
        for dtype, allowed in ((torch.float32, 5e-6), (torch.bfloat16, 2e-2)):
            found = load_model(path, dtype=dtype, backend=backend)(text, use_cache=True).logits
            assert relative_error(found, expected) < allowed, f"{backend}, {dtype}"
    if architecture == "gemma3" and available("native"):
        assert steps == [1, 1]


def test_dense_embeddings_are_scaled_too(write):
    recipe = {"token_embd.weight": "F16"}
    path, text = write(shape_of("gemma3"), lambda name, _: recipe.get(name, "Q8_0"), metadata=OF_GEMMA3), ids(1, 9)
    for backend in available("native", "dequantize"):
        model = load_model(path, dtype=torch.float32, backend=backend)
        assert relative_error(model(text, use_cache=True).logits, expected_of_gemma(path)(text).logits) < 5e-6


@pytest.mark.parametrize("kind", ["IQ3_XXS", "IQ2_S"])
def test_matrices_that_cannot_stay_packed_are_dequantised(kind, write, caplog):
    """With one line that says so. Values are those of the `gguf` package."""
    shape = FileShape("llama", VOCAB_SIZE, 256, 256, 2, 4, 2, 256)
    path = write(shape, lambda name, _: kind if ".ffn_" in name else "Q8_0")
    model = load_model(path, dtype=torch.float32, backend="dequantize")
    (line,) = [each.getMessage() for each in caplog.records if "stay packed" in each.getMessage()]
    assert f"6 matrices are of types that cannot stay packed ({kind}): they are dequantised and take 2 MB" in line
    file = read_header(path)
    entry = file.tensors["blk.1.ffn_down.weight"]
    expected = gguf.dequantize(file.read(entry).numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, torch.from_numpy(expected))
    assert model(ids(1, 5), use_cache=True).logits.isfinite().all()


@pytest.mark.usefixtures("needs_kernel")
@pytest.mark.parametrize(("backend", "dtype"), [("native", torch.float32), ("native-int8", torch.bfloat16)])
def test_a_window_moves_on_with_the_text(backend, dtype, gemma3, steps):
    """Bits depend neither on how a text is cut, nor on what a cache has dropped, nor on rows beside it."""
    model, text = load_model(gemma3, dtype=dtype, backend=backend), ids(1, 150)
    whole = model(text, use_cache=True).logits  # more rows than the kernel takes at once
    for sizes in ([1] * 150, [7, 1, 30, 112], [149, 1]):
        cache, parts = DynamicCache(config=model.config), []
        for piece in text.split(sizes, dim=1):
            parts.append(model(piece, **as_cache(cache), use_cache=True).logits)
        assert torch.equal(torch.cat(parts, dim=1), whole), sizes
        assert cache.layers[0].keys.shape[2] == WINDOW - 1
        assert cache.layers[5].keys.shape[2] == 150
    assert set(steps) == {1}
    allowed = 5e-6 if dtype is torch.float32 else 3e-2
    assert relative_error(whole, expected_of_gemma(gemma3)(text).logits) < allowed


@pytest.mark.usefixtures("needs_kernel")
def test_a_window_moves_on_behind_what_the_modules_computed(gemma3, steps, monkeypatch):
    monkeypatch.setattr("hf_speculate_gguf.native.inputs.MOST_KEYS", 100)
    model, text = load_model(gemma3, dtype=torch.float32, backend="native"), ids(1, 150)
    cache = DynamicCache(config=model.config)
    model(text[:, :-1], **as_cache(cache), use_cache=True)
    last = model(text[:, -1:], **as_cache(cache), use_cache=True).logits
    assert steps == [1]
    assert relative_error(last, expected_of_gemma(gemma3)(text).logits[:, -1:]) < 5e-6


@pytest.mark.usefixtures("needs_kernel")
def test_caches_of_layers_with_a_window_grow_at_other_times_than_the_others(write, steps):
    """The model is checked once a request, the buffers of a layer of each type at every step; the last has a window."""
    path = write(shape_of("gemma3", layers=7), "Q8_0", metadata=OF_GEMMA3)
    model = load_model(path, dtype=torch.float32, backend="native")
    request = {"max_new_tokens": 90, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(ids(1, 120), **request, return_dict_in_generate=True, output_logits=True)
    expected = expected_of_gemma(path)(found.sequences[:, :-1]).logits[:, 119:]
    assert relative_error(torch.stack(found.logits, dim=1), expected) < 5e-6
    assert steps == [1] * 90


@pytest.mark.usefixtures("needs_kernel")
def test_text_of_gemma3_is_that_of_plain_generate(write):
    """Longer than the window, greedy and sampled, alone and padded."""
    path = write(shape_of("gemma3", embedding_std=0.05), "Q8_0", metadata=OF_GEMMA3)
    model = load_model(path, dtype=torch.float32, backend="native")
    repeated = torch.cat([ids(1, 9), ids(1, 9), ids(1, 9)], dim=1)
    drafters = [PromptLookupDrafter(PromptLookupOptions()), RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=5)]
    for drafter in drafters:
        for sampling in ({}, {"do_sample": True}):
            seeds = (0,) if sampling else (None,)
            report = check_lossless(
                model, Speculator(drafter), [repeated], max_new_tokens=24, seeds=seeds, eos_token_id=None, **sampling
            )
            assert not report.ties
    batch = padded((19, 6))
    batch.pop("position_ids")
    request = {**batch, "max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    assert torch.equal(model.generate(**request, speculator=Speculator(drafters[1])), model.generate(**request))


def test_plan_model_reads_gemma3_metadata_and_defaults(write):
    """Windows by a number or one by one, a base of their own, scaling of the others only, a cap of the logits."""
    rope = {".rope.scaling.type": "linear", ".rope.scaling.factor": 8.0}
    config = plan_model(read_header(write(shape_of("gemma3"), metadata=OF_GEMMA3 | rope))).config
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert (config.sliding_window, config.query_pre_attn_scalar, config.head_dim) == (WINDOW, 32, 32)
    assert config.rope_parameters["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert config.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    more = {".rope.freq_base_swa": 500.0, ".final_logit_softcapping": 30.0}
    for pattern in (3, [True, True, False] * 2):
        changed = OF_GEMMA3 | more | {".attention.sliding_window_pattern": pattern}
        config = plan_model(read_header(write(shape_of("gemma3"), metadata=changed))).config
        assert config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"] * 2
        assert config.rope_parameters["sliding_attention"]["rope_theta"] == 500.0
        assert config.final_logit_softcapping == 30.0
    config = plan_model(read_header(write(shape_of("gemma3"), metadata={".rope.freq_base": 1e6}))).config
    assert config.layer_types == ["full_attention"] * 6
    wrong = OF_GEMMA3 | {".attention.sliding_window_pattern": [True, False]}
    with pytest.raises(CheckpointError, match="sliding_window_pattern' has 2 entries for 6 layers"):
        plan_model(read_header(write(shape_of("gemma3"), metadata=wrong)))


def test_capped_logits_are_left_to_the_modules(write, steps):
    metadata = OF_GEMMA3 | {".final_logit_softcapping": 5.0}
    path, text = write(shape_of("gemma3"), "Q8_0", metadata=metadata), ids(1, 12)
    expected = expected_of_gemma(path)
    expected.config.final_logit_softcapping = 5.0
    assert (
        relative_error(load_model(path, dtype=torch.float32)(text, use_cache=True).logits, expected(text).logits) < 5e-6
    )
    assert not steps


@pytest.mark.parametrize("architecture", ["smollm3", "granite"])
def test_logits_of_llamas_kin_are_those_of_transformers(architecture, write):
    """Layers without RoPE; factors of embeddings, parts, scores and logits. The weights are those of a Llama file."""
    shape, text = shape_of(architecture, layers=4, head_dim=None), ids(2, 12)
    weights = dequantised(write(shape_of("llama", layers=4, head_dim=None), "Q8_0")).state_dict()
    sizes: dict[str, Any] = {
        **{"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
        **{"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 10000.0, "pad_token_id": 0},
    }
    if architecture == "smollm3":
        expected = SmolLM3ForCausalLM(SmolLM3Config(**sizes, no_rope_layers=[1, 1, 1, 0]))
    else:
        sizes |= {"attention_multiplier": 0.02, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
        expected = GraniteForCausalLM(GraniteConfig(**sizes, logits_scaling=8.0))
    expected.load_state_dict(weights)
    path = write(shape, "Q8_0", metadata=OF_GRANITE if architecture == "granite" else None)
    for backend in available("native", "dequantize", "dense"):
        model = load_model(path, dtype=torch.float32, backend=backend)
        assert type(model) is type(expected)
        assert relative_error(model(text, use_cache=True).logits, expected(text).logits) < 5e-6, backend


def test_the_end_of_a_turn_ends_texts_of_gemma(write):
    pieces = [chr(ord("a") + index) for index in range(20)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>", "  ", *pieces]
    metadata = OF_GEMMA3 | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [3, 3, 3, 3, 3, 4, *[1] * len(pieces)],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }
    found = load_model(write(shape_of("gemma3"), metadata=metadata)).generation_config
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (2, [1, 4], 0)
