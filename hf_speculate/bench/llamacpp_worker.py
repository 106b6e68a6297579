"""Run by another interpreter, which has llama-cpp-python: answers each line of JSON on its input with one.

Arguments: a GGUF file, threads, tokens of context. Knows nothing of hf_speculate.
"""

from __future__ import annotations

import json
import sys
import time

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np


class Model:
    """A model with an empty context."""

    def __init__(self, path: str, threads: int, context: int):
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = context
        options.n_threads = options.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.batch = llama_cpp.llama_batch_init(context, 0, 1)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.length = 0

    def cut(self, length: int) -> None:
        """Forgets what is behind the first `length` tokens."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), 0, length, -1)
        self.length = length

    def forward(self, tokens: list[int], num_logits: int = 1) -> float:
        """Seconds of a forward that gives logits for the last `num_logits` tokens."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, self.length + i, 1, 0
            batch.logits[i] = i >= len(tokens) - num_logits
        start = time.perf_counter()
        status = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_get_logits_ith(self.context, -1)  # waits for them
        seconds = time.perf_counter() - start
        if status:
            raise SystemExit(f"llama_decode failed with status {status}")
        self.length += len(tokens)
        return seconds

    def best(self) -> int:
        """The most likely next token."""
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())


def generate(model: Model, prompt: list[int], max_new_tokens: int) -> dict:
    """Greedy decoding from an empty context: seconds of the whole and of the prompt, and the tokens."""
    model.cut(0)
    start = time.perf_counter()
    prompt_seconds = model.forward(prompt)
    tokens = [model.best()]
    while len(tokens) < max_new_tokens:
        model.forward(tokens[-1:])
        tokens.append(model.best())
    return {"seconds": time.perf_counter() - start, "prompt_seconds": prompt_seconds, "tokens": tokens}


def verify(model: Model, prompt: list[int], nodes: list[int], repeats: int) -> dict:
    """Seconds of forwards over N tokens behind the prompt, with logits for all of them: a list for each N."""
    model.cut(0)
    model.forward(prompt)
    seconds: dict[int, list[float]] = {n: [] for n in nodes}
    for repeat in range(repeats + 1):
        for n in nodes:
            taken = model.forward(list(range(3, 3 + n)), num_logits=n)
            model.cut(len(prompt))
            if repeat:  # the first is warm-up
                seconds[n].append(taken)
    return {"seconds": list(seconds.values())}


def main() -> None:
    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    quiet = llama_cpp.llama_log_callback(lambda *_: None)  # kept alive by its name
    llama_cpp.llama_log_set(quiet, None)
    model = Model(path, threads, context)
    commands = {"generate": generate, "verify": verify}
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)  # noqa: T201
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(commands[request.pop("command")](model, **request)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
