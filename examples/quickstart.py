"""The same text, faster: python examples/quickstart.py (no network needed)."""

import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate  # noqa: F401  (adds speculator= to generate)


examples = Path(__file__).parent
model = AutoModelForCausalLM.from_pretrained(examples / "pycoder", dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(examples / "pycoder")
inputs = tokenizer("class Stack:\n    def __init__(self):", return_tensors="pt")

for speculator in (None, f"{examples}/pycoder-eagle3+suffix"):
    start = time.perf_counter()
    output = model.generate(**inputs, max_new_tokens=128, speculator=speculator)
    print(tokenizer.decode(output[0]), f"\n{time.perf_counter() - start:.2f} s with {speculator or 'no drafts'}\n")
