"""Runners of a forward over a tree: the first that can runs it, and the others say why not."""

from __future__ import annotations

import pytest
import torch

from hf_speculate import Speculator
from hf_speculate.forward import EagerRunner, Forward, Runner
from hf_speculate.request import preparation
from hf_speculate.stats import RunnerRecord
from hf_speculate.testing import ScriptedDrafter


NEW_TOKENS = 12


class OneByOne(Runner):
    """A toy: it runs a tree of one row node by node, each with its ancestors, and refuses batches."""

    name, state = "one by one", "run one by one"
    can_leave_rows_out = False

    def __init__(self, fails_late=False):
        self._fails_late = fails_late

    def problem(self, scorer, nodes):
        return "several rows" if nodes.tree.batch_size > 1 else ""

    def run(self, scorer, nodes):
        if self._fails_late:
            return None
        output = EagerRunner().run(scorer, nodes)  # this leaves the entries of all nodes in the cache
        text = scorer.model.dummy_text
        for node in range(nodes.tree.num_nodes):
            path, ancestor = [], node
            while ancestor >= 0:
                path.insert(0, nodes.tree.host.token_ids[0][ancestor])
                ancestor = nodes.tree.host.parents[0][ancestor]
            tokens = torch.tensor([[*text[: scorer.cache.append_index], *path]])
            output.logits[0, node] = scorer.model(input_ids=tokens, use_cache=False).logits[0, -1]
        return output


@pytest.fixture
def request_with(monkeypatch, tiny_model):
    """A function that makes a request of some rows with runners before the eager one; the text and its statistics."""
    model = tiny_model()

    def run(runner, num_rows=1):
        prompt = torch.arange(5 * num_rows).view(num_rows, 5) + 3
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
        plain = model.generate(prompt, **options)
        object.__setattr__(model, "dummy_text", plain[0].tolist())
        original = preparation._scorer

        def scorer_of(*arguments):
            scorer = original(*arguments)
            scorer.forward = Forward(runner, *scorer.forward.runners)  # the one line that a new runner needs
            return scorer

        with monkeypatch.context() as patched:
            patched.setattr(preparation, "_scorer", scorer_of)
            vocab_size = model.config.vocab_size
            drafter = ScriptedDrafter(plain[:, 5:], (2, 1), accuracy=0.7, vocab_size=vocab_size)
            speculator = Speculator(drafter, adaptive=False)
            output = model.generate(prompt, **options, speculator=speculator, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain)
        return output.speculation

    return run


def test_a_new_runner_runs_whole_requests(request_with):
    stats = request_with(OneByOne())
    assert stats.target_runners["one by one"] == stats.target_forwards
    assert not stats.fallbacks


def test_a_runner_that_refuses_says_why_once_a_request(request_with):
    stats = request_with(OneByOne(), num_rows=2)
    assert set(stats.target_runners) == {"eager"}
    assert dict(stats.fallbacks) == {"not run one by one: several rows": 1}


def test_a_runner_that_fails_late_leaves_the_nodes_to_the_next(request_with):
    assert set(request_with(OneByOne(fails_late=True)).target_runners) == {"eager"}


def test_record_counts_a_reason_once_and_forwards_each():
    record = RunnerRecord(subject="draft ")
    for _ in range(3):
        record.ran("eager")
        record.refuse("native", "autocast")
    assert dict(record.counts) == {"eager": 3}
    assert dict(record.fallbacks) == {"draft not native: autocast": 1}
