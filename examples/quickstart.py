#!/usr/bin/env python
"""The quickest look at hf_speculate: the bundled model completes Python, plain and speculative, side by side.

    make demo        # or: python examples/quickstart.py [--drafter medusa] [--tokens 128]

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
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import hf_speculate
from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.testing import LosslessReport, check_lossless


HERE = Path(__file__).resolve().parent
TARGET, DRAFT_MODEL = HERE / "pycoder", HERE / "pycoder-draft"
HEADS = {"eagle3": HERE / "pycoder-eagle3", "medusa": HERE / "pycoder-medusa"}

PROMPTS = [
    'class Stack:\n    """A last-in first-out stack"""\n\n    def __init__(self):\n        self.items = []\n\n    def',
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(description=",
    'def read_config(path):\n    """Read the configuration file and return a dictionary."""\n    with open(path',
    "import unittest\n\n\nclass TestQueue(unittest.TestCase):\n    def setUp(self):\n        self.queue = ",
    "class Node:\n    def __init__(self, name, parent=None):\n        self.name = name\n        self.parent = ",
]


def timed(model, ids, request, speculator):
    torch.manual_seed(0)
    start = time.perf_counter()
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **request, speculator=speculator)
    return output[0, ids.shape[1] :], time.perf_counter() - start


def make_speculator(drafter: str, target) -> Speculator:
    if drafter in HEADS:
        return AutoSpeculator.from_pretrained(HEADS[drafter], target=target)
    options = {"model": DRAFT_MODEL, "top_k": 3} if drafter == "draft_model" else {}
    return AutoSpeculator.from_name(drafter, target=target, **options)


def show_texts(console, tokenizer, model, speculator, prompts, requests) -> list[LosslessReport]:
    """Both texts side by side in fp32 (sampled ones: greedy text of a small model soon repeats itself)."""
    reports = []
    for name, request in requests.items():
        seeds = (0,) if request["do_sample"] else (None,)
        reports.append(check_lossless(model, speculator, prompts, seeds=seeds, **request))
        same = f"{reports[-1].num_identical} of {reports[-1].num_cases} texts identical"
        console.print(f"   fp32, {name}: {same}, {len(reports[-1].ties)} proven ties")
    for prompt, ids in zip(PROMPTS, prompts, strict=True):
        grid = Table.grid(padding=(0, 1), expand=True)
        panels = []
        for title, choice, style in (("plain", None, "white"), ("speculative", speculator, "green")):
            tokens, _ = timed(model, ids, requests["temperature 0.8"], choice)
            panels.append(Panel(Text(prompt, style="dim") + Text(tokenizer.decode(tokens), style=style), title=title))
        grid.add_row(*panels)
        console.print(grid)
    return reports


def measure(console, model, speculator, prompts, requests, repeats) -> dict[str, dict[str, float]]:
    """Tokens/s in bf16, plain and speculative runs interleaved."""
    table = Table(title=f"tokens/s in bf16, batch 1, {speculator.drafter.name}, best of {repeats} interleaved runs")
    for column in ("request", "prompt", "plain", "speculative", "speed-up", "same text"):
        table.add_column(column, justify="left" if column in ("request", "prompt") else "right")
    figures = {}
    for name, request in requests.items():
        seconds, num_identical = [0.0, 0.0], 0
        for choice in (None, speculator):
            timed(model, prompts[0], request | {"max_new_tokens": 16}, choice)  # warm-up
        speculator.stats.reset()
        for prompt, ids in zip(PROMPTS, prompts, strict=True):
            runs = [[timed(model, ids, request, choice) for choice in (None, speculator)] for _ in range(repeats)]
            best = [min(run[i][1] for run in runs) for i in (0, 1)]
            is_equal = torch.equal(runs[0][0][0], runs[0][1][0])
            seconds = [total + value for total, value in zip(seconds, best, strict=True)]
            num_identical += is_equal
            rates = [f"{request['max_new_tokens'] / value:.0f}" for value in best]
            table.add_row(
                name, repr(prompt.splitlines()[0]), *rates, f"{best[0] / best[1]:.2f}x", "yes" if is_equal else "no"
            )
        figures[name] = {
            "identical_bf16_share": num_identical / len(prompts),
            "speedup": round(seconds[0] / seconds[1], 3),
            "mean_acceptance_length": round(speculator.stats.mean_acceptance_length or 1.0, 3),
            "engine_efficiency": round(speculator.stats.engine_efficiency or 0.0, 3),
        }
    console.print(table)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafter", choices=[*HEADS, "draft_model", "prompt_lookup"], default="eagle3")
    parser.add_argument("--tokens", type=int, default=80, help="new tokens per prompt")
    parser.add_argument("--repeats", type=int, default=2, help="timed runs per prompt and request")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    console = Console(width=120)

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    prompts = [tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in PROMPTS]
    # Without EOS everybody writes the same number of tokens.
    common = {"max_new_tokens": arguments.tokens, "eos_token_id": None, "pad_token_id": 0}
    requests = {
        "greedy": common | {"do_sample": False},
        "temperature 0.8": common | {"do_sample": True, "temperature": 0.8},
    }

    console.print(f"[bold]1. Is it the same text?[/] {len(prompts)} prompts x {arguments.tokens} tokens, same seed")
    exact = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    reports = show_texts(console, tokenizer, exact, make_speculator(arguments.drafter, exact), prompts, requests)

    console.print("\n[bold]2. How fast?[/]")
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16).eval()
    speculator = make_speculator(arguments.drafter, model)
    figures = measure(console, model, speculator, prompts, requests, arguments.repeats)

    console.print("\n[bold]3. One round[/]: what was drafted, and what the target accepted in one forward")
    # A fixed policy: an adaptive one begins with small trees.
    drafter = make_speculator(arguments.drafter, model).drafter
    rounds = hf_speculate.rounds(
        model, prompts[0], **requests["temperature 0.8"], speculator=Speculator(drafter, adaptive=False)
    )
    best = max(rounds, key=lambda round: (min(len(round.tokens[0]), 4), round.num_nodes))
    console.print(Text(best.draw(tokenizer)))

    result = {
        "identical": "proven tie" if any(report.ties for report in reports) else True,
        **figures["greedy"],
        "sampled": figures["temperature 0.8"],
        "drafter": arguments.drafter,
        "new_tokens": arguments.tokens,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    console.print()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
