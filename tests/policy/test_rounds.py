"""`rounds`, `Round.draw` and the policies that look at no clock."""

from __future__ import annotations

import pytest
import torch

import hf_speculate
from hf_speculate import DraftTree, Round, Speculator
from hf_speculate.policy import Adaptive, Budget, DraftPolicy, Fixed, PolicySession
from hf_speculate.testing import ScriptedDrafter

from ..support.models import VOCAB_SIZE


REQUEST = {"max_new_tokens": 24, "do_sample": False}
SAMPLED = {**REQUEST, "do_sample": True, "temperature": 0.8}


def scripted(model, ids, branching=(3, 2, 1), accuracy=0.8):
    plain = model.generate(ids, max_new_tokens=48)[:, ids.shape[1] :]
    return ScriptedDrafter(plain, branching, accuracy=accuracy, vocab_size=VOCAB_SIZE)


class TestRounds:
    @pytest.mark.parametrize("request_", [REQUEST, SAMPLED], ids=["greedy", "sampled"])
    def test_rounds_yield_the_text_and_the_statistics_of_the_call(self, tiny_model, prompt, request_):
        model, ids = tiny_model(), torch.cat([prompt(9), prompt(9, seed=1)])
        torch.manual_seed(3)
        expected = model.generate(ids, **request_)
        speculator = Speculator(scripted(model, ids))
        torch.manual_seed(3)
        rounds = hf_speculate.rounds(model, ids, speculator=speculator, **request_)
        texts, emitted = [[], []], 0
        for index, round in enumerate(rounds):
            assert round.is_prefill == (index == 0)
            assert round.seconds.total >= round.seconds.drafting >= 0
            for row, tokens in enumerate(round.tokens):
                texts[row] += tokens
                path = round.paths[row][: len(tokens)]
                slot = round.tree.slot(row) if tokens else 0
                accepted = [round.tree.host.token_ids[slot][node] for node in path[1:]]
                assert list(tokens[: len(accepted)]) == accepted, "tokens go along the path"
                emitted += 0 if round.is_prefill else len(tokens)
        assert texts == expected[:, 9:].tolist()
        assert speculator.stats.emitted_tokens == emitted
        assert speculator.stats.calls == 1


def test_draw_shows_accepted_nodes_and_the_token_of_the_target():
    tree = DraftTree.from_rows([([5, 6, 7, 8, 9], [-1, 0, 0, 1, 1]), ([5, 6], [-1, 0])])
    round = Round(
        tree=tree, paths=[[0, 1, 4], []], tokens=[[6, 9, 3], []], num_accepted=[2, 0], lengths=[4, 4], context=4
    )
    assert round.draw() == (
        "row 0: 2 of 4 drafted tokens accepted, 3 emitted\n5\n├─● 6\n│ ├─○ 8\n│ └─● 9\n│   └─★ 3\n└─○ 7"
    )


class TestPolicies:
    def test_fixed_policy_keeps_its_budget(self, tiny_model, prompt):
        model, ids = tiny_model(), prompt(9)
        speculator = Speculator(scripted(model, ids), policy=Fixed(max_nodes=4, max_depth=2))
        _, *rounds = hf_speculate.rounds(model, ids, speculator=speculator, **REQUEST)
        assert max(round.num_nodes for round in rounds) == 4
        assert max(round.tree.max_depth for round in rounds) == 2

    def test_custom_policy_is_started_called_and_closed(self, tiny_model, prompt):
        calls = []

        class Own(DraftPolicy, PolicySession):
            def start(self, request):
                calls.append(("start", request.batch_size, request.samples))
                return self

            def choose(self, situation):
                calls.append(("choose", tuple(situation.rows), situation.context))
                return Budget(2, 1)

            def learn(self, round):
                calls.append(("learn", round.num_nodes, round.context))

            def close(self):
                calls.append(("close",))

        model, ids = tiny_model(), prompt(9)
        out = model.generate(ids, speculator=Speculator(scripted(model, ids), policy=Own()), **REQUEST)
        assert torch.equal(out, model.generate(ids, **REQUEST))
        assert calls[:3] == [("start", 1, False), ("choose", (0,), 9), ("learn", 2, 9)]
        assert calls[-1] == ("close",)
        assert [call[0] for call in calls[1:-1]] == ["choose", "learn"] * (len(calls[1:-1]) // 2)

    def test_policy_that_raises_leaves_the_session_closed(self, tiny_model, prompt):
        class Failing(DraftPolicy, PolicySession):
            def start(self, request):
                return self

            def choose(self, situation):
                raise KeyError("no budget")

            def close(self):
                raise KeyError("nor an end")

        model, ids = tiny_model(), prompt(9)
        drafter, closed = scripted(model, ids), []
        start = drafter.start

        def watched(request):
            session = start(request)
            session.close = lambda: closed.append(True)
            return session

        drafter.start = watched
        with pytest.raises(KeyError):
            model.generate(ids, speculator=Speculator(drafter, policy=Failing()), **REQUEST)
        assert closed == [True]

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"policy": Fixed(), "adaptive": True}, ValueError, "policy= and adaptive="),
            ({"policy": "fixed"}, TypeError, "DraftPolicy"),
            ({"acceptance": "maybe"}, ValueError, "'match' or 'typical'"),
            ({"posterior_alpha": 0.3}, ValueError, "thresholds"),
            ({"acceptance": "typical", "posterior_threshold": 0.0}, ValueError, "acceptance"),
            ({"acceptance": "typical", "posterior_alpha": 1.5}, ValueError, "acceptance"),
            ({"compile": "no such backend"}, ValueError, "is not a backend"),
            ({"speed": 3}, TypeError, "speed"),
        ],
    )
    def test_speculator_refuses_contradictory_or_unused_options(self, tiny_model, prompt, options, error, message):
        with pytest.raises(error, match=message):
            Speculator(ScriptedDrafter([[1]], (1,), vocab_size=VOCAB_SIZE), **options)

    def test_adaptive_policy_is_the_default(self, monkeypatch):
        drafter = ScriptedDrafter([[1]], (1,), vocab_size=VOCAB_SIZE)
        for value, kind in (("1", Adaptive), ("0", Fixed)):
            monkeypatch.setenv("HF_SPECULATE_ADAPTIVE", value)
            assert isinstance(Speculator(drafter).policy, kind)
        assert isinstance(Speculator(drafter, adaptive=True).policy, Adaptive)
        assert isinstance(Speculator(drafter, adaptive=False).policy, Fixed)
