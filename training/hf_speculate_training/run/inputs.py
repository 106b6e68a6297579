"""What a recipe names, loaded: the target with its tokenizer, the data, the prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from datasets import IterableDataset
from torch import nn
from torch.utils.data import Subset
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from hf_speculate.bench.prompts import read_prompts, tokenize
from hf_speculate.errors import SpeculateError
from hf_speculate.gguf.loading import find_file, load_model, read_tokenizer
from hf_speculate.gguf.reading import read_header
from hf_speculate.speculator import unwrap

from ..data import PreparedData, RowDataset, StreamedRows, prepare_data
from .evaluation import Prompt, evenly_spaced, prompts_of
from .recipe import DataSection, EvaluationSection, RecipeError, TargetSection


@dataclass(frozen=True)
class RunData:
    """Training and evaluation data.

    Attributes:
        train: the training data.
        evaluation: documents for evaluation, None where a recipe has none.
        report: what became of the records, for provenance.
    """

    train: PreparedData
    evaluation: Any
    report: Mapping[str, Any]

    def evaluation_rows(self, limit: int | None = None) -> RowDataset | StreamedRows | Subset:
        """Rows for `Collator`, `limit` evenly spaced ones; of a stream the rows of its first `limit` documents."""
        documents = self.evaluation
        if limit is not None and isinstance(documents, IterableDataset):
            documents = documents.take(limit)
        rows = dataclasses.replace(self.train, evaluation=documents).rows("evaluation")
        if limit is None or not isinstance(rows, RowDataset):
            return rows
        return Subset(rows, evenly_spaced(len(rows), limit))


def load_target(section: TargetSection, device: torch.device) -> nn.Module:
    """The target, frozen, in `eval()` mode, with its adapter.

    Raises:
        SpeculateError: it cannot be had; in one line.
    """
    try:
        model: Any = _packed(section, device) if _is_packed(section) else _from_pretrained(section, device)
        if section.adapter:
            model = _adapted(model, section.adapter)
    except SpeculateError:
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise SpeculateError(f"cannot load the target {section.path!r}: {_first_line(error)}") from error
    return model.eval().requires_grad_(False)


def load_tokenizer(section: TargetSection) -> Any:
    """The target's tokenizer."""
    name = section.tokenizer or section.path
    options: dict[str, Any] = {"revision": section.revision} if section.tokenizer is None else {}
    try:
        if section.tokenizer is None and _is_packed(section):
            return read_tokenizer(read_header(find_file(section.path, section.gguf_file, options)))
        if section.tokenizer is None and section.gguf_file:
            options["gguf_file"] = section.gguf_file
        return AutoTokenizer.from_pretrained(name, **options)
    except SpeculateError:
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise SpeculateError(f"cannot load the tokenizer of {name!r}: {_first_line(error)}") from error


def load_data(section: DataSection, tokenizer: Any, target: nn.Module) -> RunData:
    """Training data, and evaluation data from their own source or held out of the training data."""
    model = unwrap(target)
    end_ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = None if end_ids is None else [end_ids] if isinstance(end_ids, int) else end_ids
    shared = {"target_config": model.config, "end_ids": ends}
    if section.eval is None:
        train = prepare_data(section.train, tokenizer, section, **shared)
        return RunData(train, train.evaluation, {"train": train.report.to_dict()})
    train = prepare_data(section.train, tokenizer, dataclasses.replace(section, eval_fraction=0.0), **shared)
    held_out_options = dataclasses.replace(section, eval_fraction=0.0, limit=None)
    held_out = prepare_data(section.eval, tokenizer, held_out_options, **shared)
    report = {"train": train.report.to_dict(), "eval": held_out.report.to_dict()}
    return RunData(train, held_out.train, report)


def load_prompts(section: EvaluationSection, data: RunData, tokenizer: Any, max_length: int) -> list[Prompt]:
    """The prompts on which acceptance is measured; those too long to be answered are left out."""
    if not section.num_prompts:
        return []
    if section.prompts is not None:
        read = read_prompts(section.prompts, section.num_prompts)
        prompts = [ids for _, ids in tokenize(read, tokenizer, use_chat_template=bool(tokenizer.chat_template))]
    elif data.evaluation is not None:
        prompts = prompts_of(data.evaluation, section.num_prompts, section.prompt_tokens)
    else:
        return []
    fitting = [prompt for prompt in prompts if len(prompt) + section.max_new_tokens <= max_length]
    if prompts and not fitting:
        raise SpeculateError(
            f"none of the {len(prompts)} evaluation prompts leaves room for {section.max_new_tokens} new tokens in the "
            f"target's context of {max_length}: take shorter ones, or fewer new tokens."
        )
    return fitting


def _is_packed(section: TargetSection) -> bool:
    is_gguf = section.gguf_file is not None or section.path.endswith(".gguf")
    return is_gguf and section.gguf_backend != "transformers"


def _packed(section: TargetSection, device: torch.device) -> Any:
    """A GGUF file as `load_gguf` has it: what the head drafts for later."""
    given = {"quantization": section.quantization, "device_map": section.device_map}
    if extra := [name for name, value in given.items() if value is not None]:
        raise RecipeError(f"target.{extra[0]} does not go with a GGUF file: it is quantised, and lies on one device.")
    path = find_file(section.path, section.gguf_file, {"revision": section.revision})
    dtype = torch.bfloat16 if section.dtype == "auto" else getattr(torch, section.dtype)
    return load_model(
        path,
        dtype=dtype,
        device=device,
        backend=section.gguf_backend,
        attn_implementation=section.attn_implementation,
    )


def _from_pretrained(section: TargetSection, device: torch.device) -> Any:
    options: dict[str, Any] = {"dtype": section.dtype, "revision": section.revision}
    if section.gguf_file:
        options["gguf_file"] = section.gguf_file
    if section.attn_implementation:
        options["attn_implementation"] = section.attn_implementation
    if section.quantization:
        options["quantization_config"] = _quantization(section.quantization)
    if section.device_map is not None or section.quantization:
        options["device_map"] = section.device_map if section.device_map is not None else {"": device}
    model: Any = AutoModelForCausalLM.from_pretrained(section.path, **options)
    return model if "device_map" in options else model.to(device)


def _quantization(kind: str) -> BitsAndBytesConfig:
    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def _adapted(model: Any, adapter: str) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, adapter)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
