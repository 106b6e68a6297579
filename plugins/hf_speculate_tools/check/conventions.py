"""Other ways to read a head: the conventions that published heads are often labelled wrongly with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_speculate.target import GenerativeModel

from .acceptance import ReadingOptions


@dataclass(frozen=True)
class Alternative:
    """Another way to read a head: options of `AutoSpeculator.from_pretrained`, and their meaning in words."""

    options: ReadingOptions
    meaning: str


def alternatives(drafter: Any, target: GenerativeModel, options: ReadingOptions) -> list[Alternative]:
    """One change of every convention that `options` leave open; none for methods without conventions."""
    find = {"eagle": _of_eagle, "block": _of_block}.get(drafter.name)
    return (
        [] if find is None else [trial for trial in find(drafter, target) if not trial.options.keys() & options.keys()]
    )


_SWITCHES = {
    "norm_before_residual": {True: "the residual taken after the norm", False: "the residual taken before the norm"},
    "norm_logits": {True: "a norm before the output matrix", False: "no norm before the output matrix"},
    "feed_back_normed": {True: "the normed state fed back", False: "the state fed back before the norm"},
}
_PLACES = {0: "the token after its place (DeepSpec)", 1: "the token at its place (z-lab)"}


def _of_eagle(drafter: Any, target: GenerativeModel) -> Iterator[Alternative]:
    """Layers, RoPE base, norms, embeddings."""
    spec, report, depth = drafter.spec, drafter.report, target.config.get_text_config(decoder=True).num_hidden_layers
    default = (2, depth // 2, depth - 3) if spec.version == 3 and spec.num_features == 3 else None
    yield from _other_layers(spec.resolved_layers(depth), depth, default)
    yield from _other_bases(spec.rope, target)
    for name, meaning in _SWITCHES.items() if spec.version == 3 else ():
        if not (spec.parallel and name == "feed_back_normed"):
            value = not getattr(spec, name)
            yield Alternative({name: value}, meaning[value])
    if "embed_tokens.weight" in report.used:
        yield Alternative({"embeddings": "target"}, "the target's embeddings")
    elif "random" in report.shared.get("embed_tokens.weight", ""):
        yield Alternative({"embeddings": "own"}, "the embeddings in the file")


def _of_block(drafter: Any, target: GenerativeModel) -> Iterator[Alternative]:
    """Layers, first slot, causality, RoPE base, and order of its pairs."""
    spec, depth = drafter.spec, target.config.get_text_config(decoder=True).num_hidden_layers
    yield from _other_layers(spec.feature_layers, depth)
    yield Alternative({"first_slot": 1 - spec.first_slot}, f"a slot that proposes {_PLACES[1 - spec.first_slot]}")
    causal = not any(spec.causal)
    meaning = "slots that see only those before them" if causal else "slots that see all of their block"
    yield Alternative({"causal": causal}, meaning)
    if spec.dialect != "llama.cpp":
        order = "two halves" if spec.rope_interleaved else "neighbouring values (LFM2)"
        yield Alternative({"rope_interleaved": not spec.rope_interleaved}, f"RoPE that turns {order}")
    yield from _other_bases(spec.rope, target)


def _other_layers(layers: tuple[int, ...], depth: int, default: tuple[int, ...] | None = None) -> Iterator[Alternative]:
    """The layers one lower and one higher, and the method's default, as far as the target has them."""
    choices = {tuple(layer + shift for layer in layers): f"layers {shift:+d}" for shift in (-1, 1)}
    if default is not None:
        choices[default] = "the default layers"
    for other, meaning in choices.items():
        if other != layers and min(other) >= 0 and max(other) <= depth:
            yield Alternative({"feature_layers": list(other)}, f"{meaning}, hidden states {list(other)}")


def _other_bases(rope: dict[str, Any], target: GenerativeModel) -> Iterator[Alternative]:
    """RoPE bases to try: 10000 (some trainers' own), the target's, Llama 3's and Qwen's."""
    targets = (getattr(target.config, "rope_parameters", None) or {}).get("rope_theta")
    for base in dict.fromkeys(float(base) for base in (1e4, targets, 5e5, 1e6) if base):
        if base != rope["rope_theta"]:
            whose = " (the target's)" if base == targets else ""
            yield Alternative({"rope_theta": base}, f"RoPE base {base:g}{whose}")
