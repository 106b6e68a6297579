"""A real llama.cpp: its server with a target and a draft head, asked for greedy texts.

`LLAMA_SERVER` names the program: b11434 or later, which knows EAGLE-3 and DSpark heads.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_speculate_gguf import LLAMA_LAYER, describe_vocabulary, interleaved, write_gguf
from hf_speculate_plugins.checkpoints import LoadedTarget


SERVER = os.environ.get("LLAMA_SERVER")
"""The program; None: there is none."""

_SECONDS = 120


class Wordless(LoadedTarget):
    """A loaded target without a tokenizer: its tokens are numbers."""

    def vocabulary(self, vocab_size: int) -> dict[str, Any]:
        names = [f"<{token}>" for token in range(vocab_size)]
        return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": names}


def write_target(path: str | os.PathLike[str], model: Any, tokenizer: Any, out_type: str = "f32") -> None:
    """Writes a Llama or Qwen2 model as llama.cpp's architecture "llama", which takes biases of q, k and v.

    Its architecture "qwen2" hands no states to heads.
    """
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    metadata = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "llama.rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "llama.vocab_size": config.vocab_size,
    }
    tensors = {"token_embd.weight": model.model.embed_tokens.weight, "output_norm.weight": model.model.norm.weight}
    if not config.tie_word_embeddings:
        tensors["output.weight"] = model.lm_head.weight
    for index, layer in enumerate(model.model.layers):
        for theirs, ours in LLAMA_LAYER.items():
            for part, values in layer.get_submodule(ours).named_parameters():
                values = interleaved(values, heads[theirs]) if theirs in heads else values
                tensors[f"blk.{index}.{theirs}.{part}"] = values
    write_gguf(path, "llama", metadata | describe_vocabulary(tokenizer, config.vocab_size), tensors, out_type)


def drafted(
    target: str | os.PathLike[str],
    head: str | os.PathLike[str],
    kind: str,
    depth: int,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    log: Path,
) -> list[dict[str, Any]]:
    """Greedy texts of llama.cpp with a head: `tokens`, `draft_n` and `draft_n_accepted` for each prompt.

    Args:
        target, head: GGUF files.
        kind: `--spec-type`.
        depth: longest draft.
        prompts: token ids.
        log: file for what the server says.
    """
    assert SERVER is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    exact = ["-fa", "off", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32"]
    size = ["-t", "1", "-tb", "1", "-td", "1", "-tbd", "1", "-c", "1024", "-np", "1", "--cache-ram", "0", "-fit", "off"]
    draft = ["--spec-type", kind, "--spec-draft-n-max", str(depth)]
    command = [SERVER, "-m", target, "-md", head, *draft, *exact, *size, "--offline", "--no-cache-prompt"]
    with log.open("w") as said:
        server = subprocess.Popen([*command, "--port", str(port)], stdout=said, stderr=said)
        try:
            _wait(server, port, log)
            return [_ask(port, list(prompt), max_new_tokens) for prompt in prompts]
        finally:
            server.terminate()
            server.wait(10)


def _wait(server: subprocess.Popen, port: int, log: Path) -> None:
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        assert server.poll() is None, f"llama-server ended: {log.read_text()[-2000:]}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise AssertionError("llama-server did not get ready")


def _ask(port: int, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": max_new_tokens, "temperature": 0.0, "samplers": ["top_k"], "top_k": 1}
    body |= {"cache_prompt": False, "return_tokens": True, "ignore_eos": False, "repeat_penalty": 1.0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        found = json.load(answer)
    return {"tokens": found["tokens"], **{key: found["timings"].get(key, 0) for key in ("draft_n", "draft_n_accepted")}}
