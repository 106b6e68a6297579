"""The example of the policy's account in the docstring of the package is what the policy computes."""

from __future__ import annotations

import re

import pytest

import hf_speculate.policy
from hf_speculate.policy import Budget
from hf_speculate.policy.costs import RoundCosts
from hf_speculate.tree import DraftTree

from ..support.decoding import new_session, round_of, situation


LEVEL = 0.1  # seconds


def example() -> list[list[float]]:
    """The rows of the table: round, nodes, levels, tokens, seconds, charge, balance, surcharge."""
    cells = (line.strip("|").split("|") for line in (hf_speculate.policy.__doc__ or "").splitlines() if line[:1] == "|")
    return [list(map(float, row)) for row in cells if re.fullmatch(r" \d+ ", row[0])]


def timed_before() -> RoundCosts:
    costs = RoundCosts()
    for _ in range(3):
        for num_nodes, seconds in ((0, 1.0), (1, 1.05), (4, 1.2)):
            costs.rounds.record(costs.width(num_nodes), seconds)
        for levels in (1, 2):
            costs.drafting.record(levels, LEVEL * levels)
    return costs


def chain_or_fan(num_nodes: int, num_levels: int) -> DraftTree:
    """A chain of `num_levels` nodes; all further nodes are children of the root."""
    parents = [-1, *range(num_levels), *[0] * (num_nodes - num_levels)]
    return DraftTree.from_rows([(range(len(parents)), parents)])


def test_documented_account_equals_that_of_the_policy(monkeypatch):
    session, charges = new_session(timed_before()), []
    update = session._update_balance
    monkeypatch.setattr(session, "_update_balance", lambda *args: (charges.append(args[1]), update(*args)))
    budgets = []
    for _, num_nodes, levels, tokens, seconds, charge, balance, surcharge in example():
        budgets.append(session.choose(situation()))
        tree, path = chain_or_fan(int(num_nodes), int(levels)), list(range(1, int(tokens)))
        session.learn(round_of(tree, [path], seconds, LEVEL * levels))
        after = charges[-1], session.known.balance, session._surcharge
        assert after == pytest.approx((charge, balance, surcharge), abs=0.005)
    assert len(budgets) == 5
    assert budgets[1] == Budget(None, 1)  # the balance pays for one level
    assert all((budget.max_depth or 16) >= 2 for budget in (budgets[0], *budgets[2:]))
