"""Builds the state of our loop from what `generate` has prepared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..attention import backends_in_use
from ..cache import TreeCache
from ..compatibility.stock import reads_stops_late
from ..drafting import MAX_NODES, RAW_LAST, Drafting, DraftRequest, cached_text, last_layer
from ..forward import MAX_NATIVE_ROWS, GraphUse, Scorer, exact_scorer, target_scorer, with_graphs
from ..graphs import GraphRunner, graph_runner_for
from ..loop import (
    TOKEN_KWARGS,
    Ahead,
    Decoding,
    Delivery,
    DepthLimits,
    Meter,
    Prompt,
    RoundClock,
    Rows,
    StockStep,
    follow_recomputing,
    round_listeners,
)
from ..policy import PolicyRequest, PolicySession
from ..speculator import Speculator
from ..stats import NATIVE, RunnerRecord, SpeculationStats
from ..target import (
    GenerativeModel,
    active_adapters,
    has_length_dependent_rope,
    has_native_layers,
    input_device,
    problem_without_kernel,
)
from ..verification import (
    BatchedChoice,
    ChoiceInputs,
    LayerRecord,
    Noise,
    Records,
    Sampler,
    Sequences,
    StepRecord,
    Stopping,
    TypicalSampler,
    Verifier,
    reason_for_host,
)
from .sample_call import SampleCall


def prepare(speculator: Speculator, call: SampleCall) -> Decoding:
    """The loop's state for a call of `_sample`."""
    model, stats = call.model, speculator.new_stats()
    if call.reason:
        stats.fallbacks[call.reason] += 1
    runner = _runner(speculator, model, stats)
    pad = call.config._pad_token_tensor
    sequences = Sequences(call.input_ids, None if pad is None else int(pad))
    sampler, stopping = _sampler(speculator, call, stats), Stopping(call.criteria)
    request = _request(speculator, call, stopping, runner, RunnerRecord.of_draft(stats))
    step = StockStep(model, sequences, call.model_kwargs)
    scorer = _scorer(call, step, RunnerRecord.of_target(stats))
    lockstep = ""
    if call.batch_size > 1:
        lockstep = _lockstep_reason(model, scorer, sampler, stopping, call.streamer is not None)
    if lockstep:
        stats.fallbacks[f"rows in lock-step: {lockstep}"] += 1
    # Whether something sees the whole batch, or every step of it.
    are_padded = stopping.has_eos and call.batch_size > 1 and (bool(lockstep) or sampler.records.are_kept)
    rows = Rows(sequences, stopping, lockstep=bool(lockstep), are_padded=are_padded, show_cache=call.shows_cache)
    if not scorer.forward.keeps_backends and (backends := backends_in_use(scorer.device)):
        is_captured = runner is not None and runner.backend is None
        has_kernel = is_captured and scorer.attention.captured_form(scorer.attention_dtype) == "kernel"
        stats.attention["kernel for trees, " * has_kernel + backends] += 1
    if runner is not None:
        scorer = with_graphs(scorer, runner, _graph_use(speculator, call, sampler, rows, stats))
    drafting = Drafting(speculator.drafter, request, MAX_NATIVE_ROWS if has_native_layers(model) else MAX_NODES)
    policy, ahead = _policy(speculator, request, drafting, scorer, sampler, stats)
    delivery = None if call.streamer is None else Delivery(call.streamer, sequences, sampler.noise)
    return Decoding(
        rows=rows,
        prompt=Prompt(
            forward=lambda **taps: model._prefill(call.input_ids, call.config, {**call.model_kwargs, **taps}),
            positions=call.positions,
            num_expected=call.num_expected,
            step=step,
            known_from=request.known_from,
        ),
        scorer=scorer,
        forward_kwargs={**drafting.forward_kwargs, **sampler.records.forward_kwargs},
        drafting=drafting,
        policy=policy,
        limits=DepthLimits(model, stopping, sequences),
        ahead=ahead,
        verifier=Verifier(
            sampler, stopping, sequences, lockstep=rows.lockstep, pads_ended=rows.are_padded, after_step=delivery
        ),
        delivery=delivery,
        stats=stats,
        meter=Meter(stats, RoundClock(_events(scorer.device)), delivery, runner),
        listeners=round_listeners(stats, sampler, sequences, scorer, drafting, policy),
        reads_stops_late=reads_stops_late(call.input_ids.device, scorer.cache.cache, call.shows_cache),
    )


def _sampler(speculator: Speculator, call: SampleCall, stats: SpeculationStats) -> Sampler:
    records = _records(call.config)
    if not call.config.do_sample:  # without a temperature both rules of acceptance are greedy
        return Sampler(call.processors, None, records)
    stats.sampled_calls += 1
    if speculator.typical is not None:
        stats.lossy_calls += 1
        return TypicalSampler(speculator.typical, call.processors, records)
    vocab_size = call.model.config.get_text_config(decoder=True).vocab_size
    return Sampler(call.processors, Noise(call.batch_size, vocab_size, call.input_ids.device), records)


def _request(
    speculator: Speculator, call: SampleCall, stopping: Stopping, runner: GraphRunner | None, record: RunnerRecord
) -> DraftRequest:
    max_length = stopping.max_length
    return DraftRequest(
        target=call.model,
        input_ids=call.input_ids,
        attention_mask=call.text_mask,
        position_ids=None if call.position_offsets is None else call.model_kwargs["position_ids"],
        known_from=_known_from(speculator, call),
        do_sample=bool(call.config.do_sample),
        max_new_tokens=None if max_length is None else max_length - call.input_ids.shape[1],
        cache=call.cache if call.shows_cache else None,
        num_earlier=call.num_earlier,
        earlier_ids=cached_text(call.cache) if call.num_earlier else None,
        adaptive=speculator.policy.is_adaptive,
        graph_runner=runner,
        adapters=active_adapters(call.model),
        record=record,
        processors=call.processors,
    )


def _events(device: torch.device) -> tuple[Any, Any] | None:
    """Events that time drafts on a GPU."""
    if device.type != "cuda" or device.index not in (None, torch.cuda.current_device()):
        return None
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _policy(
    speculator: Speculator,
    request: DraftRequest,
    drafting: Drafting,
    scorer: Scorer,
    sampler: Sampler,
    stats: SpeculationStats,
) -> tuple[PolicySession, Ahead | None]:
    """The policy of the request, and drafting ahead if it is on."""
    size = request.input_ids.shape[0]
    if speculator.options.ahead and size > 1:
        stats.fallbacks["nothing is drafted ahead: the guess would have to be right in every row"] += 1
    looks_ahead = speculator.options.ahead and size == 1
    of_request = PolicyRequest(
        target=request.target,
        batch_size=size,
        adapters=request.adapters,
        samples=request.do_sample,
        calibration=speculator.drafter.calibration,
        looks_ahead=looks_ahead,
        widths=scorer.forward.widths,
    )
    ahead = Ahead(drafting, sampler.noise, stats) if looks_ahead else None
    return speculator.policy.start(of_request), ahead


def _runner(speculator: Speculator, model: GenerativeModel, stats: SpeculationStats) -> GraphRunner | None:
    runner = graph_runner_for(speculator.options.compile, input_device(model), stats.fallbacks)
    if runner is not None and runner.backend is None:
        if speculator.options.exact:
            return None
        problem = "drafts are made ahead on another thread" if speculator.options.ahead else ""
        if torch.is_autocast_enabled(input_device(model).type):
            problem = "autocast is on, which keeps copies of weights for a time"
        if problem:
            runner.refuse(problem)
            return None
    return runner


def _graph_use(
    speculator: Speculator, call: SampleCall, sampler: Sampler, rows: Rows, stats: SpeculationStats
) -> GraphUse:
    """The request's use of static forwards. On a CPU the host chooses tokens: it waits for nothing."""
    choice = None
    if GraphRunner.captures(call.input_ids.device):
        # Rows that have ended continue with padding, which is not chosen.
        reason = "ended rows continue with padding" if rows.are_padded else reason_for_host(sampler)
        choice = None if reason else BatchedChoice(sampler.processors, sampler.noise is not None)
        if reason:
            stats.fallbacks[f"tokens are chosen on the host: {reason}"] += 1
    return GraphUse(
        choice=choice,
        choice_inputs=None if choice is None else ChoiceInputs(choice, sampler, rows.sequences),
        keeps_outputs=sampler.records.are_kept,
        last_layer=last_layer(call.model) if RAW_LAST in speculator.drafter.feature_layers else None,
        shows_cache=call.shows_cache,
    )


def _scorer(call: SampleCall, step: StockStep, record: RunnerRecord) -> Scorer:
    """The scorer of the request. Make it before the prompt runs, as it replaces the cache's layers."""
    model, token_kwargs = call.model, _token_kwargs(call.model_kwargs)
    if problem := problem_without_kernel(model):
        record.refuse(NATIVE, problem)
    arguments = call.cache, call.batch_size, call.attention_mask, call.shape
    if call.sizes is not None and not has_native_layers(model):
        cache = TreeCache(call.cache, call.batch_size)
        return exact_scorer(model, cache, call.sizes, call.attention_mask, token_kwargs, record)
    scorer = target_scorer(model, *arguments, token_kwargs=token_kwargs, record=record)
    scorer.position_offsets = call.position_offsets
    return follow_recomputing(scorer, model, step)


def _token_kwargs(model_kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Arguments with a value for each token, as stock continues them for new tokens.

    New tokens repeat the last value. `mm_token_type_ids` become 0, which means text.
    """
    given = {name: model_kwargs[name][:, -1:] for name in TOKEN_KWARGS if model_kwargs.get(name) is not None}
    return {name: torch.zeros_like(v) if name == "mm_token_type_ids" else v for name, v in given.items()}


def _records(config: GenerationConfig) -> Records:
    if not config.return_dict_in_generate:
        return Records()
    return Records(
        scores=StepRecord() if config.output_scores else None,
        logits=StepRecord() if config.output_logits else None,
        # Some models have axes before the batch's (Gemma 3n: one for each of its predictions).
        hidden_states=LayerRecord(batch_axis=-3) if config.output_hidden_states else None,
        attentions=LayerRecord(batch_axis=-4) if config.output_attentions else None,
    )


def _known_from(speculator: Speculator, call: SampleCall) -> int:
    """Index of the first prompt token whose features the prefill will show."""
    num_prompt, config = call.input_ids.shape[1], call.config
    first = 0 if call.num_earlier else call.cache.get_seq_length()
    if config.prefill_chunk_size is not None and speculator.drafter.feature_layers:
        # A chunked prefill returns only the last chunk's hidden states.
        first += (num_prompt - first - 1) // config.prefill_chunk_size * config.prefill_chunk_size
    return min(first, max(num_prompt - 1, 0))


def _lockstep_reason(
    target: GenerativeModel, scorer: Scorer, sampler: Sampler, stopping: Stopping, has_streamer: bool
) -> str:
    """The reason why all rows must emit the same number of tokens per round; "" if each advances alone."""
    if not sampler.row_wise:
        return "a logits processor that is not known to be row-wise"
    if not stopping.row_wise:
        return "a stopping criterion that is not known to be row-wise"
    if has_length_dependent_rope(target.config):
        return "RoPE that depends on the longest position"
    if scorer.needs_equal_rows:
        return "attention that takes no mask or counts along the cache"
    return "a streamer" if has_streamer else ""
