"""Script for another interpreter, which has openvino-genai: answers each line of JSON on its input with one.

Arguments: a GGUF file, threads, tokens of context, kind of speculation ("none", "prompt_lookup"). The script imports
nothing of hf_speculate.
"""

from __future__ import annotations

import json
import os
import sys

import numpy
import openvino  # pyright: ignore[reportMissingImports]
import openvino_genai  # pyright: ignore[reportMissingImports]


# The values of its documentation.
LOOKUP = {"num_assistant_tokens": 5, "max_ngram_size": 3}


def load(path: str, threads: int, speculation: str):
    """OpenVINO's pipeline, which reads the file itself and keeps weights in 4 bits."""
    options = {} if speculation == "none" else {speculation: True}
    return openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads, **options)


def generate(
    pipeline, speculation: str, prompt: list[int], max_new_tokens: int, temperature: float, seed: int
) -> dict[str, int]:
    """Writes a text and returns the number of its tokens."""
    config = openvino_genai.GenerationConfig()
    settings = {"max_new_tokens": max_new_tokens, "ignore_eos": True, "apply_chat_template": False, "rng_seed": seed}
    if temperature:
        settings |= {"do_sample": True, "temperature": temperature, "top_k": 2**31 - 1, "top_p": 1.0}
    settings |= LOOKUP if speculation != "none" else {}
    for name, value in settings.items():
        setattr(config, name, value)
    found = pipeline.generate(openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)), config)
    return {"num_tokens": len(found.tokens[0])}


def main() -> None:
    path, threads, speculation = sys.argv[1], int(sys.argv[2]), sys.argv[4]
    # OpenVINO may print: answers go where stdout was.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    pipeline = load(path, threads, speculation)
    print(json.dumps({"version": openvino_genai.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(generate(pipeline, speculation, **json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
