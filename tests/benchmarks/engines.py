"""Other engines on the same GGUF file: each is a process of another interpreter that has its package.

llama.cpp comes as llama-cpp-python, which `make llama-cpp` compiles for the machine.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from hf_speculate.errors import SpeculateError
from hf_speculate_tools.bench.methods import Method


LlamaCppPython = Annotated[
    str | None,
    typer.Option(
        "--llama-cpp",
        metavar="PYTHON",
        help="Also measure llama.cpp on the same GGUF file, with this Python, which has llama-cpp-python.",
    ),
]


@dataclass(frozen=True, eq=False)
class EngineKind:
    """An engine.

    Attributes:
        name: its name in tables.
        option: option of the command line that gives its interpreter.
        worker: script that the interpreter runs.
        methods: name of each method -> kind of speculation.
    """

    name: str
    option: str
    worker: Path
    methods: dict[str, str]


LLAMA_CPP = EngineKind(
    "llama.cpp",
    "--llama-cpp",
    Path(__file__).with_name("llamacpp_worker.py"),
    {"llama.cpp": "none"},
)


class OtherEngine:
    """A GGUF file in another engine, which writes one text at a time and waits while others are measured.

    It stands in for a model: both lines of JSON, the request and the answer, are part of the time.

    Args:
        kind: the engine.
        python: an interpreter that has its package.
        path: the GGUF file.
        threads: number of threads.
        context: maximum number of tokens of prompt and text together.
        speculation: "none", or a kind that the engine has.
    Attributes:
        version: name and version of its package.
    """

    device = torch.device("cpu")

    def __init__(self, kind: EngineKind, python: str, path: str, threads: int, context: int, speculation: str = "none"):
        self._kind = kind
        # By its text, not by its path: it must not find the modules next to it.
        command = [python, "-c", kind.worker.read_text(), path, str(threads), str(context), speculation]
        # A file: a pipe is not read while a text is written, and a full one stops the writer.
        self._messages = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._messages}
        try:
            self._process = subprocess.Popen(command, text=True, **pipes)
        except OSError as error:
            self._messages.close()
            raise SpeculateError(f"{kind.option} {python}: {error}") from error
        self.version: str = self._answer()["version"]

    def __enter__(self) -> OtherEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._messages.close()

    def generate(
        self, input_ids: Tensor, *, max_new_tokens: int, do_sample: bool = False, temperature: float = 1.0, **_: Any
    ) -> Any:
        """Writes a text after int64 [1, S], EOS not counting as an end.

        Returns:
            An object with `sequences`, int64 [1, S + new]. Engines tell only how many tokens they wrote: these are -1.
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
        raise SpeculateError(f"{self._kind.name} ended ({how}): {message.strip()[-2000:] or 'it said nothing'}")


@contextmanager
def engine_methods(pythons: Mapping[EngineKind, str | None], path: str, context: int) -> Iterator[list[Method]]:
    """Methods of other engines, plain and drafting from the text, with as many threads as torch has.

    Args:
        pythons: interpreter of each engine; None leaves the engine out.
        path: the GGUF file.
        context: maximum number of tokens of prompt and text together.
    Raises:
        SpeculateError: the target is not a GGUF file, there is no such interpreter, or an engine cannot load the file.
    """
    with ExitStack() as stack:
        methods = []
        for kind, python in pythons.items():
            if python is None:
                continue
            if not path.endswith(".gguf"):
                raise SpeculateError(f"{kind.option} runs GGUF files; the target is {path}.")
            for name, speculation in kind.methods.items():
                engine = OtherEngine(kind, python, path, torch.get_num_threads(), context, speculation)
                methods.append(Method(name=name, kind="engine", model=stack.enter_context(engine)))
        yield methods
