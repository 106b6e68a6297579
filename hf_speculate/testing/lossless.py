"""`check_lossless`: speculative text is the target's own, token for token or up to a proven numerical tie.

A speculative forward scores several tokens at once, so its logits differ from a one-token forward's in the last bits.
If two tokens are almost equally good, the choice may flip. `check_lossless` accepts a difference only if a fresh plain
forward on the common prefix proves two things: the logits that were used are right (with a wrong mask, position or
cache entry they are not), and the decision was closer than their rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import LosslessnessError
from ..speculator import Speculator
from ..target import GenerativeModel, unwrap
from ..verification import Noise


# Logit errors that count as rounding, relative to the largest logit. Measured: fp32 5e-6 (24 x 896 body, tree of 24
# nodes), bf16 2.5e-2.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-2}


@dataclass(frozen=True, kw_only=True)
class Tie:
    """A difference that was proven to be a tie.

    Attributes:
        case: prompt (and seed) of the difference.
        step: index of the first differing new token.
        plain_token, speculative_token: the two choices.
        margin: distance between the two best candidates in the sampler's own decision.
        logit_error: largest difference between the logits used and those of a fresh plain forward.
        max_logit: largest absolute logit in that forward.
    """

    case: str
    step: int
    plain_token: int | None
    speculative_token: int | None
    margin: float
    logit_error: float
    max_logit: float

    @property
    def relative_error(self) -> float:
        return self.logit_error / self.max_logit


@dataclass
class LosslessReport:
    """The result of `check_lossless`."""

    num_cases: int = 0
    num_identical: int = 0
    num_tokens: int = 0
    ties: list[Tie] = field(default_factory=list)

    @property
    def identical_share(self) -> float:
        return self.num_identical / self.num_cases if self.num_cases else 1.0


def check_lossless(
    model: GenerativeModel,
    speculator: Speculator,
    prompts: Sequence[Tensor | str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 64,
    seeds: Sequence[int | None] = (None,),
    tolerance: float | None = None,
    **generate_kwargs: Any,
) -> LosslessReport:
    """Compares `generate` with and without `speculator` on every prompt (and seed), one prompt at a time.

    Args:
        model: target; it may be wrapped by PEFT or compiled.
        speculator: speculator to compare with plain `generate`.
        prompts: token ids, int64 [S] or [1, S] each, or texts.
        tokenizer: tokenizer for prompts that are texts; None if all are token ids.
        max_new_tokens: length of the texts, in tokens.
        seeds: seeds to try for sampled requests (`do_sample=True`); the RNG state afterwards is compared too.
        tolerance: logit error that counts as rounding, relative to the largest logit; None: `TOLERANCE` of the
            coarsest weights (an adapter in float32 makes a model in bfloat16 no finer).
        generate_kwargs: the rest of the request.

    Returns:
        A report; every difference in it is a proven tie.

    Raises:
        LosslessnessError: a difference is not a tie, or the RNG state differs after equal text.
        TypeError: texts came without a tokenizer, prompts are not a list, or `speculator` is not a speculator.
    """
    if not isinstance(speculator, Speculator):
        raise TypeError(f"check_lossless takes a Speculator, got {type(speculator).__name__}: Speculator(drafter).")
    prompts = prompt_ids(prompts, tokenizer)
    if tolerance is None:
        dtypes = {parameter.dtype for parameter in unwrap(model).parameters()}
        tolerance = max(TOLERANCE[dtype] for dtype in dtypes & TOLERANCE.keys())
    report = LosslessReport()
    for index, prompt in enumerate(prompts):
        for seed in seeds:
            name = f"prompt {index}" if seed is None else f"prompt {index}, seed {seed}"
            input_ids = prompt.view(1, -1).to(model.device)
            request = {
                "max_new_tokens": max_new_tokens,
                "attention_mask": torch.ones_like(input_ids),
                **generate_kwargs,
            }
            case = _Case(name, model, input_ids, seed, request, tolerance)
            case.check(speculator, report)
    return report


def prompt_ids(prompts: Sequence[Tensor | str], tokenizer: PreTrainedTokenizerBase | None) -> list[Tensor]:
    """Token ids of prompts, int64 [S] each; raises `TypeError` for texts without a tokenizer, or without a list."""
    if isinstance(prompts, str | Tensor):
        raise TypeError(f"prompts must be a list of texts or token ids, got one {type(prompts).__name__}: [prompt].")
    if tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
        raise TypeError("prompts are texts, and no tokenizer was given: tokenizer=AutoTokenizer.from_pretrained(...).")
    tokenize: Any = tokenizer
    return [
        tokenize(prompt, return_tensors="pt")["input_ids"][0] if isinstance(prompt, str) else prompt.view(-1)
        for prompt in prompts
    ]


@dataclass(frozen=True)
class _Case:
    """One prompt with one seed."""

    name: str
    model: GenerativeModel
    input_ids: Tensor
    seed: int | None
    request: dict[str, Any]
    tolerance: float

    def check(self, speculator: Speculator, report: LosslessReport) -> None:
        (plain, plain_rng), (speculative, rng) = self._generate(None), self._generate(speculator)
        new = [output.sequences[0, self.input_ids.shape[1] :].tolist() for output in (plain, speculative)]
        report.num_cases += 1
        report.num_tokens += len(new[0])
        if new[0] != new[1]:
            report.ties.append(self._prove_tie(new, plain, speculative))
            return
        report.num_identical += 1
        if self.seed is not None and not torch.equal(plain_rng, rng):
            raise LosslessnessError(f"{self.name}: equal text, but the RNG is not where plain generate leaves it.")

    def _generate(self, speculator: Speculator | None) -> tuple[Any, Tensor]:
        """The output of the request, and the state of the RNG after it."""
        if self.seed is not None:
            torch.manual_seed(self.seed)
        kept = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
        output = self.model.generate(self.input_ids, **kept | self.request, speculator=speculator)
        device = self.input_ids.device
        return output, torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)

    def _prove_tie(self, new: list[list[int]], plain: Any, speculative: Any) -> Tie:
        step = next((i for i, (a, b) in enumerate(zip(*new, strict=False)) if a != b), min(map(len, new)))
        tokens = [row[step] if step < len(row) else None for row in new]
        if None in tokens:
            raise LosslessnessError(
                f"{self.name}: equal text, but plain generate stops after {len(new[0])}, not {len(new[1])}."
            )
        prefix = torch.cat([self.input_ids[0], self.input_ids.new_tensor(new[0][:step])])[None]
        with torch.no_grad():
            fresh = self.model(prefix, logits_to_keep=1).logits[0, -1].float()
        max_logit = fresh.abs().max().item()
        allowed = self.tolerance * max_logit
        error = (fresh - speculative.logits[step][0]).abs().max().item()
        decision, scale = plain.scores[step][0], 1.0
        if self.request.get("do_sample"):
            torch.manual_seed(self.seed or 0)
            noise = Noise(1, decision.shape[-1], decision.device).row(step)[0]
            decision = torch.log_softmax(decision, dim=-1) - noise.log()
            scale = 1.0 / min(self.request.get("temperature") or 1.0, 1.0)
        best = decision.topk(2).values
        margin = (best[0] - best[1]).item()
        if error > allowed or margin > 2 * allowed * scale:
            raise LosslessnessError(
                f"{self.name}: new token {step} is {tokens[1]}, plain generate has {tokens[0]}, and this is not a tie: "
                f"the logits used differ from a fresh forward's by {error:.2e} (allowed {allowed:.2e} = "
                f"{self.tolerance:g} x {max_logit:.3g}), the decision's margin is {margin:.2e} (allowed "
                f"{2 * allowed * scale:.2e})."
            )
        return Tie(
            case=self.name,
            step=step,
            plain_token=tokens[0],
            speculative_token=tokens[1],
            margin=margin,
            logit_error=error,
            max_logit=max_logit,
        )
