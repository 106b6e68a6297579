"""Mean acceptance length in the decoding loop, the aim of a head, on prompts that it was not trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from hf_speculate.errors import SpeculateError
from hf_speculate.speculator import Speculator, without_verdicts
from hf_speculate.stats import SpeculationStats
from hf_speculate.target import GenerativeModel

from ..methods import TrainingMethod
from ..target import is_sharded


PromptIds = Int[Tensor, " S"]

ACCEPTANCE = "mean_acceptance_length"


@dataclass(frozen=True, kw_only=True)
class AcceptanceOptions:
    """Options for measuring acceptance.

    Attributes:
        nodes: sizes of draft trees, without the root. The first one is that of `mean_acceptance_length`.
        temperatures: temperatures, 0 for greedy decoding. The first one is that of `mean_acceptance_length`.
        max_new_tokens: tokens to generate after a prompt; fewer if the target stops.
        batch_size: prompts decoded together.
        seed: seed of sampled runs, which leave the training's random numbers alone.
        options: options of the drafter, e.g. `{"depth": 6, "top_k": 6}`.
    """

    nodes: Sequence[int] = (16,)
    temperatures: Sequence[float] = (0.0,)
    max_new_tokens: int = 64
    batch_size: int = 8
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("nodes", "temperatures"):
            if not getattr(self, name):
                raise SpeculateError(f"evaluation.{name} is empty: name at least one.")
        for name, low in (("nodes", min(self.nodes)), ("max_new_tokens", self.max_new_tokens)):
            if low < 1:
                raise SpeculateError(f"evaluation.{name} must be at least 1, got {low}.")
        if self.batch_size < 1 or min(self.temperatures) < 0:
            raise SpeculateError("evaluation: batch_size must be at least 1 and temperatures at least 0.")


class AcceptanceEvaluation:
    """Runs the decoding loop with the head as it is now, on at least one prompt of token ids."""

    def __init__(self, prompts: Sequence[PromptIds], options: AcceptanceOptions | None = None):
        if not prompts:
            raise SpeculateError("evaluation needs at least one prompt.")
        self.prompts = list(prompts)
        self.options = options or AcceptanceOptions()

    def measure(self, target: GenerativeModel, method: TrainingMethod, accelerator: Any = None) -> dict[str, float]:
        """Mean acceptance lengths: tokens that a round with a draft emits, the bonus token included.

        The processes of an `accelerator` share the prompts out, unless they share the target, which all must run
        equally often. The method's mode and weights stay as they are.

        Returns:
            `mean_acceptance_length` and, for several settings, `mean_acceptance_length_nodes_8`,
            `mean_acceptance_length_nodes_8_temperature_1`, …; the same in every process. A setting without drafts
            gives 0.
        """
        if is_sharded(target):
            accelerator = None
        index, count = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
        prompts = self.prompts[index::count]
        lengths: dict[str, float] = {}
        for name, nodes, temperature in self._settings():
            stats = self._run(target, method, prompts, nodes, temperature)
            counts = torch.tensor(
                [stats.accepted_tokens + stats.bonus_tokens, stats.rounds], dtype=torch.float64, device="cpu"
            )
            if count > 1:
                counts = accelerator.reduce(counts.to(accelerator.device), "sum").cpu()
            tokens, rounds = counts.tolist()
            lengths[name] = tokens / rounds if rounds else 0.0
        first = {ACCEPTANCE: next(iter(lengths.values()))}
        return first if len(lengths) == 1 else {**first, **lengths}

    def _settings(self) -> Iterator[tuple[str, int, float]]:
        for temperature in self.options.temperatures:
            for nodes in self.options.nodes:
                suffix = f"_nodes_{nodes}" + (f"_temperature_{temperature:g}" if temperature else "")
                yield ACCEPTANCE + suffix, nodes, temperature

    def _run(
        self,
        target: GenerativeModel,
        method: TrainingMethod,
        prompts: Sequence[PromptIds],
        nodes: int,
        temperature: float,
    ) -> SpeculationStats:
        speculator = Speculator(method.evaluation_drafter(target, nodes, **self.options.options), adaptive=False)
        devices = [] if target.device.type == "cpu" else [target.device]
        with torch.random.fork_rng(devices=devices), _plain_settings(target, temperature), torch.inference_mode():
            torch.manual_seed(self.options.seed)
            ordered, size = sorted(prompts, key=len), self.options.batch_size  # similar lengths need less padding
            for start in range(0, len(ordered), size):
                batch = ordered[start : start + size]
                ids, mask = (
                    pad_sequence(rows, batch_first=True, padding_side="left").to(target.device)
                    for rows in (batch, [torch.ones_like(prompt) for prompt in batch])
                )
                length = self.options.max_new_tokens
                with without_verdicts():
                    target.generate(ids, attention_mask=mask, max_new_tokens=length, speculator=speculator)
        return speculator.stats


def prompts_of(documents: Any, count: int, num_tokens: int = 64) -> list[PromptIds]:
    """At most `count` prompts, of evenly spaced documents: all tokens before the first one that the target is to emit.

    Of a plain text, all of which it is to emit, the prompt is the first `num_tokens`.
    """
    prompts: list[PromptIds] = []
    for document in (documents[index] for index in evenly_spaced(len(documents), count)):
        ids = torch.as_tensor(document["input_ids"], dtype=torch.long, device="cpu")
        mask = torch.as_tensor(document["loss_mask"], dtype=torch.int, device="cpu")
        start = int(mask.argmax())
        length = start if start > 0 else min(num_tokens, len(ids) // 2)
        if length and bool(mask.any()):
            prompts.append(ids[:length].long())
    return prompts


def evenly_spaced(size: int, count: int) -> list[int]:
    """`count` indices (or all) spread evenly over `size`."""
    return [index * size // count for index in range(count)] if count < size else list(range(size))


@contextmanager
def _plain_settings(target: GenerativeModel, temperature: float) -> Iterator[None]:
    """Sets greedy or plain sampling: with checkpoints' own settings figures of two models could not be compared."""
    own = target.generation_config
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    eos = own.eos_token_id
    first_eos = eos[0] if isinstance(eos, list) else eos
    pad = own.pad_token_id if own.pad_token_id is not None else first_eos or 0
    target.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=eos, pad_token_id=pad, **sampling
    )
    was_training = target.training
    target.eval()
    try:
        yield
    finally:
        target.generation_config = own
        target.train(was_training)
