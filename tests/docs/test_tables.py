"""Tables of the README and of the drafters' pages, held against the code and the metadata."""

from __future__ import annotations

import builtins
import re
from dataclasses import fields

import pytest

from hf_speculate import errors
from hf_speculate.speculator import EngineOptions, SpeculatorSpec, load_drafter
from hf_speculate_gguf.named import NAMED_TARGETS
from hf_speculate_plugins.mtp.layouts import LAYOUTS

from .facts import (
    HEADS,
    built_in_drafters,
    drafters_without_weights,
    head_kind,
    is_released,
    joining_drafters,
    metadata,
    oldest,
    options_of,
    readable_heads,
    releases,
    writable_layouts,
)
from .pages import README, REPOSITORY, code_in, table


DRAFTERS = REPOSITORY / "docs" / "choosing-a-drafter.md"
HUB = REPOSITORY / "docs" / "heads-from-the-hub.md"
WHICH = {have: take for have, take, *_ in table(README, "you have", "take")}
THERE_IS = {code_in(name)[0]: weights for name, weights, *_ in table(DRAFTERS, "drafter", "weights")}
OPTIONS = {code_in(name)[0]: options for name, options in table(DRAFTERS, "drafter", "options (default)")}
COMMANDS = [options for _, _, options, _ in table(DRAFTERS, "model and hardware", "text", "options")]
MISTAKES = table(DRAFTERS, "mistake", "error")
README_TEXT = README.read_text(encoding="utf-8")


def heads_in(cell: str) -> set[str]:
    """Kinds of the heads that a cell lists: "EAGLE-1, -2" are two."""
    names = re.sub(r"(?<=, )-", "EAGLE-", cell)
    return {kind for name in re.findall(r"[\w-]+", names) if (kind := head_kind(name)) in readable_heads()}


class TestReadme:
    def test_every_drafter_is_a_choice_or_reads_the_heads(self):
        names = re.findall(r'"([\w+]+)"', " ".join(WHICH.values()))
        assert {*"+".join(names).split("+")} - {"HEAD"} == {*built_in_drafters()} - joining_drafters() - HEADS.keys()

    def test_all_heads_that_are_read_are_listed(self):
        assert heads_in(WHICH["a published head for your model"]) == readable_heads()

    def test_drafters_without_weights_have_none(self):
        (take,) = (take for _, take, weights in table(README, "you have", "take") if weights == "none")
        assert set(re.findall(r'"(\w+)"', take)) == drafters_without_weights()

    def test_extras_are_those_of_the_package(self):
        names = {name for cell, _ in table(README, '`pip install -e ".[NAME]"`') for name in code_in(cell)}
        assert names == metadata()["optional-dependencies"].keys() - {"dev"}

    def test_versions_are_those_that_are_allowed_and_tested(self):
        python = metadata()["requires-python"].removeprefix(">=")
        *others, last = releases()
        assert f"Python >= {python}, torch >= {oldest('torch')} " in README_TEXT
        assert f"transformers >= {oldest('transformers')}, < 6 (`make versions` tests " in README_TEXT
        assert f"{', '.join(others)} and {last})" in README_TEXT

    def test_it_is_said_to_be_on_the_index_when_it_is(self):
        assert ("not on the package index yet" in README_TEXT) != is_released()

    def test_the_headline_has_the_figures_of_the_table(self):
        speeds = [re.sub(r"\W", "", greedy) for _, greedy, *_ in table(README, "the same file with")]
        headline = re.findall(r" (\d+)\b", README_TEXT.partition("![")[2].partition("]")[0])
        assert len(headline) == 4
        assert set(headline) <= set(speeds)


def test_every_drafter_is_described():
    assert THERE_IS.keys() == {*built_in_drafters()}
    assert OPTIONS.keys() == {*built_in_drafters()}


def test_drafters_that_need_no_weights_have_none():
    assert {name for name, weights in THERE_IS.items() if weights == "none"} - joining_drafters() == (
        drafters_without_weights()
    )


def test_every_kind_of_head_is_described():
    described = {name: heads_in(THERE_IS[name]) for name in HEADS}
    assert set.union(*described.values()) == readable_heads()
    assert described["eagle"] == {kind for kind in readable_heads() if "eagle" in kind}


@pytest.mark.parametrize("drafter", built_in_drafters())
def test_options_are_those_that_the_drafter_takes(drafter):
    how_to_draft, *how_to_read = load_drafter(drafter).options_classes
    conventions = {field.name for kind in how_to_read for field in fields(kind)}  # they have a page of their own
    written = dict(re.findall(r"`(\w+)`(?: \((\w+))?", OPTIONS[drafter]))
    assert written.keys() == options_of(drafter) - conventions
    defaults = {field.name: field.default for field in fields(how_to_draft)}
    for name, default in written.items():
        if defaults.get(name) not in (None, ()):
            assert default == str(defaults[name])


@pytest.mark.parametrize("drafter", ["eagle", "mtp"])
def test_the_width_of_trees_is_the_default(drafter):
    greedy, sampled = (load_drafter(drafter).options_classes[0]().width(samples) for samples in (False, True))
    assert f"`top_k` ({greedy}; {sampled} where a request samples)" in OPTIONS[drafter]


def test_options_of_the_engine_are_all_of_them():
    (sentence,) = re.findall(r"^All of them also take (.*?), see", DRAFTERS.read_text(encoding="utf-8"), re.M | re.S)
    assert {name.rstrip("=") for name in code_in(sentence)} == {field.name for field in fields(EngineOptions)}


@pytest.mark.parametrize(("error", "also"), [(error, also) for _, error, also in MISTAKES])
def test_mistakes_are_errors_of_these_kinds(error, also):
    kind = getattr(errors, *code_in(error))
    assert issubclass(kind, errors.SpeculateError)
    for name in code_in(also):
        assert issubclass(kind, getattr(builtins, name))


@pytest.mark.parametrize("commands", COMMANDS)
def test_commands_name_targets_and_drafters(commands, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    for flag, value in re.findall(r"-([ts]) (\S+)", " ".join(code_in(commands))):
        if flag == "t":
            assert value in NAMED_TARGETS
        elif value != "none":
            spec = SpeculatorSpec.parse(value)
            spec.check_source()
            if spec.source in built_in_drafters():
                assert spec.options.keys() <= options_of(spec.source)


def test_files_with_draft_layers_are_those_that_are_read():
    names = [code_in(cell)[0].rstrip("*") for _, cell, _ in table(REPOSITORY / "docs" / "mtp.md", "files of", "names")]
    assert [layout.name for layout in LAYOUTS if any(map(layout.example.startswith, names))] == [
        layout.name for layout in LAYOUTS
    ]


def test_layouts_that_are_written_are_those_that_can_be():
    layouts = writable_layouts()
    written = {method: {*code_in(cell)} for method, _, cell in table(HUB, "method", "layouts read") if code_in(cell)}
    assert len(written) == len(layouts)
    for method, names in written.items():
        first = re.split(r"[,:( ]", method)[0]
        assert names == layouts["jetspec" if first == "JetSpec" else head_kind(first)]
