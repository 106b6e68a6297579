"""The bridge: what makes `model.generate(..., speculator=...)` work on stock transformers models.

Three methods of `GenerationMixin` are wrapped (`install`, undone by `uninstall`). `generate` takes `speculator=` off
the arguments and notes it in a ContextVar; everything else goes through the original, which prepares inputs, cache,
processors and criteria as always; `_validate_generation_mode` refuses what cannot work before any of that; `_sample`,
which serves greedy decoding and sampling, runs our loop if the note names this model and the original otherwise.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL, GenerateDecoderOnlyOutput
from transformers.utils import logging

from .acceptance import TypicalSampler
from .cache import TreeCache
from .decoding import Decoding, decode
from .drafter import DraftRequest
from .errors import UnsupportedRequestError
from .models import GenerativeModel
from .noise import Noise
from .scoring import Scorer, supported_shape
from .sequences import Sequences
from .speculator import Speculator, attached, resolve
from .stats import SpeculationStats
from .stopping import Stopping
from .verification import Records, Sampler, StepRecord


logger = logging.get_logger(__name__)

_NOT_GIVEN: Any = object()
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# Arguments of `_sample` that the loop makes anew for every forward, or that concern the prompt only.
_OWN_KWARGS = (
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "inputs_embeds",
    "output_attentions",
    "output_hidden_states",
    *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL,
)


@dataclass(frozen=True)
class _Note:
    """What `generate` tells `_sample`: the speculator for exactly this model, and whether it was asked for."""

    model: GenerativeModel
    speculator: Speculator
    explicit: bool


_note: ContextVar[_Note | None] = ContextVar("hf_speculate_note", default=None)
_originals: dict[str, Callable] = {}


def install() -> None:
    """Adds `speculator=` to `generate` of every transformers model. Idempotent; done by `import hf_speculate`."""
    if _originals:
        return
    for name, wrap in (
        ("generate", _wrap_generate),
        ("_validate_generation_mode", _wrap_validate),
        ("_sample", _wrap_sample),
    ):
        original = getattr(GenerationMixin, name)
        _originals[name] = original
        setattr(GenerationMixin, name, wrap(original))


def uninstall() -> None:
    """Undoes `install`. A method that somebody else has wrapped since is left alone, with a warning."""
    for name, original in _originals.items():
        if getattr(GenerationMixin, name).__dict__.get("__hf_speculate__"):
            setattr(GenerationMixin, name, original)
        else:
            logger.warning(f"GenerationMixin.{name} was wrapped again after hf_speculate; leaving it as it is.")
    _originals.clear()


def _wrap_generate(original: Callable) -> Callable:
    @functools.wraps(original)
    def generate(self, *args, speculator=_NOT_GIVEN, **kwargs):
        explicit = speculator is not _NOT_GIVEN
        chosen = speculator if explicit else attached(self)
        if chosen is None:
            return original(self, *args, **kwargs)
        resolved = resolve(chosen, self)
        note = _Note(self, resolved, explicit)
        if problem := _problem_with_model(self) or _problem_with_arguments(kwargs):
            if explicit:
                raise UnsupportedRequestError(problem)
            logger.warning_once(f"{problem} Running without the attached speculator.")
            return original(self, *args, **kwargs)
        resolved.drafter.check_target(self)
        token = _note.set(note)
        try:
            return original(self, *args, **kwargs)
        finally:
            _note.reset(token)

    signature = inspect.signature(original)
    parameters = list(signature.parameters.values())
    new = inspect.Parameter(
        "speculator", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Speculator | str | None"
    )
    generate.__signature__ = signature.replace(parameters=[*parameters[:-1], new, parameters[-1]])  # type: ignore
    generate.__dict__["__hf_speculate__"] = True
    return generate


def _wrap_validate(original: Callable) -> Callable:
    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        note = _note.get()
        if note is not None and note.model is self:
            problem = _problem_with_request(generation_mode, generation_config, generation_mode_kwargs)
            if problem:
                _refuse(note, problem)
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    _validate_generation_mode.__dict__["__hf_speculate__"] = True
    return _validate_generation_mode


def _wrap_sample(original: Callable) -> Callable:
    @functools.wraps(original)
    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        note = _note.get()
        arguments = (self, input_ids, logits_processor, stopping_criteria, generation_config)
        if note is None or note.model is not self:
            return original(*arguments, **kwargs)
        _note.set(None)  # nested calls (guidance, drafters) are plain
        if problem := _problem_with_inputs(self, input_ids, generation_config, kwargs):
            _refuse(note, problem)
            return original(*arguments, **kwargs)
        shape, reason = supported_shape(self, kwargs["past_key_values"])
        if shape == "single":
            note.speculator.stats.fallbacks[reason] += 1
            return original(*arguments, **kwargs)
        return _speculate(note.speculator, *arguments, **kwargs)

    _sample.__dict__["__hf_speculate__"] = True
    return _sample


def _refuse(note: _Note, problem: str) -> None:
    """Raises for an explicit speculator; an attached one steps aside with one warning."""
    if note.explicit:
        raise UnsupportedRequestError(problem)
    note.speculator.stats.fallbacks[problem] += 1
    logger.warning_once(f"{problem} Running without the attached speculator.")
    _note.set(None)


def _problem_with_model(model: GenerativeModel) -> str:
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"speculator= was given for {name}, an encoder-decoder model; only decoder-only models are supported."
    if not type(model)._sample.__dict__.get("__hf_speculate__"):
        return f"{name} has a decoding method of its own (`_sample`), which a speculator cannot replace."
    prepare = getattr(model.prepare_inputs_for_generation, "__self__", model)
    peft_config: Any = getattr(prepare, "active_peft_config", None)
    if prepare is not model and getattr(peft_config, "is_prompt_learning", False):
        return f"prompt-learning adapters ({peft_config.peft_type}) do not work with a speculator yet; LoRA does."
    return ""


def _problem_with_arguments(kwargs: dict[str, Any]) -> str:
    if kwargs.get("custom_generate") is not None:
        return "speculator= and custom_generate= both replace the decoding loop: give one of them."
    if kwargs.get("cache_implementation") == "paged":
        return "speculator= does not work with continuous batching (cache_implementation='paged')."
    return ""


def _problem_with_request(mode: GenerationMode, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> str:
    if mode not in _MODES:
        return (
            f"speculator= was given with generation mode {mode.value!r}; greedy decoding and sampling (num_beams=1, no "
            "assistant_model, no prompt_lookup_num_tokens, no penalty_alpha) are what it supports."
        )
    if config.use_cache is False:
        return "speculator= needs the KV cache, but use_cache=False."
    if config.cache_implementation not in (None, "dynamic"):
        return (
            f"speculator= was given with cache_implementation={config.cache_implementation!r}; only the default "
            "(dynamic) cache can keep the entries of an accepted path."
        )
    if mode_kwargs.get("synced_gpus"):
        return "speculator= does not work with synced_gpus (ZeRO-3, FSDP): ranks would run different numbers of rounds."
    for flag in ("output_attentions", "output_hidden_states"):
        if getattr(config, flag, None) and config.return_dict_in_generate:
            return f"{flag}=True is not supported with a speculator yet; output_scores and output_logits are."
    return ""


def _problem_with_inputs(
    model: GenerativeModel, input_ids: Tensor, config: GenerationConfig, kwargs: dict[str, Any]
) -> str:
    cache, position_ids = kwargs.get("past_key_values"), kwargs.get("position_ids")
    if not isinstance(cache, Cache):
        return f"speculator= needs a transformers Cache, but {type(model).__name__} has {type(cache).__name__}."
    unknown = cache.offloading or (not isinstance(cache, DynamicCache) and type(cache) is not Cache)
    if unknown or cache.is_compileable:
        kind = "offloaded " if cache.offloading else ""
        return f"speculator= was given with a {kind}{type(cache).__name__}; pass a DynamicCache, or none."
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2:
        return f"speculator= needs a model with two-dimensional position ids; {type(model).__name__} has other ones."
    if kwargs.get("token_type_ids") is not None:
        return "token_type_ids are not supported with a speculator."
    past = cache.get_seq_length()
    total = _total_length(input_ids, config, kwargs)
    if past and total <= past:
        return (
            f"the prompt has {total} tokens but past_key_values already holds {past}: pass the whole text with "
            "at least one new token, or only the new tokens with an attention mask for all."
        )
    return ""


def _total_length(input_ids: Tensor, config: GenerationConfig, kwargs: dict[str, Any]) -> int:
    """Tokens of cache and prompt together. `generate` drops a mask of ones and notes its length."""
    mask = kwargs.get("attention_mask")
    return mask.shape[1] if mask is not None else getattr(config, "_mask_length", input_ids.shape[1])


def _speculate(
    speculator: Speculator,
    model: GenerativeModel,
    input_ids: Tensor,
    logits_processor,
    stopping_criteria,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer=None,
    **model_kwargs,
):
    """Our `_sample`: the same contract, tokens, cache and RNG."""
    start = time.perf_counter()
    run = _prepare(speculator, model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
    run.stream_each_step = streamer is not None
    loop = decode(run)
    try:
        if streamer is None:
            for _ in loop:
                pass
        else:
            _stream(run, loop, streamer)
    finally:
        loop.close()
        run.stats.calls += 1
        run.stats.total_seconds += time.perf_counter() - start
        speculator.stats.merge(run.stats)
    sequences = run.sequences.result()
    if not generation_config.return_dict_in_generate:
        return sequences
    records, batch_size = run.sampler.records, len(sequences)
    parts: dict[str, Any] = {
        "scores": records.scores.complete(batch_size) if records.scores else None,
        "logits": records.logits.complete(batch_size) if records.logits else None,
    }
    output: Any = GenerateDecoderOnlyOutput(sequences=sequences, past_key_values=run.cache.cache, **parts)  # type: ignore
    output.speculation = run.stats
    return output


def _stream(run: Decoding, loop, streamer) -> None:
    """Hands over the tokens one step at a time, as stock does, and remembers how many were handed over."""
    run.num_delivered = 0
    for _ in loop:
        for tokens in run.sequences.columns(run.num_delivered):
            run.num_delivered += 1
            streamer.put(tokens)
    streamer.end()


def _prepare(
    speculator: Speculator,
    model: GenerativeModel,
    input_ids: Tensor,
    logits_processor,
    stopping_criteria,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> Decoding:
    batch_size, stats = input_ids.shape[0], SpeculationStats()
    cache, attention_mask = model_kwargs["past_key_values"], model_kwargs.get("attention_mask")
    shape, reason = supported_shape(model, cache)
    if reason:
        stats.fallbacks[reason] += 1
    noise = None
    typical = speculator.typical if generation_config.do_sample else None  # without a temperature both rules are greedy
    stats.lossy_calls += typical is not None
    if generation_config.do_sample and typical is None:
        noise = Noise(batch_size, model.config.get_text_config(decoder=True).vocab_size, input_ids.device)
    wants = generation_config.return_dict_in_generate
    records = Records(
        scores=StepRecord() if wants and generation_config.output_scores else None,
        logits=StepRecord() if wants and generation_config.output_logits else None,
    )
    sampler = Sampler(logits_processor, noise, records)
    if typical is not None:
        sampler = TypicalSampler(typical, logits_processor, records)
    pad = generation_config._pad_token_tensor
    stopping = Stopping(stopping_criteria)
    request = DraftRequest(
        target=model,
        input_ids=input_ids,
        attention_mask=attention_mask,
        known_from=_known_from(speculator, input_ids, generation_config, model_kwargs),
        do_sample=generation_config.do_sample,
        max_new_tokens=None if stopping.max_length is None else stopping.max_length - input_ids.shape[1],
    )
    forward_kwargs = {k: v for k, v in model_kwargs.items() if v is not None and k not in _OWN_KWARGS}
    return Decoding(
        target=model,
        drafter=speculator.drafter,
        request=request,
        scorer=Scorer(model, TreeCache(cache, batch_size), attention_mask, shape, forward_kwargs),
        prefill_forward=lambda **taps: model._prefill(input_ids, generation_config, {**model_kwargs, **taps}),
        sampler=sampler,
        stopping=stopping,
        sequences=Sequences(input_ids, None if pad is None else int(pad)),
        stats=stats,
        prompt_positions=model_kwargs["position_ids"][:, -1].expand(batch_size).tolist(),
    )


def _known_from(speculator: Speculator, input_ids: Tensor, config: GenerationConfig, kwargs: dict[str, Any]) -> int:
    """Index of the first prompt token whose features the prefill will show."""
    num_prompt = input_ids.shape[1]
    is_whole_text = _total_length(input_ids, config, kwargs) == num_prompt
    first = kwargs["past_key_values"].get_seq_length() if is_whole_text else 0
    if config.prefill_chunk_size is not None and speculator.drafter.feature_layers:
        # Of a chunked prefill only the last chunk's hidden states come back.
        first += (num_prompt - first - 1) // config.prefill_chunk_size * config.prefill_chunk_size
    return min(first, max(num_prompt - 1, 0))
