"""Phase `text`: the texts of pycoder against plain `generate`: with its EAGLE-3 head in every mode, and with other
drafters, recorded.

In fp32 the texts must be equal. In bf16 two tokens within rounding of each other may swap; each difference is then
proven to be such a tie, or it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_speculate.errors import LosslessnessError
from hf_speculate.speculator import Speculator
from hf_speculate.target import GenerativeModel
from hf_speculate.testing import check_lossless
from hf_speculate.testing.lossless import TOLERANCE
from hf_speculate.verification import Noise

from .models import DRAFTERS, left_padded, load_pycoder, prompts, pycoder_head
from .setting import Setting


NEW_TOKENS, _TINY_TOKENS = 48, 5
SAMPLING = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 40}}
SEED = 5
WITH_LOGITS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
_CASE_SECONDS = {"eager": 2.0, "recorded": 3.0, "compiled": 45.0}
_CASES_OF_OTHERS = 4  # those in float32


@dataclass(frozen=True)
class Case:
    """One request, and what plain `generate` makes of it.

    Attributes:
        name: dtype, sampling and batch size.
        model: the target.
        ids, mask: prompts of the batch.
        arguments: arguments of `generate`.
        plain: output of plain `generate`.
        rng: state of the random number generator after it.
    """

    name: str
    model: GenerativeModel
    ids: Tensor
    mask: Tensor
    arguments: dict[str, Any]
    plain: Any
    rng: Tensor

    @classmethod
    def of(cls, name: str, model: GenerativeModel, ids: Tensor, mask: Tensor, arguments: dict[str, Any]) -> Case:
        """The case, with plain text made now."""
        plain, rng = _generate(model, ids, mask, arguments | WITH_LOGITS)
        return cls(name, model, ids, mask, arguments, plain, rng)

    def compare(self, speculator: Any) -> dict[str, Any]:
        """Number of equal rows, whether the random numbers are where plain `generate` leaves them, and the ties."""
        output, rng = _generate(self.model, self.ids, self.mask, self.arguments, speculator)
        pairs = list(zip(self._new(self.plain.sequences), self._new(output), strict=True))
        different = [row for row, (plain, found) in enumerate(pairs) if plain != found]
        result: dict[str, Any] = {"rows": len(pairs), "equal": len(pairs) - len(different)}
        if not different:
            return result | {"rng_equal": bool(torch.equal(rng, self.rng))}
        if len(self.ids) == 1:
            verdicts = [self._verdict_of_check(speculator)]
        else:
            again, _ = _generate(self.model, self.ids, self.mask, self.arguments | WITH_LOGITS, speculator)
            verdicts = [self._verdict(row, again) for row in different]
        problems = [each["error"] for each in verdicts if "error" in each]
        result |= {"ties": len(verdicts) - len(problems), "differences": verdicts}
        return result | ({"error": problems[0]} if problems else {})

    def _new(self, sequences: Tensor) -> list[list[int]]:
        return sequences[:, self.ids.shape[1] :].tolist()

    def _verdict_of_check(self, speculator: Any) -> dict[str, Any]:
        """Whether `check_lossless` proves a tie, for one row."""
        seed = SEED if self.arguments["do_sample"] else None
        try:
            report = check_lossless(self.model, speculator, [self.ids], seeds=[seed], **self.arguments)
        except LosslessnessError as error:
            return {"error": str(error)[:300]}
        if not report.ties:
            return {"error": "the text differs only where no logits are asked for"}
        tie = report.ties[0]
        return {"step": tie.step, "margin": tie.margin, "logit_error": tie.logit_error, "max_logit": tie.max_logit}

    def _verdict(self, row: int, ours: Any) -> dict[str, Any]:
        """The same for one row of a batch, from an output with logits."""
        plain, found = self._new(self.plain.sequences)[row], self._new(ours.sequences)[row]
        step = next((index for index, (a, b) in enumerate(zip(plain, found, strict=True)) if a != b), None)
        if step is None:
            return {"row": row, "error": "the text differs only where no logits are asked for"}
        allowed, error, margin = self._margin(row, step, plain, ours)
        verdict = {"row": row, "step": step, "margin": margin, "logit_error": error, "allowed": allowed}
        if error > allowed or margin > 2 * allowed:
            verdict["error"] = f"not a tie: margin {margin:.3g}, logit error {error:.3g}, allowed {allowed:.3g}"
        return verdict

    def _margin(self, row: int, step: int, plain: list[int], ours: Any) -> tuple[float, float, float]:
        """Allowed rounding, error of the logits that were used, and margin of the decision; of one row of a batch."""
        prefix = torch.cat([self.ids[row][self.mask[row].bool()], self.ids.new_tensor(plain[:step])])[None]
        with torch.no_grad():
            fresh = self.model(prefix, logits_to_keep=1).logits[0, -1].float()
        allowed = TOLERANCE[self.model.dtype] * fresh.abs().max().item()
        error = (fresh - ours.logits[step][row].float()).abs().max().item()
        decision, scale = self.plain.scores[step][row], 1.0
        if self.arguments["do_sample"]:
            torch.manual_seed(SEED)
            noise = Noise(len(self.ids), decision.shape[-1], decision.device).row(step)[row]
            decision, scale = torch.log_softmax(decision, dim=-1) - noise.log(), self.arguments["temperature"]
        best = decision.topk(2).values
        return allowed, error, (best[0] - best[1]).item() * scale


def measure(setting: Setting) -> None:
    """Writes a finding for each mode, dtype, sampling and batch size."""
    texts = prompts(setting.device)
    modes = setting.modes()
    cases = [case for dtype in (torch.float32, torch.bfloat16) for case in _cases(setting, dtype, texts)]
    for mode, value in modes.items():
        make = partial(pycoder_head, compile=value, adaptive=False)
        _compare(setting, mode, make, _chosen(cases, mode, setting))
        for name, make in DRAFTERS.items() if mode == "recorded" else ():
            _compare(setting, f"recorded, {name}", make, cases[:_CASES_OF_OTHERS])


def _compare(setting: Setting, mode: str, make: Callable[[GenerativeModel], Speculator], cases: Sequence[Case]) -> None:
    """Writes a finding for each case, with one speculator for each model."""
    speculators: dict[int, Speculator] = {}
    for case in cases:
        seconds = 0.0 if setting.is_tiny else _CASE_SECONDS[mode.partition(",")[0]]
        if not setting.allows(seconds, f"{mode}, {case.name}"):
            continue
        with setting.guarded(mode=mode, case=case.name):
            if id(case.model) not in speculators:
                speculators[id(case.model)] = make(case.model)
            speculator = speculators[id(case.model)]
            speculator.stats.reset()
            found = case.compare(speculator)
            stats = speculator.stats
            setting.report(
                mode=mode,
                case=case.name,
                **found,
                tokens_per_round=stats.tokens_per_round,
                fallbacks=dict(stats.fallbacks),
            )


def _chosen(cases: list[Case], mode: str, setting: Setting) -> list[Case]:
    """The cases of a mode. Compiling takes long, so that mode has those of batch 1 only, bf16 first."""
    if mode != "compiled":
        return cases
    chosen = [case for case in reversed(cases) if len(case.ids) == 1]
    return chosen[:1] if setting.is_tiny else chosen


def _cases(setting: Setting, dtype: torch.dtype, texts: list[Tensor]) -> list[Case]:
    model, name = load_pycoder(setting.device, dtype), str(dtype).removeprefix("torch.")
    count = _TINY_TOKENS if setting.is_tiny else NEW_TOKENS
    found = []
    for sampling, chosen in SAMPLING.items():
        arguments = {"max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0, **chosen}
        for size, (ids, mask) in ((1, left_padded(texts[:1])), (4, left_padded(texts))):
            with setting.guarded(case=name, plain=sampling):
                found.append(Case.of(f"{name}, {sampling}, batch {size}", model, ids, mask, arguments))
    return found


def _generate(
    model: GenerativeModel, ids: Tensor, mask: Tensor, arguments: dict[str, Any], speculator: Any = None
) -> tuple[Any, Tensor]:
    torch.manual_seed(SEED)
    output = model.generate(ids, attention_mask=mask, **arguments, speculator=speculator)
    on_cuda = ids.device.type == "cuda"
    return output, torch.cuda.get_rng_state(ids.device) if on_cuda else torch.get_rng_state()
