"""Script for another interpreter, which has llama-cpp-python: answers each line of JSON on its input with one.

Arguments: a GGUF file, threads, tokens of context, kind of speculation (always "none"). The script imports nothing of
hf_speculate. It calls llama.cpp's C functions and samplers, one token at a time.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import llama_cpp as c  # pyright: ignore[reportMissingImports]


def load(path: str, threads: int, context: int) -> Any:
    """llama.cpp's context of a file."""
    c.llama_backend_init()
    model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
    params = c.llama_context_default_params()
    params.n_ctx = params.n_batch = context
    params.n_threads = params.n_threads_batch = threads
    found = c.llama_init_from_model(model, params)
    if not found:
        raise SystemExit(f"llama.cpp cannot load {path}")
    return found


def generate(context: Any, prompt: list[int], max_new_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
    """Writes a text; counts and returns its tokens."""
    written: list[int] = []
    c.llama_memory_clear(c.llama_get_memory(context), True)
    chain = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())
    if temperature:
        c.llama_sampler_chain_add(chain, c.llama_sampler_init_temp(temperature))
    last = c.llama_sampler_init_dist(seed) if temperature else c.llama_sampler_init_greedy()
    c.llama_sampler_chain_add(chain, last)
    tokens = prompt
    for _ in range(max_new_tokens):
        array = (c.llama_token * len(tokens))(*tokens)  # which the batch points to
        if c.llama_decode(context, c.llama_batch_get_one(array, len(tokens))):
            raise SystemExit("llama.cpp cannot decode")
        tokens = [c.llama_sampler_sample(chain, context, -1)]
        written += tokens
    c.llama_sampler_free(chain)
    return {"num_tokens": len(written), "tokens": written}


def main() -> None:
    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # llama.cpp may print: answers go where stdout was.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loaded = load(path, threads, context)
    print(json.dumps({"version": f"llama-cpp-python {c.__version__}"}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(generate(loaded, **json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
