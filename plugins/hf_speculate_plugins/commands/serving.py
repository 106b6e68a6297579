"""What serving engines can do with a head: in which layout, with which flags, and how they draft.

Facts of vLLM (docs "EAGLE Draft Models", `vllm/config/speculative.py`) and SGLang (docs "Speculative Decoding"), read
in November 2026; neither was run. For which targets they have the states that EAGLE-3 heads read is in lists of theirs,
which grow.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from hf_speculate.errors import SpeculateError


EngineName: TypeAlias = Literal["vllm", "sglang"]

# Method -> layout, and what the engine calls it.
_SERVED: Mapping[EngineName, Mapping[str, tuple[str, str]]] = {
    "vllm": {
        "eagle3": ("speculators", "eagle3"),
        "eagle": ("safeailab", "eagle"),
        "dflash": ("speculators", "dflash"),
        "medusa": ("vllm", "medusa"),
    },
    "sglang": {"eagle3": ("specforge", "EAGLE3"), "eagle": ("safeailab", "EAGLE")},
}
_TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
# Parts of `model_type`, as vLLM compares them: in its list since 0.11.
_EAGLE3_TARGETS = ("llama", "qwen", "minicpm", "gpt_oss")


@dataclass(frozen=True)
class Drafting:
    """How an engine drafts.

    Attributes:
        depth: tokens along a branch: `num_speculative_tokens`, `--speculative-num-steps`.
        top_k: branches of a level; 1 is a chain.
        max_nodes: draft nodes, the root not counted.
    """

    depth: int
    top_k: int = 1
    max_nodes: int = 0

    def __post_init__(self) -> None:
        if self.max_nodes == 0:
            object.__setattr__(self, "max_nodes", self.depth)

    @property
    def words(self) -> str:
        return f"chains of {self.depth}" if self.top_k == 1 else f"trees of {self.max_nodes} nodes, {self.depth} deep"


@dataclass(frozen=True)
class Serving:
    """A head in an engine.

    Attributes:
        layout: that it reads.
        method: its name for the method.
    """

    engine: EngineName
    layout: str
    method: str

    @property
    def title(self) -> str:
        return _TITLES[self.engine]

    @classmethod
    def of(cls, engine: EngineName, method: str) -> Serving:
        """Raises `SpeculateError` if the engine serves no heads of the method."""
        served = _SERVED[engine]
        if method not in served:
            others = [_TITLES[name] for name, methods in _SERVED.items() if method in methods]
            elsewhere = f"; {' and '.join(others)} does" if others else "; nobody known here does"
            raise SpeculateError(f"{_TITLES[engine]} serves heads of {', '.join(served)}, not of {method}{elsewhere}.")
        return cls(engine, *served[method])

    def drafting(
        self, depth: int | None, top_k: int | None, num_draft_tokens: int | None, stated: int | None
    ) -> Drafting:
        """What it drafts with these flags; None: the engine's defaults, of vLLM what the head's own config states.

        Args:
            num_draft_tokens: nodes of a tree, the root counted, as SGLang counts them.
            stated: `speculative_tokens` of the head's config.
        Raises:
            SpeculateError: vLLM, which drafts chains, is asked for a tree; a tree that has no room for its depth.
        """
        if self.engine == "vllm":
            if (top_k or 1) > 1 or num_draft_tokens is not None:
                raise SpeculateError("vLLM drafts chains: --top-k and --num-draft-tokens are SGLang's.")
            return Drafting(depth or stated or 5)
        depth, top_k = depth or 5, top_k or 4
        nodes = num_draft_tokens - 1 if num_draft_tokens is not None else depth if top_k == 1 else 7
        if nodes < depth:
            raise SpeculateError(
                f"a tree of --num-draft-tokens {nodes + 1} (its root among them) cannot be {depth} deep: at least "
                f"{depth + 1}, or fewer --depth."
            )
        return Drafting(depth, top_k, nodes)

    def script(self, target: str, drafting: Drafting, facts: str) -> str:
        """A shell script that serves the head in the folder that it lies in; further flags are passed on."""
        return (
            f"#!/bin/sh\n# {facts}\n"
            'head=$(cd "$(dirname "$0")" && pwd)\n'
            f'exec {self._command(shlex.quote(target), drafting)} "$@"\n'
        )

    def _command(self, target: str, drafting: Drafting) -> str:
        if self.engine == "vllm":
            given: dict[str, Any] = {"method": self.method, "model": "$head"}
            config = json.dumps(given | {"num_speculative_tokens": drafting.depth}).replace('"', '\\"')
            return f'vllm serve {target} --speculative-config "{config}"'
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {self.method} "
            f'--speculative-draft-model-path "$head" --speculative-num-steps {drafting.depth} '
            f"--speculative-eagle-topk {drafting.top_k} --speculative-num-draft-tokens {drafting.max_nodes + 1}"
        )

    def warnings(self, config: Any, method: str, dtype: str) -> list[str]:
        """What may go otherwise there than here.

        Args:
            config: the target's.
            dtype: in which it was measured.
        """
        found = []
        kind = config.get_text_config(decoder=True).model_type
        if method == "eagle3" and not any(part in kind for part in _EAGLE3_TARGETS):
            found.append(
                f"{self.title} hands out the states that EAGLE-3 heads read for targets in a list of its own; "
                f"{kind!r} was not in it when this was written."
            )
        if dtype == "float32":
            found.append(f"measured in float32; {self.title} serves in 16 bit unless it is told otherwise (--dtype).")
        return found


def refuse_quantized(engine: EngineName, label: str) -> None:
    """Raises `SpeculateError` for a target of weights that an engine does not load as they are here.

    Args:
        label: of `quantization_label`, "" for none.
    """
    if label:
        raise SpeculateError(
            f"the target's weights are quantised ({label}), and {_TITLES[engine]} would serve other ones: the head "
            "reads the states of those. Possible: --target the checkpoint that is to be served (its acceptance is "
            "measured then), or serve this one here."
        )
