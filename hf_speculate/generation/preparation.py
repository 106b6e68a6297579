"""From what `generate` has prepared to the state of our loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig

from ..compilation import Compiler
from ..drafting import RAW_LAST, Drafting, DraftRequest, cached_text
from ..models import GenerativeModel
from ..policy import Tuner
from ..speculator import Speculator
from ..stats import SpeculationStats
from ..target import Shape, active_adapters, compiled, prompt_learning, target_scorer
from ..verification import LayerRecord, Noise, Records, Sampler, Sequences, StepRecord, Stopping, TypicalSampler
from .delivery import Delivery
from .loop import Decoding
from .recomputing import recomputing
from .requests import total_length
from .stock_step import TOKEN_KWARGS, StockStep


def prepare(
    speculator: Speculator,
    arguments: tuple[Any, ...],
    model_kwargs: dict[str, Any],
    *,
    shape: Shape,
    reason: str,
    has_callers_cache: bool,
    streamer: Any = None,
) -> Decoding:
    """The loop's state for a call of `_sample`.

    Args:
        arguments: its positional ones: model, prompt, processors, criteria, generation config; `model_kwargs` are the
            others.
        shape, reason: what the model takes, and why nothing wider, see `request_shape`.
        has_callers_cache: the cache was an argument of `generate`.
        streamer: as `generate` takes it.
    """
    model, input_ids, logits_processor, stopping_criteria, generation_config = arguments
    batch_size, stats = input_ids.shape[0], SpeculationStats()
    compiler = None if speculator.backend is None else Compiler(speculator.backend, stats.fallbacks)
    cache, attention_mask = model_kwargs["past_key_values"], model_kwargs.get("attention_mask")
    if reason:
        stats.fallbacks[reason] += 1
    noise = None
    typical = speculator.typical if generation_config.do_sample else None  # without a temperature both rules are greedy
    stats.lossy_calls += typical is not None
    if generation_config.do_sample and typical is None:
        noise = Noise(batch_size, model.config.get_text_config(decoder=True).vocab_size, input_ids.device)
    records = _records(generation_config)
    sampler = Sampler(logits_processor, noise, records)
    if typical is not None:
        sampler = TypicalSampler(typical, logits_processor, records)
    pad = generation_config._pad_token_tensor
    num_earlier = total_length(input_ids, generation_config, model_kwargs) - input_ids.shape[1]
    stopping = Stopping(stopping_criteria)
    request = DraftRequest(
        target=model,
        input_ids=input_ids,
        attention_mask=attention_mask,
        known_from=_known_from(speculator, input_ids, generation_config, model_kwargs),
        do_sample=generation_config.do_sample,
        max_new_tokens=None if stopping.max_length is None else stopping.max_length - input_ids.shape[1],
        cache=cache,
        num_earlier=num_earlier,
        earlier_ids=cached_text(cache) if num_earlier else None,
        adaptive=speculator.experience is not None,
        compiler=compiler,
        adapters=active_adapters(model),
    )
    positions = [num_earlier + input_ids.shape[1] - 1] * batch_size
    if model_kwargs.get("position_ids") is not None:
        positions = model_kwargs["position_ids"][:, -1].expand(batch_size).tolist()
    num_virtual = 0
    if (adapter := prompt_learning(model)) is not None:
        if adapter.peft_type not in ("PREFIX_TUNING", "CARTRIDGE"):
            # PEFT drops the position ids then: positions are those in the cache, padding counted.
            positions = [input_ids.shape[1] - 1] * batch_size
        num_virtual = adapter.num_virtual_tokens
        positions = [num_virtual + position for position in positions]
        if attention_mask is not None:
            attention_mask = functional.pad(attention_mask, (num_virtual, 0), value=1)
    num_expected = None if attention_mask is None else attention_mask.shape[1]
    if attention_mask is None and model_kwargs.get("inputs_embeds") is None:
        num_expected = num_virtual + num_earlier + input_ids.shape[1]
    token_kwargs = _token_kwargs(model_kwargs)
    scorer = target_scorer(model, cache, batch_size, attention_mask, shape, token_kwargs=token_kwargs)
    sequences = Sequences(input_ids, None if pad is None else int(pad))
    step = StockStep(model, sequences, model_kwargs)
    scorer = recomputing(scorer, model, step)
    shows_cache = has_callers_cache or bool(generation_config.return_dict_in_generate)
    if compiler is not None:
        scorer = compiled(
            scorer, compiler, has_taps=RAW_LAST in speculator.drafter.feature_layers, is_private=not shows_cache
        )
    return Decoding(
        target=model,
        drafting=Drafting(speculator.drafter, request),
        scorer=scorer,
        prefill_forward=lambda **taps: model._prefill(input_ids, generation_config, {**model_kwargs, **taps}),
        sampler=sampler,
        stopping=stopping,
        sequences=sequences,
        stats=stats,
        prompt_positions=positions,
        num_expected=num_expected,
        step=step,
        compiler=compiler,
        shows_cache=shows_cache,
        delivery=None if streamer is None else Delivery(streamer, sequences, noise),
        tuner=_tuner(speculator, model, batch_size, request.adapters),
    )


def _token_kwargs(model_kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """What new tokens get of the arguments with a value for each token, as stock goes on with them: the last one's,
    and 0 (text) where images are told from text."""
    given = {name: model_kwargs[name][:, -1:] for name in TOKEN_KWARGS if model_kwargs.get(name) is not None}
    return {name: torch.zeros_like(v) if name == "mm_token_type_ids" else v for name, v in given.items()}


def _tuner(speculator: Speculator, model: GenerativeModel, batch_size: int, adapters: str) -> Tuner | None:
    if speculator.experience is None:
        return None
    chooses_depth = not speculator.drafter.chooses_depth
    return speculator.experience.tuner(model, batch_size, adapters, chooses_depth)


def _records(config: GenerationConfig) -> Records:
    if not config.return_dict_in_generate:
        return Records()
    return Records(
        scores=StepRecord() if config.output_scores else None,
        logits=StepRecord() if config.output_logits else None,
        # Some models have axes in front of the batch's (Gemma 3n: one for each of its predictions).
        hidden_states=LayerRecord(batch_axis=-3) if config.output_hidden_states else None,
        attentions=LayerRecord(batch_axis=-4) if config.output_attentions else None,
    )


def _known_from(speculator: Speculator, input_ids: Tensor, config: GenerationConfig, kwargs: dict[str, Any]) -> int:
    """Index of the first prompt token whose features the prefill will show."""
    num_prompt = input_ids.shape[1]
    is_whole_text = total_length(input_ids, config, kwargs) == num_prompt
    first = kwargs["past_key_values"].get_seq_length() if is_whole_text else 0
    if config.prefill_chunk_size is not None and speculator.drafter.feature_layers:
        # Of a chunked prefill only the last chunk's hidden states come back.
        first += (num_prompt - first - 1) // config.prefill_chunk_size * config.prefill_chunk_size
    return min(first, max(num_prompt - 1, 0))
