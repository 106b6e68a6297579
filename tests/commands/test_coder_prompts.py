"""The prompts that examples/coder_prompts.py makes of a module's functions."""

from __future__ import annotations

import importlib.util
import json
import random
import sys

import pytest

from ..support.paths import REPOSITORY


SOURCE = '''
class Account:
    def deposit(self, amount):
        """Add an amount of money to the balance of the account.

        It must be positive.
        """
        if amount <= 0:
            raise ValueError(amount)
        self.balance += amount
        return self.balance


def short():
    return 1
'''


@pytest.fixture
def module(monkeypatch):
    spec = importlib.util.spec_from_file_location("coder_prompts", REPOSITORY / "examples" / "coder_prompts.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "coder_prompts", module)  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_functions_finds_documented_functions_of_a_module(module):
    (found,) = module.functions(SOURCE)
    assert found.name == "deposit"
    assert found.arguments == ["amount"]
    assert found.summary == "Add an amount of money to the balance of the account."
    assert found.header.endswith('It must be positive.\n    """')
    assert found.code.startswith("def deposit")
    assert found.code.endswith("return self.balance")
    assert list(module.functions("def broken(:")) == []


@pytest.mark.parametrize("seed", range(8))
def test_task_quotes_the_function_that_it_asks_about(module, seed):
    (function,) = module.functions(SOURCE)
    rng = random.Random(seed)
    for kind in module.EDIT:
        assert function.code in module.task(function, kind, rng)
    assert function.header in module.task(function, "complete", rng)
    assert "return self.balance" not in module.task(function, "complete", rng)
    assert function.summary in module.task(function, "write", rng)


def test_a_function_without_a_docstring_is_neither_completed_nor_written(module):
    (function,) = module.functions("def f(a):\n    b = a\n    c = b\n    d = c\n    return d\n")
    assert module.task(function, "complete", random.Random(0)) is None
    assert module.task(function, "write", random.Random(0)) is None


def test_the_file_has_a_user_message_a_line(module, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "library", lambda: list(module.functions(SOURCE)) * 9)
    monkeypatch.setattr(sys, "argv", ["coder_prompts.py", str(tmp_path / "p.jsonl"), "--limit", "5"])
    module.main()
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 5 == len({line["prompt"][0]["content"] for line in lines})
    assert {line["prompt"][0]["role"] for line in lines} == {"user"}
