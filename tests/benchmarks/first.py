"""First calls: what a call gains in a fresh process, on a quiet machine and while other processes take its cores.

Each process loads a target, makes `CALLS` calls with other prompts, and prints their seconds. Processes of plain and
speculative text alternate. A gain is the ratio of both, call by call, each the median over processes. The prompt of a
first call takes ten times as long as that of a third one, with drafts and without, so there are two gains: of whole
calls, and of what comes after the first token.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_speculate.errors import SpeculateError
from hf_speculate_gguf.named import NAMED_TARGETS
from hf_speculate_tools.commands import chat_ids, say, say_json


CALLS = 3
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HEADS = {"pycoder": "pycoder-eagle3+suffix", **{name: target.head for name, target in NAMED_TARGETS.items()}}
PROMPTS = {
    "pycoder": ["import argparse\n\n\ndef main():\n", "class Stack:\n    def push(", "def read_config(path):\n    "],
    "qwen2.5-coder-0.5b": [
        "Write a Python function that reverses a linked list.",
        "Write a Python function that counts the words of a file.",
        "Write a Python class for a stack with push and pop.",
    ],
    "": ["Why does bread rise when it is baked?", "Name five trees.", "Write a Python function that adds two numbers."],
}


class FirstToken:
    """A streamer that notes when the first token came."""

    def __init__(self) -> None:
        self.num_puts, self.seconds = 0, 0.0

    def put(self, value: object) -> None:
        self.num_puts += 1
        if self.num_puts == 2:  # the prompt comes first
            self.seconds = time.perf_counter()

    def end(self) -> None:
        pass


def worker(target: str, is_speculative: bool, num_tokens: int, shift: int) -> None:
    """One process: prints the seconds of its calls, and those after the first token; `shift` turns the prompts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_speculate
    from hf_speculate_tools.bench import fixed_length

    if target == "pycoder":
        model = AutoModelForCausalLM.from_pretrained(EXAMPLES / target, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / target)
    else:
        path = NAMED_TARGETS[target].find()
        if path is None:
            raise SpeculateError(f"{target} is not on this machine: {NAMED_TARGETS[target].install}.")
        model, tokenizer = hf_speculate.load_gguf(path)
    prompts = PROMPTS.get(target, PROMPTS[""])
    speculator = None
    if is_speculative:
        speculator = hf_speculate.AutoSpeculator.from_pretrained(EXAMPLES / HEADS[target], target=model)
    seconds = []
    for call in range(CALLS):
        ids = prompt_ids(tokenizer, prompts[(call + shift) % len(prompts)])
        options = fixed_length(num_tokens) | {"do_sample": False, "attention_mask": torch.ones_like(ids)}
        first, began = FirstToken(), time.perf_counter()
        model.generate(ids, speculator=speculator, streamer=first, **options)
        ended = time.perf_counter()
        seconds.append((ended - began, ended - first.seconds))
    say_json(seconds)


def prompt_ids(tokenizer: Any, prompt: str) -> Any:
    """Token ids [1, P] of a prompt, as a user's message where the tokenizer has a chat template."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")["input_ids"]
    return chat_ids([{"role": "user", "content": prompt}], tokenizer)[None]


@contextmanager
def cores_taken(count: int) -> Iterator[None]:
    """Other processes that compute all the time."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure(target: str, num_tokens: int, repeats: int) -> dict[str, list[float]]:
    """The gains of each call."""
    seconds: dict[bool, list[Any]] = {False: [], True: []}
    for number in range(repeats):
        for is_speculative, found in seconds.items():
            arguments = [target, str(int(is_speculative)), str(num_tokens), str(number)]
            command = [sys.executable, "-m", __spec__.name, "worker", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SpeculateError(f"{target}: a process failed: {done.stderr.strip()[-400:]}")
            found.append(json.loads(done.stdout.splitlines()[-1]))
    gains: dict[str, list[float]] = {}
    for part, name in enumerate(("whole", "after the first token")):
        plain, ours = (
            [statistics.median(process[call][part] for process in found) for call in range(CALLS)]
            for found in seconds.values()
        )
        gains[name] = [round(before / after, 2) for before, after in zip(plain, ours, strict=True)]
    return gains


def main(
    targets: Annotated[
        list[str] | None, typer.Option("--target", help="Target to measure; repeat for several.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens of a call.")] = 48,
    repeats: Annotated[int, typer.Option(help="Processes of each kind.")] = 3,
    taken: Annotated[list[int] | None, typer.Option(help="Cores that others take; repeat for several.")] = None,
) -> None:
    """Measure what the first calls of a fresh process gain."""
    rows = []
    for target in targets or ["pycoder", *(name for name, known in NAMED_TARGETS.items() if known.find())]:
        for count in taken or [0, 1, 2]:
            with cores_taken(count):
                gains = measure(target, max_new_tokens, repeats)
            rows.append({"target": target, "cores_taken": count, **gains})
            say(f"{target}, {count} cores taken: {gains}", err=True)
    say_json({"new_tokens": max_new_tokens, "processes": repeats, "rows": rows})


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], sys.argv[3] == "1", int(sys.argv[4]), int(sys.argv[5]))
    else:
        typer.run(main)
