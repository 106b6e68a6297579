"""Acceptance on edited code: a file is the prompt, and the text is the file with small changes. No clock.

Assistants often write again what they were given. Small models cannot, so the target is made to write a text that was
laid down beforehand.
"""

from __future__ import annotations

import keyword
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from hf_speculate.errors import SpeculateError
from hf_speculate.speculator.registry import SpeculatorSpec
from hf_speculate_tools.bench.acceptance import figures
from hf_speculate_tools.bench.methods import speculator_methods
from hf_speculate_tools.bench.runs import batches, fixed_length, generate_once
from hf_speculate_tools.commands import Grid, Specs, environment, parse_specs, progress

from .command import ACCEPTANCE_COLUMNS, TargetSettings, run


_DEFAULT_SPECS = ("prompt_lookup", "suffix")
_IDENTIFIER = re.compile(r"\b[a-z_][a-z0-9_]{3,}\b")
_NUMBER = re.compile(r"\b\d+\b")


@dataclass(kw_only=True)
class EditSettings(TargetSettings):
    """Options. Files are modules of Python's standard library, as it is installed."""

    QUICK: ClassVar = {"num_files": 4}

    speculators: Specs = None
    nodes: Annotated[list[int], typer.Option(min=1, help="Draft nodes (repeatable).")] = field(
        default_factory=lambda: [8]
    )
    num_files: Annotated[int, typer.Option(min=1, help="Files to edit.")] = 24
    file_tokens: Annotated[int, typer.Option(min=32, help="Tokens taken from the beginning of a file.")] = 400
    num_edits: Annotated[int, typer.Option(min=0, help="Lines changed in each, besides a name everywhere.")] = 2
    seed: Annotated[int, typer.Option(help="Seed of the edits.")] = 0

    def specs(self) -> list[SpeculatorSpec]:
        return parse_specs(self.speculators or list(_DEFAULT_SPECS))


def bench_edits(settings: EditSettings) -> dict[str, Any]:
    """Acceptance on edited code, with fixed trees: the rows are those of `bench acceptance`."""
    name, model, tokenizer = settings.load()
    edits = _replays(settings, tokenizer)
    requests = batches([("edits", before) for before, _ in edits], 1, model.device)
    rows = []
    specs = settings.specs()
    with progress("edits", total=len(specs) * len(settings.nodes) * len(edits)) as advance:
        for spec, nodes in product(specs, settings.nodes):
            (method,) = speculator_methods([spec], model, adaptive=False, max_nodes=nodes)
            stats = []
            for request, (before, after) in zip(requests, edits, strict=True):
                writes = {"logits_processor": [WritesText(len(before), after.to(model.device))]}
                found = generate_once(model, method, request, fixed_length(len(after)) | writes).stats
                assert found is not None
                stats.append(found)
                advance(f"{spec.label}, {nodes} nodes")
            row = {"speculator": spec.label, "spec": spec.text, "nodes": nodes}
            rows.append(row | figures(stats, ["edits"] * len(stats)))
    return {
        "bench": "edits",
        "target": name,
        "num_files": len(edits),
        "mean_tokens": sum(len(after) for _, after in edits) / len(edits),
        "num_edits": settings.num_edits,
        "seed": settings.seed,
        "environment": environment(model.device),
        "rows": rows,
    }


def tables(result: dict[str, Any]) -> list[Grid | str]:
    """A table with one line for each speculator and size."""
    return [
        Grid.of(
            f"Edits replayed: {result['num_files']} files of Python's standard library, {result['mean_tokens']:.0f} "
            f"tokens and {result['num_edits']} edits each besides a renaming, tokens of {result['target']}",
            result["rows"],
            {
                "speculator": "{speculator}",
                "nodes": "{nodes:d}",
                **ACCEPTANCE_COLUMNS,
            },
            groups=("speculator",),
        )
    ]


class WritesText(LogitsProcessor):
    """Makes the target write `tokens`, int64 [T], behind a prompt of one row."""

    def __init__(self, prompt_length: int, tokens: Tensor):
        self._prompt_length, self._tokens = prompt_length, tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._tokens[input_ids.shape[1] - self._prompt_length]] = 0.0
        return forced


def _replays(settings: EditSettings, tokenizer: PreTrainedTokenizerBase) -> list[tuple[Tensor, Tensor]]:
    """Files before and after the edits, int64 [S] each."""
    draw, count = random.Random(settings.seed), settings.file_tokens

    def tokens(text: str) -> Tensor:
        return tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]

    def replays() -> Iterator[tuple[Tensor, Tensor]]:
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            ids = tokens(path.read_text(encoding="utf-8")[: 8 * count])
            text = str(tokenizer.decode(ids[:count]))
            edited = edited_code(text, draw, settings.num_edits)
            if len(ids) >= count and edited is not None:
                yield tokens(text + "\n\n"), tokens(edited)

    found = list(islice(replays(), settings.num_files))
    if not found:
        raise SpeculateError(f"no module of the standard library has {count} tokens of code.")
    return found


def edited_code(text: str, draw: random.Random, num_edits: int) -> str | None:
    """The file with an identifier renamed and `num_edits` lines dropped, added or changed; None if it is too short."""
    counts: dict[str, int] = {}
    for name in _IDENTIFIER.findall(text):
        counts[name] = counts.get(name, 0) + 1
    names = sorted(name for name, count in counts.items() if 2 <= count <= 6 and not keyword.iskeyword(name))
    lines = text.splitlines()
    if not names or len(lines) <= 4 * num_edits:
        return None
    name = draw.choice(names)
    lines = [re.sub(rf"\b{name}\b", f"new_{name}", line) for line in lines]
    for _ in range(num_edits):
        place = draw.randrange(len(lines))
        indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
        kind = draw.choice(("drop", "add", "number"))
        if kind == "number" and _NUMBER.search(lines[place]):
            lines[place] = _NUMBER.sub(lambda found: str(int(found.group()) + 1), lines[place])
        elif kind == "drop":
            del lines[place]
        else:
            lines.insert(place, f"{indent}# TODO: see {draw.choice(names)}")
    return "\n".join(lines)


if __name__ == "__main__":
    run(EditSettings, bench_edits, tables)
