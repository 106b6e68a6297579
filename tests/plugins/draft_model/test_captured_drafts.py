"""Captured drafts of a draft model: those of the session's own loop of forwards, round by round, and the same text."""

from __future__ import annotations

import copy
import random
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from hf_speculate import Speculator, tree
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.drafting import DraftRequest, DraftState, ranking
from hf_speculate.graphs.graph_runner import GraphRunner, graphs_of
from hf_speculate.stats import RunnerRecord
from hf_speculate_plugins import trees
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions
from hf_speculate_plugins.draft_model.session import DraftModelSession

from ...support.captured_drafts import assert_alike, drafts_of, place_of, unwrap_functions
from ...support.inputs import padded_batch
from ...support.models import build_tiny_gpt2, build_tiny_model
from ...support.replays import stand_in
from ...support.tiers import quick


pytestmark = pytest.mark.usefixtures("unchecked_shapes")

GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 40}
REQUEST = {"max_new_tokens": 32, **GREEDY}
SHAPES = {"chain": {"depth": 5}, "tree": {"depth": 3, "top_k": 3, "max_nodes": 9}}
KINDS = ["cpu", "pretended device"]
LENGTHS = pytest.mark.parametrize("lengths", [(12,), (9, 4, 13)], ids=["1 row", "3 rows left padded"])
SAMPLING = pytest.mark.parametrize("sampling", quick([GREEDY, SAMPLED], SAMPLED), ids=["greedy", "sampled"])
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES)


@cache
def target() -> Any:
    return build_tiny_model("qwen2", max_positions=2048)


@cache
def similar_model(vocab_size: int = 0) -> Any:
    """A draft model whose drafts the target accepts in part: its weights are nearly the target's."""
    model, generator = copy.deepcopy(target()), torch.Generator().manual_seed(1)
    if vocab_size:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    for parameter in model.parameters():
        parameter.data += 0.09 * parameter.std().nan_to_num() * torch.randn(parameter.shape, generator=generator)
    return model.requires_grad_(False)


def drafter_of(shape, model):
    return DraftModelDrafter(model, DraftModelOptions(**SHAPES[shape]))


@pytest.fixture(params=quick(KINDS))
def place(request, monkeypatch):
    with place_of(request.param, monkeypatch) as place:
        yield place


def assert_same_drafts(place, shape, batch, request, model=None):
    """Compares captured drafts with plain ones. Returns the recorded, and their drafter."""
    model = model or similar_model()
    expected = drafts_of(DraftModelSession, target(), drafter_of(shape, model), batch, request, compile=False)
    drafter = drafter_of(shape, place.put(model))  # its own model: recordings stay with it
    found = drafts_of(DraftModelSession, place.put(target()), drafter, batch, request)
    assert_alike(found, expected)
    assert "model_draft" in place.replays.names
    return found, drafter


@SAMPLING
@LENGTHS
@EACH_SHAPE
def test_drafts_are_those_of_the_plain_path(place, prompt, lengths, shape, sampling):
    batch, request = padded_batch(prompt, lengths), {**REQUEST, **sampling}
    found, _ = assert_same_drafts(place, shape, batch, request)
    torch.manual_seed(5)
    assert found.text == target().generate(**batch, **request).tolist()
    assert place.replays.num_replayed > len(found.rounds)
    rates = list(found.stats.acceptance_rate_by_depth.values())
    assert rates[0] > 0.4
    assert rates[-1] < 0.7, "the test is about drafts that are accepted in part"


@EACH_SHAPE
def test_recorded_drafts_are_plain_after_rows_end(place, prompt, shape):
    batch = padded_batch(prompt, (9, 4, 13))
    texts = target().generate(**batch, **REQUEST)[:, batch["input_ids"].shape[1] :].tolist()
    end = next(token for token in texts[0][4:] if sum(token in text for text in texts) < 3)
    request = {**REQUEST, "eos_token_id": end, "pad_token_id": 0}
    found, _ = assert_same_drafts(place, shape, batch, request)
    assert len({len(rows) for rows in found.rounds}) > 1, "no row ended before the others"


@pytest.mark.parametrize("vocab_size", [90, 110])
@SAMPLING
@EACH_SHAPE
def test_recorded_drafts_are_plain_with_another_vocabulary_size(place, prompt, vocab_size, sampling, shape):
    ids = torch.cat([prompt(9), torch.tensor([[95]])], dim=1)  # 95 is beyond the smaller vocabulary
    assert_same_drafts(place, shape, {"input_ids": ids}, {**REQUEST, **sampling}, similar_model(vocab_size))


@EACH_SHAPE
def test_recorded_drafts_move_to_a_larger_capacity(place, prompt, shape):
    batch, request = {"input_ids": prompt(490)}, {**REQUEST, "max_new_tokens": 48}
    _, drafter = assert_same_drafts(place, shape, batch, request)
    keys: list = [key for name, key in graphs_of(drafter.model, None).by_key if name == "model_draft"]
    assert {key[1] for key in keys} == {512, 1024}


@EACH_SHAPE
@pytest.mark.parametrize("first_compile", [None, False], ids=["recorded", "plain"])
def test_recorded_drafts_are_plain_in_a_second_turn(place, prompt, shape, first_compile):
    """The session of the first turn leaves its cache to that of the second, recorded or not."""

    def second_turn(model, draft_model, compiles):
        drafter, device = drafter_of(shape, draft_model), model.device
        first = model.generate(
            prompt(12).to(device),
            **REQUEST,
            return_dict_in_generate=True,
            speculator=Speculator(drafter, adaptive=False, compile=compiles[0]),
        )
        ids = torch.cat([first.sequences, prompt(5, seed=1).to(device)], dim=1)
        request = {**REQUEST, **as_cache(cache_of(first))}
        return drafts_of(DraftModelSession, model, drafter, {"input_ids": ids}, request, compile=compiles[1])

    expected = second_turn(target(), similar_model(), (False, False))
    found = second_turn(place.put(target()), place.put(similar_model()), (first_compile, None))
    assert_alike(found, expected)
    assert "model_draft" in place.replays.names


def test_later_requests_record_nothing(place, prompt):
    model, drafter = place.put(target()), drafter_of("chain", place.put(similar_model()))
    num_captured = []
    for length in (9, 20, 14):
        model.generate(prompt(length).to(place.name), **REQUEST, speculator=Speculator(drafter))
        num_captured.append(place.replays.names.count("model_draft"))
    assert num_captured[0] == num_captured[2]


@pytest.mark.parametrize(("shape", "rate"), [("chain", 0.3), ("tree", 0.8)])
def test_recorded_drafts_recover_from_states_that_are_not_finite(place, prompt, shape, rate):
    """The token's entries stay in static buffers, unseen. They spoil the draft that they are in, and no later one."""
    model = copy.deepcopy(similar_model())
    expected = target().generate(prompt(12), **REQUEST)
    tokens = expected[0, 12:].tolist()
    bad = next(token for token in range(3, 96) if token not in tokens)
    model.model.embed_tokens.weight[bad] = torch.nan
    model.lm_head.weight[bad] = 1.05 * model.lm_head.weight[max(tokens, key=tokens.count)]
    speculator = Speculator(drafter_of(shape, place.put(model)), adaptive=False)
    found = place.put(target()).generate(prompt(12).to(place.name), **REQUEST, speculator=speculator)
    assert found.tolist() == expected.tolist()
    assert speculator.stats.acceptance_rate_by_depth[1] > rate


class Stranger:
    """Accepts and rejects the drafts of two sessions for one request, of which the second records.

    Attributes:
        fallbacks: what was not recorded.
    """

    def __init__(self, prompt, lengths, shape, seed):
        model, batch = copy.deepcopy(similar_model()).double(), padded_batch(prompt, lengths)
        drafter = drafter_of(shape, model)
        facts = {"target": model, "input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        self.fallbacks = Counter()
        runner = GraphRunner(None, self.fallbacks)
        record = RunnerRecord(fallbacks=self.fallbacks, subject="draft ")
        of_graph = DraftRequest(**facts, graph_runner=runner, record=record)
        self._sessions = drafter.start(DraftRequest(**facts)), drafter.start(of_graph)
        self._choose = random.Random(seed)
        self._texts = [[self._any()] for _ in lengths]
        known = torch.cat([batch["input_ids"][:, 1:], torch.tensor(self._texts)], dim=1)
        for session in self._sessions:
            session.observe(known, {}, torch.full((len(lengths),), max(lengths)))

    def _any(self):
        return self._choose.randrange(3, 96)

    def drafts(self, active):
        state = DraftState(
            root_ids=torch.tensor([text[-1] for text in self._texts]),
            active=active,
            max_depth=self._choose.choice([1, 2, 3, 9]),
            chains_only=self._choose.random() < 0.2,
            num_emitted=tuple(map(len, self._texts)),
        )
        return [session.draft(state) for session in self._sessions]

    def judge(self, drafted, active):
        """Accepts some way down a draft, then any token. Now and then several rounds without a draft follow."""
        for _ in range(1 if self._choose.random() < 0.8 else 9):
            new = [self._accepted(drafted, row) if runs else [] for row, runs in enumerate(active)]
            drafted, width = None, max(map(len, new))
            tokens = torch.tensor([row + [0] * (width - len(row)) for row in new])
            for text, row in zip(self._texts, new, strict=True):
                text += row
            for session in self._sessions:
                session.observe(tokens, {}, torch.tensor([len(row) for row in new]))

    def _accepted(self, drafted, row):
        node, tokens = 0, []
        while drafted is not None and self._choose.random() < 0.8:
            children = [n for n, parent in enumerate(drafted.host.parents[row]) if parent == node]
            if not children:
                break
            node = self._choose.choice(children)
            tokens.append(drafted.host.token_ids[row][node])
        return [*tokens, self._any()]


@LENGTHS
@EACH_SHAPE
@pytest.mark.parametrize("seed", quick(range(6), 0, 1))
@torch.no_grad()
def test_recorded_drafts_are_plain_after_any_rejections(monkeypatch, prompt, lengths, shape, seed):
    replays, stranger = stand_in(monkeypatch), Stranger(prompt, lengths, shape, seed)
    for round in range(24):
        active = tuple(row != 1 or round < 12 for row in range(len(lengths)))
        drafts = stranger.drafts(active)
        plain, recorded = (drafted.host for drafted in drafts)
        assert plain.values
        assert recorded.values
        for row in (row for row, runs in enumerate(active) if runs):
            assert recorded.token_ids[row] == plain.token_ids[row]
            assert list(recorded.parents[row]) == list(plain.parents[row])
            assert recorded.values[row] == pytest.approx(plain.values[row], abs=1e-5)
        stranger.judge(drafts[0], active)
    assert replays.num_replayed > 15
    assert not stranger.fallbacks


def hooked():
    model = copy.deepcopy(similar_model())
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    return model


PROBLEMS = {
    "not every layer of MistralForCausalLM keeps all of the text": lambda: build_tiny_model(
        "mistral", sliding_window=8
    ),
    "positions without RoPE": lambda: build_tiny_gpt2(num_positions=128),
    "RoPE that depends on the longest position": lambda: build_tiny_model(
        rope=(("rope_type", "dynamic"), ("rope_theta", 1e4), ("factor", 2.0))
    ),
    "hooks on the model, which a replay would not call": hooked,
}


@EACH_SHAPE
@pytest.mark.parametrize("problem", PROBLEMS)
def test_draft_model_with_a_problem_is_not_recorded(monkeypatch, prompt, problem, shape):
    replays, speculator = stand_in(monkeypatch), Speculator(drafter_of(shape, PROBLEMS[problem]()), adaptive=False)
    found = target().generate(prompt(12), **REQUEST, speculator=speculator)
    assert torch.equal(found, target().generate(prompt(12), **REQUEST))
    assert "model_draft" not in replays.names
    assert speculator.stats.fallbacks == {f"draft not recorded: {problem}": 1}


def test_draft_model_on_another_device_is_not_recorded(monkeypatch, prompt):
    with place_of("pretended device", monkeypatch) as place:
        speculator = Speculator(drafter_of("chain", similar_model()), adaptive=False)
        found = place.put(target()).generate(prompt(12).to(place.name), **REQUEST, speculator=speculator)
        assert found.tolist() == target().generate(prompt(12), **REQUEST).tolist()
        assert set(place.replays.names) == {"tree_forward"}
        assert speculator.stats.fallbacks == {"draft not recorded: another device than the target's": 1}


def test_drafts_made_ahead_are_not_recorded(monkeypatch, prompt):
    replays, speculator = stand_in(monkeypatch), Speculator(drafter_of("chain", similar_model()), ahead=True)
    found = target().generate(prompt(12), **REQUEST, speculator=speculator)
    assert torch.equal(found, target().generate(prompt(12), **REQUEST))
    assert "model_draft" not in replays.names


class TestCompiled:
    @pytest.fixture(autouse=True)
    def _without_checks(self, fresh_dynamo, monkeypatch):
        """The target is not compiled."""
        monkeypatch.setattr("hf_speculate.request.preparation.with_graphs", lambda scorer, *_args, **_options: scorer)
        unwrap_functions(monkeypatch, (trees, ranking, tree))

    @pytest.mark.parametrize("sampling", quick([GREEDY, SAMPLED], SAMPLED), ids=["greedy", "sampled"])
    @pytest.mark.parametrize("lengths", quick([(12,), (9, 4, 13)], (9, 4, 13)), ids=["1 row", "3 rows left padded"])
    @EACH_SHAPE
    def test_drafts_are_those_of_the_plain_path(self, prompt, lengths, shape, sampling):
        drafter, found = drafter_of(shape, copy.deepcopy(similar_model())), []
        for compile in (False, "eager"):
            batch, request = padded_batch(prompt, lengths), {**REQUEST, **sampling}
            found.append(drafts_of(DraftModelSession, target(), drafter, batch, request, compile=compile))
        assert_alike(found[1], found[0])
        names = [name for name, _ in graphs_of(drafter.model, "eager").by_key]
        assert set(names) == {"model_draft"}
        assert len(names) <= 2
