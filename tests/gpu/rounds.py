"""Phase `rounds`: rounds of pycoder with its head, eager and recorded, and a profile of each.

Our forwards do without cuDNN's attention. They run so, and again with it. On one H200 a round took 252 ms, and cuDNN
building a plan for each new key length is the likely cause.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_speculate.speculator import Speculator
from hf_speculate.target import GenerativeModel
from hf_speculate_tools.commands import timed

from .models import load_pycoder, prompts, pycoder_head
from .profiling import profiled
from .setting import Setting, cudnn_attention


NEW_TOKENS, PROFILED_TOKENS, PASSES = 96, 24, 2
_TINY_TOKENS = 6
_CONFIGURATION_SECONDS = 4.0


def measure(setting: Setting) -> None:
    """Writes a finding for plain decoding, and for each configuration one with its rounds and one with its profile."""
    model, texts = load_pycoder(setting.device, torch.bfloat16), prompts(setting.device)[:1]
    modes = setting.modes()
    _plain(setting, model, texts)
    configurations: list[tuple[str, bool | None]] = [("eager", None), ("recorded", None)]
    if setting.on_cuda:
        configurations += [("eager", True), ("recorded", True)]
    for mode, cudnn in configurations:
        name = {"mode": mode, "cudnn": "as it is" if cudnn is None else "allowed"}
        if mode in modes and setting.allows(_CONFIGURATION_SECONDS * (not setting.is_tiny), str(name)):
            with setting.guarded(**name), nullcontext() if cudnn is None else cudnn_attention(cudnn):
                _rounds(setting, model, texts, name, modes[mode])


def request(count: int) -> dict[str, Any]:
    """Arguments of a greedy request of exactly `count` new tokens."""
    return {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def _plain(setting: Setting, model: GenerativeModel, texts: list[Tensor]) -> None:
    count = _TINY_TOKENS if setting.is_tiny else NEW_TOKENS // 3
    for allowed in (True, False) if setting.on_cuda else (True,):
        with setting.guarded(mode="plain"), cudnn_attention(allowed) if setting.on_cuda else nullcontext():
            seconds = _best_pass(setting, model, texts, count, None)
            setting.report(mode="plain", cudnn_allowed=allowed, ms_per_token=1e3 * seconds / count / len(texts))


def _rounds(
    setting: Setting, model: GenerativeModel, texts: list[Tensor], name: dict[str, Any], value: bool | str | None
) -> None:
    speculator = pycoder_head(model, compile=value, adaptive=False)
    count = _TINY_TOKENS if setting.is_tiny else NEW_TOKENS
    first, _ = timed(lambda: model.generate(texts[0], **request(count), speculator=speculator), setting.device)
    seconds = _best_pass(setting, model, texts, count, speculator)
    stats = speculator.stats
    rounds, host = stats.target_forwards, stats.total_seconds
    setting.report(
        **name,
        ms_per_round=1e3 * seconds / rounds,
        tokens_per_round=stats.tokens_per_round,
        tokens_per_second=count * len(texts) / seconds,
        host_ms={
            "target": 1e3 * stats.target_seconds / rounds,
            "drafter": 1e3 * stats.drafter_seconds / rounds,
            "rest": 1e3 * stats.rest_seconds / rounds,
            "prompt": 1e3 * (stats.prefill_seconds + stats.drafter_prefill_seconds) / len(texts),
            "whole call": 1e3 * host / len(texts),
        },
        first_call_ms=1e3 * first,
        attention=dict(getattr(stats, "attention", {})),
        fallbacks=dict(stats.fallbacks),
    )
    few = _TINY_TOKENS if setting.is_tiny else PROFILED_TOKENS
    model.generate(texts[0], **request(few), speculator=speculator)
    speculator.stats.reset()
    with setting.guarded(**name, profile=True):
        found = profiled(lambda: model.generate(texts[0], **request(few), speculator=speculator), setting.device)
        setting.report(**name, profile=found, rounds=speculator.stats.target_forwards)


def _best_pass(
    setting: Setting, model: GenerativeModel, texts: list[Tensor], count: int, speculator: Speculator | None
) -> float:
    """Seconds of the fastest pass over the prompts, after one that warms up. The statistics are those of the last."""
    seconds = []
    for number in range(2 if setting.is_tiny else 1 + PASSES):
        if number > 1 and setting.left < 2 * seconds[-1]:
            break
        if speculator is not None:
            speculator.stats.reset()
        taken, _ = timed(
            lambda: [model.generate(ids, **request(count), speculator=speculator) for ids in texts], setting.device
        )
        seconds.append(taken)
    return min(seconds[1:])
