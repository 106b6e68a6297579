"""The choice of all tokens as a function of tensors, against the sampler's own choice at every node."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

from hf_speculate.tree import PADDING_PARENT, DraftTree
from hf_speculate.verification import BatchedChoice, ChoiceInputs, Noise, Records, Sampler, Sequences, reason_for_host

from ..support.versions import has_transformers


V = 40
PROCESSORS = {
    "none": [],
    "warpers": [lp.TemperatureLogitsWarper(0.7), lp.TopKLogitsWarper(9), lp.TopPLogitsWarper(0.9)],
    "penalty": [lp.RepetitionPenaltyLogitsProcessor(1.7)],
    "penalty that leaves the prompt out": [lp.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=5)],
    "penalty, then warpers": [lp.RepetitionPenaltyLogitsProcessor(0.6), lp.TemperatureLogitsWarper(1.4)],
}


# Older penalties leave out the same number of tokens in every row, and fail for tokens without scores.
KNOWS_PADDING = has_transformers("5.23")
if KNOWS_PADDING:
    PROCESSORS["penalty that leaves padding out"] = [
        lp.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=torch.tensor([3, 0]))
    ]


class Request:
    """Two rows of different lengths, and buffers that keep their addresses."""

    def __init__(self, processors, samples, seed):
        self.random = random.Random(seed)
        prompt = torch.tensor([[self.random.randrange(V) for _ in range(5)] for _ in range(2)])
        if KNOWS_PADDING:
            prompt[0, 2] = V + 3  # the embeddings may know more tokens than there are scores
        self.sequences = Sequences(prompt, None)
        self.noise = Noise(2, V, torch.device("cpu")) if samples else None
        self.sampler = Sampler(LogitsProcessorList(processors), self.noise, Records(), tier="prefix")
        self.choice = BatchedChoice(self.sampler.processors, samples)
        self.inputs = ChoiceInputs(self.choice, self.sampler, self.sequences)
        self.buffers = {}
        for row, count in enumerate((1, 3)):
            self.emit(row, count)

    def emit(self, row, count):
        for _ in range(count):
            self.sequences.append(row, self.random.randrange(V))

    def make(self, name, shape, dtype):
        return self.buffers.setdefault((name, shape), torch.zeros(shape, dtype=dtype))

    def tree(self):
        rows = []
        for row in range(2):
            tokens, parents = [self.sequences.new_tokens[row][-1]], [-1]
            for token in self.random.sample(range(V), self.random.randint(0, 6)):
                tokens.append(token)
                parents.append(self.random.randrange(len(tokens) - 1))
            rows.append((tokens, parents))
        return DraftTree.from_rows(rows)


@pytest.mark.parametrize("samples", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_every_node_gets_the_samplers_token(name, samples):
    for seed in range(6):
        request = Request(PROCESSORS[name], samples, seed)
        for round in range(5):
            tree = request.tree()
            logits = torch.randn(2, tree.num_nodes, V) * 3
            inputs = request.inputs.fill(request.make, tree, 8, V)
            chosen, are_tainted = request.choice(logits, tree.token_ids, tree.plan, inputs)
            choose = request.sampler.chooser(logits, tree, request.sequences)
            for row in range(2):
                nodes = [i for i, parent in enumerate(tree.host.parents[row]) if parent != PADDING_PARENT]
                assert [int(chosen[row, node]) for node in nodes] == [choose([row], [node])[0] for node in nodes]
            assert not are_tainted.any()
            for row in range(2):
                request.emit(row, 12 if round == 2 else request.random.randint(0, 3))


def test_choice_fills_new_buffers_from_the_beginning():
    """So it is after the cache has grown."""
    request = Request(PROCESSORS["penalty"], False, 1)
    for _ in range(2):
        tree, logits = request.tree(), torch.randn(2, 1, V)
        tree = tree.first(0)
        chosen, _ = request.choice(logits, tree.token_ids, tree.plan, request.inputs.fill(request.make, tree, 8, V))
        choose = request.sampler.chooser(logits, tree, request.sequences)
        assert chosen[:, 0].tolist() == [choose([row], [0])[0] for row in range(2)]
        request.kept, request.buffers = request.buffers, {}


def test_scores_that_are_nan_are_marked():
    request = Request([], False, 0)
    tree, logits = request.tree(), torch.randn(2, 1, V)
    tree = tree.first(0)
    logits[1] = torch.nan
    _, are_tainted = request.choice(logits, tree.token_ids, tree.plan, {})
    assert are_tainted.tolist() == [False, True]


@pytest.mark.parametrize(
    ("processors", "reason"),
    [
        ([], ""),
        (PROCESSORS["penalty, then warpers"], ""),
        ([lp.NoRepeatNGramLogitsProcessor(2)], "logits processors ['NoRepeatNGramLogitsProcessor']"),
        ([lp.EtaLogitsWarper(1e-3)], "logits processors ['EtaLogitsWarper']"),
        ([lambda ids, scores: scores], "unknown logits processors"),
    ],
)
def test_reason_for_host_names_unsupported_processors(processors, reason):
    assert reason_for_host(Sampler(LogitsProcessorList(processors), None, Records())) == reason


def test_a_tree_deeper_than_noise_is_passed_in_for():
    for samples, fits in ((False, True), (True, False)):
        request = Request([], samples, 0)
        chain = DraftTree.chain(torch.zeros(2, 20, dtype=torch.long))
        assert request.inputs.fit(chain) is fits
