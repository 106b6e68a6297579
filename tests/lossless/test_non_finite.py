"""Drafted tokens whose states are not finite: rejected as any other, and nothing of them reaches the text."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from hf_speculate import Speculator
from hf_speculate.cache import as_cache
from hf_speculate.drafting import Drafter, DraftSession
from hf_speculate.tree import DraftTree
from hf_speculate_gguf import load_model
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions

from ..support.inputs import padded_batch, random_prompt
from ..support.models import CHAIN_ONLY, VOCAB_SIZE, build_tiny_lfm2, build_tiny_model
from ..support.random_gguf import FileShape, one_type, write_random_file
from ..support.tiers import quick


BAD = VOCAB_SIZE - 1
NEW_TOKENS = 20
BROKEN = {"NaN": float("nan"), "infinite": float("inf"), "overflowing": 3e38}


class BadDrafter(Drafter):
    """Drafts right tokens, and in every second round for some rows the bad one beside them, or in chains instead."""

    name = "bad"

    def __init__(self, prompts, text):
        self._text = [row[prompts.shape[1] :] for row in text.tolist()]

    @classmethod
    def for_target(cls, target, **options):
        raise NotImplementedError

    def start(self, request):
        return BadSession(self._text)


class BadSession(DraftSession):
    def __init__(self, text):
        self._text, self._num_drafts = text, 0

    def observe(self, tokens, features, lengths):
        pass

    def draft(self, state):
        self._num_drafts += 1
        rows = [self._drafted(row, root, state) for row, root in enumerate(state.root_ids.tolist())]
        return DraftTree.from_rows(rows).pruned([state.max_depth] * len(rows))

    def _drafted(self, row, root, state):
        right = self._text[row][state.num_emitted[row] : state.num_emitted[row] + 2]
        if self._num_drafts % 2 or row % 2:
            return [root, *right], range(-1, len(right))
        if state.chains_only:
            return [root, BAD, BAD], range(-1, 2)
        return [root, BAD, *right], [-1, 0, 0, 2][: 2 + len(right)]


TARGETS = {
    "sdpa, folded masks": lambda: build_tiny_model(),
    "eager": lambda: build_tiny_model(attention="eager"),
    "sliding windows": lambda: build_tiny_model("mistral", sliding_window=8),
    "an attention that takes no trees": lambda: build_tiny_model(attention=CHAIN_ONLY),
    "recurrent layers": build_tiny_lfm2,
}

pytestmark = pytest.mark.usefixtures("chain_only")


def broken(model, value):
    """A copy in which a row of the embedding is not finite, which stock never reads."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = value
        model.get_output_embeddings().weight[BAD] = 0
    return model


def generate(model, inputs, speculator, seed=3, **request):
    torch.manual_seed(seed)
    options = {"suppress_tokens": [BAD], "max_new_tokens": NEW_TOKENS, "pad_token_id": 0, **request}
    return model.generate(**inputs, **options, speculator=speculator)


def assert_same_text(model, lengths, sampled, compile=False, **request):
    inputs = padded_batch(random_prompt, lengths)
    plain = generate(model, inputs, None, do_sample=sampled, **request)
    speculator = Speculator(BadDrafter(inputs["input_ids"], plain), adaptive=False, compile=compile)
    assert torch.equal(generate(model, inputs, speculator, do_sample=sampled, **request), plain)
    return speculator.stats


@pytest.mark.parametrize("value", quick(BROKEN))
@pytest.mark.parametrize("lengths", [(9,), (9, 4, 7)], ids=["one row", "a padded batch"])
@pytest.mark.parametrize("name", TARGETS)
def test_text_is_plain_with_drafts_that_are_not_finite(name, lengths, value):
    model = broken(TARGETS[name](), BROKEN[value])
    for sampled in (False, True):
        stats = assert_same_text(model, lengths, sampled)
        assert stats.accepted_tokens, "right drafts of other rounds are accepted"


@pytest.mark.parametrize("value", ["NaN", "infinite"])
def test_stock_attention_gives_plain_text(monkeypatch, value):
    monkeypatch.setenv("HF_SPECULATE_ATTENTION", "stock")
    assert_same_text(broken(build_tiny_model(), BROKEN[value]), (9, 4, 7), sampled=False)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_forwards_give_plain_text():
    stats = assert_same_text(broken(build_tiny_model(max_positions=2048), BROKEN["NaN"]), (9,), False, compile="eager")
    assert not [reason for reason in stats.fallbacks if "not finite" not in reason], "nothing was to run uncompiled"


def test_rounds_say_that_they_were_scored_again():
    stats = assert_same_text(broken(build_tiny_model(), BROKEN["NaN"]), (9,), sampled=False)
    assert any("not finite" in reason for reason in stats.fallbacks)
    stats = assert_same_text(broken(build_tiny_model(), 0.1), (9,), sampled=False)
    assert not stats.fallbacks, "what is finite is scored once"
    assert stats.accepted_tokens > NEW_TOKENS / 2


def test_a_row_of_the_output_matrix_that_is_not_finite_is_no_sign_of_it():
    """Its logit is NaN wherever one looks, in plain `generate` too."""
    model = copy.deepcopy(build_tiny_model())
    for row in (0, BAD):  # looked at, among others
        with torch.no_grad():
            model.get_output_embeddings().weight[row] = float("nan")
        stats = assert_same_text(model, (9,), sampled=False, suppress_tokens=[0, BAD])
        assert not stats.fallbacks


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_next_turn_sees_no_rejected_entries(speculative):
    """Behind the end of a shorter row lay nodes of its last drafts; the next turn masks them, and 0 x NaN is NaN."""
    model, inputs = broken(build_tiny_model(), BROKEN["NaN"]), padded_batch(random_prompt, (9, 4, 7, 9))
    turns = []
    for drafts in (False, True):
        text = generate(model, inputs, None, eos_token_id=list(range(3, 12)))
        cache = DynamicCache(config=model.config)
        speculator = Speculator(BadDrafter(inputs["input_ids"], text), adaptive=False) if drafts else None
        first = generate(model, inputs, speculator, eos_token_id=list(range(3, 12)), **as_cache(cache))
        assert all(layer.keys.isfinite().all() and layer.values.isfinite().all() for layer in cache.layers)
        new = (first[:, 9:] != 0).long()
        assert len(set(new.sum(1).tolist())) > 1, "rows that end at different steps are what this is about"
        more = random_prompt(4, seed=5).expand(4, -1)
        mask = torch.cat([inputs["attention_mask"], new, torch.ones_like(more)], dim=1)
        follows = {"input_ids": torch.cat([first, more], dim=1), "attention_mask": mask, **as_cache(cache)}
        second = RightDrafter(model) if drafts and speculative else None
        turns.append(generate(model, follows, second))
    assert torch.equal(*turns)


def RightDrafter(model):
    return Speculator(DraftModelDrafter(model, DraftModelOptions(depth=3)), adaptive=False)


def test_draft_model_with_a_broken_row_gives_plain_text():
    """It drafts what it can, and is wrong only in speed."""
    draft_model = broken(build_tiny_model(seed=1), float("nan"))
    with torch.no_grad():
        draft_model.get_output_embeddings().weight[BAD] = 10.0  # often the likeliest
    model, inputs = broken(build_tiny_model(), float("nan")), padded_batch(random_prompt, (9, 4, 7))
    speculator = Speculator(DraftModelDrafter(draft_model, DraftModelOptions(depth=3)), adaptive=False)
    assert torch.equal(generate(model, inputs, speculator), generate(model, inputs, None))


@pytest.mark.rest
@pytest.mark.usefixtures("needs_kernel")
@pytest.mark.parametrize("backend", ["native", "native-int8"])
def test_packed_targets_give_plain_text(tmp_path, backend):
    """The hook lets modules compute: in a file, values are finite."""
    shape = FileShape("llama", VOCAB_SIZE, 256, 512, 2, 4, 2, 512, False, 1.0, None)
    write_random_file(tmp_path / "model.gguf", shape, one_type("Q8_0"))
    model = load_model(tmp_path / "model.gguf", dtype=torch.float32, backend=backend)

    def break_one(module, inputs, output):
        return output.masked_fill((inputs[0] == BAD)[..., None], float("nan"))

    model.get_input_embeddings().register_forward_hook(break_one)
    for lengths in ((9,), (9, 4, 7)):
        assert_same_text(model, lengths, sampled=False)
