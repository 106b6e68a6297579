"""Training of a `RecurrentHead`: unrolled over the text, against the target's own distribution at every step."""

from __future__ import annotations

from dataclasses import dataclass

from hf_speculate.target import last_device
from hf_speculate_training import Batch, StepOutput, TargetStates, TrainingMethod
from hf_speculate_training.methods import (
    Entries,
    SoftTargets,
    Teacher,
    detached_copy,
    plain_cross_entropy,
    tokens_ahead,
    trainable,
)

from .drafter import RecurrentDrafter, RecurrentHead, load_head


@dataclass(frozen=True, kw_only=True)
class RecurrentShape:
    """A recipe's `method.head`: `width` of the hidden layer; None for the target's hidden size."""

    width: int | None = None


@dataclass(frozen=True, kw_only=True)
class RecurrentOptions:
    """A recipe's `method.options`: unrolled `steps`, and `decay`, the factor from the weight of one to the next."""

    steps: int = 3
    decay: float = 0.8

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}.")


class RecurrentMethod(TrainingMethod):
    """Trains a `RecurrentHead`."""

    name = "recurrent"
    head_class = RecurrentShape
    options_class = RecurrentOptions

    def __init__(self, head: RecurrentHead, target, options: RecurrentOptions):
        super().__init__()
        config = target.config.get_text_config(decoder=True)
        self.head, self.options = head, options
        self.feature_layers = (config.num_hidden_layers,)
        # In a tuple and in the teacher: a module as an attribute would be trained and saved with the head.
        self._embed = (target.get_input_embeddings(),)
        self._teacher = Teacher(target.get_output_embeddings(), None, config.vocab_size)

    @classmethod
    def for_target(cls, target, head: RecurrentShape, options: RecurrentOptions, count_tokens) -> RecurrentMethod:
        size = target.config.get_text_config(decoder=True).hidden_size
        return cls(RecurrentHead(size, head.width or size).to(last_device(target)), target, options)

    @classmethod
    def from_folder(cls, folder: str, target, options: RecurrentOptions) -> RecurrentMethod:
        return cls(trainable(load_head(folder, target).to(last_device(target))), target, options)

    def forward(self, batch: Batch, states: TargetStates) -> StepOutput:
        weight = self.head.down.weight
        entries = Entries.of(batch, self.options.steps, weight.device)
        last_hidden = states.last_hidden.to(weight.device)
        outputs, hidden = [], last_hidden.to(weight.dtype)
        for step in range(self.options.steps):
            embedding = self._embed[0](tokens_ahead(batch["input_ids"], step + 1).to(self._embed[0].weight.device))
            hidden = self.head(hidden, embedding.to(hidden))
            outputs.append(hidden)
        wanted = last_hidden[entries.teacher_positions]
        targets = SoftTargets(self._teacher.read(wanted), entries.teacher_row)
        weights = entries.weights(self.options.decay)
        losses = plain_cross_entropy(entries.gather(outputs).to(last_hidden), self._teacher.lm_head, targets, weights)
        hits = losses.best == self._teacher.argmax(wanted)[entries.teacher_row]
        return StepOutput(losses.loss, entries.metrics(losses.each, hits))

    def drafter(self, target, **options) -> RecurrentDrafter:
        return RecurrentDrafter(detached_copy(self.head, target.dtype), target, **options)

    def evaluation_drafter(self, target, num_nodes: int, **options) -> RecurrentDrafter:
        return self.drafter(target, depth=num_nodes, **options)  # its drafts are chains
