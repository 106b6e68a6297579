#!/usr/bin/env python
"""The quickest look at hf_speculate: the bundled model completes Python, plain and speculative, side by side.

    make demo        # or: python examples/quickstart.py [--drafter prompt_lookup] [--tokens 128]

Prints both texts, tokens/s, speed-up and mean acceptance length, the picture of one round's draft tree with the
accepted path, and as its last line everything as JSON. The texts are compared in fp32 (`identical`: equal token for
token, or a proven numerical tie); speed is measured in bf16, where near ties flip now and then
(`identical_bf16_share`).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rich.tree import Tree
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_speculate import AutoSpeculator, Drafter, DraftRequest, DraftSession, DraftState, DraftTree, Speculator
from hf_speculate.testing import check_lossless


HERE = Path(__file__).resolve().parent
TARGET, DRAFT_MODEL = HERE / "pycoder", HERE / "pycoder-draft"

PROMPTS = [
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):\n        self._items = []\n\n    def push(',
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(description=",
    'def read_config(path):\n    """Read the configuration file and return a dictionary."""\n    with open(path',
    "import unittest\n\n\nclass TestQueue(unittest.TestCase):\n    def setUp(self):\n        self.queue = ",
    "class Node:\n    def __init__(self, name, parent=None):\n        self.name = name\n        self.parent = ",
]


class Recorder(Drafter):
    """Passes everything on to another drafter and remembers each round's tree and what came of it."""

    name = "recorder"

    def __init__(self, inner: Drafter):
        self.inner = inner
        self.feature_layers = inner.feature_layers
        self.rounds: list[tuple[DraftTree, list[int]]] = []

    @classmethod
    def for_target(cls, target, **options):
        raise NotImplementedError("the recorder wraps a drafter that exists")

    def start(self, request: DraftRequest) -> DraftSession:
        return _RecorderSession(self, self.inner.start(request))


class _RecorderSession(DraftSession):
    def __init__(self, recorder: Recorder, inner: DraftSession):
        self.recorder, self.inner = recorder, inner
        self.tree: DraftTree | None = None

    def draft(self, state: DraftState) -> DraftTree:
        self.tree = self.inner.draft(state)
        return self.tree

    def observe(self, tokens, features, lengths) -> None:
        if self.tree is not None:
            self.recorder.rounds.append((self.tree, tokens[0, : lengths[0]].tolist()))
        self.inner.observe(tokens, features, lengths)

    def close(self) -> None:
        self.inner.close()


def picture(tree: DraftTree, emitted: list[int], tokenizer) -> Tree:
    """A round's tree: accepted nodes in green, the bonus token behind them, rejected nodes dim."""
    tokens, parents = tree.host.token_ids[0], tree.host.parents[0]

    def label(token: int) -> str:
        return repr(tokenizer.decode([token]))[1:-1] or "·"

    path, node = {0}, 0
    for token in emitted:
        child = tree.host.child(0, node, token)
        if child is None:
            break
        path.add(child)
        node = child
    last, bonus = node, emitted[len(path) - 1 :][:1]
    drawn = Tree(Text(f"{label(tokens[0])}  (root)", style="bold green"), guide_style="dim")
    branches = {0: drawn}
    for index in range(1, len(tokens)):
        if parents[index] >= 0:
            style = "bold green" if index in path else "dim"
            mark = " ✓" if index in path else ""
            branches[index] = branches[parents[index]].add(Text(label(tokens[index]) + mark, style=style))
    for token in bonus:
        branches[last].add(Text(f"{label(token)}  (bonus token, the target's own)", style="bold cyan"))
    return drawn


def timed(model, ids, num_tokens, speculator):
    start = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        eos_token_id=None,  # the same number of tokens from everyone
        pad_token_id=0,
        speculator=speculator,
    )
    return output[0, ids.shape[1] :], time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafter", choices=["draft_model", "prompt_lookup"], default="draft_model")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs per prompt, interleaved; the median counts")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    console = Console(width=120)

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16).eval()
    exact = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    prompts = [tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in PROMPTS]

    def speculator_for(target) -> Speculator:
        options = {"model": str(DRAFT_MODEL)} if arguments.drafter == "draft_model" else {}
        return AutoSpeculator.from_name(arguments.drafter, target=target, **options)

    console.print(
        f"[bold]1. Is it the same text?[/] fp32, {len(prompts)} prompts x {arguments.tokens} tokens, greedy …"
    )
    report = check_lossless(
        exact, speculator_for(exact), prompts, max_new_tokens=arguments.tokens, eos_token_id=None, pad_token_id=0
    )
    console.print(f"   {report.num_identical} of {report.num_cases} identical; proven ties: {len(report.ties)}\n")

    speculator = speculator_for(model)
    for ids in prompts[:1]:  # warm-up
        timed(model, ids, 16, None), timed(model, ids, 16, speculator)
    speculator.stats.reset()
    table = Table(title=f"2. How fast? bf16, batch 1, greedy, {arguments.drafter}, median of {arguments.repeats}")
    for column in ("prompt", "plain tokens/s", "speculative tokens/s", "speed-up", "bf16 text identical"):
        table.add_column(column, justify="right" if "tokens" in column or column == "speed-up" else "left")
    totals, num_identical = [0.0, 0.0], 0
    for prompt, ids in zip(PROMPTS, prompts, strict=True):
        runs = [
            [timed(model, ids, arguments.tokens, choice) for choice in (None, speculator)]
            for _ in range(arguments.repeats)
        ]
        (plain, _), (fast, _) = runs[-1]
        seconds = [sorted(run[i][1] for run in runs)[arguments.repeats // 2] for i in (0, 1)]
        totals = [total + value for total, value in zip(totals, seconds, strict=True)]
        is_equal = torch.equal(plain, fast)
        num_identical += is_equal
        console.print(
            Panel(Text(prompt, style="dim") + Text(tokenizer.decode(plain), style="white"), title="plain"),
            Panel(Text(prompt, style="dim") + Text(tokenizer.decode(fast), style="green"), title="speculative"),
        )
        rates = [arguments.tokens / value for value in seconds]
        table.add_row(
            repr(prompt.splitlines()[0]), *(f"{r:.0f}" for r in rates), f"{rates[1] / rates[0]:.2f}x", str(is_equal)
        )
    console.print(table)

    recorder = Recorder(speculator.drafter)
    timed(model, prompts[0], arguments.tokens, Speculator(recorder))
    tree, emitted = max(recorder.rounds, key=lambda item: (min(len(item[1]), 5), item[0].num_nodes))
    console.print("\n[bold]3. One round[/]: what was drafted, and what the target accepted in one forward")
    console.print(picture(tree, emitted, tokenizer))

    stats = speculator.stats
    result = {
        "identical": True if not report.ties else "proven tie",
        "identical_bf16_share": num_identical / len(prompts),
        "speedup": round(totals[0] / totals[1], 3),
        "mean_acceptance_length": round(stats.mean_acceptance_length or 1.0, 3),
        "engine_efficiency": round(stats.engine_efficiency or 0.0, 3),
        "drafter": arguments.drafter,
        "new_tokens": arguments.tokens,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    console.print()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
