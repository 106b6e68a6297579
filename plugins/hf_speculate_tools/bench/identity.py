"""Comparison of a method's text with eager's, and the proof that a difference is a numerical tie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_speculate.errors import LosslessnessError
from hf_speculate.target import GenerativeModel
from hf_speculate.testing import check_lossless

from .methods import Method
from .replay import replayed
from .runs import Request, TimedRun


def compare_texts(
    model: GenerativeModel,
    method: Method,
    runs: Sequence[TimedRun],
    requests: Sequence[Request],
    arguments: dict[str, Any],
    max_proofs: int,
) -> dict[str, Any] | None:
    """Compares a method's texts with eager's.

    Returns:
        Share of identical rows, and the divergences. None where nothing promises equality: eager itself, other engines,
        and stock's speculative modes when sampling.
    """
    if method.kind in ("eager", "engine") or (method.kind == "stock_speculative" and arguments["do_sample"]):
        return None
    first = {(run.method, run.request): run for run in runs if run.repeat == 0}
    num_rows, divergences = 0, []
    for request in requests:
        run = first[method.name, request.index]
        for row, (plain, ours) in enumerate(zip(first["eager", request.index].rows, run.rows, strict=True)):
            num_rows += 1
            step = next((i for i, (a, b) in enumerate(zip(plain, ours, strict=True)) if a != b), None)
            if step is None:
                continue
            divergence = {"prompt": request.index, "row": row, "step": step}
            if method.kind == "speculator" and len(run.rows) == 1 and len(divergences) < max_proofs:
                divergence |= _proof(model, method, request, run, arguments)
            divergences.append(divergence)
    return {"share": 1 - len(divergences) / num_rows, "num_rows": num_rows, "divergences": divergences}


def _proof(
    model: GenerativeModel, method: Method, request: Request, run: TimedRun, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Margin and logit error at the first divergence, from a second run, and whether they make it a tie."""
    seed = request.index if arguments["do_sample"] else None
    speculator = replayed(method.arguments["speculator"], run.budgets)
    try:
        report = check_lossless(model, speculator, [request.input_ids], seeds=[seed], **arguments)
    except LosslessnessError as error:
        return {"is_tie": False, "why": str(error)}
    if not report.ties:  # the same trees, and now the texts agree: the forward itself is not reproducible
        return {"is_tie": None, "why": "not reproduced"}
    tie = report.ties[0]
    return {
        "is_tie": True,
        "step": tie.step,
        "margin": tie.margin,
        "logit_error": tie.logit_error,
        "max_logit": tie.max_logit,
    }
