"""What `generate` can be asked for with a speculator: every clear error before any work, and facts of a request.

The functions return a message, or "" where there is no problem.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.configuration_utils import GenerationMode

from ..drafting import problem_with_taps
from ..models import GenerativeModel
from ..speculator import Speculator
from ..target import activated_lora, prompt_learning, takes_position_ids
from ..verification import see_rows_alone


_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def problem_with_model(model: GenerativeModel) -> str:
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"speculator= was given for {name}, an encoder-decoder model; only decoder-only models are supported."
    if not type(model)._sample.__dict__.get("__hf_speculate__"):
        return f"{name} has a decoding method of its own (`_sample`), which a speculator cannot replace."
    if model.training and getattr(model, "is_activation_checkpointing", False):
        return f"{name} is in training mode with gradient checkpointing, which leaves the KV cache out: call eval()."
    return ""


def problem_with_arguments(kwargs: dict[str, Any]) -> str:
    if kwargs.get("custom_generate") is not None:
        return "speculator= and custom_generate= both replace the decoding loop: give one of them."
    if kwargs.get("cache_implementation") == "paged":
        return "speculator= does not work with continuous batching (cache_implementation='paged')."
    return ""


def problem_with_request(mode: GenerationMode, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> str:
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
    return ""


def problem_with_inputs(
    model: GenerativeModel, input_ids: Tensor, config: GenerationConfig, kwargs: dict[str, Any]
) -> str:
    cache, position_ids = kwargs.get("past_key_values"), kwargs.get("position_ids")
    if not isinstance(cache, Cache):
        return f"speculator= needs a transformers Cache, but {type(model).__name__} has {type(cache).__name__}."
    unknown = cache.offloading or (not isinstance(cache, DynamicCache) and type(cache) is not Cache)
    if unknown or cache.is_compileable:
        kind = "offloaded " if cache.offloading else ""
        return f"speculator= was given with a {kind}{type(cache).__name__}; pass a DynamicCache, or none."
    if own := _own_methods(cache):
        return (
            f"speculator= was given with a {type(cache).__name__}, which has its own {', '.join(own)}: what it keeps "
            "of the text is not known. Pass a DynamicCache, or none."
        )
    if takes_position_ids(model) and (not isinstance(position_ids, Tensor) or position_ids.dim() != 2):
        return f"speculator= needs a model with two-dimensional position ids; {type(model).__name__} has other ones."
    if activated_lora(model):
        return (
            "speculator= does not work while an activated LoRA (alora_invocation_tokens) is in effect: PEFT would "
            "leave it out for some of the tokens that are scored at once."
        )
    past = cache.get_seq_length()
    if past and prompt_learning(model):
        return (
            f"past_key_values holds {past} tokens, but a prompt-learning adapter is active: transformers cannot "
            "continue a cache behind its virtual tokens. Pass the whole text without past_key_values."
        )
    total = total_length(input_ids, config, kwargs)
    if past and total <= past:
        return (
            f"the prompt has {total} tokens but past_key_values already holds {past}: pass the whole text with "
            "at least one new token, or only the new tokens with an attention mask for all."
        )
    return ""


def _own_methods(cache: Cache) -> list[str]:
    """What a subclass of stock's caches does its own way: one that evicts entries overrides some of it."""
    stock = next(kind for kind in type(cache).__mro__ if kind in (DynamicCache, Cache))
    subclasses = type(cache).__mro__[: type(cache).__mro__.index(stock)]
    names = {name for kind in subclasses for name in vars(kind) if not name.startswith("__")}
    return sorted(name for name in names if hasattr(stock, name))


def problem_with_features(speculator: Speculator, model: GenerativeModel) -> str:
    """What the drafter wants to see of the target and cannot."""
    return problem_with_taps(model, speculator.drafter.feature_layers, speculator.drafter.name)


def problem_with_acceptance(speculator: Speculator, config: GenerationConfig, processors: LogitsProcessorList) -> str:
    if speculator.lossless or not config.do_sample or see_rows_alone(processors):
        return ""
    names = [type(processor).__name__ for processor in processors]
    return (
        f"acceptance='typical' needs logits processors that are known to be row-wise, found {names}. Use "
        "acceptance='match', or give your own processor `row_wise = True` if it looks at one row at a time."
    )


def total_length(input_ids: Tensor, config: GenerationConfig, kwargs: dict[str, Any]) -> int:
    """Tokens of cache and prompt together. `generate` drops a mask of ones and notes its length."""
    mask = kwargs.get("attention_mask")
    return mask.shape[1] if mask is not None else getattr(config, "_mask_length", input_ids.shape[1])
