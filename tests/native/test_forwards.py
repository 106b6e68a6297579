"""Whole models in one native call: states, logits and cache are those of the modules, whoever asks for what."""

from __future__ import annotations

import copy
import inspect
import io

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from hf_speculate.attention.grouped import TreeAttention, fold
from hf_speculate.cache import CACHE_NAME, PreallocatedLayer, as_cache, cache_of
from hf_speculate.target import has_native_layers
from hf_speculate_gguf.native import binding as native
from hf_speculate_gguf.native.formats import FORMATS
from hf_speculate_gguf.native.forwards import fuse
from hf_speculate_gguf.native.inputs import MOST_KEYS
from hf_speculate_gguf.native.layers import MOST_ROWS

from ..support.packed import OTHER_CPUS, ids, modules_only, padded


pytestmark = [pytest.mark.rest, pytest.mark.usefixtures("needs_kernel")]

RECIPES = ["Q4_0", "Q8_0", "Q2_K", "mixed", "Q4_K_M", "some dense"]


@torch.no_grad()
def answer(model, input_ids, cache=None, **options):
    return model(input_ids, **as_cache(cache), use_cache=True, **options)


def outputs_of(model, input_ids, cache=None, **options):
    """The states of all layers, the logits and the cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    output = answer(model, input_ids, cache, output_hidden_states=True, **options)
    return torch.stack(output.hidden_states), output.logits, cache


def states_of(model, input_ids, cache=None, **options):
    states, _, cache = outputs_of(model, input_ids, cache, **options)
    return states, cache


def entries(cache) -> torch.Tensor:
    return torch.stack([torch.stack([layer.keys, layer.values]) for layer in cache.layers])


def assert_alike(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("architecture", "heads", "recipe", "is_tied"),
    [
        ("llama", (4, 2), "Q4_0", True),
        ("llama", (2, 2), "mixed", False),
        ("qwen2", (8, 1), "Q8_0", True),
        ("qwen2", (4, 2), "some dense", False),
        ("qwen3", (4, 2), "Q2_K", True),
        ("qwen3", (4, 2), "Q4_K_M", False),
    ],
)
def test_native_forward_equals_the_modules_in_states_and_cache(architecture, heads, recipe, is_tied, load, calls):
    model = load(architecture, recipe, torch.float32, heads, is_tied)
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        found, expected = ((each, DynamicCache(config=model.config)) for each in (model, modules_only(model)))
        for text, options in ((ids(1, 37), {}), (ids(1, 1), {"logits_to_keep": 1}), (ids(1, 5), {"logits_to_keep": 2})):
            outputs, others = (
                answer(each, text, cache, output_hidden_states=True, **options) for each, cache in (found, expected)
            )
            assert type(outputs) is type(others)
            assert outputs.keys() == others.keys()
            assert_alike(outputs.logits, others.logits)
            assert_alike(torch.stack(outputs.hidden_states), torch.stack(others.hidden_states))
        assert_alike(entries(found[1]), entries(expected[1]))
    assert calls == [1] * 6


def test_native_forward_quantizes_activations_as_the_modules_do(load, calls):
    """The same bytes, but for inputs that lie between two of them to the rounding of norms."""
    model = load(recipe="mixed", dtype=torch.float32, backend="native-int8")
    found, cache = states_of(model, ids(1, 37))
    expected, twin_cache = states_of(modules_only(model), ids(1, 37))
    for each, other in ((found, expected), (entries(cache), entries(twin_cache))):
        assert (each - other).norm() < 2e-4 * other.norm()
    exact, _ = states_of(load(recipe="mixed", dtype=torch.float32), ids(1, 37))
    assert (exact - found).norm() > 1e-3 * exact.norm(), "they are quantised"
    assert calls == [1, 1]


@pytest.mark.parametrize("kind", FORMATS)
def test_native_embeddings_have_the_bits_of_the_module(kind, load, calls):
    for dtype in (torch.float32, torch.bfloat16):
        model = load(recipe=kind, dtype=dtype)
        states, _ = states_of(model, ids(1, 9))
        assert torch.equal(states[0], model.model.embed_tokens(ids(1, 9)))
        assert model.model.embed_tokens(ids(2, 0)).shape == (2, 0, 256)
    assert calls == [1, 1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_native_bfloat16_is_as_near_to_float32_as_the_modules(recipe, load):
    exact, _ = states_of(load(recipe=recipe, dtype=torch.float32), ids(1, 37))
    model = load(recipe=recipe)
    found, _ = states_of(model, ids(1, 37))
    modules, _ = states_of(modules_only(model), ids(1, 37))
    error, allowed = ((states[-1].float() - exact[-1]).norm() for states in (found, modules))
    assert error <= allowed * 1.05


@pytest.mark.parametrize("backend", ["native", "native-int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["mixed", "Q8_0", "some dense"])
def test_native_forward_gives_a_row_the_same_bits_in_every_batch(dtype, recipe, backend, load):
    model, text = load(recipe=recipe, dtype=dtype, backend=backend), ids(1, 45)
    whole, logits, cache = outputs_of(model, text)
    for sizes in ([1] * 45, [20, 1, 7, 17], [44, 1]):
        parts, other = [], DynamicCache(config=model.config)
        for piece in text.split(sizes, dim=1):
            parts.append(outputs_of(model, piece, other)[:2])
        assert torch.equal(torch.cat([states for states, _ in parts], dim=2), whole), sizes
        assert torch.equal(torch.cat([scores for _, scores in parts], dim=1), logits), sizes
        assert torch.equal(entries(other), entries(cache))


def tree_mask(parents: list[int], num_prefix: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Additive [1, 1, n, M + n] and positions [1, n]."""
    mask = torch.full((len(parents), num_prefix + len(parents)), torch.finfo(dtype).min, dtype=dtype)
    mask[:, :num_prefix] = 0
    depths = []
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        while node >= 0:
            mask[len(depths) - 1, num_prefix + node] = 0
            node = parents[node]
    return mask[None, None], num_prefix + torch.tensor([depths])


@pytest.mark.parametrize("form", ["additive", "bool", "folded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_forward_gives_a_node_the_bits_of_its_path(form, dtype, load, calls):
    """Greedy text under speculation is plain's in bfloat16 too: nothing depends on where ancestors lie."""
    model, parents = load(recipe="mixed", dtype=dtype), [-1, 0, 0, 1, 2, 2, 4, 6, 3]
    prefix, nodes = ids(1, 30), ids(1, len(parents), seed=2)
    _, cache = states_of(model, prefix)
    mask, positions = tree_mask(parents, 30, dtype)
    mask = {"additive": mask, "bool": mask == 0, "folded": fold(mask, 2)}[form]
    states, _ = states_of(model, nodes, copy.deepcopy(cache), attention_mask=mask, position_ids=positions)
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone, _ = states_of(model, nodes[:, path], copy.deepcopy(cache))
        assert torch.equal(states[:, :, node], alone[:, :, -1]), f"node {node}"
    assert set(calls) == {1}


def test_native_forward_of_a_root_needs_no_mask(load, calls):
    model = load()
    _, cache = states_of(model, ids(1, 9))
    twin = copy.deepcopy(cache)
    mask = TreeAttention.without_mask(2, torch.device("cpu"))
    found, _ = states_of(model, ids(1, 1), cache, attention_mask=mask)
    expected, _ = states_of(model, ids(1, 1), twin)
    assert torch.equal(found, expected)
    assert calls == [1, 1, 1]


@pytest.mark.parametrize("backend", ["native", "native-int8"])
@pytest.mark.parametrize("repeats", [1, 7])
def test_native_forward_gives_padded_rows_the_bits_that_they_get_alone(repeats, backend, load, calls):
    """21 texts of up to 24 tokens are more rows than the kernel takes at once."""
    model, lengths = load(recipe="mixed", backend=backend), [11, 24, 3] * repeats
    batch = padded(lengths)
    found, _, cache = outputs_of(model, **batch)
    assert len(calls) == -(-len(lengths) // (MOST_ROWS // 24))
    one_more, mask = ids(len(lengths), 1, seed=9), torch.nn.functional.pad(batch["attention_mask"], (0, 1), value=1)
    later, _ = states_of(model, one_more, cache, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1)
    for row, length in enumerate(lengths):
        alone, own = states_of(model, ids(1, length, seed=length))
        assert torch.equal(found[:, row, 24 - length :], alone[:, 0])
        assert torch.equal(later[:, row], states_of(model, one_more[row : row + 1], own)[0][:, 0])
    assert set(calls) == {1}


@pytest.mark.parametrize("backend", ["native", "native-int8"])
def test_native_forward_computes_long_texts_in_pieces(backend, load, calls):
    model, lengths = load(recipe="mixed", backend=backend), [300, 7, 140]
    batch = padded(lengths)
    found, logits, cache = outputs_of(model, **batch)
    assert len(calls) == 3 * 3
    for row, length in enumerate(lengths):
        text, own, parts = ids(1, length, seed=length), DynamicCache(config=model.config), []
        for piece in text.split(100, dim=1):
            parts.append(states_of(model, piece, own)[0])
        assert torch.equal(found[:, row, 300 - length :], torch.cat(parts, dim=2)[:, 0])
        assert torch.equal(entries(cache)[:, :, row, :, 300 - length :], entries(own)[:, :, 0])
    calls.clear()
    for num_scored in (1, 45, 200):
        assert torch.equal(answer(model, **batch, logits_to_keep=num_scored).logits, logits[:, -num_scored:])
    assert set(calls) == {1}


def test_native_forward_gives_the_same_bits_with_any_number_of_threads(load, set_threads):
    model, found = load(recipe="mixed"), []
    for threads in (1, 2, 3):
        set_threads(threads)
        found.append(states_of(model, ids(1, 33))[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("flags", OTHER_CPUS[:2])
def test_native_forward_is_right_on_cpus_without_some_instructions(flags, load, compiled, monkeypatch):
    """Also in bfloat16 where it cannot be multiplied: no further from float32 than the modules are."""
    model = load(recipe="mixed", dtype=torch.float32)
    expected, _ = states_of(modules_only(model), ids(1, 20))
    monkeypatch.setattr(native.library(), "step", compiled(flags).step)
    found, _ = states_of(model, ids(1, 20))
    assert_alike(found, expected)
    narrow = load(recipe="mixed")
    modules, _ = states_of(modules_only(narrow), ids(1, 20))
    found, _ = states_of(narrow, ids(1, 20))
    error, allowed = ((states[-1].float() - expected[-1]).norm() for states in (found, modules))
    assert error <= allowed * 1.1


@pytest.mark.parametrize("wanted", [True, 1, [0, 3], [-1], [-2, 1], False])
def test_native_forward_returns_hidden_states_as_transformers_does(wanted, load, calls):
    model = load(dtype=torch.float32)
    found, expected = (answer(each, ids(1, 6), output_hidden_states=wanted) for each in (model, modules_only(model)))
    assert (found.hidden_states is None) == (expected.hidden_states is None)
    for state, other in zip(found.hidden_states or (), expected.hidden_states or (), strict=True):
        assert (state is None) == (other is None)
        if state is not None:
            assert_alike(state, other)
    assert calls == [1]


def test_native_forward_takes_positions_beyond_the_rope_table(load, calls):
    model = load(dtype=torch.float32)
    twin, positions = modules_only(model), torch.tensor([[5000, 5001]])
    found, expected = (
        answer(each, ids(1, 2), cache_of(answer(each, ids(1, 2))), position_ids=positions).logits
        for each in (model, twin)
    )
    assert_alike(found, expected)
    assert calls == [1, 1]


def test_native_forward_raises_for_tokens_without_an_embedding(load):
    model = load()
    cache = cache_of(answer(model, ids(1, 4)))
    with pytest.raises(IndexError):
        answer(model, torch.tensor([[5, 97]]), cache)
    assert cache.get_seq_length() == 4


def test_native_forward_takes_caches_that_were_cut_reordered_or_copied(load, calls):
    """Plain caches become ones that are appended in place; cut, reordered, repeated and exchanged they go on."""
    model, text = load(), ids(2, 12)
    expected, _ = states_of(model, text.flip(0))
    for cache in (DynamicCache(config=model.config), DynamicCache()):
        states_of(model, text, cache)
        assert all(type(layer) is PreallocatedLayer for layer in cache.layers)
        cache.crop(-7)
        cache.reorder_cache(torch.tensor([1, 0]))
        assert torch.equal(states_of(model, text.flip(0)[:, 5:], cache)[0], expected[:, :, 5:])
        cache.crop(-7)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        assert torch.equal(states_of(model, text.flip(0)[:, 5:], cache)[0], expected[:, :, 5:])
    assert set(calls) == {1}


def test_interrupted_native_forward_leaves_a_usable_cache(load):
    model, text = load(), ids(1, 8)
    expected, _ = states_of(model, text)
    _, cache = states_of(model, text[:, :5])

    def interrupt(*_):
        raise KeyboardInterrupt

    interrupt.__module__ = "hf_speculate"  # one that the stack calls after having computed all
    handle = model.model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        states_of(model, text[:, 5:], cache)
    handle.remove()
    cache.crop(5 - cache.get_seq_length())
    assert torch.equal(states_of(model, text[:, 5:], cache)[0], expected[:, :, 5:])


def test_plain_generate_takes_one_native_call_per_token(load, calls):
    load().generate(ids(1, 5), max_new_tokens=7, do_sample=False, pad_token_id=0)
    assert calls == [1] * 7


def test_native_forward_keeps_the_signature_of_the_class(load):
    model = load()
    of_class = list(inspect.signature(LlamaForCausalLM.forward).parameters.values())
    assert list(inspect.signature(model.forward).parameters.values()) == of_class[1:]
    assert CACHE_NAME in inspect.signature(model.model.forward).parameters


# ---- who looks into a model, or changes it ----


def seen_by_modules(model, change) -> bool:
    """Whether a change to a model has the same effect as on the modules alone, also on what is left in the cache."""
    twin, found = modules_only(model), []
    for each in (model, twin):
        change(each)
        first, cache = states_of(each, ids(1, 12))
        found.append((first, states_of(each, ids(1, 5, seed=2), cache)[0]))
    return all(torch.allclose(*pair, rtol=1e-4, atol=2e-5) for pair in zip(*found, strict=True))


def scaled(module, inputs, output):
    return output * 1.5


CHANGES = {
    "a hook on a projection": lambda model: model.model.layers[1].self_attn.v_proj.register_forward_hook(scaled),
    "a hook on an MLP": lambda model: model.model.layers[0].mlp.register_forward_hook(scaled),
    "a hook on a layer": lambda model: model.model.layers[1].register_forward_hook(scaled),
    "a hook before a layer": lambda model: model.model.layers[1].register_forward_pre_hook(lambda m, a: (a[0] * 1.5,)),
    "another module": lambda model: setattr(model.model.layers[2].mlp, "act_fn", torch.nn.GELU()),
    "another forward": lambda model: setattr(model.model.layers[2].mlp, "forward", lambda inputs: inputs * 0.5),
    "another forward of a layer": lambda model: setattr(
        model.model.layers[2], "forward", lambda hidden_states, **_: hidden_states * 0.5
    ),
    "a hook on the norm": lambda model: model.model.norm.register_forward_hook(scaled),
    "a hook on embeddings": lambda model: model.model.embed_tokens.register_forward_hook(scaled),
    "a hook on the decoder": lambda model: model.model.register_forward_hook(
        lambda module, inputs, output: setattr(
            output, "hidden_states", tuple(1.5 * each for each in output.hidden_states)
        )
    ),
    "other frequencies": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
    "another final norm": lambda model: setattr(
        model.model.norm, "weight", torch.nn.Parameter(torch.arange(256.0) / 256)
    ),
    "fewer layers": lambda model: setattr(model.model, "layers", model.model.layers[:2]),
    "fewer layers used": lambda model: setattr(model.config, "num_hidden_layers", 2),
    "layers in another order": lambda model: setattr(
        model.model, "layers", torch.nn.ModuleList([model.model.layers[i] for i in (2, 1, 0)])
    ),
    "norms of another type": lambda model: model.model.layers[2].input_layernorm.double(),
    "other weights of a norm": lambda model: model.model.layers[1].input_layernorm.weight.data.mul_(2),
    "weights elsewhere": lambda model: model.to(torch.bfloat16).to(torch.float32),
}


@pytest.mark.parametrize("change", CHANGES)
def test_native_model_notices_changes_of_its_modules(change, load):
    model = load(recipe="Q4_K_M", dtype=torch.float32)
    states_of(model, ids(1, 4))  # whatever is remembered
    before, _ = states_of(model, ids(1, 12))
    assert seen_by_modules(model, CHANGES[change])
    after, _ = states_of(model, ids(1, 12))
    rounds = "weights elsewhere", "norms of another type"
    assert after.shape != before.shape or not torch.equal(after[-1], before[-1]) or change in rounds


def test_native_forward_returns_when_a_foreign_hook_is_removed(load, calls):
    model = load()
    handle = model.model.layers[0].mlp.register_forward_hook(scaled)
    states_of(model, ids(1, 5))
    assert not calls
    assert not has_native_layers(model)
    handle.remove()
    states_of(model, ids(1, 5))
    assert calls == [1]
    assert has_native_layers(model)


def test_native_forward_calls_a_replaced_forward_of_the_class(load, calls, monkeypatch):
    model, seen = load(), []
    stock = LlamaForCausalLM.forward
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda self, *a, **k: seen.append(1) or stock(self, *a, **k))
    answer(model, ids(1, 4))
    assert seen == [1]
    assert not calls


def test_native_forward_resumes_after_attentions_were_returned(load, calls):
    model = load(attn_implementation="eager")
    assert len(answer(model, ids(1, 6), output_attentions=True).attentions) == 3
    assert not calls
    answer(model, ids(1, 6))
    assert calls == [1], "transformers' hooks stay, and sleep"


def test_native_forward_calls_our_reading_hooks_at_every_layer(load, calls):
    model, seen = load(), []

    def reader(module, inputs, output):
        seen.append((module, inputs[0], output))

    reader.__module__ = "hf_speculate.tests"
    handles = [layer.register_forward_hook(reader) for layer in model.model.layers]
    states, _ = states_of(model, ids(1, 5))
    for handle in handles:
        handle.remove()
    assert [module for module, _, _ in seen] == list(model.model.layers)
    assert all(torch.equal(before, states[i]) for i, (_, before, _) in enumerate(seen))
    assert all(torch.equal(output, states[i + 1]) for i, (_, _, output) in enumerate(seen[:-1]))
    assert calls == [1]


def other_mask():
    return {"attention_mask": torch.randn(1, 1, 6, 6, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize(
    "options",
    [
        lambda model: {CACHE_NAME: StaticCache(config=model.config, max_cache_len=16)},
        lambda model: {"use_cache": False},
        lambda model: other_mask(),
        lambda model: {"input_ids": ids(1, MOST_KEYS + 1)},
        lambda model: {"input_ids": None, "inputs_embeds": model.model.embed_tokens(ids(1, 6))},
        lambda model: {"position_ids": torch.tensor([[5]]), CACHE_NAME: DynamicCache(config=model.config)},
        lambda model: {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])},  # two texts in one row
        lambda model: {"return_dict": False},
        lambda model: {"output_attentions": True},
        lambda model: {"labels": ids(1, 6)},
        lambda model: {"logits_to_keep": torch.tensor([2])},
    ],
)
def test_native_forward_leaves_unsupported_arguments_to_the_modules(options, load, calls):
    model = load(dtype=torch.float32, attn_implementation="eager")
    twin = modules_only(model)
    found, expected = (each(**{"input_ids": ids(1, 6), **options(each)}) for each in (model, twin))
    logits = (each[0] if isinstance(each, tuple) else each.logits for each in (found, expected))
    assert_alike(*logits)
    assert not calls


def test_native_forward_leaves_gradients_autocast_and_foreign_caches_to_the_modules(load, calls):
    model, text = load(dtype=torch.float32), ids(1, 6)
    with torch.autocast("cpu", torch.bfloat16):
        answer(model, text)
    with pytest.raises(AttributeError):
        answer(model, text, ((torch.zeros(1), torch.zeros(1)),))
    model.model.norm.weight.requires_grad_()
    model(text, use_cache=True).logits.sum().backward()
    assert model.model.norm.weight.grad is not None
    assert not calls
    answer(model, text)
    assert calls == [1]


def test_copies_of_a_native_model_compute_the_same(load, calls):
    model = load(dtype=torch.float32)
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    expected, _ = states_of(model, ids(1, 7))
    for other in (copy.deepcopy(model), torch.load(written, weights_only=False)):
        calls.clear()
        assert other.forward.module is other
        assert_alike(states_of(other, ids(1, 7))[0], expected)
        assert not calls
        assert fuse(other)
        assert torch.equal(states_of(other, ids(1, 7))[0], expected)
        assert calls == [1]


def test_fuse_leaves_models_of_other_backends_alone(load):
    model = load(backend="dequantize")
    assert not fuse(model)
    assert "forward" not in vars(model)


# ---- what is looked at once, while nobody disturbs a request ----


def looks(model, monkeypatch):
    """How often the model is looked at."""
    whole, found = model.forward.native, []
    change = whole.change
    monkeypatch.setattr(whole, "change", lambda: found.append(1) or change())
    return found


def test_native_model_is_checked_once_per_request(load, monkeypatch):
    model = load()
    found = looks(model, monkeypatch)
    model.generate(ids(1, 5), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert len(found) == 1
    model.generate(ids(1, 5), max_new_tokens=6, do_sample=False, pad_token_id=0, logits_processor=[lambda _, s: s])
    assert len(found) == 7
    answer(model, ids(1, 2))
    answer(model, ids(1, 2))
    assert len(found) == 9


def test_assume_unchanged_notices_a_new_hook(load, calls):
    model = load(dtype=torch.float32)
    with model.forward.native.assume_unchanged(is_threaded=False):
        before = answer(model, ids(1, 6)).logits
        handle = model.model.norm.register_forward_hook(lambda module, inputs, output: output * 1.5)
        assert not torch.allclose(answer(model, ids(1, 6)).logits, before)
        assert calls == [1]
        handle.remove()
        assert torch.equal(answer(model, ids(1, 6)).logits, before)
    assert calls == [1, 1]


def test_native_model_notices_changes_after_a_request(load):
    model = load(dtype=torch.float32)
    with model.forward.native.assume_unchanged(is_threaded=False):
        before = answer(model, ids(1, 6)).logits
        with model.forward.native.assume_unchanged(is_threaded=False):  # a request within a request
            answer(model, ids(1, 6))
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * 2, requires_grad=False)
    assert_alike(answer(model, ids(1, 6)).logits, before * 2)


def test_assume_unchanged_allows_changes_of_the_cache(load):
    """Rows that have ended leave it, text is cut: all layers alike."""
    model, text = load(), ids(2, 12)
    with model.forward.native.assume_unchanged(is_threaded=False):
        expected = answer(model, text[1:]).logits[:, 5:]
        cache = cache_of(answer(model, text))
        cache.crop(-7)
        cache.batch_select_indices(torch.tensor([1]))
        assert torch.equal(answer(model, text[1:, 5:], cache).logits, expected)
        cache.crop(-7)
        assert torch.equal(answer(model, text[1:, 5:], cache).logits, expected)
        long = ids(1, 100, seed=3)
        assert torch.equal(
            answer(model, long, cache).logits, answer(model, torch.cat([text[1:], long], dim=1)).logits[:, 12:]
        )
