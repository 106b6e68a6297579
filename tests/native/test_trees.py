"""Draft trees on packed models: visible ranges are read off the tree itself, and entries are moved in one call."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_speculate.attention import TreeMask
from hf_speculate.attention.ranges import ranges_of_trees
from hf_speculate.cache import TreeCache, as_cache
from hf_speculate.forward import Scorer
from hf_speculate.tree import DraftTree, TreePlan, additive
from hf_speculate_gguf import load_model
from hf_speculate_gguf.native import binding as native
from hf_speculate_gguf.native.layers import ranges_of_mask

from ..support.packed import ids


pytestmark = [pytest.mark.rest, pytest.mark.usefixtures("needs_kernel")]

BINARY = [-1, 0, 0, 1, 1, 2, 2, 5]
LATE = [-1, 0, 0, 2, 2, 1, 4, 6]
PADDED = [-1, 0, 1, 2, -2, -2, -2, -2]


@pytest.fixture(scope="module")
def model(packed_file):
    return load_model(packed_file("llama", "Q4_0", (4, 2), True), dtype=torch.bfloat16, backend="native")


def tree_of(*parents):
    count = len(parents[0])
    tokens = torch.arange(len(parents) * count).view(len(parents), count) + 2
    return DraftTree(tokens, [list(row) for row in parents])


def scorer_of(model, batch_size, length=11):
    cache = TreeCache(DynamicCache(config=model.config), batch_size)
    with torch.no_grad():
        model(ids(batch_size, length), **as_cache(cache.cache), use_cache=True)
    cache.commit_appended()
    return Scorer(model, cache)


def score(scorer, tree):
    with torch.no_grad():
        return scorer(tree, [scorer.cache.append_index] * tree.batch_size).logits


@pytest.fixture
def masks(monkeypatch):
    """What the model is given as a mask."""
    found, original = [], Scorer.arranged_mask
    monkeypatch.setattr(Scorer, "arranged_mask", lambda *a: found.append(original(*a)) or found[-1])
    return found


@pytest.mark.parametrize("parents", [(BINARY,), (BINARY, LATE), (PADDED, LATE, BINARY), ([-1, 0],)], ids=str)
def test_visible_ranges_of_a_tree_equal_those_of_its_mask(parents):
    visible = TreePlan.from_parents(parents).ancestors
    for num_before in (0, 1, 40):
        mask = torch.cat([torch.ones(*visible.shape[:2], num_before, dtype=torch.bool), visible], dim=2)
        expected = ranges_of_mask(additive(mask, torch.float32)[:, None], *visible.shape[:2], mask.shape[2])
        offsets, ranges = ranges_of_trees(parents, [0] * len(parents), [num_before] * len(parents), num_before)
        if num_before:
            assert torch.equal(offsets, expected[0])
            assert torch.equal(ranges, expected[1][: len(ranges)])
        else:  # an empty range of nothing before
            assert (ranges[:, 1] >= ranges[:, 0]).all()


@pytest.mark.parametrize("parents", [(BINARY, LATE), (PADDED, LATE)], ids=str)
@pytest.mark.parametrize(
    ("starts", "lengths"), [((0, 3), (9, 9)), ((0, 0), (9, 4)), ((2, 0), (5, 9)), ((8, 0), (9, 1))]
)
def test_ranges_of_trees_after_rows_of_several_lengths(starts, lengths, parents):
    visible = TreePlan.from_parents(parents).ancestors
    entries = torch.arange(9)
    prefix = torch.stack([(start <= entries) & (entries < end) for start, end in zip(starts, lengths, strict=True)])
    mask = torch.cat([prefix[:, None].expand(-1, visible.shape[1], -1), visible], dim=2)
    offsets, ranges = ranges_of_mask(additive(mask, torch.float32)[:, None], *visible.shape[:2], mask.shape[2])
    found = ranges_of_trees(parents, starts, lengths, 9)
    assert torch.equal(found[0], offsets)
    assert torch.equal(found[1], ranges[: offsets[-1]])


@pytest.mark.parametrize("num_nodes", [1, 8])
@pytest.mark.parametrize("holes", ["left padding", "rows of several lengths", "both", "in the prompt"])
def test_logits_of_ragged_rows_are_those_behind_a_mask(holes, num_nodes, model, masks, monkeypatch):
    def scored():
        mask = torch.ones(2, 11, dtype=torch.bool)
        if holes in ("left padding", "both"):
            mask[1, :3] = False
        if holes == "in the prompt":
            mask[1, 4:6] = False
        cache = TreeCache(DynamicCache(config=model.config), 2)
        with torch.no_grad():
            model(ids(2, 11), attention_mask=mask.long(), **as_cache(cache.cache), use_cache=True)
        cache.commit_appended()
        scorer = Scorer(model, cache, mask)
        if holes in ("rows of several lengths", "both"):
            score(scorer, tree_of(BINARY, BINARY))
            cache.keep([[0], [0, 1, 3]])
        masks.clear()
        positions = [int(row.sum()) + length - 11 for row, length in zip(mask, cache.lengths, strict=True)]
        tree = DraftTree.root_only(ids(2, 1)[:, 0]) if num_nodes == 1 else tree_of(BINARY, LATE)
        with torch.no_grad():
            return scorer(tree, positions).logits

    found = scored()
    assert [type(mask) for mask in masks] == [torch.Tensor if holes == "in the prompt" else TreeMask]
    monkeypatch.setattr("hf_speculate.forward.scorer.takes_tree_masks", lambda _: False)
    assert torch.equal(found, scored())


@pytest.mark.parametrize("parents", [(BINARY,), (BINARY, LATE), (PADDED, LATE)], ids=str)
def test_tree_mask_gives_the_logits_of_an_additive_mask(parents, model, masks, monkeypatch):
    tree = tree_of(*parents)
    found = score(scorer_of(model, len(parents)), tree)
    monkeypatch.setattr("hf_speculate.forward.scorer.takes_tree_masks", lambda _: False)
    expected = score(scorer_of(model, len(parents)), tree)
    assert [type(mask) for mask in masks] == [TreeMask, torch.Tensor]
    assert torch.equal(found, expected)


def test_tree_mask_is_additive_for_the_modules(model, masks, monkeypatch):
    """Where the kernel does not compute, as for whoever looks into a layer."""
    hook = model.model.layers[0].register_forward_pre_hook(lambda *_: None)
    try:
        found = score(scorer_of(model, 1), tree_of(BINARY))
        monkeypatch.setattr("hf_speculate.forward.scorer.takes_tree_masks", lambda _: False)
        expected = score(scorer_of(model, 1), tree_of(BINARY))
    finally:
        hook.remove()
    assert [type(mask) for mask in masks] == [TreeMask, torch.Tensor]
    assert torch.equal(found, expected)


def test_tree_mask_is_additive_for_hooks_on_the_model(model, masks):
    seen = []
    hook = model.register_forward_pre_hook(
        lambda _m, _a, named: seen.append(named.get("attention_mask")), with_kwargs=True
    )
    try:
        scorer = scorer_of(model, 1)
        score(scorer, tree_of(BINARY))
    finally:
        hook.remove()
    assert isinstance(seen[-1], torch.Tensor)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("path", [[0, 2, 5], [0, 1, 4], [0, 2, 5, 7], [1, 2, 3]], ids=str)
def test_move_entries_equals_the_move_by_cache_layers(path, batch_size, model, monkeypatch):
    moved, move = [], native.library().move
    monkeypatch.setattr(native.library(), "move", lambda *a: moved.append(1) or move(*a))
    states = []
    for is_native in (True, False):
        scorer = scorer_of(model, batch_size)
        score(scorer, tree_of(*[BINARY] * batch_size))
        if not is_native:
            scorer.cache.mover = None
        scorer.cache.keep([path] * batch_size)
        states.append([state.clone() for layer in scorer.cache.cache.layers for state in (layer.keys, layer.values)])
    assert moved == [1]
    assert all(map(torch.equal, *states))


def test_move_entries_leaves_replaced_buffers_to_cache_layers(model, monkeypatch):
    monkeypatch.setattr(native.library(), "move", lambda *_: pytest.fail("these are other buffers"))
    scorer = scorer_of(model, 1)
    score(scorer, tree_of(BINARY))
    layer = scorer.cache.cache.layers[1]
    layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    before = layer.keys.clone()
    scorer.cache.keep([[0, 2, 5]])
    assert torch.equal(layer.keys[:, :, -2:], before[:, :, [11 + 2, 11 + 5]])
