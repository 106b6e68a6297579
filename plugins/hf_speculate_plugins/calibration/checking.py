"""Is a head read as it was trained? Acceptance on the target's own text, as stated and under other conventions.

Published heads are often mis-labelled: the layers that they read are off by one, a norm is on the wrong side, RoPE has
another base. Such a head loads and drafts badly, with nothing to see. Here it drafts a greedy chain at every position
of texts that the target wrote greedily, all positions at once, and what the target wrote says how much of it would have
been accepted. The same is done under the known alternatives, and a change is adopted if it makes a clear difference.

This module knows no method: `Reader` is what a method brings (`eagle.calibration`, `medusa.calibration`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_speculate.drafter import RAW_LAST
from hf_speculate.errors import SpeculateError
from hf_speculate.features import FeatureTaps
from hf_speculate.models import GenerativeModel


Verdict = Literal["plausible", "mislabelled", "better", "unexplained"]
Options = dict[str, Any]

# Published heads accept 62 to 73 % at depth 1, and of those accepted to one depth, at the next not less than 0.77 times
# that share (figures in vLLM's tests). A state that is fed back wrongly shows at depth 2 only.
_LOW_FIRST, _LOW_DECAY = 0.6, 0.7
# A change must gain this many standard errors (paired over positions, which are not quite independent, hence many) and
# this many tokens a round.
_MIN_SIGMAS, _MIN_GAIN = 4.0, 0.05
_MIN_SPREAD = 0.1  # a gain that is the same at every position is not infinitely sure
_MAX_CHANGES = 3


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


@dataclass(frozen=True)
class Acceptance:
    """How much of a greedy chain is accepted, over all positions.

    Attributes:
        num_positions: how many chains were drafted.
        by_depth: share of chains accepted to depth 1, 2, … (unconditional).
        conditional: of the chains accepted to the depth before, the share accepted at this one; None without any.
        mean_length: tokens a round would emit, the bonus token included.
    """

    num_positions: int
    by_depth: tuple[float, ...]
    conditional: tuple[float | None, ...]
    mean_length: float

    @classmethod
    def of(cls, accepted: Int[Tensor, " P"], depth: int) -> Acceptance:
        """From the number of accepted tokens of every chain."""
        counts = [len(accepted), *(int((accepted >= d).sum()) for d in range(1, depth + 1))]
        return cls(
            num_positions=counts[0],
            by_depth=tuple(count / counts[0] for count in counts[1:]),
            conditional=tuple(after / before if before else None for before, after in pairwise(counts)),
            mean_length=1 + sum(counts[1:]) / counts[0],
        )

    @property
    def is_suspicious(self) -> bool:
        """Low for a trained head at depth 1, or falling off faster than heads do."""
        first, *deeper = self.conditional
        return first is None or first < _LOW_FIRST or any((rate or 0.0) < _LOW_DECAY * first for rate in deeper)


@dataclass(frozen=True)
class Alternative:
    """Another way to read a head: options of `AutoSpeculator.from_pretrained`, and what they mean."""

    options: Options
    meaning: str


@dataclass(frozen=True)
class Trial:
    """What an alternative did.

    Attributes:
        options: all that differs from what the file says.
        meaning: the change in words.
        acceptance: None if the head cannot be read like this, see `problem`.
        gain: tokens a round more than before the change; None without acceptance.
        sigmas: the gain in standard errors, paired over positions.
        problem: why the head cannot be read like this.
    """

    options: Options
    meaning: str
    acceptance: Acceptance | None = None
    gain: float | None = None
    sigmas: float | None = None
    problem: str | None = None

    @property
    def helps(self) -> bool:
        return bool(self.gain and self.sigmas and self.gain >= _MIN_GAIN and self.sigmas >= _MIN_SIGMAS)


@dataclass(frozen=True)
class HeadCheck:
    """Outcome of `check_head`.

    Attributes:
        head: folder or Hub id.
        drafter: name of the drafter that reads it.
        stated: acceptance as the files say.
        trials: the alternatives that were tried, in order; empty where nothing was suspicious.
        fix: options that make it better, empty if none does.
        best: acceptance with them.
        verdict: "plausible": as expected of a trained head. "mislabelled": low as stated, plausible with `fix`.
            "better": `fix` helps and it is still low, or it was plausible without. "unexplained": low, and no
            convention helps.
    """

    head: str
    drafter: str
    stated: Acceptance
    trials: tuple[Trial, ...] = ()
    fix: Options = field(default_factory=dict)
    best: Acceptance | None = None

    @property
    def verdict(self) -> Verdict:
        if not self.fix or self.best is None:
            return "unexplained" if self.stated.is_suspicious else "plausible"
        return "mislabelled" if self.stated.is_suspicious and not self.best.is_suspicious else "better"

    @property
    def code(self) -> str:
        """The line that loads the head as it should be read."""
        options = "".join(f", {name}={_literal(value)}" for name, value in self.fix.items())
        return f'speculator = AutoSpeculator.from_pretrained("{self.head}", target=model{options})'

    @property
    def message(self) -> str:
        """The verdict in words."""
        changes = " and ".join(trial.meaning for trial in self.trials if trial.options == self.fix) or "nothing"
        return {
            "plausible": "Acceptance is what a trained head shows: nothing to fix.",
            "mislabelled": f"The head is mis-labelled. What it was trained with: {changes}.",
            "better": f"The head drafts better with: {changes}.",
            "unexplained": "Acceptance is low and no convention helps. Is this the target that the head was trained "
            "for, are the prompts in the form that it was trained on (chat template, system prompt), was it trained at "
            "all?",
        }[self.verdict]


class Reader(Protocol):
    """A head that can be read in several ways."""

    name: str

    def accepted(self, options: Options, texts: Sequence[Text], depth: int) -> Int[Tensor, " P"]:
        """Accepted tokens of a greedy chain of `depth` tokens at every root of every text.

        Raises:
            SpeculateError: the head cannot be read with these options.
        """
        ...

    def alternatives(self, options: Options) -> list[Alternative]:
        """Other ways to read a head that is read with `options` now: one change each."""
        ...

    def depth(self, depth: int) -> int:
        """The deepest chain that it drafts, at most `depth`."""
        ...


def check_head(
    reader: Reader,
    head: str,
    texts: Sequence[Text],
    *,
    depth: int = 5,
    try_alternatives: bool | None = None,
) -> HeadCheck:
    """Measures a head as stated and, where that looks wrong, as its neighbours in convention would have it.

    Args:
        reader: the head.
        head: what to call it.
        texts: from `write_texts`.
        depth: of the chains.
        try_alternatives: None: if the acceptance is suspicious.
    Raises:
        SpeculateError: the head cannot be read as stated, or the texts are too short.
    """
    depth = reader.depth(depth)
    if not any(text.roots(depth) for text in texts):
        raise SpeculateError(
            f"the target wrote too little to check chains of {depth} tokens on: more tokens (--max-new-tokens) or "
            "other prompts are needed."
        )
    accepted = reader.accepted({}, texts, depth)
    stated = Acceptance.of(accepted, depth)
    if not (stated.is_suspicious if try_alternatives is None else try_alternatives):
        return HeadCheck(head, reader.name, stated)
    trials, fix, best = _search(reader, texts, depth, accepted)
    return HeadCheck(head, reader.name, stated, tuple(trials), fix, best)


def _search(
    reader: Reader, texts: Sequence[Text], depth: int, accepted: Tensor
) -> tuple[list[Trial], Options, Acceptance]:
    """Adopts the best change that helps, then tries the others on top of it; a file may be wrong in two places."""
    trials: list[Trial] = []
    adopted = Trial({}, "", Acceptance.of(accepted, depth))
    for _ in range(_MAX_CHANGES):
        found = [
            _try(reader, change, adopted, accepted, texts, depth) for change in reader.alternatives(adopted.options)
        ]
        trials += [trial for trial, _ in found]
        helpful = [pair for pair in found if pair[0].helps]
        if not helpful:
            break
        adopted, accepted = max(helpful, key=lambda pair: pair[0].gain or 0.0)
    assert adopted.acceptance is not None
    return trials, adopted.options, adopted.acceptance


def _try(
    reader: Reader, change: Alternative, before: Trial, accepted: Tensor, texts: Sequence[Text], depth: int
) -> tuple[Trial, Tensor]:
    options = before.options | change.options
    meaning = f"{before.meaning} and {change.meaning}" if before.meaning else change.meaning
    try:
        now = reader.accepted(options, texts, depth)
    except SpeculateError as error:
        return Trial(options, meaning, problem=str(error)), accepted
    difference = (now - accepted).double()
    gain = float(difference.mean())
    error = max(float(difference.std(correction=0)), _MIN_SPREAD) / math.sqrt(len(difference))
    return Trial(options, meaning, Acceptance.of(now, depth), gain, gain / error), now


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


def _literal(value: Any) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)
