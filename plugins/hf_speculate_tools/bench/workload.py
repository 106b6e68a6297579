"""Target and prompts of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from hf_speculate.errors import SpeculateError
from hf_speculate.target import GenerativeModel

from ..commands import (
    Prompt,
    builtin_prompts,
    chat_ids,
    environment,
    find_device,
    load_target,
    read_prompts,
    tokenize,
)
from .runs import fitting
from .settings import WorkloadSettings


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A target and the prompts that fit it.

    Attributes:
        name: name of the target.
        model: the target.
        prompts: (category, int64 [S]) of each prompt.
        num_skipped: number of prompts that are too long.
        prompt_sets: names of the prompt files.
        uses_chat_template: whether the prompts went through it.
        eos_token_id: the tokenizer's EOS; the model's own generation config is emptied.
    """

    name: str
    model: GenerativeModel
    prompts: list[tuple[str, Tensor]]
    num_skipped: int = 0
    prompt_sets: Sequence[str] = ("random",)
    uses_chat_template: bool = False
    eos_token_id: Any = None

    @property
    def vocab_size(self) -> int:
        return self.model.config.get_text_config(decoder=True).vocab_size

    def describe(self) -> dict[str, Any]:
        """Entries of a result that describe the workload."""
        model = self.model
        return {
            "target": self.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": model.config._attn_implementation,
            "parameters": _num_parameters(model),
            "prompt_sets": list(self.prompt_sets),
            "num_prompts": len(self.prompts),
            "num_skipped_prompts": self.num_skipped,
            "mean_prompt_length": sum(len(ids) for _, ids in self.prompts) / len(self.prompts),
            "chat_template": self.uses_chat_template,
            "environment": environment(model.device),
        }


def _num_parameters(model: GenerativeModel) -> int:
    """Parameters of the architecture: quantised weights have other shapes."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model.config).num_parameters()


def load_workload(settings: WorkloadSettings, prompt_tokens: slice | None = None) -> Workload:
    """Loads target and prompts.

    With `prompt_tokens` these tokens of every text are taken, without a chat template; texts that end before are left
    out.
    """
    device, files = find_device(settings.device), settings.prompts or []
    groups = [read_prompts(path, settings.limit, settings.categories) for path in files]
    model, tokenizer = load_target(settings.target_name, settings.dtype, device, settings.gguf_backend)
    uses_chat_template = bool(tokenizer.chat_template) and not settings.raw and prompt_tokens is None
    if not groups:
        groups = [builtin_prompts(settings.limit, chat=uses_chat_template)]
    chosen = [prompt for group in groups for prompt in group]
    prompts = tokenize(chosen, tokenizer, use_chat_template=uses_chat_template)
    if prompt_tokens is not None:
        prompts = _cut(prompts, prompt_tokens)
    elif uses_chat_template:
        prompts += [p for prompt in chosen for p in _later_turns(prompt, model, tokenizer, settings.max_new_tokens)]
        order = list(dict.fromkeys(prompt.category for prompt in chosen))
        prompts.sort(key=lambda prompt: order.index(prompt[0]))
    kept = fitting(prompts, model, settings.max_new_tokens)
    return Workload(
        name=settings.target_name,
        model=model,
        prompts=kept,
        num_skipped=len(prompts) - len(kept),
        prompt_sets=[str(path) for path in files] or ["built-in"],
        uses_chat_template=uses_chat_template,
        eos_token_id=tokenizer.eos_token_id,
    )


def describe_target(result: dict[str, Any]) -> str:
    """The beginning of a table's title."""
    env = result["environment"]
    return (
        f"{result['target']} ({result['parameters'] / 1e6:.1f} M parameters, {result['dtype']}), {env['device']}, "
        f"{env['threads']} threads: {result['num_prompts']} prompts, {result['max_new_tokens']} new tokens"
    )


def _cut(prompts: Sequence[tuple[str, Tensor]], taken: slice) -> list[tuple[str, Tensor]]:
    wanted = taken.stop - taken.start
    cut = [(category, ids[taken]) for category, ids in prompts]
    kept = [prompt for prompt in cut if len(prompt[1]) == wanted]
    if not kept:
        longest = max(len(ids) for _, ids in prompts)
        raise SpeculateError(
            f"no prompt has {taken.stop} tokens (the longest has {longest}): tokens {taken.start} to "
            f"{taken.stop} of each were asked for."
        )
    return kept


def _later_turns(
    prompt: Prompt, model: GenerativeModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int
) -> list[tuple[str, Tensor]]:
    """Prompts of a conversation's later turns, after the target's own greedy answers."""
    prompts, messages = [], prompt.messages
    for turn in prompt.later_turns:
        ids = chat_ids(messages, tokenizer)[None].to(model.device)
        arguments: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            output = model.generate(ids, **arguments, eos_token_id=tokenizer.eos_token_id, speculator=None)
        answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        prompts.append((prompt.category, chat_ids(messages, tokenizer)))
    return prompts
