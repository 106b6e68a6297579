"""The parts of a captured forward as functions of tensors, on random rounds: masks, positions and slots against the
scorer's, accepted paths against the walk, moved entries against the cache's own."""

from __future__ import annotations

import random

import pytest
import torch
from transformers.cache_utils import DynamicCache

from hf_speculate.attention import grouped as attention_module
from hf_speculate.attention.grouped import TreeAttention
from hf_speculate.attention.prefix import visible_prefix
from hf_speculate.cache import TreeCache
from hf_speculate.forward import AcceptedPath, Scorer
from hf_speculate.forward.tree_forward import NODES, GraphNodes, tree_forward
from hf_speculate.tree import PADDING_PARENT, ROOT_PARENT, DraftTree, TreePlan, additive
from hf_speculate.verification import BatchedChoice, ScoredTable

from ..support.models import VOCAB_SIZE
from ..support.tiers import quick


WIDTH, CAPACITY = 8, 48


class Round:
    """A random round of 1 to 3 rows: trees, lengths, padding, and a token chosen after every node."""

    def __init__(self, seed: int, vocab_size: int = 6):
        choose = random.Random(seed)
        self.num_rows = choose.choice([1, 1, 2, 3])
        self.count = choose.randint(1, WIDTH)
        self.lengths = [choose.randint(1, CAPACITY - WIDTH) for _ in range(self.num_rows)]
        self.padding = [choose.randint(0, length - 1) for length in self.lengths]
        self.positions = [choose.randint(0, 99) for _ in range(self.num_rows)]
        self.tokens, self.parents = [], []
        for _ in range(self.num_rows):
            tokens, parents, taken = [choose.randrange(vocab_size)], [ROOT_PARENT], set()
            while len(tokens) < self.count:
                parent, token = choose.randrange(len(tokens)), choose.randrange(vocab_size)
                is_new = (parent, token) not in taken and parents[parent] != PADDING_PARENT
                taken.add((parent, token))
                tokens.append(token)
                parents.append(parent if is_new else PADDING_PARENT)
            self.tokens.append(tokens)
            self.parents.append(parents)
        self.chosen = torch.tensor([[choose.randrange(vocab_size) for _ in range(WIDTH)] for _ in self.tokens])
        self.garbage = choose.randrange(10**6)

    @property
    def plan(self) -> torch.Tensor:
        """The plan, with anything behind the tree's nodes: what an earlier round has left there."""
        noise = torch.Generator().manual_seed(self.garbage)
        plan = torch.randint(-(10**6), 10**6, (self.num_rows, NODES + 2 * WIDTH), generator=noise)
        for row in range(self.num_rows):
            place = [self.lengths[row], self.positions[row], self.count]
            plan[row, :NODES] = torch.tensor(place)
            plan[row, NODES : NODES + self.count] = torch.tensor(self.tokens[row])
            plan[row, NODES + WIDTH : NODES + WIDTH + self.count] = torch.tensor(self.parents[row])
        return plan

    @property
    def prompt(self) -> torch.Tensor:
        return torch.arange(CAPACITY) >= torch.tensor(self.padding)[:, None]

    def paths(self) -> list[list[int]]:
        """The accepted path of every row, by the walk."""
        paths = []
        for tokens, parents, chosen in zip(self.tokens, self.parents, self.chosen.tolist(), strict=True):
            path = [0]
            while children := [i for i, p in enumerate(parents) if p == path[-1] and tokens[i] == chosen[path[-1]]]:
                path += children
            paths.append(path)
        return paths


@pytest.mark.parametrize("first", quick(range(0, 10_000, 1000)))
def test_captured_metadata_is_right_for_random_rounds(first):
    for seed in range(first, first + 1000):
        check(Round(seed))


def check(round: Round) -> None:
    nodes = GraphNodes.of(round.plan, vocab_size=6)
    reference = TreePlan.from_parents([[*row, *[PADDING_PARENT] * (WIDTH - round.count)] for row in round.parents])
    base = max(round.lengths)
    assert nodes.slots.tolist() == list(range(base, base + WIDTH))
    assert torch.equal(nodes.tree.ancestors, reference.ancestors)
    assert torch.equal(nodes.positions, torch.tensor(round.positions)[:, None] + reference.depths)
    assert nodes.tokens[:, : round.count].tolist() == round.tokens
    assert (nodes.tokens[:, round.count :] == nodes.tokens[:, :1]).all(), "padding runs the root again"

    seen = torch.zeros(round.num_rows, WIDTH, CAPACITY, dtype=torch.bool)
    seen[:, :, :base] = visible_prefix(round.lengths, round.prompt[:, :base], base, seen.device)[:, None]
    seen[:, :, base : base + WIDTH] = reference.ancestors
    assert torch.equal(
        nodes.attention({"prompt": round.prompt}).additive(torch.float32), additive(seen[:, None], torch.float32)
    )

    along, paths = AcceptedPath.of(nodes.tokens, nodes.parents, nodes.tree, round.chosen), round.paths()
    assert [row[:count] for row, count in zip(along.nodes.tolist(), along.counts.tolist(), strict=True)] == paths
    check_moves(round, along, paths)


def check_moves(round: Round, along: AcceptedPath, paths: list[list[int]]) -> None:
    """Entries of the paths are at the end of each row's text, and nothing else of the text has changed."""
    stacks = tuple(torch.rand(2, round.num_rows, 1, CAPACITY, 2) for _ in range(2))
    before = [stack.clone() for stack in stacks]
    base = max(round.lengths)
    along.move(stacks, torch.tensor(base), torch.tensor(round.lengths))
    for stack, old in zip(stacks, before, strict=True):
        for row, (length, path) in enumerate(zip(round.lengths, paths, strict=True)):
            wanted = torch.cat([old[:, row, :, :length], old[:, row, :, [base + node for node in path]]], dim=2)
            assert torch.equal(stack[:, row, :, : length + len(path)], wanted)


def test_scored_table_returns_the_written_values():
    chosen, tokens, parents = (torch.randint(99, (2, 4)) for _ in range(3))
    values = torch.tensor([[0.0, -1.5, -torch.inf, torch.nan], [0.0, -0.1, -0.2, -0.3]])
    marks = torch.tensor([[1], [0]])
    table = ScoredTable(torch.cat([chosen, marks, tokens, parents, values.view(torch.int32).long()], dim=1), 4)
    found = table.read()
    assert found[:2] == (chosen.tolist(), [True, False])
    assert found[2][:2] == [tokens.tolist(), parents.tolist()]
    torch.testing.assert_close(torch.tensor(found[2][2]), values, equal_nan=True)


def random_caches(model, lengths, poison):
    """A cache of random entries, and stacks that hold the same, and `poison` everywhere else."""
    config = model.config
    num_rows, num_layers = len(lengths), config.num_hidden_layers
    shape = num_rows, config.num_key_value_heads, max(lengths), model.model.layers[0].self_attn.head_dim
    cache, stacks = DynamicCache(config=config), []
    states = [(torch.randn(shape), torch.randn(shape)) for _ in range(num_layers)]
    for layer, pair in enumerate(states):
        cache.update(*pair, layer)
    for part in range(2):
        stack = torch.full((num_layers, *shape[:2], CAPACITY, shape[3]), poison)
        for layer, pair in enumerate(states):
            for row, length in enumerate(lengths):
                stack[layer, row, :, :length] = pair[part][row, :, :length]
        stacks.append(stack)
    return cache, tuple(stacks)


def scored(model, round, stacks, form, groups):
    inputs = {"plan": round.plan, "prompt": round.prompt, "starts": torch.tensor(round.padding)}
    inputs["values"] = torch.zeros(round.num_rows, WIDTH)
    choice = BatchedChoice((), samples=False)
    options = {"output_hidden_states": [1]}
    with torch.no_grad():
        return tree_forward(model, None, stacks, inputs, options, choice, VOCAB_SIZE, (form, groups, torch.float32))


def compare(model, round, form, groups, poison):
    """A static forward against the scorer's, on the same entries."""
    cache, stacks = random_caches(model, round.lengths, poison)
    mask = torch.arange(max(round.lengths)) >= torch.tensor(round.padding)[:, None]
    tree_cache = TreeCache(cache, round.num_rows)
    tree_cache.lengths = tuple(round.lengths)
    scorer = Scorer(model, tree_cache, None if mask.all() else mask)
    tree = DraftTree(torch.tensor(round.tokens), round.parents)
    with torch.no_grad():
        wanted = scorer(tree, round.positions, forward_kwargs={"output_hidden_states": [1]})
    found = scored(model, round, stacks, form, groups)
    count = round.count
    is_node = torch.tensor(round.parents) != PADDING_PARENT
    torch.testing.assert_close(found["logits"][:, :count][is_node], wanted.logits[is_node], rtol=1e-4, atol=1e-4)
    chosen = wanted.logits.argmax(-1)
    round.chosen = torch.cat([chosen, torch.zeros(round.num_rows, WIDTH - count, dtype=torch.long)], dim=1)
    paths = round.paths()
    tree_cache.keep(paths)
    for layer, kept in enumerate(cache.layers):
        for row, length in enumerate(tree_cache.lengths):
            for stack, states in zip(stacks, (kept.keys, kept.values), strict=True):
                torch.testing.assert_close(stack[layer, row, :, :length], states[row, :, :length], rtol=1e-4, atol=1e-4)
    for row, path in enumerate(paths):
        torch.testing.assert_close(
            found["along"][1][row, : len(path)], wanted.hidden_states[1][row, path], rtol=1e-4, atol=1e-4
        )


def rounds_with_tokens(seeds):
    return [Round(seed, VOCAB_SIZE) for seed in seeds]


@pytest.mark.parametrize("form", ["stock", "folded"])
def test_tree_forward_equals_the_scorer_for_random_rounds(tiny_model, form):
    """Entries beyond the ends of rows hold large numbers."""
    model = tiny_model("qwen2")
    groups = TreeAttention(model, torch.device("cpu")).groups
    for round in rounds_with_tokens(range(60)):
        compare(model, round, form, groups, poison=1e4)


def test_tree_forward_by_the_kernel_equals_the_scorer(tiny_model, interpreted, unchecked_shapes):
    """Entries beyond the ends of rows hold NaN."""
    model = tiny_model("qwen2")
    for round in rounds_with_tokens(range(3)):  # interpreted, a round takes a second
        compare(model, round, "kernel", 2, poison=torch.nan)


def test_tree_forward_uses_the_kernel_for_16_bit_on_gpus_only(tiny_model, monkeypatch):
    model = tiny_model("qwen2")
    cpu, gpu = (TreeAttention(model, torch.device(name)) for name in ("cpu", "cuda"))
    for has_kernel in (False, True):
        monkeypatch.setattr(attention_module, "has_kernel", lambda has_kernel=has_kernel: has_kernel)
        assert gpu.captured_form(torch.bfloat16) == ("kernel" if has_kernel else "stock")
        assert gpu.captured_form(torch.float32) == "stock"
        assert cpu.captured_form(torch.bfloat16) == cpu.form == "folded"
    monkeypatch.setenv("HF_SPECULATE_ATTENTION", "stock")
    assert TreeAttention(model, torch.device("cuda")).captured_form(torch.bfloat16) == "stock"
    other = TreeAttention(tiny_model("llama", attention="eager"), torch.device("cuda"))
    assert other.captured_form(torch.bfloat16) == "stock", "its attention takes no place"
