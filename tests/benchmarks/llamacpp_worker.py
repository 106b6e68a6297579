"""Script for another interpreter, with xllamacpp or llama-cpp-python: answers each line of JSON on its input with one.

Arguments: a GGUF file, threads, tokens of context, kind of speculation ("none", "ngram_simple"). The script imports
nothing of hf_speculate.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


xllamacpp: Any
try:
    import xllamacpp  # pyright: ignore[reportMissingImports]
except ImportError:
    xllamacpp = None


class Server:
    """xllamacpp: llama.cpp's own server, without its port. One slot, nothing kept from request to request."""

    drafts = True

    def __init__(self, path: str, threads: int, context: int, speculation: str):
        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx, params.n_parallel = context, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.verbosity = 0
        kind = getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{speculation.upper()}")
        params.speculative.types = [kind]
        self._server = xllamacpp.Server(params)
        self.version = f"xllamacpp {xllamacpp.__version__}"

    def generate(self, prompt: list[int], max_new_tokens: int, temperature: float, seed: int) -> dict:
        """Writes a text; counts its tokens and those that were drafted."""
        sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": seed}
        request = {"prompt": prompt, "n_predict": max_new_tokens, "ignore_eos": True, "cache_prompt": False}
        answer = self._server.handle_completions(request | sampling)
        answer = answer if isinstance(answer, dict) else json.loads(answer)
        if "timings" not in answer:
            raise SystemExit(f"llama.cpp answered: {answer}")
        timings = answer["timings"]
        return {"num_tokens": timings["predicted_n"], "num_drafted": timings.get("draft_n", 0)}


class LlamaLibrary:
    """llama-cpp-python, which compiles llama.cpp for the machine: its C functions and samplers, one token at a time.

    Attributes:
        version: name and version of the package.
        drafts: whether it does the speculation that it was asked for ("none" only); if not, it loads nothing.
    """

    def __init__(self, path: str, threads: int, context: int, speculation: str):
        import llama_cpp  # pyright: ignore[reportMissingImports]

        self._c, self.version = llama_cpp, f"llama-cpp-python {llama_cpp.__version__}"
        self.drafts = speculation == "none"
        if not self.drafts:
            return
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = context
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot load {path}")

    def generate(self, prompt: list[int], max_new_tokens: int, temperature: float, seed: int) -> dict:
        """Writes a text; counts and returns its tokens."""
        c, written = self._c, []
        c.llama_memory_clear(c.llama_get_memory(self._context), True)
        chain = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())
        if temperature:
            c.llama_sampler_chain_add(chain, c.llama_sampler_init_temp(temperature))
        last = c.llama_sampler_init_dist(seed) if temperature else c.llama_sampler_init_greedy()
        c.llama_sampler_chain_add(chain, last)
        tokens = prompt
        for _ in range(max_new_tokens):
            array = (c.llama_token * len(tokens))(*tokens)  # which the batch points to
            if c.llama_decode(self._context, c.llama_batch_get_one(array, len(tokens))):
                raise SystemExit("llama.cpp cannot decode")
            tokens = [c.llama_sampler_sample(chain, self._context, -1)]
            written += tokens
        c.llama_sampler_free(chain)
        return {"num_tokens": len(written), "num_drafted": 0, "tokens": written}


def main() -> None:
    path, threads, context, speculation = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    # llama.cpp may print: answers go where stdout was.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind = Server if xllamacpp else LlamaLibrary
    engine = kind(path, threads, context, speculation)
    print(json.dumps({"version": engine.version, "drafts": engine.drafts}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.generate(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
