"""The properties of logits processors: how widely the request's sampler can be batched, and what a row alone needs.

Three tiers with one result:

- "scores": they see only the scores (temperature, top-k, …): all nodes at once;
- "prefix": they read the prefix, row by row (repetition penalty, n-gram bans, …): one call a depth, rows = nodes;
- "walk": anything else: one call an emitted token, exactly the calls that stock `generate` makes.

Rows of a batch go their own pace, each with calls of its own, if all processors are known to look at one row at a time
(or say so with `row_wise = True`); an unknown processor gets the whole batch at every call, as in stock.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

from torch import Tensor
from transformers.generation import logits_process as lp
from transformers.generation.logits_process import LogitsProcessorList

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
    lp.EncoderRepetitionPenaltyLogitsProcessor,
    lp.EncoderNoRepeatNGramLogitsProcessor,
)
# They see a row's prefix and nothing else, and cost too much to call for nodes that are never visited.
_SEE_PREFIX_AT_A_PRICE = (lp.PrefixConstrainedLogitsProcessor, lp.WatermarkLogitsProcessor)
_KNOWN = (*_SEE_SCORES, *_SEE_PREFIX, *_SEE_PREFIX_AT_A_PRICE)
# Of those above, the ones that hold something for every row of the batch.
_KNOW_THE_BATCH = (
    lp.RepetitionPenaltyLogitsProcessor,
    lp.EncoderRepetitionPenaltyLogitsProcessor,
    lp.EncoderNoRepeatNGramLogitsProcessor,
    lp.PrefixConstrainedLogitsProcessor,
)


class KnownProcessors(LogitsProcessorList):
    """Processors that take text and scores and nothing else: no signature is looked at in every call, as stock does,
    which takes longer than most of them. Top-p does not sort the vocabulary (`nucleus`)."""

    def __call__(self, input_ids, scores, **_: Any):
        for processor in self:
            is_top_p = type(processor) is lp.TopPLogitsWarper
            scores = top_p(processor, scores) if is_top_p else processor(input_ids, scores)
        return scores


def without_inspection(processors: LogitsProcessorList) -> LogitsProcessorList:
    """The same calls; `processors` itself where one of them is not known."""
    is_known = type(processors) is LogitsProcessorList and all(type(processor) in _KNOWN for processor in processors)
    return KnownProcessors(processors) if is_known else processors


def required_tier(processors: LogitsProcessorList) -> Tier:
    """The widest batching that `processors` allow; subclasses of known ones count as unknown."""
    sees_prefix = False
    for processor in processors:
        if type(processor) in _SEE_SCORES:
            continue
        if type(processor) not in _SEE_PREFIX and not getattr(processor, "row_wise", False):
            return "walk"
        sees_prefix = True
    return "prefix" if sees_prefix else "scores"


def see_rows_alone(processors: LogitsProcessorList) -> bool:
    """Whether rows can go their own pace: the processors are known to keep no state and look at one row at a time."""
    return all(type(processor) in _KNOWN or getattr(processor, "row_wise", False) for processor in processors)


def processors_of_row(processors: LogitsProcessorList, row: int, batch_size: int) -> LogitsProcessorList:
    """`processors` as they apply to row `row` alone, for calls whose rows are not the rows of the batch."""
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
        # `generate` gives the left padding of every row; one row's is cut off as an int.
        alone.prompt_ignore_length = int(processor.prompt_ignore_length[row])
    elif kind is lp.EncoderRepetitionPenaltyLogitsProcessor:
        # One prompt serves several rows if several sequences of it are asked for.
        prompt = row * len(processor.encoder_input_ids) // batch_size
        alone.encoder_input_ids = processor.encoder_input_ids[prompt : prompt + 1]
    elif kind is lp.EncoderNoRepeatNGramLogitsProcessor:
        prompt = row * len(processor.generated_ngrams) // batch_size
        alone.generated_ngrams, alone.batch_size = processor.generated_ngrams[prompt : prompt + 1], 1
    else:
        # Its "beams" are the rows of one prompt; it asks for what a prompt allows.
        allowed: Any = processor._prefix_allowed_tokens_fn
        prompt = row // processor._num_beams
        alone._prefix_allowed_tokens_fn, alone._num_beams = lambda _, text: allowed(prompt, text), 1
    return alone


def score_only(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Those of `processors` that can also warp a drafter's logits: they see only scores and name no token."""
    known = (p for p in processors if type(p) in _SEE_SCORES and type(p) is not lp.SuppressTokensLogitsProcessor)
    return KnownProcessors(known)
