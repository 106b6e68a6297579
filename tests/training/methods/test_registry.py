"""Installed training methods are found by entry point; a third party's is trained by a recipe and drafts losslessly."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_speculate import AutoSpeculator, installed_drafters
from hf_speculate.errors import SpeculateError
from hf_speculate.testing import check_drafter, check_lossless
from hf_speculate_tools.cli import app
from hf_speculate_training.methods import check_method, installed_methods, load_method
from hf_speculate_training.methods.eagle import Eagle3Method
from hf_speculate_training.names import GROUP
from hf_speculate_training.run import recipe_from, train_head
from hf_speculate_training.sections import RecipeError
from tests.support.entry_points import install_example, replaced_entry_points
from tests.support.paths import REPOSITORY
from tests.support.training import recipe_file


EXAMPLE = REPOSITORY / "examples" / "my_training_method"
EAGLE3 = "hf_speculate_training.methods.eagle:Eagle3Method"


@pytest.fixture
def install():
    """Replaces the installed entry points, (name, value) pairs."""
    with replaced_entry_points(GROUP, installed_methods) as replace:
        yield replace


def test_every_name_is_the_methods_own_and_its_sections_are_dataclasses():
    assert {"dflash", "dspark", "eagle1", "eagle3", "medusa"} <= set(installed_methods())
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


def test_two_methods_of_one_name_are_an_error_that_names_both(install):
    install(("mine", EAGLE3), ("mine", "somewhere.else:Method"))
    with pytest.raises(SpeculateError, match=f"{EAGLE3} .*somewhere.else:Method"):
        installed_methods()


def test_what_is_no_method_is_refused(install):
    install(("drafter", "hf_speculate_plugins.eagle:EagleDrafter"))
    with pytest.raises(SpeculateError, match="not a TrainingMethod class"):
        load_method("drafter")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return install_example("my_training_method", tmp_path_factory.mktemp("third_party"))


@pytest.fixture(scope="module")
def installed(site):
    """The package is installed in this process, and gone afterwards."""

    def forget():
        installed_methods.cache_clear()
        installed_drafters.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "my_training_method"]:
            del sys.modules[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        forget()
        yield
    forget()


@pytest.fixture(scope="module")
def trained(installed, make_recipe_values, tmp_path_factory):
    """A recipe's plain values, and the folder of the head that `hf-speculate train` made of it."""
    folder = tmp_path_factory.mktemp("recurrent")
    values = make_recipe_values(folder / "out")
    values["method"] = {"name": "recurrent", "head": {"width": 48}, "options": {"steps": 2}}
    values["training"] |= {"max_steps": 60, "per_device_train_batch_size": 12, "learning_rate": 2e-2}
    values["training"] |= {"logging_steps": 10, "eval_steps": 30}
    values["evaluation"] |= {"num_prompts": 6, "max_new_tokens": 24}
    result = CliRunner().invoke(app, ["train", "--config", str(recipe_file(values, folder))])
    assert result.exit_code == 0, result.output
    assert "On held-out prompts it yields " in result.output
    assert "\nnext: hf-speculate doctor -t " in result.output
    assert "pay here" not in result.output, "a head in training is not judged"
    return values, folder / "out"


@pytest.fixture
def target(saved_target):
    return AutoModelForCausalLM.from_pretrained(saved_target).eval()


def test_third_party_method_learns(trained):
    _, folder = trained
    history = json.loads((folder / "checkpoint-60" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    lengths = [entry["eval_mean_acceptance_length"] for entry in history if "eval_mean_acceptance_length" in entry]
    assert losses[-1] < 0.9 * losses[0], losses
    assert lengths[-1] > lengths[0] > 1.1, lengths
    found = json.loads((folder / "provenance.json").read_text())
    assert found["head"]["method"] == "recurrent"
    assert found["recipe"]["method"]["options"] == {"steps": 2}


def test_third_party_head_drafts_losslessly(trained, target):
    _, folder = trained
    speculator = AutoSpeculator.from_pretrained(folder, target=target)
    assert speculator.drafter.name == "recurrent"
    prompts = [torch.randint(3, 200, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 4)]
    report = check_lossless(target, speculator, prompts, max_new_tokens=24, eos_token_id=None, do_sample=False)
    assert report.num_cases == 2
    assert speculator.stats.rounds > 0
    check_drafter(speculator.drafter, target, prompts, max_new_tokens=8)


def test_third_party_head_continues_training(trained, target, tmp_path):
    values, folder = trained
    again = {
        **values,
        "method": {"name": "recurrent", "start_from": str(folder)},
        "output": {"folder": str(tmp_path / "out")},
    }
    again["training"] = values["training"] | {"max_steps": 1, "learning_rate": 0.0, "eval_steps": 1}
    further = train_head(recipe_from(again))
    ours, theirs = (AutoSpeculator.from_pretrained(path, target=target).drafter.head for path in (further, folder))
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
