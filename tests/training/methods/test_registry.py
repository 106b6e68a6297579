"""Installed training methods: found by entry point, with helpful errors; what each gives a recipe to say."""

from __future__ import annotations

import dataclasses

import pytest

from hf_speculate.errors import SpeculateError
from hf_speculate_training.methods import GROUP, check_method, installed_methods, load_method
from hf_speculate_training.methods.eagle import Eagle3Method
from hf_speculate_training.sections import RecipeError

from ...support.entry_points import replaced_entry_points


EAGLE3 = "hf_speculate_training.methods.eagle:Eagle3Method"


@pytest.fixture
def install():
    """Replaces the installed entry points, (name, value) pairs."""
    with replaced_entry_points(GROUP, installed_methods) as replace:
        yield replace


def test_built_in_methods_enter_by_the_same_door():
    assert {"dflash", "dspark", "eagle1", "eagle3", "medusa", "medusa2"} <= set(installed_methods())
    assert load_method("eagle3") is Eagle3Method


def test_every_name_is_the_methods_own_and_its_sections_are_dataclasses():
    for name in installed_methods():
        method = load_method(name)
        assert method.name == name
        for section in (method.head_class, method.options_class):
            assert dataclasses.is_dataclass(section)
            section()  # a recipe need not say anything


def test_listing_imports_nothing(install):
    install(("broken", "no_such_package.at_all:Method"), ("fine", EAGLE3))
    assert list(installed_methods()) == ["broken", "fine"]
    assert load_method("fine") is Eagle3Method
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load_method("broken")


def test_an_unknown_name_gets_a_suggestion_and_the_list(install):
    install(("one", EAGLE3), ("two", EAGLE3))
    with pytest.raises(RecipeError, match=r"unknown training method 'ona'.*mean 'one'\? Installed: one, two\.$"):
        check_method("ona")
    with pytest.raises(RecipeError, match=r"unknown training method 'zzz' in method\.name\. Installed: one, two\.$"):
        load_method("zzz")


def test_with_nothing_installed_the_error_says_how_to_install(install):
    install()
    with pytest.raises(RecipeError, match=r"no method is installed.*pip install -e"):
        check_method("eagle3")


def test_two_methods_of_one_name_are_an_error_that_names_both(install):
    install(("mine", EAGLE3), ("mine", "somewhere.else:Method"))
    with pytest.raises(SpeculateError, match=f"{EAGLE3} .*somewhere.else:Method"):
        installed_methods()


def test_the_same_entry_point_seen_twice_is_one_method(install):
    install(("mine", EAGLE3), ("mine", EAGLE3))
    assert list(installed_methods()) == ["mine"]


def test_what_is_no_method_is_refused(install):
    install(("drafter", "hf_speculate_plugins.eagle:EagleDrafter"))
    with pytest.raises(SpeculateError, match="not a TrainingMethod class"):
        load_method("drafter")
