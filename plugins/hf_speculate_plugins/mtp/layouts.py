"""Names of draft layers in published checkpoints, as a table: one entry for each family of files.

Sources: vLLM's and SGLang's readers, transformers' `MtpModel`, speculators' `convert/mtp`. Inside this package a layer
has the names `enorm`, `hnorm` (norms of embedding and hidden state), `fc` (their projection), `layers.0.*` (the decoder
layer) and `norm` (after it).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


_LANGUAGE = r"(?:model\.)?(?:language_model\.)?(?:model\.)?"
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Layout:
    """Naming of one family of files.

    Attributes:
        name: name for messages.
        example: name of a tensor, for messages.
        pattern: regular expression of the prefix of all names. Its group `layer`, if it has one, is the number of the
            draft layer; a prefix without it is shared by all draft layers.
        names: name inside this package by name after the prefix; all others are the decoder layer's.
        copies: names after the prefix that are copies of the target's own tensors, or hold nothing.
        hidden_first: the projection takes [hidden; embedding] instead of [embedding; hidden].
        zeroes_first: the embedding of entry 0 is zero.
        follows_target: layers are counted on from the target's own, as in `model.layers.61.`.
    """

    name: str
    example: str
    pattern: str
    names: Mapping[str, str]
    copies: Sequence[str] = ()
    hidden_first: bool = False
    zeroes_first: bool = False
    follows_target: bool = False
    regex: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "regex", re.compile(self.pattern))


_OF_BLOCKS = {
    **{f"attn_{part}": f"layers.0.self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"layers.0.self_attn.{part}_norm" for part in "qk"},
    **{f"ffn_{part}": f"layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")},
    "attn_output": "layers.0.self_attn.o_proj",
    "attn_norm": "layers.0.input_layernorm",
    "post_attention_norm": "layers.0.post_attention_layernorm",
}
_JOINED = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "fc", "final_layernorm": "norm"}

LAYOUTS = (
    Layout(
        "Qwen",
        "mtp.fc.weight",
        r"(?:model\.)?mtp\.(?:layers\.(?P<layer>\d+)\.)?",
        {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "fc", "norm": "norm"},
    ),
    Layout(
        "DeepSeek and GLM",
        "model.layers.N.eh_proj.weight",
        _LANGUAGE + r"layers\.(?P<layer>\d+)\.",
        {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "fc", "shared_head.norm": "norm"},
        copies=("shared_head.head.weight", "embed_tokens.weight"),
        follows_target=True,
    ),
    Layout(
        "MiMo",
        "model.mtp_layers.0.input_proj.weight",
        r"model\.mtp_layers\.(?P<layer>\d+)\.",
        _JOINED,
        hidden_first=True,
        zeroes_first=True,
    ),
    Layout(
        "speculators",
        "mtp_layers.0.input_proj.weight",
        r"(?:mtp_layers\.(?P<layer>\d+)\.|(?=verifier_))",
        _JOINED,
        copies=("verifier_lm_head.weight",),
    ),
    Layout(
        "GGUF",
        "blk.N.nextn.eh_proj.weight",
        r"blk\.(?P<layer>\d+)\.",
        {
            **{"nextn.enorm": "enorm", "nextn.hnorm": "hnorm", "nextn.eh_proj": "fc", "nextn.shared_head_norm": "norm"},
            **_OF_BLOCKS,
        },
        copies=("nextn.shared_head_head.weight", "nextn.embed_tokens.weight"),
        follows_target=True,
    ),
)


@dataclass(frozen=True)
class Place:
    """A tensor of a draft layer.

    Attributes:
        layer: number of the draft layer, counted from 0; None for what all of them share.
        name: name inside this package.
        is_copy: whether the target's own tensor serves instead.
    """

    layer: int | None
    name: str
    is_copy: bool = False


def place_of(layout: Layout, name: str, num_target_layers: int) -> Place | None:
    """The place of a tensor in a layout; None if it is not one of a draft layer."""
    if (match := layout.regex.match(name)) is None:
        return None
    rest = name[match.end() :]
    number = match.groupdict().get("layer")
    layer = None if number is None else int(number) - (num_target_layers if layout.follows_target else 0)
    if layer is not None and layer < 0:
        return None
    if rest in layout.copies:
        return Place(layer, rest, is_copy=True)
    module, _, kind = rest.rpartition(".")
    if module in layout.names:
        return Place(layer, f"{layout.names[module]}.{kind}")
    return Place(layer, rest if layer is None else f"layers.0.{rest}")


def layout_of(names: Iterable[str], num_target_layers: int) -> tuple[Layout, dict[str, Place]] | None:
    """The layout of a checkpoint's draft layers, and the place of each of their tensors; None if it has none.

    Args:
        names: names of all tensors of the checkpoint.
        num_target_layers: number of decoder layers of the target.
    """
    names = list(names)
    for layout in LAYOUTS:
        places = {name: place for name in names if (place := place_of(layout, name, num_target_layers)) is not None}
        if any(place.name == "fc.weight" for place in places.values()):
            return layout, places
    return None


def speculators_name(name: str) -> str:
    """The name that speculators' files give a tensor of this package."""
    module, _, kind = name.rpartition(".")
    outer = {inside: outside for outside, inside in _JOINED.items()}.get(module)
    return f"mtp_layers.0.{name.removeprefix('layers.0.') if outer is None else f'{outer}.{kind}'}"


def expert_of(name: str) -> tuple[str, int, str] | None:
    """The module of a tensor that files store for each expert, the expert's number, and which projection it is."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else (match[1], int(match[2]), match[3])
