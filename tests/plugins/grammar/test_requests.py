"""Constraints of a request: drafted from without being asked for, and the text is that of plain `generate`."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.testing import EmptyDrafter, RandomDrafter
from hf_speculate_plugins.grammar.style import Style

from ...support.inputs import random_prompt
from ...support.models import VOCAB_SIZE, build_tiny_model
from ...support.requests import BATCH, assert_same, run


_PERIOD = 5


def follower(token, place):
    return (token + 7 * place) % (VOCAB_SIZE - 3) + 3


def mostly_forced(_row, ids):
    """One token, but at every fifth place two thirds of all."""
    place = len(ids) % _PERIOD
    return [follower(int(ids[-1]), place)] if place else [token for token in range(3, VOCAB_SIZE) if token % 3]


class Forcing(LogitsProcessor):
    """The same as a processor with a state: it wants to see every emitted token once, in order."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        text = input_ids[0].tolist()
        assert not self.seen or text[:-1] == self.seen, "called with something else than what was emitted"
        self.seen = text
        allowed = mostly_forced(0, input_ids[0])
        forbidden = [token for token in range(scores.shape[-1]) if token not in allowed]
        return scores.index_fill(-1, torch.tensor(forbidden), -torch.inf)

    def forced_tokens(self, prefix):
        found = []
        while len(prefix) % _PERIOD:
            found.append(follower(int(prefix[-1]), len(prefix) % _PERIOD))
            prefix = torch.cat([prefix, prefix.new_tensor(found[-1:])])
        return found


@pytest.fixture(scope="module")
def model():
    return build_tiny_model()


CONSTRAINTS = {
    "function": lambda: {"prefix_allowed_tokens_fn": mostly_forced},
    "declared": lambda: {"logits_processor": LogitsProcessorList([Forcing()])},
}


@pytest.mark.parametrize("constraint", CONSTRAINTS.values(), ids=list(CONSTRAINTS))
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 1.2}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["none", "random", "grammar", "prompt_lookup"])
def test_forced_tokens_are_drafted_and_the_text_is_plain(model, constraint, sampling, drafter):
    if drafter == "grammar":
        speculator = AutoSpeculator.from_name("grammar", target=model)
    elif drafter == "prompt_lookup":
        speculator = AutoSpeculator.from_name("prompt_lookup", target=model)
    else:
        kind = EmptyDrafter() if drafter == "none" else RandomDrafter(vocab_size=VOCAB_SIZE)
        speculator = Speculator(kind)
    request = {"input_ids": random_prompt(9), "max_new_tokens": 40, **sampling}
    assert_same(run(model, speculator, **request, **constraint()), run(model, **request, **constraint()))
    stats = speculator.stats
    assert stats.tokens_per_round >= 3, stats.summary()
    if drafter != "grammar":
        by_source = stats.accepted_by_source
        assert by_source.total() == stats.accepted_tokens
        assert sum(count for name, count in by_source.items() if "grammar" in name) >= 20, by_source
        assert "accepted from" in stats.summary()


def test_batches_are_drafted_row_by_row(model):
    request = {**BATCH, "prefix_allowed_tokens_fn": mostly_forced, "max_new_tokens": 40, "num_return_sequences": 2}
    request |= {"do_sample": True}
    speculator = Speculator(EmptyDrafter())
    assert_same(run(model, speculator, **request), run(model, **request))
    assert speculator.stats.tokens_per_round >= 3


def test_grammar_drafts_need_a_constraint_and_the_option(model):
    off, on = Speculator(EmptyDrafter(), constraints=False), Speculator(EmptyDrafter())
    run(model, off, input_ids=random_prompt(9), prefix_allowed_tokens_fn=mostly_forced)
    run(model, on, input_ids=random_prompt(9))
    assert off.stats.drafted_tokens == on.stats.drafted_tokens == 0


def test_a_constraint_that_raises_is_left_alone(model, caplog):
    class Refusing(Forcing):
        def forced_tokens(self, prefix):
            raise KeyError("no such place")

    request = {"input_ids": random_prompt(9)}
    plain = run(model, **request, logits_processor=LogitsProcessorList([Forcing()]))
    speculator = Speculator(EmptyDrafter())
    assert_same(run(model, speculator, **request, logits_processor=LogitsProcessorList([Refusing()])), plain)
    assert speculator.stats.drafted_tokens == 0


def test_a_guide_that_fails_at_the_end_does_not_fail_the_request(model, monkeypatch):
    def failing(self, is_text):
        raise KeyError("no such token")

    monkeypatch.setattr(Style, "without_text", failing)
    request = {"input_ids": random_prompt(9), "prefix_allowed_tokens_fn": mostly_forced}
    speculator = Speculator(EmptyDrafter())
    assert_same(run(model, speculator, **request), run(model, **request))
    assert speculator.stats.accepted_tokens > 0


def test_a_declaration_that_is_wrong_costs_speed_only(model):
    class Wrong(Forcing):
        def forced_tokens(self, prefix):
            return [(token + 1) % VOCAB_SIZE for token in super().forced_tokens(prefix)]

    request = {"input_ids": random_prompt(9)}
    plain = run(model, **request, logits_processor=LogitsProcessorList([Forcing()]))
    speculator = Speculator(EmptyDrafter())
    assert_same(run(model, speculator, **request, logits_processor=LogitsProcessorList([Wrong()])), plain)
    assert speculator.stats.drafted_tokens > 0 == speculator.stats.accepted_tokens


def test_policies_stay_apart(model):
    """What is learnt of constrained requests says nothing of others."""
    speculator = Speculator(EmptyDrafter(), adaptive=True)
    request = {"input_ids": random_prompt(9)}
    constrained = speculator.serving(LogitsProcessorList([Forcing()]), model)
    assert constrained is not speculator
    assert constrained.policy is not speculator.policy
    assert constrained is speculator.serving(LogitsProcessorList([Forcing()]), model)
    run(model, speculator, **request, logits_processor=LogitsProcessorList([Forcing()]))
    assert (speculator.stats.calls, constrained.stats.calls) == (1, 0)


def test_options_of_a_combined_drafter_are_kept(model):
    parts = ["prompt_lookup", "suffix"]
    speculator = AutoSpeculator.from_name("combined", target=model, parts=parts, max_nodes=3)
    served = speculator.serving(LogitsProcessorList([Forcing()]), model).drafter
    assert [part.name for part in served.parts] == [*parts, "grammar"]
    assert served.options.max_nodes == 3
    assert speculator.serving(LogitsProcessorList(), model) is speculator
