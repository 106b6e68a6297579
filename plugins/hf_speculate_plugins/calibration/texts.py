"""Texts that the target wrote greedily, with its hidden states: what chains of a head are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_speculate.drafting import RAW_LAST, FeatureTaps
from hf_speculate.models import GenerativeModel


@dataclass(frozen=True)
class Text:
    """A prompt and what the target wrote after it.

    Attributes:
        token_ids: int64 [S].
        num_prompt: tokens of the prompt.
        states: the target's hidden states by index, [S, H] each, on the CPU; `RAW_LAST` is among them.
    """

    token_ids: Int[Tensor, " S"]
    num_prompt: int
    states: Mapping[int, Float[Tensor, "S H"]]

    def roots(self, depth: int) -> range:
        """Positions of the tokens after which `depth` more are known, all of them written by the target."""
        return range(self.num_prompt, len(self.token_ids) - depth)


@torch.inference_mode()
def write_texts(
    target: GenerativeModel, prompts: Sequence[Int[Tensor, " S"]], *, max_new_tokens: int = 64, max_prompt: int = 1024
) -> list[Text]:
    """What the target writes greedily after each prompt, with all of its hidden states.

    Args:
        max_prompt: longer prompts lose their beginning: states of all layers are kept.
    """
    layers = [*range(target.config.get_text_config(decoder=True).num_hidden_layers + 1), RAW_LAST]
    texts = []
    for prompt in prompts:
        prompt = prompt[-max_prompt:].to(target.device)[None]
        written = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            speculator=None,
        )
        states = _all_states(target, written, layers)
        texts.append(Text(written[0].cpu(), prompt.shape[1], states))
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
    """How many tokens of each chain are those that the target wrote after its root."""
    places = torch.tensor(roots)[:, None] + torch.arange(1, drafted.shape[1] + 1)
    return (drafted.cpu() == text.token_ids[places]).int().cumprod(dim=1).sum(dim=1)
