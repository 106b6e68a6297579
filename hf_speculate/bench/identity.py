"""Is the text eager's text? Where it is not: is that a proven numerical tie, and how close was the decision?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..errors import LosslessnessError
from ..models import GenerativeModel
from ..testing import check_lossless
from .methods import Method


class _Request(Protocol):
    @property
    def index(self) -> int: ...

    @property
    def input_ids(self) -> Tensor: ...


def compare_texts(
    model: GenerativeModel,
    method: Method,
    texts: Mapping[tuple[str, int], list[list[int]]],
    requests: Sequence[_Request],
    arguments: dict[str, Any],
    max_proofs: int,
) -> dict[str, Any] | None:
    """Compares a method's texts with eager's.

    Args:
        texts: (method, request) -> new tokens of every row.
        arguments: the request that made them.
        max_proofs: how many divergences are run again, for their margins (batch 1 only).
    Returns:
        share of identical rows and the divergences; None where no equality is promised (eager itself, and stock's
        speculative modes when sampling).
    """
    if method.kind == "eager" or (method.kind == "stock_speculative" and arguments["do_sample"]):
        return None
    num_rows, divergences = 0, []
    for request in requests:
        pairs = zip(texts["eager", request.index], texts[method.name, request.index], strict=True)
        for row, (plain, ours) in enumerate(pairs):
            num_rows += 1
            step = next((i for i, (a, b) in enumerate(zip(plain, ours, strict=True)) if a != b), None)
            if step is None:
                continue
            found = {"prompt": request.index, "row": row, "step": step}
            if method.kind == "speculator" and len(request.input_ids) == 1 and len(divergences) < max_proofs:
                found |= _proof(model, method, request, arguments)
            divergences.append(found)
    return {"share": 1 - len(divergences) / num_rows, "num_rows": num_rows, "divergences": divergences}


def _proof(model: GenerativeModel, method: Method, request: _Request, arguments: dict[str, Any]) -> dict[str, Any]:
    """Both runs again, with logits: margin and error at the first divergence, and whether they make it a tie."""
    seed = request.index if arguments["do_sample"] else None
    speculator = method.arguments["speculator"]
    try:
        report = check_lossless(model, speculator, [request.input_ids], seeds=[seed], **arguments)
    except LosslessnessError as error:
        return {"is_tie": False, "why": str(error)}
    if not report.ties:  # the second time the texts agree: the forward itself is not reproducible
        return {"is_tie": None, "why": "not reproduced"}
    tie = report.ties[0]
    return {
        "is_tie": True,
        "step": tie.step,
        "margin": tie.margin,
        "logit_error": tie.logit_error,
        "max_logit": tie.max_logit,
    }
