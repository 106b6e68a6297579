"""llama.cpp beside us: a process of another interpreter that has llama-cpp-python."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..errors import SpeculateError


_WORKER = Path(__file__).with_name("llamacpp_worker.py")


class LlamaCpp:
    """A GGUF file in llama.cpp, asked for one measurement at a time; it waits while others are made.

    It stands where a model does: the line of JSON that asks and the one that answers are part of the time.

    Args:
        python: an interpreter that has `llama_cpp`.
        context: the most tokens of prompt and text together.
    Attributes:
        version: of llama-cpp-python.
    """

    device = torch.device("cpu")

    def __init__(self, python: str, path: str, threads: int, context: int):
        # By its text, not by its path: the modules beside it are not to be found.
        command = [python, "-c", _WORKER.read_text(), path, str(threads), str(context)]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try:
            self._process = subprocess.Popen(command, text=True, **pipes)
        except OSError as error:
            raise SpeculateError(f"--llama-cpp {python}: {error}") from error
        self.version: str = self._answer()["version"]

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def generate(self, input_ids: Tensor, *, max_new_tokens: int, **_: Any) -> Any:
        """Greedy decoding of int64 [1, S]; returns an object with `sequences` (int64 [1, S + new])."""
        answer = self._ask(command="generate", prompt=input_ids[0].tolist(), max_new_tokens=max_new_tokens)
        return SimpleNamespace(sequences=torch.cat([input_ids, torch.tensor([answer["tokens"]])], dim=1))

    def forward_costs(self, prompt: Sequence[int], nodes: Sequence[int], repeats: int = 5) -> dict[str, Any]:
        """Medians: `verify_ms` of forwards over N tokens behind the prompt, by N, and `prompt_ms`."""
        verify = self._ask(command="verify", prompt=list(prompt), nodes=list(nodes), repeats=repeats)["seconds"]
        prompts = [self._ask(command="generate", prompt=list(prompt), max_new_tokens=1) for _ in range(3)]
        return {
            "verify_ms": {n: 1e3 * statistics.median(taken) for n, taken in zip(nodes, verify, strict=True)},
            "prompt_ms": 1e3 * statistics.median(answer["prompt_seconds"] for answer in prompts),
        }

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        _, message = self._process.communicate()
        status = self._process.returncode
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        raise SpeculateError(f"llama.cpp ended ({how}): {message.strip()[-2000:] or 'it said nothing'}")


@contextmanager
def optional_llama_cpp(python: str | None, path: str, context: int) -> Iterator[LlamaCpp | None]:
    """With as many threads as torch has; None without an interpreter."""
    if python is None:
        yield None
        return
    with LlamaCpp(python, path, torch.get_num_threads(), context) as other:
        yield other
