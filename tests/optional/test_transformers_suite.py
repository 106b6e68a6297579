"""transformers' own tests, from its source distribution, with a speculator attached (`make stock-tests`).

`transformers_suite/suite.py` runs twice, each in a process of its own: without hf_speculate, to see what passes on
this machine at all, and with it. `HF_SPECULATE_WRITE_DOCS=1 make stock-tests` writes `docs/transformers-tests.md` anew.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
import transformers

from .transformers_suite.tiny import MODELS


SUITE = Path(__file__).parent / "transformers_suite" / "suite.py"
NO_CACHE = "speculator= needs the KV cache, but use_cache=False."
TIME_LIMIT = 1800
# Column of the table: which tests of which class.
GENERATION = {
    "`test_tp_generation`": ("TensorParallel", "test_tp_generation"),
    "`…_quantized`": ("TensorParallel", "test_tp_generation_quantized"),
    "`test_training_overfit`": ("Overfit", "test_training_overfit"),
    "… with cache, prompt lookup": ("OverfitPromptLookup", "test_training_overfit"),
    "… with cache, half right": ("OverfitHalfRight", "test_training_overfit"),
}

pytestmark = pytest.mark.skipif(
    "TRANSFORMERS_SDIST" not in os.environ, reason="TRANSFORMERS_SDIST is not set: `make stock-tests` sets it up"
)


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory):
    """Outcomes of the tests by name, plain and attached."""
    information = (Path(os.environ["TRANSFORMERS_SDIST"]) / "PKG-INFO").read_text()
    assert f"\nVersion: {transformers.__version__}\n" in information, "TRANSFORMERS_SDIST is of another version"
    folder, root = tmp_path_factory.mktemp("reports"), request.config.rootpath
    runs = {name: start(root, folder / name, is_plain=name == "plain") for name in ("plain", "attached")}
    for run in runs.values():
        run.wait(TIME_LIMIT)
    for name in runs:
        path = folder / f"{name}.json"
        assert path.exists(), (folder / f"{name}.log").read_text()[-3000:]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in runs}


def start(root: Path, path: Path, is_plain: bool) -> subprocess.Popen:
    """The whole suite, on the CPU (a GPU would skip what needs two processes) and without the network."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {
        "STOCK_TESTS_PLAIN": str(int(is_plain)),
        "STOCK_TESTS_REPORT": str(path.with_suffix(".json")),
        "TRANSFORMERS_SDIST": os.path.abspath(os.environ["TRANSFORMERS_SDIST"]),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    # Our own options are not for their tests: they use marks that nobody declared.
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=--import-mode=importlib", "-W", "ignore"]
    with path.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            [*command, "-p", "no:cacheprovider", str(SUITE)], cwd=root, env=environment, stdout=log, stderr=log
        )


def of_model(report: dict, model_type: str, kind: str | None = None) -> dict[str, dict]:
    """The tests of one type of model (of one class)."""
    found = {}
    for name, result in report.items():
        class_name, test = name.split("::")
        its_kind, _, its_type = class_name.partition("_")
        if its_type == model_type and kind in (None, its_kind):
            found[f"{its_kind}::{test}"] = result
    return found


@pytest.mark.parametrize("model_type", MODELS)
def test_what_passes_without_hf_speculate_passes_with_it(reports, model_type):
    plain, attached = (of_model(reports[name], model_type) for name in ("plain", "attached"))
    assert len(plain) > 100
    assert plain.keys() == attached.keys()
    for name, result in plain.items():
        found = attached[name]
        if result["outcome"] == "failed":
            continue
        assert (found["outcome"], found["why"]) == (result["outcome"], result["why"]), name


@pytest.mark.parametrize("model_type", MODELS)
def test_every_call_speculates_or_says_why_not(reports, model_type):
    for name, result in of_model(reports["attached"], model_type).items():
        counts, stepped_aside = Counter(result["calls"]["counts"]), result["calls"]["stepped_aside"]
        assert counts["generate"] == counts["asked"] == counts["served"] + sum(stepped_aside.values()), name
        assert not counts["differs"], f"{name}: text is not plain generate's"
        if name.startswith("Overfit::"):
            assert stepped_aside == {NO_CACHE: 1}, name
        elif counts["generate"]:
            assert not stepped_aside, name
            assert counts["accepted"] > 0, name
            assert "HalfRight" not in name or counts["accepted"] < counts["drafted"], name


@pytest.mark.parametrize("model_type", MODELS)
def test_the_generation_tests_generate(reports, model_type):
    for kind, test in GENERATION.values():
        for report in reports.values():
            result = report[f"{kind}_{model_type}::{test}"]
            calls = result["calls"]["counts"].get("generate", 0)
            expected = 4 if kind == "TensorParallel" else 1  # two models in two processes
            assert calls == (0 if result["outcome"] == "skipped" else expected), (kind, result)


def test_the_page_in_the_docs_is_what_was_found(request, reports):
    path = request.config.rootpath / "docs" / "transformers-tests.md"
    text = document(reports["attached"])
    if os.environ.get("HF_SPECULATE_WRITE_DOCS"):
        path.write_text(text)
    assert path.read_text() == text, "stale: run `HF_SPECULATE_WRITE_DOCS=1 make stock-tests`"


def document(report: dict) -> str:
    columns = ["`model_type`", *GENERATION, "export", "the model's other tests"]
    lines = [HEAD.format(version=transformers.__version__, types=len(MODELS)), "| " + " | ".join(columns) + " |"]
    lines.append("|---" * len(columns) + "|")
    for model_type in MODELS:
        cells = [f"`{model_type}`"]
        cells += [in_a_word(report[f"{kind}_{model_type}::{test}"]) for kind, test in GENERATION.values()]
        cells.append(in_numbers(of_model(report, model_type, "Export")))
        others = of_model(report, model_type, "Modeling") | of_model(report, model_type, "TensorParallel")
        others = {name: result for name, result in others.items() if "generation" not in name}
        cells.append(in_numbers(others))
        lines.append("| " + " | ".join(cells) + " |")
    found = [names(report, model_type) for model_type in MODELS]
    by_all = set.intersection(*found)
    lines += ["", listed("Passed by all types (`test_` is left out):", by_all), ""]
    lines += [listed("Passed by some, not applicable to the others (or see the table):", set.union(*found) - by_all)]
    return "\n".join(lines) + "\n"


def in_a_word(result: dict) -> str:
    if result["outcome"] == "skipped":
        return "not applicable"
    outcome = {"passed": "passed", "failed": "fails without it too"}[result["outcome"]]
    return f"{outcome}, {'speculated' if result['calls']['counts']['served'] else 'stepped aside'}"


def in_numbers(results: dict[str, dict]) -> str:
    """ "3 passed, 2 need …": the reasons are in the page's text."""
    outcomes = Counter(
        result["outcome"]
        if result["outcome"] != "skipped"
        else "need more"
        if result["why"].lower().startswith(("test requires", "test is slow"))
        else "not applicable"
        for result in results.values()
    )
    return ", ".join(f"{number} {word}" for word, number in sorted(outcomes.items(), key=lambda item: -item[1]))


def names(report: dict, model_type: str) -> set[str]:
    """Names of the tests that passed; those with parameters once."""
    passed = {name for name, result in of_model(report, model_type).items() if result["outcome"] == "passed"}
    return {re.sub(r"_\d+(_.*)?$", "", name.split("::test_")[1]) for name in passed}


def listed(title: str, found: set[str]) -> str:
    return textwrap.fill(f"{title} {', '.join(f'`{name}`' for name in sorted(found))}.", 120, break_on_hyphens=False)


HEAD = """# transformers' own tests, with a speculator attached

`make stock-tests` downloads the source distribution of the installed transformers and runs its tests with tiny models
of {types} types. It runs them twice: without `hf_speculate`, and with a speculator attached to every model that
generates. Every test that passes without it also passes with it. `HF_SPECULATE_WRITE_DOCS=1 make stock-tests` writes
this page, and a stale page fails. No code of transformers is in this repository.

The distribution of {version} holds only the files at the top of transformers' `tests` folder. It has neither
`tests/models` nor `tests/generation`, the generation tests proper. (`tests/request/GENERATION_TESTS.md` says where
their behaviours are tested here.) These tests call `generate`:

- `test_training_overfit` trains a model on a text until it writes it. It generates without a cache, where an attached
  speculator steps aside. So it also runs with `use_cache=True`, once with prompt lookup, and once with drafts that are
  right half of the time.
- `test_tp_generation` compares a model in two processes with the same model in one: equal tokens and scores. Both
  speculate, with drafts that are right half of the time. `…_quantized` does so in float8 (torchao). There the scales
  of a whole matrix and of its parts differ, so random models of some types miss its 75 % of equal tokens, with or
  without a speculator.
- The tests of pipelines cannot run: their classes are not in the distribution, and their models are on the Hub.

Every call must run with the speculator or say why not. Drafts must be accepted and, if half right, also rejected. The
text of every call is compared with plain `generate`'s once more.

The other tests generate nothing. They show that `hf_speculate`, which wraps methods of `GenerationMixin` and registers
an attention function, changes nothing else: `test_executorch.py` (static caches, `torch.export`),
`test_modeling_common.py` and the other tests of tensor parallelism. *Need more*: a GPU, a package, or much time. *Not
applicable*: transformers skips them for such a model. Tests of images, audio and video are left out. Models have 2
layers, run on the CPU, and have sliding windows if the type has them.
"""
