"""Layers in one native call: as modules compute them, the same bits whatever is beside a row; modules for who looks."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_speculate.cache import CACHE_NAME, PreallocatedLayer, as_cache
from hf_speculate.scoring.attention import TreeAttention, fold
from hf_speculate_gguf.native import binding as native
from hf_speculate_gguf.native.forwards import fuse
from hf_speculate_gguf.native.fused import FusedForward
from hf_speculate_gguf.native.layers import MOST_ROWS

from ..support.packed import OTHER_CPUS, ids, modules_only, padded


pytestmark = [pytest.mark.rest, pytest.mark.usefixtures("needs_kernel")]

RECIPES = ["Q4_0", "Q8_0", "Q2_K", "mixed", "Q4_K_M", "some dense"]


@torch.no_grad()
def states_of(model, input_ids, cache=None, **options):
    """The states behind every layer."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    output = model.model(input_ids, **as_cache(cache), use_cache=True, output_hidden_states=True, **options)
    return torch.stack(output.hidden_states), cache


def entries(cache) -> torch.Tensor:
    return torch.stack([torch.stack([layer.keys, layer.values]) for layer in cache.layers])


def test_rounded_inputs_are_those_of_the_modules(load, calls):
    """The same bytes, but for inputs that lie between two of them to the rounding of norms."""
    model = load(recipe="mixed", dtype=torch.float32, backend="native-int8")
    found, cache = states_of(model, ids(1, 37))
    expected, twin_cache = states_of(modules_only(model), ids(1, 37))
    for each, other in ((found, expected), (entries(cache), entries(twin_cache))):
        assert (each - other).norm() < 2e-4 * other.norm()
    exact, _ = states_of(load(recipe="mixed", dtype=torch.float32), ids(1, 37))
    assert (exact - found).norm() > 1e-3 * exact.norm(), "they are rounded"
    assert calls == [3, 3]


ARCHITECTURES = [("llama", (4, 2)), ("qwen2", (8, 1)), ("qwen3", (4, 2)), ("llama", (2, 2))]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("architecture", "heads"), ARCHITECTURES)
def test_states_and_cache_are_those_of_the_modules(architecture, recipe, heads, load, calls):
    model = load(architecture, recipe, torch.float32, heads)
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        twin = modules_only(model)
        found, cache = states_of(model, ids(1, 37))
        expected, twin_cache = states_of(twin, ids(1, 37))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(entries(cache), entries(twin_cache), rtol=1e-4, atol=2e-5)
        assert calls == [3], "all layers in one call"
        calls.clear()


@pytest.mark.parametrize("recipe", RECIPES)
def test_bfloat16_is_no_further_from_float32_than_the_modules_are(recipe, load):
    exact, _ = states_of(load(recipe=recipe, dtype=torch.float32), ids(1, 37))
    model = load(recipe=recipe)
    found, _ = states_of(model, ids(1, 37))
    modules, _ = states_of(modules_only(model), ids(1, 37))
    error, allowed = ((states[-1].float() - exact[-1]).norm() for states in (found, modules))
    assert error <= allowed * 1.05


@pytest.mark.parametrize("backend", ["native", "native-int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["mixed", "Q8_0", "some dense"])
def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it(dtype, recipe, backend, load):
    model, text = load(recipe=recipe, dtype=dtype, backend=backend), ids(1, 45)
    whole, cache = states_of(model, text)
    for sizes in ([1] * 45, [20, 1, 7, 17], [44, 1]):
        parts, other = [], DynamicCache(config=model.config)
        for piece in text.split(sizes, dim=1):
            states, other = states_of(model, piece, other)
            parts.append(states)
        assert torch.equal(torch.cat(parts, dim=2), whole), sizes
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
def test_a_node_gets_the_bits_of_its_path(form, dtype, load, calls):
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
    assert set(calls) == {3}


def test_a_root_alone_needs_no_mask(load, calls):
    model = load()
    _, cache = states_of(model, ids(1, 9))
    twin = copy.deepcopy(cache)
    mask = TreeAttention.without_mask(2, torch.device("cpu"))
    found, _ = states_of(model, ids(1, 1), cache, attention_mask=mask)
    expected, _ = states_of(model, ids(1, 1), twin)
    assert torch.equal(found, expected)
    assert calls == [3, 3, 3]


def test_rows_of_a_padded_batch_get_the_bits_that_they_get_alone(load, calls):
    model, lengths = load(recipe="mixed"), (11, 24, 3)
    batch = padded(lengths)
    found, cache = states_of(model, **batch)
    one_more, mask = ids(3, 1, seed=9), torch.nn.functional.pad(batch["attention_mask"], (0, 1), value=1)
    later, _ = states_of(model, one_more, cache, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1)
    assert calls == [3, 3]
    for row, length in enumerate(lengths):
        alone, own = states_of(model, ids(1, length, seed=length))
        assert torch.equal(found[:, row, 24 - length :], alone[:, 0])
        assert torch.equal(later[:, row], states_of(model, one_more[row : row + 1], own)[0][:, 0])


@pytest.mark.parametrize("backend", ["native", "native-int8"])
def test_a_large_batch_is_run_in_parts(backend, load, calls):
    """21 texts of three lengths are more rows than the kernel takes at once."""
    model, lengths = load(dtype=torch.float32, backend=backend), [11, 24, 3] * 7
    batch = padded(lengths)
    found, _ = states_of(model, **batch)
    assert calls == [3] * -(-len(lengths) // (MOST_ROWS // 24))
    for row in range(len(lengths)):
        alone = {name: values[row : row + 1] for name, values in batch.items()}
        assert torch.equal(found[:, row], states_of(model, **alone)[0][:, 0])


def test_threads_do_not_change_bits(load, set_threads):
    model, found = load(recipe="mixed"), []
    for threads in (1, 2, 3):
        set_threads(threads)
        found.append(states_of(model, ids(1, 33))[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("flags", OTHER_CPUS[:2])
def test_other_cpus_compute_the_same(flags, load, compiled, monkeypatch):
    """Also in bfloat16 where it cannot be multiplied: no further from float32 than the modules are."""
    model = load(recipe="mixed", dtype=torch.float32)
    expected, _ = states_of(modules_only(model), ids(1, 20))
    monkeypatch.setattr(native.library(), "run_layers", compiled(flags).run_layers)
    found, _ = states_of(model, ids(1, 20))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    narrow = load(recipe="mixed")
    modules, _ = states_of(modules_only(narrow), ids(1, 20))
    found, _ = states_of(narrow, ids(1, 20))
    error, allowed = ((states[-1].float() - expected[-1]).norm() for states in (found, modules))
    assert error <= allowed * 1.1


def test_a_layer_of_two_types_is_computed_by_its_modules(load, calls):
    model = load(dtype=torch.float32)
    layer = model.model.layers[2]
    layer.input_layernorm.double(), layer.post_attention_layernorm.double()
    states, _ = states_of(model, ids(1, 12))
    assert calls == [1, 1]
    assert torch.isfinite(states).all()


# ---- who looks into a layer, or changes it ----


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
    "other weights of a norm": lambda model: model.model.layers[1].input_layernorm.weight.data.mul_(2),
    "weights elsewhere": lambda model: model.to(torch.bfloat16).to(torch.float32),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_have_their_effect(change, load):
    model = load(recipe="Q4_K_M", dtype=torch.float32)
    states_of(model, ids(1, 4))  # whatever is remembered
    before, _ = states_of(model, ids(1, 12))
    assert seen_by_modules(model, CHANGES[change])
    after, _ = states_of(model, ids(1, 12))
    assert after.shape != before.shape or not torch.equal(after[-1], before[-1]) or change == "weights elsewhere"


@pytest.mark.parametrize("change", ["fewer layers", "fewer layers used"])
def test_layers_that_are_not_called_get_no_entries(change, load):
    """As where a model drafts for itself with its first layers (`assistant_early_exit`)."""
    model = load()
    _, cache = states_of(model, ids(1, 5))
    CHANGES[change](model)
    states_of(model, ids(1, 3), cache)
    assert [layer.get_seq_length() for layer in cache.layers] == [8, 8, 5]


def test_a_hook_that_is_gone_leaves_the_kernel(load, calls):
    model = load()
    handle = model.model.layers[0].mlp.register_forward_hook(scaled)
    states_of(model, ids(1, 5))
    assert calls == [1, 1], "the other two, one by one"
    handle.remove()
    states_of(model, ids(1, 5))
    assert calls == [1, 1, 3]


def test_attentions_are_handed_out_and_forgotten(load, calls):
    model = load(attn_implementation="eager")
    with torch.no_grad():
        output = model(ids(1, 6), output_attentions=True)
    assert len(output.attentions) == 3
    assert not calls
    states_of(model, ids(1, 6))
    assert calls == [3], "transformers' hooks stay, and sleep"


def test_layers_called_by_others_are_computed_one_by_one(load, calls):
    """Nobody may find entries of layers that were not called."""
    model = load()
    states, cache = states_of(model, ids(1, 6))
    twin = DynamicCache(config=model.config)
    with torch.no_grad():
        hidden = model.model.embed_tokens(ids(1, 6))
        rotary = model.model.rotary_emb(hidden, torch.arange(6)[None])
        for layer in model.model.layers[:2]:
            hidden = layer(hidden, **as_cache(twin), position_embeddings=rotary)
    assert calls == [3, 1, 1]
    assert torch.equal(hidden, states[2])
    assert [layer.get_seq_length() for layer in twin.layers] == [6, 6, 0]
    assert torch.equal(entries(twin)[:2] if len(twin.layers) < 3 else twin.layers[1].keys, cache.layers[1].keys)


def test_hooks_that_read_are_shown_every_layer(load, calls):
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
    assert calls == [3]


def test_what_the_kernel_does_not_serve_is_left_to_the_modules(load, calls):
    model, text = load(dtype=torch.float32), ids(1, 6)
    twin = modules_only(model)

    def other_mask():
        return {"attention_mask": torch.randn(1, 1, 6, 6, generator=torch.Generator().manual_seed(0))}

    for arguments in (
        lambda: {CACHE_NAME: StaticCache(config=model.config, max_cache_len=16)},
        lambda: {"use_cache": False},
        other_mask,
        lambda: {"input_ids": ids(1, MOST_ROWS + 1)},
    ):
        found, expected = (each(**{"input_ids": text, **arguments()}).logits for each in (model, twin))
        torch.testing.assert_close(found, expected)
    with torch.autocast("cpu", torch.bfloat16):
        model(text)
    embeddings = model.model.embed_tokens(text).requires_grad_()
    model(inputs_embeds=embeddings).logits.sum().backward()
    assert embeddings.grad is not None
    assert not calls


def test_positions_and_embeddings_of_another_shape_are_left_to_the_modules(load, calls):
    """The kernel would read what is not there. A chunked prefill of embeddings has positions for its ids alone."""
    model, text = load(dtype=torch.float32), ids(1, 6)
    twin, embeddings = modules_only(model), model.model.embed_tokens(text)
    one_for_all = {"inputs_embeds": embeddings, "position_ids": torch.tensor([[5]])}
    found, expected = (each(**one_for_all, use_cache=True).logits for each in (model, twin))
    torch.testing.assert_close(found, expected)
    for each in (model, twin):
        with pytest.raises(RuntimeError, match="size of tensor"):
            each(inputs_embeds=embeddings, position_ids=torch.arange(3)[None], use_cache=True)
        with pytest.raises(RuntimeError, match="size of tensor"):
            each(inputs_embeds=embeddings[..., :128], use_cache=True)
        with pytest.raises(RuntimeError, match="size of tensor"):
            each.generate(inputs_embeds=embeddings, max_new_tokens=2, prefill_chunk_size=3)
    assert not calls


def test_caches_are_used_as_they_are(load, calls):
    """Plain caches become ones that are appended in place; cut, reordered and repeated they go on."""
    model, text = load(), ids(2, 8)
    for cache in (DynamicCache(config=model.config), DynamicCache()):
        states_of(model, text, cache)
        assert all(type(layer) is PreallocatedLayer for layer in cache.layers)
        cache.crop(-3)
        cache.reorder_cache(torch.tensor([1, 0]))
        found, _ = states_of(model, text[:, 5:], cache)
        expected, _ = states_of(model, torch.cat([text.flip(0)[:, :5], text[:, 5:]], dim=1))
        assert torch.equal(found, expected[:, :, 5:])
    assert set(calls) == {3}


def test_an_interruption_leaves_a_cache_that_goes_on(load):
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


def test_copies_compute_the_same(load, calls):
    model = load()
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    expected, _ = states_of(model, ids(1, 7))
    for other in (copy.deepcopy(model), torch.load(written, weights_only=False)):
        calls.clear()
        assert all(isinstance(layer.forward, FusedForward) for layer in other.model.layers)
        assert all(layer.forward.layer is layer for layer in other.model.layers)
        found, _ = states_of(other, ids(1, 7))
        assert torch.equal(found[:-1], expected[:-1])
        torch.testing.assert_close(found[-1], expected[-1])  # the module's norm
        assert calls == [1, 1, 1]
        fuse(other)
        assert torch.equal(states_of(other, ids(1, 7))[0], expected)
        assert calls == [1, 1, 1, 3]


def test_layers_of_other_backends_are_left_alone(load):
    model = load(backend="dequantize")
    assert fuse(model) == 0
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)
