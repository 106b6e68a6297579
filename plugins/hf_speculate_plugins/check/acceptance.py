"""Acceptance of a head: its greedy chains, read under some conventions, against the target's own greedy texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.drafting import RAW_LAST, FeatureTaps
from hf_speculate.models import GenerativeModel
from hf_speculate.stats import HeadRecord


Options = dict[str, Any]
Loaded = TypeVar("Loaded")

# Published heads accept 62 to 73 % at depth 1. Of the chains accepted to one depth, the share accepted at the next is
# at least 0.77 times that (figures in vLLM's tests). A state that is fed back wrongly shows at depth 2 only.
_LOW_DECAY = 0.7


@dataclass(frozen=True)
class Text:
    """A prompt and the target's greedy continuation.

    Attributes:
        token_ids: int64 [S], prompt and continuation.
        num_prompt: number of prompt tokens.
        states: the target's hidden states by index, [S, H] each, on the CPU; `RAW_LAST` is among them.
    """

    token_ids: Int[Tensor, " S"]
    num_prompt: int
    states: Mapping[int, Float[Tensor, "S H"]]

    def roots(self, depth: int) -> range:
        """Positions of the tokens that `depth` tokens of the target's own follow."""
        return range(self.num_prompt, len(self.token_ids) - depth)


@torch.inference_mode()
def write_texts(
    target: GenerativeModel, prompts: Sequence[Int[Tensor, " S"]], *, max_new_tokens: int = 64, max_prompt: int = 1024
) -> list[Text]:
    """Lets the target continue each prompt greedily, and keeps all of its hidden states.

    Args:
        max_prompt: tokens kept of a longer prompt, its last ones: the states of all layers are held in memory.
    """
    layers = [*range(target.config.get_text_config(decoder=True).num_hidden_layers + 1), RAW_LAST]
    texts = []
    for prompt in prompts:
        prompt = prompt[-max_prompt:].to(target.device)[None]
        mask = torch.ones_like(prompt)
        written = target.generate(
            prompt, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens, speculator=None
        )
        texts.append(Text(written[0].cpu(), prompt.shape[1], _all_states(target, written, layers)))
    return texts


def _all_states(target: GenerativeModel, token_ids: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    taps = FeatureTaps(target, layers)
    try:
        with taps.listening():
            output = target(token_ids, use_cache=False, logits_to_keep=1, **taps.forward_kwargs)
        states = taps.last(output.hidden_states, token_ids.shape[1])
        return {layer: state[0].cpu() for layer, state in states.items()}
    finally:
        taps.close()


def accepted_lengths(drafted: Int[Tensor, "P D"], text: Text, roots: Sequence[int]) -> Int[Tensor, " P"]:
    """Number of tokens of each chain, from its root on, that the target wrote too."""
    places = torch.tensor(roots)[:, None] + torch.arange(1, drafted.shape[1] + 1)
    return (drafted.cpu() == text.token_ids[places]).int().cumprod(dim=1).sum(dim=1)


@dataclass(frozen=True)
class AcceptanceRates:
    """Acceptance of greedy chains, over all positions.

    Attributes:
        num_positions: number of chains that were drafted.
        by_depth: share of all chains that was accepted to depth 1, 2, …
        conditional: share accepted at each depth, of the chains accepted to the depth before; None if there are none.
        mean_length: tokens that a round would emit, the bonus token included.
    """

    num_positions: int
    by_depth: tuple[float, ...]
    conditional: tuple[float | None, ...]
    mean_length: float

    @classmethod
    def of(cls, accepted: Int[Tensor, " P"], depth: int) -> AcceptanceRates:
        """Counts chains of `depth` tokens by the number of their accepted tokens."""
        counts = [len(accepted), *(int((accepted >= d).sum()) for d in range(1, depth + 1))]
        return cls(
            num_positions=counts[0],
            by_depth=tuple(count / counts[0] for count in counts[1:]),
            conditional=tuple(after / before if before else None for before, after in pairwise(counts)),
            mean_length=1 + sum(counts[1:]) / counts[0],
        )

    def is_low(self, record: HeadRecord) -> bool:
        """Whether depth 1 accepts less than the head's record promises, or acceptance falls too fast with depth."""
        first, *deeper = self.conditional
        return first is None or first < record.low_first or any((rate or 0.0) < _LOW_DECAY * first for rate in deeper)


@dataclass(frozen=True)
class Alternative:
    """Another way to read a head: options of `AutoSpeculator.from_pretrained`, and their meaning in words."""

    options: Options
    meaning: str


class Reader(Protocol):
    """A head that can be read in several ways."""

    name: str

    def accepted(self, options: Options, texts: Sequence[Text], depth: int) -> Int[Tensor, " P"]:
        """Number of accepted tokens of a greedy chain of `depth` tokens at every root of every text.

        Raises:
            SpeculateError: the head cannot be read with these options.
        """
        ...

    def alternatives(self, options: Options) -> list[Alternative]:
        """Other ways to read a head that is now read with `options`, one change each."""
        ...

    def depth(self, depth: int) -> int:
        """The deepest chain that the head drafts, at most `depth`."""
        ...


class ConventionReader(ABC, Generic[Loaded]):
    """A `Reader` that loads the head in `folder` anew for every set of conventions, as a user who passes them would."""

    def __init__(self, folder: str, target: PreTrainedModel):
        self._folder, self._target = folder, target
        self._num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        self._options: Options = {}
        self._loaded = self.read({})

    @abstractmethod
    def read(self, options: Options) -> Loaded:
        """Loads the head with these conventions."""

    @abstractmethod
    def accepted_in(self, loaded: Loaded, text: Text, depth: int) -> Int[Tensor, " P"]:
        """Number of accepted tokens of the greedy chains at all roots of a text."""

    @torch.inference_mode()
    def accepted(self, options: Options, texts: Sequence[Text], depth: int) -> Int[Tensor, " P"]:
        """See `Reader`."""
        loaded = self.load(options)
        return torch.cat([self.accepted_in(loaded, text, depth) for text in texts])

    def load(self, options: Options) -> Loaded:
        """The head with these conventions; the last one is kept."""
        if options != self._options:
            self._loaded = self.read(options)
            self._options = dict(options)
        return self._loaded

    def other_bases(self, rope: dict[str, Any]) -> list[Alternative]:
        """RoPE bases to try: 10000 (some trainers' own), the target's, Llama 3's and Qwen's."""
        targets = (getattr(self._target.config, "rope_parameters", None) or {}).get("rope_theta")
        bases = dict.fromkeys(float(base) for base in (1e4, targets, 5e5, 1e6) if base)
        return [
            Alternative({"rope_theta": base}, f"RoPE base {base:g}" + (" (the target's)" if base == targets else ""))
            for base in bases
            if base != rope["rope_theta"]
        ]
