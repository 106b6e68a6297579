"""One timed `generate` call, and many of them in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from hf_speculate.errors import SpeculateError, first_line
from hf_speculate.graphs import CudaGraphs
from hf_speculate.messages import get_logger
from hf_speculate.stats import SpeculationStats
from hf_speculate.target import GenerativeModel

from ..commands import timed
from .methods import Method
from .replay import Budgets, recorded_budgets


logger = get_logger(__name__)

# New tokens of a warm-up call, and whole passes where something is compiled.
WARM_UP_TOKENS, MAX_WARM_UPS = 16, 4


@dataclass(frozen=True)
class Request:
    """One `generate` call: prompts of one category, left-padded to a batch."""

    index: int
    category: str
    input_ids: Tensor
    attention_mask: Tensor

    @property
    def length(self) -> int:
        return self.input_ids.shape[1]


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """One timed `generate` call.

    Attributes:
        method: name of the method.
        request: index of the request.
        category: category of its prompts.
        repeat: number of the pass over the prompts.
        seconds: duration of the call.
        rows: new tokens of every row.
        stats: statistics of a speculator's call.
        budgets: nodes and depth that an adaptive speculator drafted in each round, where they are noted (`replay`).
    """

    method: str
    request: int
    category: str
    repeat: int
    seconds: float
    rows: list[list[int]]
    stats: SpeculationStats | None
    budgets: Budgets | None = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.rows))


def fixed_length(max_new_tokens: int, temperature: float = 0.0) -> dict[str, Any]:
    """Arguments of `generate` that all methods share: exactly `max_new_tokens`, greedy or plain sampling.

    `top_k=0`: the library's default of 50 is not plain sampling.
    """
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    return {"max_new_tokens": max_new_tokens, "eos_token_id": None, "pad_token_id": 0, **sampling}


def batches(prompts: Sequence[tuple[str, Tensor]], batch_size: int, device: torch.device) -> list[Request]:
    """Batches within a category; the last of a category is filled up with its first prompts."""
    groups: dict[str, list[Tensor]] = {}
    for category, ids in prompts:
        groups.setdefault(category, []).append(ids)
    requests = []
    for category, group in groups.items():
        for start in range(0, len(group), batch_size):
            members = [group[i % len(group)] for i in range(start, start + batch_size)]
            width = max(map(len, members))
            rows = [torch.nn.functional.pad(ids, (width - len(ids), 0)) for ids in members]
            mask = [torch.nn.functional.pad(torch.ones_like(ids), (width - len(ids), 0)) for ids in members]
            request = Request(len(requests), category, torch.stack(rows).to(device), torch.stack(mask).to(device))
            requests.append(request)
    return requests


def fitting(
    prompts: Sequence[tuple[str, Tensor]], model: GenerativeModel, max_new_tokens: int
) -> list[tuple[str, Tensor]]:
    """Prompts that leave room for the new tokens in the target's context; raises `SpeculateError` for none."""
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    kept = [p for p in prompts if len(p[1]) and (context is None or len(p[1]) + max_new_tokens <= context)]
    if not kept:
        shortest = min(len(ids) for _, ids in prompts)
        raise SpeculateError(
            f"no prompt fits: the shortest has {shortest} tokens and {max_new_tokens} new ones are asked for, the "
            f"target's context is {context}."
        )
    return kept


def generate_once(
    model: GenerativeModel, method: Method, request: Request, arguments: dict[str, Any], repeat: int = 0
) -> TimedRun:
    """One timed call, seeded by the request."""
    model = method.model or model
    arguments = {"speculator": None, "return_dict_in_generate": True, **arguments, **method.arguments}
    arguments |= method.fresh() if method.fresh is not None else {}
    torch.manual_seed(request.index)
    seconds, output = timed(
        lambda: model.generate(request.input_ids, attention_mask=request.attention_mask, **arguments), model.device
    )
    return TimedRun(
        method=method.name,
        request=request.index,
        category=request.category,
        repeat=repeat,
        seconds=seconds,
        rows=output.sequences[:, request.length :].tolist(),
        stats=getattr(output, "speculation", None),
        budgets=recorded_budgets(arguments["speculator"]),
    )


def without_refused(
    model: GenerativeModel, methods: Sequence[Method], request: Request, arguments: dict[str, Any]
) -> list[Method]:
    """The methods without compiled ones of stock's speculation that raise for this target. A warning gives the reason.

    Stock's largest static cache decides the shapes of all later ones: call this before anything warms up.
    """
    working = []
    for method in methods:
        try:
            if method.compiles and method.kind == "stock_speculative":
                generate_once(model, method, request, arguments)
            working.append(method)
        except Exception as error:  # torch.compile fails in many ways
            logger.warning(f"{method.name} is not measured: {type(error).__name__}: {first_line(error)}")
    return working


def measure_in_turn(
    model: GenerativeModel,
    methods: Sequence[Method],
    requests: Sequence[Request],
    arguments: dict[str, Any],
    repeats: int,
    advance: Callable[[str], None],
) -> list[TimedRun]:
    """Runs every method on every request, `repeats` times, one after the other in an order that rotates.

    Drift of the machine hits all methods alike; each has a warm-up before. Drafters forget the texts of a pass before
    the next one, which would repeat them. It calls `advance` `num_steps` times.

    Raises:
        SpeculateError: a method emitted another number of tokens than it was asked for.
    """
    wanted = arguments["max_new_tokens"]
    for method in methods:
        _warm_up(model, method, requests, arguments)
        advance("warm-up")
    runs = []
    for repeat in range(repeats):
        for method in methods:
            method.forget()
        for request in requests:
            for method in rotated(methods, repeat + request.index):
                run = generate_once(model, method, request, arguments, repeat)
                if lengths := {len(row) for row in run.rows} - {wanted}:
                    raise SpeculateError(
                        f"{method.name} emitted {sorted(lengths)} tokens instead of {wanted}: tokens/s would not be "
                        "comparable."
                    )
                runs.append(run)
                advance(method.name)
    return runs


def _warm_up(model: GenerativeModel, method: Method, requests: Sequence[Request], arguments: dict[str, Any]) -> None:
    """Runs a few tokens after the longest prompt; for methods that compile, whole passes."""
    if not method.compiles:
        longest = max(requests, key=lambda request: request.length)
        count = min(arguments["max_new_tokens"], WARM_UP_TOKENS)
        generate_once(model, method, longest, arguments | {"max_new_tokens": count})
        return
    # On accelerators the second pass records what the first has compiled.
    for _ in range(MAX_WARM_UPS):
        known = _num_compiled()
        for request in requests:
            generate_once(model, method, request, arguments)
        if _num_compiled() == known:
            return
    logger.warning(f"{method.name} still compiled in pass {MAX_WARM_UPS} of its warm-up: its times include some of it.")


def _num_compiled() -> int:
    """Number of graphs that were compiled or captured in this process so far."""
    return counters["stats"]["unique_graphs"] + CudaGraphs.num_captured


def num_steps(num_methods: int, num_requests: int, repeats: int) -> int:
    """Number of times that `measure_in_turn` calls `advance`."""
    return num_methods * (repeats * num_requests + 1)


def rotated(methods: Sequence[Method], turn: int) -> list[Method]:
    """Methods in the order of this turn."""
    first = turn % len(methods)
    return [*methods[first:], *methods[:first]]


def seconds_by_repeat(runs: Sequence[TimedRun], method: str) -> list[float]:
    """Seconds of a method, one sum over the requests a repeat."""
    seconds: dict[int, float] = {}
    for run in runs:
        if run.method == method:
            seconds[run.repeat] = seconds.get(run.repeat, 0.0) + run.seconds
    return [seconds[repeat] for repeat in sorted(seconds)]


def merged(stats: Iterable[SpeculationStats]) -> SpeculationStats:
    """Statistics of several calls together."""
    whole = SpeculationStats()
    for one in stats:
        whole.merge(one)
    return whole
