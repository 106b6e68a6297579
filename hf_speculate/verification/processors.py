"""Properties of logits processors: how widely sampling can be batched, and what applies to a single row.

There are three tiers with one result:
- "scores": they see only the scores (temperature, top-k, …): all nodes at once;
- "prefix": they read the prefix, row by row (repetition penalty, n-gram bans, …): one call per depth, rows = nodes;
- "walk": anything else: one call for each emitted token, exactly as stock `generate` makes it.

Rows of a batch advance independently if all processors look at one row at a time: known ones, or those with `row_wise =
True`. An unknown processor gets the whole batch at every call, as in stock.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.generation import logits_process as lp
from transformers.generation.logits_process import LogitsProcessorList

from ..compatibility.stock import PENALISES_EVERY_ROW
from .nucleus import top_p


Tier = Literal["scores", "prefix", "walk"]

_SEE_SCORES = (
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.TopHLogitsWarper,
    lp.MinPLogitsWarper,
    lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper,
    lp.EtaLogitsWarper,
    lp.InfNanRemoveLogitsProcessor,
    lp.LogitNormalization,
    lp.SuppressTokensLogitsProcessor,
)
_NOT_FOR_DRAFTS = (lp.SuppressTokensLogitsProcessor, lp.EtaLogitsWarper, lp.TopHLogitsWarper)
_SEE_PREFIX = (
    lp.RepetitionPenaltyLogitsProcessor,
    lp.NoRepeatNGramLogitsProcessor,
    lp.SequenceBiasLogitsProcessor,
    lp.NoBadWordsLogitsProcessor,
    lp.MinLengthLogitsProcessor,
    lp.MinNewTokensLengthLogitsProcessor,
    lp.ForcedBOSTokenLogitsProcessor,
    lp.ForcedEOSTokenLogitsProcessor,
    lp.SuppressTokensAtBeginLogitsProcessor,
    lp.ExponentialDecayLengthPenalty,
    *((lp.EncoderRepetitionPenaltyLogitsProcessor,) if PENALISES_EVERY_ROW else ()),
    lp.EncoderNoRepeatNGramLogitsProcessor,
)
# They see only a row's prefix, but are too slow to call for nodes that are never visited.
_SEE_PREFIX_AT_A_PRICE = (
    lp.PrefixConstrainedLogitsProcessor,
    lp.WatermarkLogitsProcessor,
    lp.EncoderRepetitionPenaltyLogitsProcessor,  # older versions cannot score several nodes of one prompt
)
_KNOWN = (*_SEE_SCORES, *_SEE_PREFIX, *_SEE_PREFIX_AT_A_PRICE)
# Known processors that hold data for every row of the batch.
_KNOW_THE_BATCH = (
    lp.RepetitionPenaltyLogitsProcessor,
    lp.EncoderRepetitionPenaltyLogitsProcessor,
    lp.EncoderNoRepeatNGramLogitsProcessor,
    lp.PrefixConstrainedLogitsProcessor,
)


class KnownProcessors(LogitsProcessorList):
    """Processors that take only text and scores, called without inspecting their signatures.

    Stock inspects every signature at every call, which takes longer than most processors. Top-p does not sort the
    vocabulary (`nucleus`), and tokens are suppressed by index.
    """

    def __call__(self, input_ids, scores, **_: Any):
        for processor in self:
            quick = _QUICK.get(type(processor)) if scores.device.type == "cpu" else None
            scores = processor(input_ids, scores) if quick is None else quick(processor, input_ids, scores)
        return scores


def _before_length(processor: lp.MinLengthLogitsProcessor, input_ids: Tensor, scores: Tensor) -> Tensor:
    is_short = input_ids.shape[-1] < processor.min_length
    return _suppressed(scores, processor.eos_token_id) if is_short else scores


def _before_new_tokens(processor: lp.MinNewTokensLengthLogitsProcessor, input_ids: Tensor, scores: Tensor) -> Tensor:
    is_short = input_ids.shape[-1] - processor.prompt_length_to_skip < processor.min_new_tokens
    return _suppressed(scores, processor.eos_token_id) if is_short else scores


def _always(processor: lp.SuppressTokensLogitsProcessor, _input_ids: Tensor, scores: Tensor) -> Tensor:
    return _suppressed(scores, processor.suppress_tokens)


def _at_begin(processor: lp.SuppressTokensAtBeginLogitsProcessor, input_ids: Tensor, scores: Tensor) -> Tensor:
    is_begin = input_ids.shape[-1] == processor.begin_index
    return _suppressed(scores, processor.begin_suppress_tokens) if is_begin else scores


def _suppressed(scores: Tensor, tokens: Any) -> Tensor:
    """The scores with -inf at some tokens. Stock makes a mask of the whole vocabulary for each call."""
    tokens = tokens.to(scores.device)
    return scores.index_fill(-1, tokens[(tokens >= 0) & (tokens < scores.shape[-1])], -torch.inf)


# Faster forms of stock's processors, with the same results. They are for CPUs: on an accelerator the host would have to
# wait to find the tokens.
_QUICK: dict[type, Callable[[Any, Tensor, Tensor], Tensor]] = {
    lp.TopPLogitsWarper: lambda processor, _, scores: top_p(processor, scores),
    lp.MinLengthLogitsProcessor: _before_length,
    lp.MinNewTokensLengthLogitsProcessor: _before_new_tokens,
    lp.SuppressTokensLogitsProcessor: _always,
    lp.SuppressTokensAtBeginLogitsProcessor: _at_begin,
}


def without_inspection(processors: LogitsProcessorList) -> LogitsProcessorList:
    """The same processors without signature inspection, if all are known; else `processors` itself."""
    is_known = type(processors) is LogitsProcessorList and all(type(processor) in _KNOWN for processor in processors)
    return KnownProcessors(processors) if is_known else processors


def required_tier(processors: LogitsProcessorList) -> Tier:
    """The widest tier that `processors` allow. Subclasses of known processors count as unknown."""
    sees_prefix = False
    for processor in processors:
        if type(processor) in _SEE_SCORES:
            continue
        if type(processor) not in _SEE_PREFIX and not getattr(processor, "row_wise", False):
            return "walk"
        sees_prefix = True
    return "prefix" if sees_prefix else "scores"


def see_rows_alone(processors: LogitsProcessorList) -> bool:
    """Whether rows can advance independently: the processors keep no state and look at one row at a time."""
    return all(type(processor) in _KNOWN or getattr(processor, "row_wise", False) for processor in processors)


def processors_of_row(processors: LogitsProcessorList, row: int, batch_size: int) -> LogitsProcessorList:
    """`processors` as they apply to row `row` alone."""
    alone = LogitsProcessorList(_processor_of_row(processor, row, batch_size) for processor in processors)
    return without_inspection(alone)


def _processor_of_row(processor: Any, row: int, batch_size: int) -> Any:
    kind = type(processor)
    if kind not in _KNOW_THE_BATCH:
        return processor
    alone = copy.copy(processor)
    if kind is lp.RepetitionPenaltyLogitsProcessor:
        if not isinstance(processor.prompt_ignore_length, Tensor):
            return processor
        # `generate` sets the left padding of every row; for one row it is an int.
        alone.prompt_ignore_length = int(processor.prompt_ignore_length[row])
    elif kind is lp.EncoderRepetitionPenaltyLogitsProcessor:
        # With `num_return_sequences` several rows share a prompt, or rows beyond the prompts have none.
        prompt = row * len(processor.encoder_input_ids) // batch_size if PENALISES_EVERY_ROW else row
        alone.encoder_input_ids = processor.encoder_input_ids[prompt : prompt + 1]
    elif kind is lp.EncoderNoRepeatNGramLogitsProcessor:
        prompt = row * len(processor.generated_ngrams) // batch_size
        alone.generated_ngrams, alone.batch_size = processor.generated_ngrams[prompt : prompt + 1], 1
    else:
        # Its "beams" are the rows of one prompt.
        allowed: Any = processor._prefix_allowed_tokens_fn
        prompt = row // processor._num_beams
        alone._prefix_allowed_tokens_fn, alone._num_beams = lambda _, text: allowed(prompt, text), 1
    return alone


def score_only(processors: LogitsProcessorList) -> LogitsProcessorList:
    """The processors that can also warp a drafter's logits: they see only scores, name no token, and never make the
    host wait for a device."""
    return KnownProcessors(p for p in processors if type(p) in _SEE_SCORES and type(p) not in _NOT_FOR_DRAFTS)
