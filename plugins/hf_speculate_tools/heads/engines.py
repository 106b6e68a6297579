"""Serving engines: the layout of heads that each reads, and the command that starts it with a head.

Facts of vLLM (docs "EAGLE Draft Models", `vllm/config/speculative.py`) and SGLang (docs "Speculative Decoding") were
read in November 2026; neither was run. llama.cpp is b11434, read and run on a CPU.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from typing import Literal, TypeAlias

from hf_speculate.errors import SpeculateError


EngineName: TypeAlias = Literal["vllm", "sglang", "llama.cpp"]

# Engine -> method -> layout that the engine reads, and its own name of the method.
_SERVED: Mapping[EngineName, Mapping[str, tuple[str, str]]] = {
    "vllm": {
        "eagle3": ("speculators", "eagle3"),
        "eagle": ("safeailab", "eagle"),
        "dflash": ("speculators", "dflash"),
    },
    "sglang": {"eagle3": ("specforge", "EAGLE3"), "eagle": ("safeailab", "EAGLE")},
    "llama.cpp": {
        "eagle3": ("llama.cpp", "draft-eagle3"),
        "dflash": ("llama.cpp", "draft-dflash"),
        "dspark": ("llama.cpp", "draft-dspark"),
    },
}
# Types of targets whose states llama.cpp hands to heads; "mistral" becomes its "llama".
_LLAMACPP_TARGETS = (
    *("llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gemma4_text"),
    *("gpt_oss", "deepseek_v4", "minimax", "minimax_m2", "nemotron_h", "lfm2"),
)
_DEPTH = 5  # draft tokens along a branch
_TOP_K, _NODES = 4, 8  # of SGLang's trees; the root is one of the nodes


def served_layout(engine: EngineName, method: str) -> str:
    """Layout in which an engine reads heads of a method; raises `SpeculateError` if it serves no such heads."""
    if method not in _SERVED[engine]:
        others = [name for name, methods in _SERVED.items() if method in methods]
        elsewhere = f"possible: --for {' or '.join(others)}" if others else "none of the other engines does either"
        raise SpeculateError(f"{engine} serves heads of {', '.join(_SERVED[engine])}, not of {method}; {elsewhere}.")
    return _SERVED[engine][method][0]


def check_target(engine: EngineName, model_type: str) -> None:
    """Raises `SpeculateError` for a target whose states an engine does not hand to heads."""
    if engine == "llama.cpp" and model_type not in _LLAMACPP_TARGETS:
        raise SpeculateError(
            f"llama.cpp hands no states of {model_type!r} models to heads, and ends with an assertion if it is asked "
            f"to. It does for {', '.join(_LLAMACPP_TARGETS)} (b11434). Possible: use this head here."
        )


def start_command(engine: EngineName, method: str, head: str | os.PathLike, target: str | None) -> str:
    """The shell command that starts an engine with a head.

    Args:
        head: folder of the head, in the engine's layout.
        target: folder, Hub id or GGUF file of the target; None: the user has to name it.
    """
    path, name = os.path.abspath(head), _SERVED[engine][method][1]
    is_gguf = target is not None and target.endswith(".gguf")
    if target is None or is_gguf != (engine == "llama.cpp"):
        target = "TARGET.gguf" if engine == "llama.cpp" else "TARGET"
    target = shlex.quote(os.path.abspath(target) if os.path.exists(target) else target)
    if engine == "llama.cpp":
        from hf_speculate_plugins.checkpoints import GGUF_FILE

        file = shlex.quote(os.path.join(path, GGUF_FILE))
        return f"llama-server -m {target} -md {file} --spec-type {name} --spec-draft-n-max {_DEPTH}"
    if engine == "vllm":
        config = json.dumps({"method": name, "model": path, "num_speculative_tokens": _DEPTH})
        return f"vllm serve {target} --speculative-config {shlex.quote(config)}"
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {name} "
        f"--speculative-draft-model-path {shlex.quote(path)} --speculative-num-steps {_DEPTH} "
        f"--speculative-eagle-topk {_TOP_K} --speculative-num-draft-tokens {_NODES}"
    )
