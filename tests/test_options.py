"""Options: every mistake is an `OptionError` that has what was written and what is possible."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

import pytest

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.errors import OptionError, SpeculateError
from hf_speculate.policy import Adaptive, Fixed
from hf_speculate.speculator import EngineOptions, installed_drafters, load_drafter, read_options
from hf_speculate.testing import EmptyDrafter
from hf_speculate.verification import TypicalAcceptance
from hf_speculate_plugins.suffix import SuffixStore

from .support.heads import write_medusa_heads
from .support.tiny_heads import write_eagle_head


ENGINE = (
    "the engine takes acceptance, posterior_threshold, posterior_alpha, policy, adaptive, compile, ahead, exact, "
    "constraints."
)


def refusal(make):
    with pytest.raises(OptionError) as raised:
        make()
    assert isinstance(raised.value, SpeculateError)
    assert isinstance(raised.value, TypeError)
    assert isinstance(raised.value, ValueError)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("drafter", "option", "nearest"),
    [
        ("prompt_lookup", "max_ngrams", "max_ngram"),
        ("prompt_lookup", "acceptence", "acceptance"),
        ("suffix", "corpora", "corpus"),
        ("draft_model", "topk", "top_k"),
        ("combined", "max_node", "max_nodes"),
    ],
)
def test_unknown_option_of_a_drafter_gets_a_suggestion(tiny_model, drafter, option, nearest):
    given = {"draft_model": {"model": tiny_model(seed=1)}, "combined": {"parts": ["prompt_lookup"] * 2}}
    message = refusal(lambda: AutoSpeculator.from_name(drafter, tiny_model(), **{option: 3}, **given.get(drafter, {})))
    assert message.startswith(
        f"unknown option {option!r} of the drafter {drafter!r}. Did you mean {nearest!r}? Possible: "
    )
    assert ENGINE in message  # unions add how to give options to a part


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompt_lookup:max_ngram=zero", "the option max_ngram is 'zero'; it takes a whole number."),
        ("suffix:depth=x", "the option depth is 'x'; it takes a whole number."),
        ("suffix:depth=yes", "the option depth is 'yes'; it takes a whole number."),
        ("suffix:depth=2.5", "the option depth is 2.5; it takes a whole number."),
        ("suffix:exact=maybe", "the option exact is 'maybe'; it takes true or false."),
        ("suffix:adaptive=2", "the option adaptive is 2; it takes true or false or none."),
    ],
)
def test_options_refuse_words_in_place_of_numbers(tiny_model, prompt, text, said):
    assert refusal(lambda: tiny_model().generate(prompt(5), max_new_tokens=4, speculator=text)) == said


@pytest.mark.parametrize(
    ("written", "value"),
    [
        *((word, True) for word in ("true", "True", "yes", "on", "1")),
        *((word, False) for word in ("false", "False", "no", "off", "0")),
        *((word, None) for word in ("none", "None", "null")),
    ],
)
def test_options_read_words_for_true_false_and_none(tiny_model, written, value):
    speculator = AutoSpeculator.from_pretrained(f"suffix:adaptive={written}", tiny_model())
    assert speculator.options.adaptive is value


MISTAKES = {
    "acceptance": (
        lambda: Speculator(EmptyDrafter(), acceptance="typicl"),
        "must be 'match' or 'typical', got 'typicl'",
    ),
    "thresholds": (lambda: Speculator(EmptyDrafter(), posterior_alpha=0.2), "thresholds of acceptance='typical'"),
    "threshold": (lambda: TypicalAcceptance(posterior_alpha=2.0), "above 0 and at most 1, got 2.0"),
    "policy": (lambda: Speculator(EmptyDrafter(), policy="fixed"), "takes a DraftPolicy .* got str"),
    "two policies": (lambda: Speculator(EmptyDrafter(), policy=Adaptive(), adaptive=True), "give one of them"),
    "limit": (lambda: Fixed(max_nodes=-1), "max_nodes must be None or at least 0, got -1"),
    "backend": (lambda: Speculator(EmptyDrafter(), compile="inductr"), "'inductr' is not a backend .*; possible: True"),
    "ahead": (lambda: EngineOptions(ahead=2), "ahead must be True or False, got 2"),  # type: ignore[arg-type]
    "exact": (
        lambda: Speculator(EmptyDrafter(), exact=True, compile=True),
        "compile= cannot promise: give one of them",
    ),
    "store": (lambda: SuffixStore(max_tokens=0), "at least 1, got 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_options_refuse_values_without_a_meaning(name):
    make, said = MISTAKES[name]
    assert re.search(said, refusal(make))


@pytest.mark.parametrize(
    ("drafter", "options", "said"),
    [
        ("prompt_lookup", {"min_ngram": 9}, r"min_ngram \(9\) is above max_ngram"),
        ("suffix", {"store": "on disk"}, "store is True, False or a SuffixStore, got str"),
        ("draft_model", {}, "needs the draft model: .*model=PATH"),
        ("combined", {"parts": ["suffix"]}, "at least two drafters, got 1"),
        ("combined", {"parts": ["suffix", 3]}, "takes drafters, names and folders, got int"),
        ("eagle", {}, "needs a trained head: .*head='folder or Hub id'"),
        ("medusa", {}, "needs its heads: .*from_pretrained"),
    ],
)
def test_from_name_names_missing_parts_of_a_drafter(tiny_model, drafter, options, said):
    assert re.search(said, refusal(lambda: AutoSpeculator.from_name(drafter, tiny_model(), **options)))


@pytest.mark.parametrize("given", ["suffix and more", EmptyDrafter(), 3], ids=["text", "drafter", "number"])
def test_generate_refuses_speculators_of_another_type(tiny_model, prompt, given):
    error = SpeculateError if isinstance(given, str) else OptionError
    with pytest.raises(error, match=r"suffix and more|takes a Speculator, .*got"):
        tiny_model().generate(prompt(5), max_new_tokens=2, speculator=given)


_CHECKED = ("int", "float", "bool", "Sequence[int]")


@pytest.mark.parametrize("name", installed_drafters())
def test_values_of_another_kind_are_refused_with_the_kind_that_is_possible(name):
    for kind in load_drafter(name).options_classes:
        for field in fields(kind):
            if str(field.type).removesuffix(" | None") in _CHECKED:
                for value in ({"a": 1}, "several words"):
                    message = refusal(lambda: read_options(kind, {field.name: value}, name))  # noqa: B023
                    assert message.startswith(f"the option {field.name} is {value!r}; it takes ")


def test_read_options_turns_errors_of_the_class_into_option_errors():
    @dataclass
    class Checking:
        depth: object = 1

        def __post_init__(self):
            raise ValueError("depth must be odd")

    message = refusal(lambda: read_options(Checking, {"depth": 2}, "third"))
    assert message == "the drafter 'third' cannot take depth=2: depth must be odd"


@pytest.mark.parametrize("name", installed_drafters())
def test_sizes_of_drafts_are_positive(name):
    options = load_drafter(name).options_classes[0]
    sizes = {field.name for field in fields(options)} & {"depth", "max_nodes", "top_k", "max_ngram", "min_ngram"}
    assert sizes
    for size in sizes:
        with pytest.raises(OptionError, match=f"{name}: {size} must be at least 1, got 0"):
            options(**{size: 0})


def test_unknown_option_of_a_head_gets_a_suggestion(tiny_model, tmp_path):
    eagle = write_eagle_head(tmp_path / "eagle", 32, 96)
    message = refusal(lambda: AutoSpeculator.from_pretrained(eagle, tiny_model(), featur_layers=(0, 1, 2)))
    assert "Did you mean 'feature_layers'?" in message
    assert re.search(r"'eagle' takes .*rope_theta, depth, top_k, max_nodes;", message)
    medusa = write_medusa_heads(tmp_path / "medusa")
    message = refusal(lambda: AutoSpeculator.from_pretrained(medusa, tiny_model(), xyz=1))
    assert message.startswith(
        "unknown option 'xyz' of the drafter 'medusa'. Possible: the drafter 'medusa' takes max_nodes"
    )
