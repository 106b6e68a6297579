"""Tree attention without repeated KV heads: the same numbers as stock sdpa with the same mask, and nobody else's."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_speculate
from hf_speculate import DraftTree, Speculator
from hf_speculate.attention import grouped as attention
from hf_speculate.attention.grouped import TreeAttention, fold, grouped_sdpa, head_groups, install_attention
from hf_speculate.errors import SpeculateError
from hf_speculate.testing import RandomDrafter

from ..support.models import VOCAB_SIZE
from ..support.requests import prefilled
from ..support.versions import has_transformers


# Of outputs that are means of standard normal values.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}

# batch, query heads, KV heads, head dim, prefix, nodes
SHAPES = [
    (1, 14, 2, 64, 300, 17),
    (2, 4, 2, 8, 5, 3),
    (3, 8, 1, 16, 70, 40),
    (1, 32, 8, 128, 33, 9),
    (1, 4, 2, 8, 1, 2),
]


def layer(num_heads, num_kv_heads):
    """All that an attention function looks at of its module."""
    module = nn.Module()
    module.num_key_value_groups = num_heads // num_kv_heads
    return module


def states(shape, dtype, device="cpu"):
    """Query, key and value as a model hands them over: strided views."""
    batch_size, num_heads, num_kv_heads, head_dim, num_prefix, num_nodes = shape
    query = torch.randn(batch_size, num_nodes, num_heads, head_dim, dtype=dtype, device=device).transpose(1, 2)
    size = (batch_size, num_kv_heads, num_prefix + num_nodes + 9, head_dim)
    buffers = [torch.randn(size, dtype=dtype, device=device) for _ in range(2)]
    return query, *(buffer[:, :, : num_prefix + num_nodes] for buffer in buffers)


def tree_mask(shape, dtype, *, holes=False, device="cpu"):
    """Trees of random structure, other in every row, behind the whole prefix or (holes) a part of it."""
    batch_size, *_, num_prefix, num_nodes = shape
    mask = torch.zeros(batch_size, 1, num_nodes, num_prefix + num_nodes, dtype=dtype, device=device)
    for row in range(batch_size):
        parents = [-1, *(int(torch.randint(0, node, ())) for node in range(1, num_nodes))]
        plan = DraftTree(torch.arange(num_nodes)[None], parents).plan
        mask[row, 0, :, num_prefix:] = plan.bias(dtype, torch.device(device))[0]
    if holes:
        hidden = torch.rand(batch_size, num_prefix, device=device) < 0.4
        mask[..., :num_prefix].masked_fill_(hidden[:, None, None], torch.finfo(dtype).min)
    return mask


def reference(shape, query, key, value, mask):
    """Stock, in fp64, with all heads repeated."""
    wide = (tensor.double() for tensor in (query, key, value, mask))
    return sdpa_attention_forward(layer(*shape[1:3]), *wide, scaling=0.2)[0]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("holes", [False, True])
def test_grouped_sdpa_equals_stock_with_the_full_mask(shape, dtype, holes):
    query, key, value = states(shape, dtype)
    mask = tree_mask(shape, dtype, holes=holes)
    folded = fold(mask, shape[1] // shape[2])
    found, weights = grouped_sdpa(layer(*shape[1:3]), query, key, value, folded, scaling=0.2)
    assert weights is None
    assert found.dtype is dtype
    assert found.is_contiguous()
    error = (found - reference(shape, query, key, value, mask)).abs().max().item()
    assert error <= TOLERANCE[dtype], f"off by {error:.1e}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grouped_sdpa_is_as_near_as_stock_in_16_bit(shape):
    """Bit for bit on some CPUs; where a kernel's blocks depend on the number of rows, a last digit may differ."""
    query, key, value = states(shape, torch.bfloat16)
    mask = tree_mask(shape, torch.bfloat16, holes=True)
    stock = sdpa_attention_forward(layer(*shape[1:3]), query, key, value, mask, scaling=0.2)[0]
    found = grouped_sdpa(layer(*shape[1:3]), query, key, value, fold(mask, shape[1] // shape[2]), scaling=0.2)[0]
    step = 2.0**-7 * stock.float().abs().clamp(min=2.0**-7)
    assert ((found.float() - stock.float()).abs() <= step).all(), "folded rows round differently from stock's"
    assert (found == stock).float().mean() > 0.95


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_grouped_sdpa_of_a_root_needs_no_mask(dtype):
    shape = (2, 14, 2, 64, 300, 1)
    query, key, value = states(shape, dtype)
    without = TreeAttention.without_mask(7, query.device)
    found = grouped_sdpa(layer(14, 2), query, key, value, without, scaling=0.2)[0]
    zeros = torch.zeros(2, 1, 1, 301, dtype=dtype)
    error = (found - reference(shape, query, key, value, zeros)).abs().max().item()
    assert error <= TOLERANCE[dtype], f"off by {error:.1e}"
    if has_transformers("5.15"):  # older ones ignore it
        biased = {"position_bias": torch.randn(1, 14, 1, 301, dtype=dtype)}
        expected = sdpa_attention_forward(layer(14, 2), query, key, value, zeros, **biased)[0]
        assert torch.equal(grouped_sdpa(layer(14, 2), query, key, value, without, **biased)[0], expected)


def test_grouped_sdpa_unfolds_masks_under_dropout_and_position_bias():
    shape = (1, 4, 2, 8, 30, 6)
    query, key, value = states(shape, torch.float64)
    mask = tree_mask(shape, torch.float64)
    bias = torch.randn(1, 4, 6, 36, dtype=torch.float64)
    expected = sdpa_attention_forward(layer(4, 2), query, key, value, mask, position_bias=bias)[0]
    found = grouped_sdpa(layer(4, 2), query, key, value, fold(mask, 2), position_bias=bias)[0]
    assert torch.equal(found, expected)
    torch.manual_seed(1)
    expected = sdpa_attention_forward(layer(4, 2), query, key, value, mask, dropout=0.5)[0]
    torch.manual_seed(1)
    found = grouped_sdpa(layer(4, 2), query, key, value, fold(mask, 2), dropout=0.5)[0]
    assert torch.equal(found, expected)
    if has_transformers("5.21"):  # older ones ignore it
        with pytest.raises(ValueError, match="softcap"):
            grouped_sdpa(layer(4, 2), query, key, value, fold(mask, 2), softcap=30.0)


@pytest.mark.parametrize("mask", [None, "2 heads", "bool", "one query"])
def test_grouped_sdpa_passes_foreign_masks_to_stock(mask, monkeypatch):
    shape = (1, 4, 2, 8, 30, 1 if mask == "one query" else 6)
    query, key, value = states(shape, torch.float64)
    given = {
        None: None,
        "2 heads": torch.zeros(1, 4, 6, 36, dtype=torch.float64),
        "bool": torch.ones(1, 1, 6, 36, dtype=torch.bool),
        "one query": torch.zeros(1, 1, 1, 31, dtype=torch.float64),
    }[mask]
    seen = []
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *a, **k: seen.append((a, k)))
    module = layer(4, 2)
    grouped_sdpa(module, query, key, value, given, scaling=0.1, is_causal=False)
    ((arguments, options),) = seen
    assert arguments[0] is module
    assert all(found is put for found, put in zip(arguments[1:], (query, key, value, given), strict=True))
    assert options == {"scaling": 0.1, "is_causal": False}


# The model's forward.


def scored(model, rows, tree, form, monkeypatch, ragged):
    """Behind left-padded texts; ragged: rows have different lengths in the cache as well."""
    monkeypatch.setenv("HF_SPECULATE_ATTENTION", form)
    scorer, positions = prefilled(model, rows)
    if ragged:
        scorer.cache.truncate([max(map(len, rows)) - row for row in range(len(rows))])
    assert scorer.attention.form == form
    return scorer(tree, positions).logits


ROWS = {
    "single": [[3, 1, 4, 1, 5, 9, 2, 6]],
    "equal": [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]],
    "padded": [[3, 1, 4, 1, 5], [9, 2], [6]],
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("nodes", [1, 12])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_grouped_sdpa_gives_trees_the_logits_of_stock_attention(
    tiny_model, random_tree, architecture, nodes, rows, ragged, monkeypatch
):
    model, texts = tiny_model(architecture, dtype=torch.float64), ROWS[rows]
    tree = random_tree(3, len(texts), VOCAB_SIZE, max_nodes=nodes - 1)
    expected = scored(model, texts, tree, "stock", monkeypatch, ragged=ragged)
    error = (scored(model, texts, tree, "folded", monkeypatch, ragged=ragged) - expected).abs().max().item()
    assert error <= 1e-12, f"off by {error:.1e}"


def test_grouped_sdpa_equals_stock_for_levels_after_cached_nodes(tiny_model, monkeypatch):
    """A drafter that grows a tree runs a part of its nodes."""
    model = tiny_model("llama", dtype=torch.float64)
    tree = DraftTree(torch.tensor([[7, 8, 9, 10, 11]]), [-1, 0, 0, 1, 2])
    found = {}
    for form in ("stock", "folded"):
        monkeypatch.setenv("HF_SPECULATE_ATTENTION", form)
        scorer, positions = prefilled(model, ROWS["single"])
        scorer(tree.first(2), positions)
        found[form] = scorer(tree, positions, num_cached=3).logits
    error = (found["folded"] - found["stock"]).abs().max().item()
    assert error <= 1e-12, f"off by {error:.1e}"


def test_tree_attention_form_follows_device_and_model(tiny_model, monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    llama = tiny_model("llama")
    assert TreeAttention(llama, cpu).form == "folded", "measured to win on a CPU"
    assert TreeAttention(llama, gpu).form == "stock", "not measured on a GPU"
    assert TreeAttention(tiny_model("llama", attention="eager"), cpu).form == "stock"
    alone = copy.deepcopy(llama)
    for decoder_layer in alone.model.layers:
        decoder_layer.self_attn.num_key_value_groups = 1
    assert TreeAttention(alone, cpu).form == "stock", "nothing is repeated"
    monkeypatch.setenv("HF_SPECULATE_ATTENTION", "folded")
    assert TreeAttention(llama, gpu).form == "folded"
    assert TreeAttention(tiny_model("llama", attention="eager"), cpu).form == "stock"
    monkeypatch.setenv("HF_SPECULATE_ATTENTION", "flash")
    with pytest.raises(SpeculateError, match=r"'flash'.*stock, folded, kernel"):
        TreeAttention(llama, cpu)


def test_install_attention_leaves_a_foreign_sdpa_alone(tiny_model):
    model = tiny_model("llama")
    install_attention()
    assert head_groups(model) == 2

    def foreign(*args, **kwargs):
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("sdpa", foreign)
    try:
        install_attention()
        assert AttentionInterface()["sdpa"] is foreign
        assert head_groups(model) == 0, "folded masks would reach a function that does not know them"
    finally:
        AttentionInterface.register("sdpa", grouped_sdpa)


def test_attention_is_installed_by_the_first_speculative_request(tiny_model):
    model = tiny_model("llama")
    TreeAttention(model, torch.device("cpu"))
    assert AttentionInterface()["sdpa"] is grouped_sdpa
    hf_speculate.uninstall()
    try:
        assert AttentionInterface()["sdpa"] is sdpa_attention_forward
    finally:
        hf_speculate.install()
    prompt = torch.tensor(ROWS["single"])
    model.generate(prompt, max_new_tokens=1)
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward
    model.generate(prompt, max_new_tokens=1, speculator="prompt_lookup")
    assert AttentionInterface()["sdpa"] is grouped_sdpa


def test_grouped_sdpa_is_right_in_several_threads(tiny_model):
    """One thread speculates, another runs plain batches with a mask: neither sees the other's attention."""
    model = tiny_model("llama", dtype=torch.float64)
    prompt = torch.tensor(ROWS["single"])
    batch = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]])
    mask = (batch > 0).long()
    request = {"max_new_tokens": 24, "do_sample": False}
    plain = model.generate(batch, attention_mask=mask, **request)
    expected = model.generate(prompt, **request)
    wrong = []

    def speculate():
        for seed in range(6):
            drafter = RandomDrafter(vocab_size=VOCAB_SIZE, seed=seed)
            found = model.generate(prompt, speculator=Speculator(drafter), **request)
            wrong.extend(["speculative"] * (not torch.equal(found, expected)))

    def run_plain():
        for _ in range(6):
            found = model.generate(batch, attention_mask=mask, **request)
            wrong.extend(["plain"] * (not torch.equal(found, plain)))

    threads = [threading.Thread(target=target) for target in (speculate, run_plain)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, f"texts changed: {wrong}"
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grouped_sdpa_equals_stock_on_a_gpu(shape, dtype):
    query, key, value = states(shape, dtype, "cuda")
    mask = tree_mask(shape, dtype, device="cuda")
    folded = fold(mask, shape[1] // shape[2])
    found = grouped_sdpa(layer(*shape[1:3]), query, key, value, folded, scaling=0.2)[0]
    expected = reference(shape, *(tensor.cpu() for tensor in (query, key, value, mask)))
    error = (found.cpu() - expected).abs().max().item()
    assert error <= TOLERANCE[dtype], f"off by {error:.1e}"
