"""Our cells in docs/beside-others.md: the code says what each must begin with, and a row without a check fails."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor

import hf_speculate
from hf_speculate import AutoSpeculator, Speculator, graphs
from hf_speculate.errors import OptionError
from hf_speculate.policy import Adaptive
from hf_speculate.speculator import EngineOptions, SpeculatorSpec, find_installed
from hf_speculate.stats import SpeculationStats
from hf_speculate.testing import ScriptedDrafter
from hf_speculate_gguf.native.backends import BACKENDS, choose_backend
from hf_speculate_plugins.prompt_lookup import PromptLookupDrafter
from hf_speculate_tools.cli import commands

from ..support.inputs import padded_batch, random_prompt
from ..support.models import VOCAB_SIZE, build_tiny_model
from ..support.requests import run
from ..support.vocabularies import LLAMA, byte_level_tokenizer
from .facts import (
    built_in_drafters,
    drafters_without_weights,
    is_released,
    metadata,
    oldest,
    options_of,
    readable_heads,
    releases,
)
from .pages import REPOSITORY, code_in, table


PAGE = REPOSITORY / "docs" / "beside-others.md"
OURS = {row: cell for row, cell, *_ in table(PAGE, "you need", "hf_speculate")}
OF_ENGINES = table(PAGE, "you need", "llama.cpp, 2026-10")
INSTEAD = table(PAGE, "there", "here")
THREE_ROWS = padded_batch(random_prompt, (9, 5, 7))


class Counting(LogitsProcessor):
    """A processor with a state: the token that it favours depends on the number of its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores[:, self.calls % VOCAB_SIZE] += 2
        return scores


def yes(is_so: bool) -> str:
    return "yes" if is_so else "**no**"


def guessing(texts: torch.Tensor, prompt: torch.Tensor) -> Speculator:
    """A speculator whose trees hold most of what the target writes."""
    new = texts[:, prompt.shape[1] :]
    return Speculator(ScriptedDrafter(new, (2, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE))


def is_plain(make=dict, **request) -> bool:
    """Whether a sampled request with accepted drafts has the text of plain `generate`; `make` gives more arguments."""
    model, request = build_tiny_model(), {"input_ids": random_prompt(9), "do_sample": True, **request}
    plain, _ = run(model, **request, **make())
    speculator = guessing(plain, request["input_ids"])
    ours, _ = run(model, speculator, **request, **make())
    return torch.equal(ours, plain) and speculator.stats.accepted_tokens > 0


def drafts_trees() -> bool:
    model, prompt = build_tiny_model(), random_prompt(9)
    speculator = guessing(run(model, input_ids=prompt)[0], prompt)
    rounds = list(hf_speculate.rounds(model, prompt, speculator=speculator, max_new_tokens=8))
    return any(round.num_nodes > round.depth for round in rounds)


def drafts_by_another_vocabulary() -> str:
    tokenizer, other = byte_level_tokenizer(600), byte_level_tokenizer(1500, LLAMA)
    target, model = (build_tiny_model(vocab_size=len(each)) for each in (tokenizer, other))
    given = {"target": target, "model": model, "tokenizer": tokenizer, "draft_tokenizer": other}
    AutoSpeculator.from_name("draft_model", **given)
    with pytest.raises(OptionError, match="top_k"):
        AutoSpeculator.from_name("draft_model", **given, top_k=2)
    return "yes, [chains]"


def takes_for_each_row(**option) -> bool:
    try:
        run(build_tiny_model(), Speculator(PromptLookupDrafter()), **THREE_ROWS, **option)
    except (TypeError, ValueError):
        return False
    return True


def fast_gguf() -> str:
    """Where packed files are fast by themselves. `auto` takes nothing that was not measured."""
    chosen = choose_backend("auto", torch.device("cuda"), torch.bfloat16)
    return "packed; fast on a CPU" if chosen is BACKENDS["dequantize"] else "packed; fast anywhere"


def transformers_range() -> str:
    return f"{oldest('transformers')} to {releases()[-1]}"


def measured_card() -> str:
    """The GPU of the GPU page."""
    (card,) = re.findall(r"^One NVIDIA (\w+)", (PAGE.parent / "gpu.md").read_text(encoding="utf-8"), re.MULTILINE)
    return card


def default_length() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HF_SPECULATE_ADAPTIVE")  # which fixes it for the suite
        return "by measured cost" if isinstance(Speculator(PromptLookupDrafter()).policy, Adaptive) else "fixed"


# The words that each of our cells must begin with.
CODE_SAYS = {
    "at T=1, the text of plain `generate` with the same seed": lambda: f"{yes(is_plain())}, in fp32",
    "batches with left padding": lambda: yes(is_plain(**THREE_ROWS)),
    "logits processors, grammars": lambda: (
        "any processor" if is_plain(lambda: {"logits_processor": [Counting()]}) else "no"
    ),
    "trees": lambda: yes(drafts_trees()),
    "EAGLE-3 heads": lambda: yes("eagle3" in readable_heads()),
    "DFlash heads": lambda: yes("dflash" in readable_heads()),
    "Medusa heads": lambda: yes("medusa" in readable_heads()),
    "MTP layers of the model": lambda: yes("mtp" in built_in_drafters()),
    "drafts without other weights": lambda: ", ".join(sorted(drafters_without_weights(), reverse=True)),
    "a draft model with another tokenizer": drafts_by_another_vocabulary,
    "a sampler and limit for each row": lambda: yes(
        takes_for_each_row(max_new_tokens=[3, 5, 4]) or takes_for_each_row(do_sample=True, temperature=[0.5, 1.0, 0.7])
    ),
    "draft length": default_length,
    "quantised targets": lambda: (
        "bitsandbytes, packed GGUF" if {"bitsandbytes", "gguf"} <= metadata()["optional-dependencies"].keys() else "no"
    ),
    "GGUF files": fast_gguf,
    "training of heads": lambda: yes(bool(find_installed("hf_speculate.training_methods", "training method"))),
    "serving many users": lambda: yes("without continuous batching" not in inspect.getdoc(commands.serve)),
    "speed on GPUs": lambda: f"{'CUDA graphs' if hasattr(graphs, 'CudaGraphs') else 'no'}, [{measured_card()}](gpu.md)",
    "transformers": transformers_range,
    "`pip install NAME`": lambda: yes(is_released()),
}


def test_every_row_of_ours_is_held_against_the_code():
    assert OURS.keys() == CODE_SAYS.keys()


def test_engines_are_compared_in_the_same_rows():
    assert [row for row, *_ in OF_ENGINES] == list(OURS)


@pytest.mark.parametrize("row", CODE_SAYS)
def test_our_cell_is_what_the_code_does(row):
    assert OURS[row].startswith(CODE_SAYS[row]())


def known_options() -> set[str]:
    drafters = (options_of(drafter) for drafter in built_in_drafters())
    return {field.name for field in fields(EngineOptions)}.union(*drafters)


@pytest.mark.parametrize("here", [here for _, here in INSTEAD])
def test_what_is_written_here_instead_is_understood(here):
    for code in code_in(here):
        spec = re.search(r'speculator="(.*)"', code)
        if spec and spec[1] != "HEAD":
            parsed = SpeculatorSpec.parse(spec[1])
            parsed.check_source()
            assert parsed.options.keys() <= options_of(parsed.source)
        elif code.startswith("output."):
            assert hasattr(SpeculationStats, code.rpartition(".")[2])
        else:
            words = set(re.findall(r"(\w+)=", code)) - {"speculator"}
            assert words <= known_options() | vars(GenerationConfig()).keys()


def test_what_has_no_counterpart_has_none():
    absent = [there for there, here in INSTEAD if here.startswith("none")]
    names = {name for there in absent for code in code_in(there) for name in re.findall(r"\w+", code)}
    assert {"layer_skip", "assistant_early_exit"} <= names
    assert not names & (known_options() | {*built_in_drafters()})


def test_draft_layers_are_named_where_others_have_them():
    assert [here for there, here in INSTEAD if "mtp`" in there] == ['`speculator="mtp"`'] * 2


def test_stock_is_the_newest_release_that_is_tested():
    assert table(PAGE, "you need", "hf_speculate", f"stock {releases()[-1]}")
