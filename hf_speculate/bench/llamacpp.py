"""llama.cpp beside us: a process of another interpreter that has xllamacpp, a wheel of llama.cpp and its server."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from ..errors import SpeculateError
from .methods import Method


Interpreter = Annotated[
    str | None,
    typer.Option("--llama-cpp", metavar="PYTHON", help="An interpreter with xllamacpp, beside a GGUF target."),
]
"""An option of benchmarks, see `llama_cpp_methods`."""

_WORKER = Path(__file__).with_name("llamacpp_worker.py")

PLAIN = "llama.cpp"
# Name of the method -> kind of speculation. The others of llama.cpp that need no model remember earlier requests: with
# every prompt measured several times, they would draft its own answer.
METHODS = {PLAIN: "none", f"{PLAIN}, n-gram": "ngram_simple"}


class LlamaCpp:
    """A GGUF file in llama.cpp, asked for one text at a time; it waits while others are measured.

    It stands where a model does: the line of JSON that asks and the one that answers are part of the time.

    Args:
        python: an interpreter that has `xllamacpp`.
        context: the most tokens of prompt and text together.
        speculation: "none", or a kind of llama.cpp's speculation.
    Attributes:
        version: of xllamacpp.
    """

    device = torch.device("cpu")

    def __init__(self, python: str, path: str, threads: int, context: int, speculation: str = "none"):
        # By its text, not by its path: the modules beside it are not to be found.
        command = [python, "-c", _WORKER.read_text(), path, str(threads), str(context), speculation]
        # A file: nobody reads a pipe while a text is written, and a full one stops the writer.
        self._messages = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._messages}
        try:
            self._process = subprocess.Popen(command, text=True, **pipes)
        except OSError as error:
            self._messages.close()
            raise SpeculateError(f"--llama-cpp {python}: {error}") from error
        self.version: str = self._answer()["version"]

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._messages.close()

    def generate(
        self, input_ids: Tensor, *, max_new_tokens: int, do_sample: bool = False, temperature: float = 1.0, **_: Any
    ) -> Any:
        """A text after int64 [1, S], EOS not counting as an end.

        Returns:
            an object with `sequences`, int64 [1, S + new]: llama.cpp says how many tokens it wrote, not which; they are
            -1.
        """
        answer = self._ask(
            prompt=input_ids[0].tolist(),
            max_new_tokens=max_new_tokens,
            temperature=temperature if do_sample else 0.0,
            seed=torch.initial_seed() % 2**32,
        )
        return SimpleNamespace(sequences=torch.nn.functional.pad(input_ids, (0, answer["num_tokens"]), value=-1))

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
        self._process.communicate()
        self._messages.seek(0)
        message, status = self._messages.read(), self._process.returncode
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        raise SpeculateError(f"llama.cpp ended ({how}): {message.strip()[-2000:] or 'it said nothing'}")


@contextmanager
def llama_cpp_methods(python: str | None, path: str, context: int) -> Iterator[list[Method]]:
    """llama.cpp plain and with its n-gram speculation, with as many threads as torch has; none without an interpreter.

    Raises:
        SpeculateError: no GGUF file; no such interpreter; llama.cpp cannot load the file.
    """
    if python is not None and not path.endswith(".gguf"):
        raise SpeculateError(f"--llama-cpp runs GGUF files; the target is {path}.")
    with ExitStack() as stack:
        methods = []
        for name, speculation in METHODS.items() if python is not None else ():
            model = stack.enter_context(LlamaCpp(str(python), path, torch.get_num_threads(), context, speculation))
            methods.append(Method(name=name, kind="llama_cpp", model=model))
        yield methods
