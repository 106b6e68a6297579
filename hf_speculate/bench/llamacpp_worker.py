"""Run by another interpreter, which has xllamacpp: answers each line of JSON on its input with one.

Arguments: a GGUF file, threads, tokens of context, kind of speculation ("none", "ngram_simple"). Knows nothing of
hf_speculate.
"""

from __future__ import annotations

import json
import os
import sys

import xllamacpp  # pyright: ignore[reportMissingImports]


def load(path: str, threads: int, context: int, speculation: str):
    """llama.cpp's own server, without its port: one slot, nothing kept from request to request."""
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel = context, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = 0
    kind = getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{speculation.upper()}")
    params.speculative.types = [kind]
    return xllamacpp.Server(params)


def generate(server, prompt: list[int], max_new_tokens: int, temperature: float, seed: int) -> dict:
    """Counts: tokens written and drafted, and what llama.cpp measured of itself."""
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": seed}
    request = {"prompt": prompt, "n_predict": max_new_tokens, "ignore_eos": True, "cache_prompt": False}
    answer = server.handle_completions(request | sampling)
    answer = answer if isinstance(answer, dict) else json.loads(answer)
    if "timings" not in answer:
        raise SystemExit(f"llama.cpp answered: {answer}")
    timings = answer["timings"]
    return {"num_tokens": timings["predicted_n"], "num_drafted": timings.get("draft_n", 0)}


def main() -> None:
    path, threads, context, speculation = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    # llama.cpp may print: what is answered goes where stdout was.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    server = load(path, threads, context, speculation)
    print(json.dumps({"version": xllamacpp.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(generate(server, **json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
