"""Heads whose forwards are compiled: the drafts of the plain head, and few graphs."""

from __future__ import annotations

import copy
import gc
from collections import Counter

import pytest
import torch
from torch._dynamo.utils import counters

from hf_speculate import Speculator, tree
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.drafting import DraftRequest, ranking
from hf_speculate.graphs.graph_runner import GraphRunner, graphs_of
from hf_speculate.stats import RunnerRecord
from hf_speculate_gguf import load_model
from hf_speculate_plugins import block, eagle, trees
from hf_speculate_plugins.eagle import EagleDrafter
from hf_speculate_plugins.heads import head as heads_head
from hf_speculate_plugins.medusa import MedusaDrafter, StaticTree
from hf_speculate_plugins.medusa.steps import CapturedSteps

from ..support.block_heads import random_block
from ..support.captured_drafts import unwrap_functions
from ..support.heads import (
    DEPTH,
    HIDDEN,
    MEDUSA_CHOICES,
    PLAIN,
    SHAPES,
    VOCAB,
    batch_of,
    extended_target,
    random_heads,
    target,
    write_head,
)
from ..support.random_gguf import FileShape, one_type, write_random_file


CHECKED = (
    *(eagle.head, eagle.steps, eagle.captured, block.head, block.steps, block.scores),
    *(heads_head, trees, ranking, tree),
)
# Shape checks are decorators that dynamo cannot trace.
pytestmark = pytest.mark.usefixtures("unchecked_shapes")


REQUEST = {**PLAIN, "max_new_tokens": 16}


@pytest.fixture(autouse=True)
def _without_checks(fresh_dynamo, monkeypatch):
    graphs_of(target(), "eager").by_key.clear()
    unwrap_functions(monkeypatch, CHECKED)


@pytest.fixture
def heads_only(monkeypatch):
    """The target is not compiled: that takes most of the time, and has its own tests."""
    monkeypatch.setattr("hf_speculate.request.preparation.with_graphs", lambda scorer, *_args, **_options: scorer)


def eagle(folder, layout="safeailab", shape="dynamic"):
    return EagleDrafter.from_folder(write_head(folder, layout), target(), **SHAPES[shape])


def medusa(outputs=None):
    return MedusaDrafter(random_heads(outputs=outputs), target(), tree=StaticTree.of(MEDUSA_CHOICES))


def assert_same_drafts(drafter, drafts, batch, model=None, **request):
    """Compiled and not: the same drafts, and the text of the target alone. Returns the compiled speculator."""
    model, texts, seen = model or target(), [], []
    compiled = Speculator(drafter, compile="eager")
    for speculator in (None, Speculator(drafter), compiled):
        torch.manual_seed(2)
        texts.append(model.generate(**batch, speculator=speculator, **REQUEST, **request).tolist())
        seen.append(list(drafts))
        drafts.clear()
    assert texts[0] == texts[1] == texts[2]
    assert len(seen[1]) > 2
    assert seen[1] == seen[2]
    assert not compiled.stats.fallbacks
    return compiled


@pytest.mark.parametrize("method", ["eagle1", "speculators", "dflash", "dspark", "dflash2"])
@pytest.mark.usefixtures("heads_only")
def test_targets_with_added_tokens(tmp_path, prompt, drafts, method):
    model = extended_target(factor=2.0)
    if method.startswith("d"):
        drafter = random_block(method, model)
    else:
        drafter = EagleDrafter.from_folder(write_head(tmp_path, method), model, **SHAPES["dynamic"])
    batch = batch_of(prompt, 3)
    batch["input_ids"][:, -3:] = VOCAB + 1
    assert_same_drafts(drafter, drafts, batch, model, sequence_bias={(VOCAB + 2,): 9.0}, do_sample=True)


# Those whose drafts are one graph, with and without entries to read.
WHOLE = {("safeailab", "dynamic"), ("safeailab", "chain"), ("eagle1", "dynamic")}


@pytest.mark.parametrize(
    ("layout", "shape", "size"),
    [
        ("safeailab", "dynamic", 1),
        ("safeailab", "dynamic", 3),
        ("safeailab", "chain", 3),
        ("speculators", "dynamic", 3),  # two layers, one of them with a window
        ("eagle1", "dynamic", 1),  # with the target's output matrix
        ("speculators-parallel", "dynamic", 3),  # its masks are a level
    ],
)
@pytest.mark.usefixtures("heads_only")
def test_eagle_drafts_what_it_drafts_uncompiled(tmp_path, prompt, drafts, layout, shape, size):
    drafter = eagle(tmp_path, layout, shape)
    assert_same_drafts(drafter, drafts, batch_of(prompt, size), do_sample=False)
    keys = list(graphs_of(drafter.head, "eager").by_key)
    wanted = {"eagle_draft"} if (layout, shape) in WHOLE else {"eagle_entries", "eagle_level"}
    assert {name for name, _ in keys} == wanted
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("kind", "size", "options"),
    [
        ("dspark", 1, {}),
        ("dspark", 3, {"top_k": 1}),
        ("dflash", 3, {}),
        ("gated", 1, {}),
        ("reduced", 1, {}),  # with a vocabulary of its own
        ("windows", 3, {}),  # two kinds of masks
        ("jetspec", 1, {}),
        ("rnn", 3, {}),
        ("dflash2", 3, {}),
        ("lilicorr", 3, {}),
    ],
)
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.usefixtures("heads_only")
def test_one_pass_heads_draft_what_they_draft_uncompiled(prompt, drafts, kind, size, options, do_sample):
    drafter = random_block(kind, target(), **options)
    graphs_of(drafter.head, "eager").by_key.clear()
    assert_same_drafts(drafter, drafts, batch_of(prompt, size), do_sample=do_sample)
    assert [name for name, _ in graphs_of(drafter.head, "eager").by_key] == ["block_draft"]


@pytest.mark.parametrize("outputs", [None, 0])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.usefixtures("heads_only")
def test_medusa_drafts_what_it_drafts_uncompiled(prompt, drafts, outputs, size):
    drafter = medusa(outputs)
    assert_same_drafts(drafter, drafts, batch_of(prompt, size), do_sample=False)
    assert len(graphs_of(drafter.heads, "eager").by_key) == 1, "cut trees need no other graph"


def test_sampled_requests_draft_alike_too(tmp_path, prompt, drafts):
    assert_same_drafts(eagle(tmp_path), drafts, batch_of(prompt, 1), do_sample=True, temperature=0.9)


@pytest.mark.usefixtures("heads_only")
def test_later_requests_compile_nothing_and_make_no_buffers(tmp_path, prompt, monkeypatch):
    made = []
    monkeypatch.setattr(torch._dynamo, "mark_static_address", lambda tensor, **_: made.append(tensor.shape))
    for drafter in (eagle(tmp_path), medusa()):
        speculator = Speculator(drafter, compile="eager")
        target().generate(prompt(12), speculator=speculator, do_sample=False, **REQUEST)
        num_graphs = counters["stats"]["unique_graphs"]
        gc.collect()  # what compiles holds the first request's cache in reference cycles for a while
        made.clear()
        target().generate(prompt(15), speculator=speculator, do_sample=False, **REQUEST)
        assert counters["stats"]["unique_graphs"] == num_graphs
        assert not any(512 in shape for shape in made), (drafter, made)


@pytest.mark.usefixtures("heads_only")
def test_the_next_turn_goes_on_compiled(tmp_path, prompt, drafts):
    """A conversation hands the head's cache, with its buffers, to the next request."""
    drafter, model, texts = eagle(tmp_path), target(), []
    for compile in (False, "eager"):
        speculator = Speculator(drafter, compile=compile)
        first = model.generate(
            prompt(12), speculator=speculator, do_sample=False, return_dict_in_generate=True, **REQUEST
        )
        second = torch.cat([first.sequences, prompt(5, seed=1)], dim=1)
        cache = cache_of(first)
        texts.append(
            model.generate(second, speculator=speculator, do_sample=False, **as_cache(cache), **REQUEST).tolist()
        )
        assert not speculator.stats.fallbacks
    half = len(drafts) // 2
    assert texts[0] == texts[1]
    assert drafts[:half] == drafts[half:]


@pytest.mark.parametrize(
    ("outputs", "backend", "is_compiled"), [(None, "inductor", 0), (0, "inductor", 1), (None, "eager", 1)]
)
def test_heads_that_inductor_would_slow_down_are_not_compiled(prompt, outputs, backend, is_compiled):
    fallbacks = Counter()
    runner, record = GraphRunner(backend, fallbacks), RunnerRecord(fallbacks=fallbacks, subject="draft ")
    request = DraftRequest(target=target(), input_ids=prompt(4), graph_runner=runner, record=record)
    session = medusa(outputs).start(request)
    assert isinstance(session._steps, CapturedSteps) == bool(is_compiled)
    assert bool(fallbacks) != bool(is_compiled)


@pytest.mark.usefixtures("heads_only")
def test_packed_matrices_of_a_gguf_target_are_a_part_of_the_graph(tmp_path, prompt):
    path = str(tmp_path / "packed.gguf")
    write_random_file(path, FileShape("llama", VOCAB, HIDDEN, 64, DEPTH, 4, 2, 256, is_tied=False), one_type("Q8_0"))
    model = load_model(path, dtype=torch.float32, backend="dequantize")
    head = EagleDrafter.from_folder(write_head(tmp_path / "head", "eagle1"), model, **SHAPES["dynamic"])
    assert head.head.shared == {"embed_tokens": model.model.embed_tokens, "lm_head": model.lm_head}
    speculator = Speculator(head, compile="eager")
    found = model.generate(prompt(9), speculator=speculator, do_sample=False, **REQUEST)
    assert torch.equal(found, model.generate(prompt(9), do_sample=False, **REQUEST))
    assert not speculator.stats.fallbacks
    assert graphs_of(head.head, "eager").by_key


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, prompt):
    model = copy.deepcopy(target()).to("cuda")
    heads = random_heads().to("cuda")
    for drafter in (
        EagleDrafter.from_folder(write_head(tmp_path), model, **SHAPES["dynamic"]),
        MedusaDrafter(heads, model, tree=StaticTree.of(MEDUSA_CHOICES)),
    ):
        for backend in (None, "eager", "inductor"):
            speculator = Speculator(drafter, compile=backend)
            text = prompt(12).to("cuda")
            for _ in range(3):  # compiled, captured, replayed
                found = model.generate(text, speculator=speculator, do_sample=False, **REQUEST)
                assert torch.equal(found, model.generate(text, do_sample=False, **REQUEST))
            assert not speculator.stats.fallbacks
