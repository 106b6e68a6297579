"""Serving engines for heads: what they serve, how they draft, and the command that starts them.

Facts of vLLM (docs "EAGLE Draft Models", `vllm/config/speculative.py`) and SGLang (docs "Speculative Decoding") were
read in November 2026; neither was run. llama.cpp is b11434, read and run on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from hf_speculate.errors import SpeculateError
from hf_speculate_plugins.checkpoints import GGUF_FILE


EngineName: TypeAlias = Literal["vllm", "sglang", "llama.cpp"]

TITLES: Mapping[EngineName, str] = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp"}
# Method -> layout that the engine reads, and its own name of the method.
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
# Targets whose states vLLM and SGLang hand to EAGLE-3 heads: parts of `model_type`, in vLLM's list since 0.11. Lists
# grow.
_EAGLE3_TARGETS = ("llama", "qwen", "minicpm", "gpt_oss")
# Types of targets that llama.cpp hands to heads; for others it ends the process. "mistral" becomes its "llama".
_LLAMACPP_TARGETS = (
    *("llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gemma4_text"),
    *("gpt_oss", "deepseek_v4", "minimax", "minimax_m2", "nemotron_h", "lfm2"),
)


@dataclass(frozen=True)
class EngineDrafts:
    """The drafts of an engine.

    Attributes:
        depth: tokens along a branch: `num_speculative_tokens`, `--speculative-num-steps`, `--spec-draft-n-max`.
        top_k: branches of a level; 1 is a chain.
        max_nodes: draft nodes without the root; 0: `depth`.
    """

    depth: int
    top_k: int = 1
    max_nodes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_nodes", self.max_nodes or self.depth)

    @property
    def words(self) -> str:
        return f"chains of {self.depth}" if self.top_k == 1 else f"trees of {self.max_nodes} nodes, {self.depth} deep"


def served(engine: EngineName, method: str) -> tuple[str, str]:
    """Layout and the engine's name of a method; raises `SpeculateError` if the engine serves no such heads."""
    if method not in _SERVED[engine]:
        others = [TITLES[name] for name, served_there in _SERVED.items() if method in served_there]
        elsewhere = f"export for {' and '.join(others)} does" if others else "export for no engine does"
        methods = ", ".join(_SERVED[engine])
        raise SpeculateError(f"export for {TITLES[engine]} takes heads of {methods}, not of {method}; {elsewhere}.")
    return _SERVED[engine][method]


def engine_drafts(
    engine: EngineName, depth: int | None, top_k: int | None, num_draft_tokens: int | None, stated: int | None
) -> EngineDrafts:
    """The drafts of an engine with these flags; None: the engine's defaults, for chains what the head states.

    Args:
        num_draft_tokens: nodes of a tree with its root, as SGLang counts them.
        stated: tokens that the head's files have engines draft; None: they do not say.
    Raises:
        SpeculateError: an engine that drafts chains is asked for a tree; a tree has no room for its depth.
    """
    if engine != "sglang":
        if (top_k or 1) > 1 or num_draft_tokens is not None:
            raise SpeculateError(f"{TITLES[engine]} drafts chains: --top-k and --num-draft-tokens are SGLang's.")
        return EngineDrafts(depth or stated or (5 if engine == "vllm" else 3))
    depth, top_k = depth or 5, top_k or 4
    nodes = num_draft_tokens - 1 if num_draft_tokens is not None else depth if top_k == 1 else 7
    if nodes < depth:
        raise SpeculateError(
            f"a tree of --num-draft-tokens {nodes + 1} (its root among them) cannot be {depth} deep: at least "
            f"{depth + 1}, or fewer --depth."
        )
    return EngineDrafts(depth, top_k, nodes)


def command(engine: EngineName, method: str, target: str, drafts: EngineDrafts) -> str:
    """The shell command that serves the head in the folder `$head`.

    Args:
        method: the engine's name of the method.
        target: name of the target, quoted for the shell.
    """
    if engine == "llama.cpp":
        return (
            f'llama-server -m {target} -md "$head/{GGUF_FILE}" --spec-type {method} '
            f"--spec-draft-n-max {drafts.depth} --spec-draft-n-min 0 --spec-draft-p-min 0"
        )
    if engine == "vllm":
        config = {"method": method, "model": "$head", "num_speculative_tokens": drafts.depth}
        quoted = json.dumps(config).replace('"', '\\"')
        return f'vllm serve {target} --speculative-config "{quoted}"'
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {method} "
        f'--speculative-draft-model-path "$head" --speculative-num-steps {drafts.depth} '
        f"--speculative-eagle-topk {drafts.top_k} --speculative-num-draft-tokens {drafts.max_nodes + 1}"
    )


def engine_warnings(engine: EngineName, config: Any, method: str, dtype: str, target: str = "") -> list[str]:
    """Differences that the engine may show.

    Args:
        config, target: config and name of the target.
        method: method of the head.
        dtype: dtype in which the head was measured.
    """
    found, kind = [], config.get_text_config(decoder=True).model_type
    if engine == "llama.cpp":
        if not target.endswith(".gguf"):
            found.append("the target was not measured as a GGUF file; with other weights acceptance differs, too.")
        return found
    if method == "eagle3" and not any(part in kind for part in _EAGLE3_TARGETS):
        found.append(
            f"{TITLES[engine]} hands out the states that EAGLE-3 heads read for targets in a list of its own; "
            f"{kind!r} was not in it when this was written."
        )
    if dtype == "float32":
        found.append(f"measured in float32; {TITLES[engine]} serves in 16 bit unless it is told otherwise (--dtype).")
    return found


def refuse_target(engine: EngineName, config: Any) -> None:
    """Raises `SpeculateError` for a target whose states an engine does not hand to heads."""
    kind = config.get_text_config(decoder=True).model_type
    if engine == "llama.cpp" and kind not in _LLAMACPP_TARGETS:
        raise SpeculateError(
            f"llama.cpp hands no states of {kind!r} models to heads, and ends with an assertion if it is asked to. "
            f"It does for {', '.join(_LLAMACPP_TARGETS)} (b11434). Possible: serve this head here."
        )


def refuse_quantized(engine: EngineName, label: str) -> None:
    """Raises `SpeculateError` for a target whose weights an engine does not load as they are here.

    Args:
        label: result of `quantization_label`; "" for none.
    """
    if label and not (engine == "llama.cpp" and label.startswith("GGUF")):
        raise SpeculateError(
            f"the target's weights are quantised ({label}), and {TITLES[engine]} would serve other ones: the head "
            "reads the states of those. Possible: --target the checkpoint that is to be served (its acceptance is "
            "measured then), or serve this one here."
        )
