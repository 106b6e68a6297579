"""Installed drafters: found by entry point, with helpful errors."""

from __future__ import annotations

import pytest

from hf_speculate import AutoSpeculator
from hf_speculate.errors import CheckpointError, DrafterNotFoundError, SpeculateError
from hf_speculate.speculator.registry import GROUP, SpeculatorSpec, installed_drafters, load_drafter
from hf_speculate_plugins.prompt_lookup import PromptLookupDrafter

from .support.entry_points import replaced_entry_points


LOOKUP = "hf_speculate_plugins.prompt_lookup:PromptLookupDrafter"


@pytest.fixture
def install():
    """Replaces the installed entry points, (name, value) pairs."""
    with replaced_entry_points(GROUP, installed_drafters) as replace:
        yield replace


def test_built_in_drafters_enter_by_the_same_door():
    assert {"prompt_lookup", "draft_model"} <= set(installed_drafters())
    assert load_drafter("prompt_lookup") is PromptLookupDrafter


def test_every_name_is_the_drafters_own():
    for name in installed_drafters():
        assert load_drafter(name).name == name


def test_listing_imports_nothing(install):
    install(("broken", "no_such_package.at_all:Drafter"), ("fine", LOOKUP))
    assert list(installed_drafters()) == ["broken", "fine"]
    assert load_drafter("fine") is PromptLookupDrafter
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load_drafter("broken")


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(DrafterNotFoundError) as caught:
        load_drafter("promt_lookup")
    message = str(caught.value)
    assert message.startswith("unknown drafter 'promt_lookup'. Did you mean 'prompt_lookup'?")
    assert "draft_model" in message


def test_with_nothing_installed_the_error_says_how_to_install(install):
    install()
    with pytest.raises(DrafterNotFoundError, match=r"no drafter is installed.*pip install -e"):
        load_drafter("prompt_lookup")


def test_two_drafters_of_one_name_are_an_error_that_names_both(install):
    install(("mine", LOOKUP), ("mine", "somewhere.else:Drafter"))
    with pytest.raises(SpeculateError) as caught:
        installed_drafters()
    assert LOOKUP in str(caught.value)
    assert "somewhere.else:Drafter" in str(caught.value)


def test_the_same_entry_point_seen_twice_is_one_drafter(install):
    install(("mine", LOOKUP), ("mine", LOOKUP))
    assert list(installed_drafters()) == ["mine"]


@pytest.mark.parametrize("value", ["hf_speculate.tree:DraftTree", "hf_speculate.speculator.registry:load_drafter"])
def test_an_entry_point_that_is_no_drafter_class_is_refused(install, value):
    install(("odd", value))
    with pytest.raises(SpeculateError, match=r"entry point 'odd' .* not a Drafter class"):
        load_drafter("odd")


def test_a_kind_of_head_is_no_drafter_and_where_heads_are_is_said(monkeypatch, tmp_path):
    for name in ("first-eagle3", "second-eagle3", "medusa"):
        folder = tmp_path / "examples" / name
        folder.mkdir(parents=True)
        (folder / "provenance.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DrafterNotFoundError) as error:
        load_drafter("eagle3")
    assert str(error.value).endswith("by its folder or Hub id: examples/first-eagle3, examples/second-eagle3.")
    monkeypatch.chdir("/")
    with pytest.raises(
        DrafterNotFoundError, match=r"head of this kind \('eagle'\) is given by its folder or Hub id\.$"
    ) as error:
        load_drafter("eagle3")
    assert "Did you mean" not in str(error.value), "alone it drafts nothing"
    with pytest.raises(DrafterNotFoundError, match="Did you mean 'suffix'"):
        load_drafter("suffixes")


def test_a_name_is_no_path_unless_a_folder_has_it(monkeypatch, tmp_path, tiny_model):
    monkeypatch.chdir(tmp_path)
    assert "depth=3" in repr(AutoSpeculator.from_pretrained("suffix:depth=3", tiny_model()))
    (tmp_path / "suffix").mkdir()
    with pytest.raises(CheckpointError, match="no weights"):
        AutoSpeculator.from_pretrained("suffix", tiny_model())


def test_parts_of_a_speculator_are_named_with_their_options():
    spec = SpeculatorSpec.parse("draft_model:model=/models/c++/small,depth=4+suffix:compile=true")
    assert (spec.source, spec.options) == ("draft_model:model=/models/c++/small,depth=4+suffix", {"compile": True})
    assert spec.label == "draft_model:model=small,depth=4+suffix:compile=True"
    spec.check_source()
    again = SpeculatorSpec.parse(spec.with_option("exact", True).text)
    assert (again.source, again.options) == (spec.source, {"compile": True, "exact": True})
    assert SpeculatorSpec.parse("suffix+models/head:corpus=a+b").label == "suffix+head:corpus=a+b"
    with pytest.raises(DrafterNotFoundError, match="draft_modl"):
        SpeculatorSpec.parse("draft_modl:model=x+suffix").check_source()
