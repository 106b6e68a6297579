"""Checks of requests with a speculator, before any work, and facts about a request.

Each check raises `UnsupportedRequestError`, and the bridge decides whether the caller sees it. `check_options` raises
`OptionError`, which every caller sees.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, StaticCache
from transformers.generation.configuration_utils import GenerationMode

from ..attention import Sizes
from ..cache import CACHE_NAME, reserving
from ..compatibility import too_old
from ..compatibility.stock import has_checkpointing
from ..errors import OptionError, UnsupportedRequestError
from ..forward import exact_sizes
from ..loop import recomputing_switch
from ..speculator import Speculator, SpeculatorSpec, installed_drafters, takers_of
from ..target import GenerativeModel, activated_lora, outdated_peft, prompt_learning, takes_position_ids
from ..verification import see_rows_alone


_OF_REQUESTS = ("tokenizer",)  # of stop strings; no parameter of `generate` by name

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_ASKED_BY = {
    "assisted_generation": "assistant_model=, prompt_lookup_num_tokens= or assistant_early_exit=",
    "contrastive_search": "penalty_alpha=",
    **dict.fromkeys(("beam_search", "beam_sample", "constrained_beam_search", "group_beam_search"), "num_beams="),
}
"""Arguments that choose another mode."""


def check_model(model: GenerativeModel) -> None:
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedRequestError(
            f"speculator= was given for {name}, an encoder-decoder model; only decoder-only models are supported."
        )
    if not type(model)._sample.__dict__.get("__hf_speculate__"):
        raise UnsupportedRequestError(
            f"{name} has a decoding method of its own (`_sample`), which a speculator cannot replace."
        )
    if model.training and has_checkpointing(model):
        raise UnsupportedRequestError(
            f"{name} is in training mode with gradient checkpointing, which leaves the KV cache out: call eval()."
        )


def check_options(model: GenerativeModel, speculator: Any, kwargs: dict[str, Any]) -> None:
    """Raises `OptionError` for an option of speculators among the arguments of `generate`; the message says where it
    goes.

    Args:
        speculator: speculator of the request, or the text that names it.
        kwargs: arguments of `generate` by name. Those of the request or of the model are its own, whatever their name.
    """
    if kwargs.get("custom_generate") is not None:
        return  # it may take anything
    methods = (model.forward, model.prepare_inputs_for_generation, vars(GenerationMixin)["generate"])
    known = {name for method in methods for name in inspect.signature(method).parameters} | {*_OF_REQUESTS}
    configs = getattr(model, "generation_config", None), kwargs.get("generation_config")
    for name in kwargs.keys() - known:
        value = kwargs[name]
        if value is None or any(hasattr(config, name) for config in configs) or not (takers := takers_of(name)):
            continue
        owner = "speculators" if takers == [""] else " and ".join(map(repr, takers))
        raise OptionError(
            f"{name}={value!r} was given to generate, and is an option of {owner}: it goes with the speculator, "
            f"{_with_option(speculator, name, value, takers)}."
        )


def _with_option(speculator: Any, name: str, value: Any, takers: list[str]) -> str:
    """Code that makes the speculator with the option: in its text if it was given as one, else by a function."""
    spec = SpeculatorSpec.parse(speculator) if isinstance(speculator, str) else None
    if spec is None or ("" not in takers and spec.source in {*installed_drafters()}.difference(takers)):
        return f"AutoSpeculator.from_pretrained(NAME_OR_PATH, target=model, {name}={value!r})"
    by_function = f"AutoSpeculator.from_pretrained({speculator!r}, target=model, {name}={value!r})"
    is_short = isinstance(value, str | int | float)
    return f"speculator={spec.with_option(name, value).text!r}, or {by_function}" if is_short else by_function


def check_arguments(kwargs: dict[str, Any]) -> None:
    if kwargs.get("custom_generate") is not None:
        raise UnsupportedRequestError(
            "speculator= and custom_generate= both replace the decoding loop: give one of them."
        )
    if kwargs.get("cache_implementation") == "paged":
        raise UnsupportedRequestError(
            "speculator= does not work with continuous batching (cache_implementation='paged')."
        )


def check_request(mode: GenerationMode, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    if mode not in _MODES:
        asked = _ASKED_BY.get(mode.value, "the arguments that ask for it")
        raise UnsupportedRequestError(
            f"speculator= works with greedy decoding and sampling, not with {mode.value}: leave out {asked}."
        )
    if config.use_cache is False:
        raise UnsupportedRequestError("speculator= needs the KV cache, but use_cache=False.")
    if config.cache_implementation not in (None, "dynamic", "static"):
        raise UnsupportedRequestError(
            f"speculator= was given with cache_implementation={config.cache_implementation!r}; only 'dynamic' (the "
            "default) and 'static' can keep the entries of an accepted path."
        )
    if mode_kwargs.get("synced_gpus"):
        raise UnsupportedRequestError(
            "speculator= does not work with synced_gpus (ZeRO-3, FSDP): ranks would run different numbers of rounds."
        )


def with_our_cache(model: GenerativeModel, config: GenerationConfig, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `_sample`, with a cache that can keep paths in place of a static one that `generate` has made.

    A static cache of the caller's stays.
    """
    cache = kwargs.get(CACHE_NAME)
    if config.cache_implementation != "static" or not isinstance(cache, StaticCache):
        return kwargs
    if vars(model).get("_cache") is cache:  # older versions reuse it, and fail if nothing was written to it
        del model._cache
    return {**kwargs, CACHE_NAME: reserving(cache, model.config.get_text_config(decoder=True))}


def check_inputs(model: GenerativeModel, input_ids: Tensor, config: GenerationConfig, kwargs: dict[str, Any]) -> None:
    _check_prompt(input_ids, kwargs)
    _check_cache(model, kwargs.get(CACHE_NAME))
    _check_positions(model, kwargs.get("position_ids"))
    _check_adapters(model, kwargs[CACHE_NAME])
    _check_lengths(model, input_ids, config, kwargs)


def _check_prompt(input_ids: Tensor, kwargs: dict[str, Any]) -> None:
    if not input_ids.shape[0] or (not input_ids.shape[1] and kwargs.get("inputs_embeds") is None):
        raise UnsupportedRequestError(
            f"speculator= needs a prompt of at least one row and one token; this one is {list(input_ids.shape)}."
        )


def _check_cache(model: GenerativeModel, cache: Any) -> None:
    if not isinstance(cache, Cache):
        raise UnsupportedRequestError(
            f"speculator= needs a transformers Cache, but {type(model).__name__} has {type(cache).__name__}."
        )
    if cache.layers and not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        raise UnsupportedRequestError(
            f"speculator= needs a transformers Cache with attention layers, but {type(model).__name__} keeps recurrent "
            "states alone."
        )
    unknown = cache.offloading or (not isinstance(cache, DynamicCache) and type(cache) is not Cache)
    if unknown or cache.is_compileable:
        kind = "offloaded " if cache.offloading else ""
        raise UnsupportedRequestError(
            f"speculator= was given with a {kind}{type(cache).__name__}; pass a DynamicCache, or none. "
            "cache_implementation='static' reserves the memory at once."
        )
    if own := _own_methods(cache):
        raise UnsupportedRequestError(
            f"speculator= was given with a {type(cache).__name__}, which has its own {', '.join(own)}: what it keeps "
            "of the text is not known. Pass a DynamicCache, or none."
        )


def _check_positions(model: GenerativeModel, position_ids: Any) -> None:
    if takes_position_ids(model) and (not isinstance(position_ids, Tensor) or position_ids.dim() not in (2, 3)):
        raise UnsupportedRequestError(
            f"speculator= takes position ids [B, N], or [kinds, B, N] as for pictures; {type(model).__name__} has "
            "other ones."
        )


def _check_adapters(model: GenerativeModel, cache: Cache) -> None:
    if activated_lora(model):
        raise UnsupportedRequestError(
            "speculator= does not work while an activated LoRA (alora_invocation_tokens) is in effect: PEFT would "
            "leave it out for some of the tokens that are scored at once."
        )
    if not prompt_learning(model):
        return
    if problem := outdated_peft():
        raise UnsupportedRequestError(f"speculator= does not work with this prompt-learning adapter: {problem}.")
    if past := cache.get_seq_length():
        raise UnsupportedRequestError(
            f"{CACHE_NAME} holds {past} tokens, but a prompt-learning adapter is active: transformers cannot "
            f"continue a cache that begins with virtual tokens. Pass the whole text without {CACHE_NAME}."
        )


def _check_lengths(model: GenerativeModel, input_ids: Tensor, config: GenerationConfig, kwargs: dict[str, Any]) -> None:
    switch = recomputing_switch(model)
    is_reached = switch is not None and (config.max_length is None or config.max_length > switch)
    # Older versions drop the cache there, and continue with the last token alone.
    if is_reached and (problem := too_old(f"{type(model).__name__} with more than {switch} tokens", "5.20")):
        raise UnsupportedRequestError(f"speculator= was given for a long text, but {problem}")
    past, total = kwargs[CACHE_NAME].get_seq_length(), total_length(input_ids, config, kwargs)
    if past and total <= past:
        raise UnsupportedRequestError(
            f"the prompt has {total} tokens but {CACHE_NAME} already holds {past}: pass the whole text with "
            "at least one new token, or only the new tokens with an attention mask for all."
        )


def _own_methods(cache: Cache) -> list[str]:
    """Methods of stock's caches that a subclass overrides: one that evicts entries overrides some."""
    stock = next(kind for kind in type(cache).__mro__ if kind in (DynamicCache, Cache))
    subclasses = type(cache).__mro__[: type(cache).__mro__.index(stock)]
    names = {name for kind in subclasses for name in vars(kind) if not name.startswith("__")}
    return sorted(name for name in names if hasattr(stock, name))


def check_acceptance(speculator: Speculator, config: GenerationConfig, processors: LogitsProcessorList) -> None:
    if speculator.lossless or not config.do_sample or see_rows_alone(processors):
        return
    names = [type(processor).__name__ for processor in processors]
    raise UnsupportedRequestError(
        f"acceptance='typical' needs logits processors that are known to be row-wise, found {names}. Use "
        "acceptance='match', or give your own processor `row_wise = True` if it looks at one row at a time."
    )


def exact_sizes_of(
    speculator: Speculator, model: GenerativeModel, input_ids: Tensor, config: GenerationConfig, kwargs: dict[str, Any]
) -> Sizes | None:
    """Row counts that exact forwards can trust; None if exact text was not asked for."""
    if not speculator.options.exact:
        return None
    if config.output_attentions:
        raise UnsupportedRequestError(
            "exact=True computes attention node by node and keeps no attention weights: output_attentions=True cannot "
            "be had with it. Leave out one of the two."
        )
    mask, position_ids = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if position_ids is not None and position_ids.dim() > 2:
        raise UnsupportedRequestError(
            f"exact=True was asked for, and {type(model).__name__} counts positions of texts and pictures apart, which "
            "exact forwards do not. Without exact= the text is plain's up to near ties."
        )
    is_padded = mask is not None and not bool(mask.all())
    sizes = exact_sizes(model, kwargs[CACHE_NAME], input_ids.shape[0], is_padded)
    if isinstance(sizes, str):
        raise UnsupportedRequestError(
            f"exact=True was asked for, and {type(model).__name__} in {model.dtype} cannot have it here: {sizes}. "
            "Without exact= the text is plain's up to near ties."
        )
    return sizes


def check_stream(streamed: str | None, batch_size: int) -> None:
    """Raises for requests that `generate` can run but `hf_speculate.stream` cannot."""
    if streamed == "text" and batch_size > 1:
        raise UnsupportedRequestError(
            f"stream(tokenizer=...) yields the text of one sequence, the request has {batch_size}; without tokenizer= "
            "it yields the tokens of every row."
        )


def total_length(input_ids: Tensor, config: GenerationConfig, kwargs: dict[str, Any]) -> int:
    """Number of tokens in cache and prompt together. `generate` drops a mask of ones and notes its length."""
    mask = kwargs.get("attention_mask")
    return mask.shape[1] if mask is not None else getattr(config, "_mask_length", input_ids.shape[1])
