"""Benchmarks: `hf-speculate bench ...`. Every baseline is measured in the same run.

Definitions of the figures:

- run: one `generate` call, timed on the host around the whole call (prefill, drafter's prefill and preparation
  included), with the device synchronised before and after.
- tokens/s: new tokens of all rows / seconds, both summed over the runs of one repeat (one pass over the prompts). The
  figure is the median over the repeats; its spread is their minimum and maximum.
- equal work: requests have no EOS (`eos_token_id=None`; `min_new_tokens` would add a processor), so each method emits
  exactly `max_new_tokens` per row. Only `acceptance`, which times nothing, ends texts at EOS. A neutral
  `generation_config` replaces the checkpoint's: temperature 0 is `do_sample=False`, any other is plain sampling at that
  temperature without top-k, top-p or penalties.
- interleaving: for each prompt all methods run one after the other, in an order that rotates, so that drift of the
  machine hits all of them alike. Every method has a warm-up run before.
- seeds: a prompt has the same seed for every method and repeat; repeats vary the machine, not the text.
- speed-up against a baseline: seconds of the baseline / seconds of the method within one repeat; median over repeats.
  Below 1 is a slow-down; such rows stay in the table.
- eager: stock `generate` with its dynamic cache. stock compiled: with a static cache, the decoding forward under
  `torch.compile`, compiled in two warm-up calls of full length. Stock speculative modes: `prompt_lookup_num_tokens=`
  and `assistant_model=` with their default settings (batch 1 only). `best_stock_speculative` is the one of them that is
  fastest at that temperature and batch size.
- rounds, mean acceptance length, acceptance rate by depth, engine efficiency: see `hf_speculate.stats`.
- identical: share of rows whose text is eager's token for token. At batch 1 the first divergence of a row runs again
  with the same trees through `hf_speculate.testing.check_lossless`, which proves that it is a numerical tie and gives
  the margin of that decision, or says that it is none.

Benchmarks of the project itself, which users do not need, lie in `tests/benchmarks`.
"""

from typing import TYPE_CHECKING, Any

from .commands import app as app
from .settings import GenerateSettings as GenerateSettings


if TYPE_CHECKING:
    from .generate import bench_generate as bench_generate
    from .runs import fixed_length as fixed_length


def __getattr__(name: str) -> Any:
    """Names whose modules import torch: the command's help does without."""
    if name == "bench_generate":
        from .generate import bench_generate

        return bench_generate
    if name == "fixed_length":
        from .runs import fixed_length

        return fixed_length
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
