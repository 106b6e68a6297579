"""Other engines beside us, on the same GGUF file: each a process of another interpreter that has its package.

llama.cpp is llama-cpp-python, which compiles it for the machine, or xllamacpp, a wheel of it and its server; OpenVINO
is openvino-genai.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from ..errors import SpeculateError
from .methods import Method


LlamaCppPython = Annotated[
    str | None,
    typer.Option(
        "--llama-cpp", metavar="PYTHON", help="An interpreter with llama-cpp-python or xllamacpp, beside a GGUF target."
    ),
]
OpenVinoPython = Annotated[
    str | None,
    typer.Option("--openvino", metavar="PYTHON", help="An interpreter with openvino-genai, beside a GGUF target."),
]
"""Options of benchmarks, see `engine_methods`."""


@dataclass(frozen=True)
class EngineKind:
    """An engine.

    Attributes:
        option: by which an interpreter is given.
        worker: what that runs.
        methods: name of the method -> kind of speculation.
    """

    name: str
    option: str
    worker: str
    methods: dict[str, str]


# The other kinds of llama.cpp that need no model remember earlier requests: with every prompt measured several times,
# they would draft its own answer.
LLAMA_CPP = EngineKind(
    "llama.cpp", "--llama-cpp", "llamacpp_worker.py", {"llama.cpp": "none", "llama.cpp, n-gram": "ngram_simple"}
)
OPENVINO = EngineKind(
    "OpenVINO", "--openvino", "openvino_worker.py", {"OpenVINO": "none", "OpenVINO, prompt lookup": "prompt_lookup"}
)


class Engine:
    """A GGUF file in another engine, asked for one text at a time; it waits while others are measured.

    It stands where a model does: the line of JSON that asks and the one that answers are part of the time.

    Args:
        kind: which.
        python: an interpreter that has it.
        context: the most tokens of prompt and text together.
        speculation: "none", or a kind that the engine has.
    Attributes:
        version: of its package, and which.
        drafts: whether that package drafts as it was asked to; if not, it answers nothing.
    """

    device = torch.device("cpu")

    def __init__(self, kind: EngineKind, python: str, path: str, threads: int, context: int, speculation: str = "none"):
        self._kind = kind
        # By its text, not by its path: the modules beside it are not to be found.
        source = Path(__file__).with_name(kind.worker).read_text()
        command = [python, "-c", source, path, str(threads), str(context), speculation]
        # A file: nobody reads a pipe while a text is written, and a full one stops the writer.
        self._messages = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._messages}
        try:
            self._process = subprocess.Popen(command, text=True, **pipes)
        except OSError as error:
            self._messages.close()
            raise SpeculateError(f"{kind.option} {python}: {error}") from error
        ready = self._answer()
        self.version: str = ready["version"]
        self.drafts: bool = ready.get("drafts", True)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._messages.close()

    def generate(
        self, input_ids: Tensor, *, max_new_tokens: int, do_sample: bool = False, temperature: float = 1.0, **_: Any
    ) -> Any:
        """A text after int64 [1, S], EOS not counting as an end.

        Returns:
            an object with `sequences`, int64 [1, S + new]: engines say how many tokens they wrote; these are -1.
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
def engine_methods(llama_cpp: str | None, openvino: str | None, path: str, context: int) -> Iterator[list[Method]]:
    """Engines plain and with what they draft with from the text, with as many threads as torch has.

    Args:
        llama_cpp, openvino: interpreters; None: not this one.

    Raises:
        SpeculateError: no GGUF file; no such interpreter; an engine cannot load the file.
    """
    asked = [(kind, python) for kind, python in ((LLAMA_CPP, llama_cpp), (OPENVINO, openvino)) if python is not None]
    if asked and not path.endswith(".gguf"):
        raise SpeculateError(f"{asked[0][0].option} runs GGUF files; the target is {path}.")
    with ExitStack() as stack:
        methods = []
        for kind, python in asked:
            for name, speculation in kind.methods.items():
                engine = Engine(kind, python, path, torch.get_num_threads(), context, speculation)
                stack.enter_context(engine)
                if engine.drafts:
                    methods.append(Method(name=name, kind="engine", model=engine))
        yield methods
