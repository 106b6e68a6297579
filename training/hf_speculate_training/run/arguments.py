"""What the trainer can be told: `transformers.TrainingArguments` with the defaults of head training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments


@dataclass
class HeadTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the defaults of head training (EAGLE's optimizer, SpecForge's rate and clipping).

    Everything that `TrainingArguments` knows can be set. Different defaults: `learning_rate` 1e-4, `adam_beta2` 0.95,
    `lr_scheduler_type` "cosine", `warmup_steps` 4 % of all steps, `max_grad_norm` 0.5, `num_train_epochs` 10,
    `logging_steps` 10, `save_total_limit` 2, `logging_nan_inf_filter` False (a loss that is not a number stops the
    run), `remove_unused_columns` False and `label_names` (a batch is no model's arguments), tokens counted; of several
    processes `ddp_find_unused_parameters` False (methods give every parameter a gradient) and `log_level_replica`
    "error" (what is said is said once). New: `muon` and `adamw_learning_rate`, see `MuonWithAdamW`.
    """

    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate."})
    muon: bool = field(
        default=False,
        metadata={"help": "Muon for the layers' matrices at `learning_rate`, AdamW for the rest."},
    )
    adamw_learning_rate: float | None = field(
        default=None, metadata={"help": "Of that AdamW; None: half of `learning_rate`."}
    )
    adam_beta2: float = field(default=0.95, metadata={"help": "Beta2 of AdamW."})
    lr_scheduler_type: Any = field(default="cosine", metadata={"help": "Learning rate schedule."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Steps, or a share of all steps if below 1."})
    max_grad_norm: float = field(default=0.5, metadata={"help": "Norm to which gradients are clipped."})
    num_train_epochs: float = field(default=10.0, metadata={"help": "Passes over the data."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between two log entries."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints kept, the best one among them."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Not used: such a loss stops the run."})
    include_num_input_tokens_seen: Any = field(default="all", metadata={"help": "Count tokens, padding included."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay False."})
    label_names: list[str] | None = field(default_factory=lambda: ["loss_mask"], metadata={"help": "Not used."})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Every parameter has a gradient."})
    log_level_replica: str = field(default="error", metadata={"help": "Log level of processes but the first."})
