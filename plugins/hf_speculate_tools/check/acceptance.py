"""Acceptance of a head: its greedy chains at every place of the target's own greedy texts.

The head's own session reads a text token by token, and drafts before each. So a chain is the one that decoding would
draft there, and the text shows how much of it would have been accepted. The target itself runs once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_speculate.drafting import RAW_LAST, Drafter, DraftRequest, DraftState, FeatureTaps
from hf_speculate.errors import CheckpointError
from hf_speculate.speculator import drafter_class_for
from hf_speculate.stats import HeadRecord
from hf_speculate.target import GenerativeModel


ReadingOptions = dict[str, Any]
"""Options of `AutoSpeculator.from_pretrained` that change how a head is read, beyond the contents of its files."""

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
        target: the model.
        prompts: token ids, int64 [S] each.
        max_new_tokens: tokens that the target writes after each prompt.
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


class HeadReader:
    """Loads the head in `folder` again for every set of options, as a user who passes them would.

    Raises:
        SpeculateError: the head cannot be read as its files state.
        CheckpointError: the folder holds a draft model.
    """

    def __init__(self, folder: str, target: GenerativeModel):
        self._folder, self._target, self._class = folder, target, drafter_class_for(folder)
        self._known = {field.name for field in fields(self._class.options_classes[0])}
        self.name = self._class.name
        if self.name == "draft_model":
            raise CheckpointError(
                f"{folder} is a checkpoint of {self.name!r}, which reads no states of the target; only heads can be "
                "checked."
            )
        self.load({}, 1)

    def load(self, options: ReadingOptions, depth: int) -> Drafter:
        """The drafter of chains of `depth` tokens; raises `SpeculateError` if the head cannot be read so."""
        limits = {"depth": depth} if "depth" in self._known else {}
        return self._class.from_folder(self._folder, self._target, **limits, **options)

    def deepest(self, depth: int) -> int:
        """Tokens of the longest chain that the head drafts, at most `depth`."""
        drafter: Any = self.load({}, depth)
        if self.name == "block":  # read with another first slot it drafts one token less, or more
            return min(depth, drafter.spec.block_size - 1)
        return min(depth, drafter.heads.num_heads) if self.name == "medusa" else depth

    def accepted(self, options: ReadingOptions, texts: Sequence[Text], depth: int) -> list[Int[Tensor, " P"]]:
        """Number of accepted tokens of a greedy chain of `depth` tokens at every root of each text."""
        return replayed(self.load(options, depth), self._target, texts, depth)


@torch.no_grad()
def replayed(drafter: Drafter, target: GenerativeModel, texts: Sequence[Text], depth: int) -> list[Int[Tensor, " P"]]:
    """Number of accepted tokens of the chain at every root of each text; empty for texts that are too short."""
    counts: list[list[int]] = [[] for _ in texts]
    rows = [row for row, text in enumerate(texts) if text.roots(depth)]
    if rows:
        with closing(_Replay(drafter, target, [texts[row] for row in rows], depth)) as replay:
            for accepted in replay.steps():
                for slot, count in accepted.items():
                    counts[rows[slot]].append(count)
    return [torch.tensor(of_text, dtype=torch.long, device="cpu") for of_text in counts]


class _Replay:
    """A session of the drafter that observes the texts as in decoding, side by side."""

    def __init__(self, drafter: Drafter, target: GenerativeModel, texts: Sequence[Text], depth: int):
        self._texts, self._depth, self._layers = texts, depth, drafter.feature_layers
        prompts = [text.token_ids[: text.num_prompt] for text in texts]
        self._ids = _left_padded(prompts)
        mask = _left_padded([torch.ones_like(prompt) for prompt in prompts])
        request = DraftRequest(target=target, input_ids=self._ids, attention_mask=None if mask.all() else mask)
        self._session = drafter.start(request)

    def close(self) -> None:
        self._session.close()

    def steps(self) -> Iterator[dict[int, int]]:
        """Number of accepted tokens by slot of the text, at one root after the other."""
        self._observe_prompts()
        num_roots = [len(text.roots(self._depth)) for text in self._texts]
        for step in range(max(num_roots)):
            active = [step < count for count in num_roots]
            # A text without further roots waits at its last token but one.
            places = [min(text.num_prompt + step, len(text.token_ids) - 2) for text in self._texts]
            yield self._accepted(places, active, num_emitted=step + 1)
            self._observe(places, active)

    def _accepted(self, places: Sequence[int], active: Sequence[bool], num_emitted: int) -> dict[int, int]:
        state = DraftState(
            root_ids=self._tokens(places),
            active=tuple(active),
            max_depth=self._depth,
            chains_only=True,
            num_emitted=(num_emitted,) * len(active),
        )
        tree, counts = self._session.draft(state).host, {}
        for slot, (text, place) in enumerate(zip(self._texts, places, strict=True)):
            if active[slot]:
                counts[slot] = _num_accepted(tree, slot, text.token_ids[place + 1 : place + 1 + self._depth].tolist())
        return counts

    def _observe_prompts(self) -> None:
        """Passes the session the prompts' states, each with the token after it."""
        roots = torch.stack([text.token_ids[text.num_prompt] for text in self._texts])
        tokens = torch.cat([self._ids[:, 1:], roots[:, None]], dim=1)
        features = {
            layer: _left_padded([text.states[layer][: text.num_prompt] for text in self._texts])
            for layer in self._layers
        }
        self._session.observe(
            tokens, features, torch.full((len(self._texts),), self._ids.shape[1], dtype=torch.long, device="cpu")
        )

    def _observe(self, places: Sequence[int], active: Sequence[bool]) -> None:
        """Passes the session one more state of each active text, with the token after it."""
        features = {}
        for layer in self._layers:
            states = [text.states[layer][place] for text, place in zip(self._texts, places, strict=True)]
            features[layer] = torch.stack(states)[:, None]
        following = self._tokens([place + 1 for place in places])
        self._session.observe(following[:, None], features, torch.tensor(active, dtype=torch.long, device="cpu"))

    def _tokens(self, places: Sequence[int]) -> Int[Tensor, " R"]:
        return torch.stack([text.token_ids[place] for text, place in zip(self._texts, places, strict=True)])


def _left_padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_side="left")


def _num_accepted(tree: Any, row: int, wanted: Sequence[int]) -> int:
    """Number of the first tokens of `wanted` that a path of a tree has."""
    node: int | None = 0
    for count, token in enumerate(wanted):
        node = tree.child(row, node, token)
        if node is None:
            return count
    return len(wanted)


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
