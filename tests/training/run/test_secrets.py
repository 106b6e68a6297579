"""No token and no path of the machine is in what a run writes to be uploaded; a run goes on without them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub import HfApi

from hf_speculate.errors import SpeculateError
from hf_speculate_tools.hub import LOCAL_RECIPE_FILE, push_folder, write_custom_generate
from hf_speculate_training.run import Recipe, read_recipe, recipe_from, train_head
from hf_speculate_training.run.provenance import check_same
from hf_speculate_training.sections import RecipeError
from tests.support.training import recipe_file


# Put together here, so that nobody's scanner takes this file for a leak.
TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz12345678"
COMMIT = "0123456789abcdef" * 2 + "01234567"

SECRETS = [
    ("training.hub_token", TOKEN),
    ("data.train", "https://me:passw0rd@host/data.jsonl"),
    ("method.options.api_key", "abc"),
    ("output.notes", f"made with {TOKEN}"),
    ("unknown.password", "abc"),
]


@pytest.mark.parametrize(("place", "secret"), SECRETS)
@pytest.mark.parametrize("way", ["recipe", "--set"])
def test_a_token_in_a_recipe_is_refused_and_not_shown(recipe_values, tmp_path, place, secret, way):
    overrides = [f"{place}={secret}"]
    if way == "recipe":
        section, name = place.rsplit(".", 1)
        inner = recipe_values
        for key in section.split("."):
            inner = inner.setdefault(key, {})
        inner[name], overrides = secret, []
    with pytest.raises(RecipeError, match=f"{place} holds a token.*hf auth login.*HF_TOKEN") as caught:
        read_recipe(recipe_file(recipe_values, tmp_path), overrides)
    assert secret not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_recipe_made_in_python_is_looked_at_too(recipe_values):
    recipe = recipe_from(recipe_values)
    sections = {name: getattr(recipe, name) for name in ("target", "data", "method", "output")}
    with pytest.raises(RecipeError, match=r"training\.hub_token holds a token"):
        Recipe(**sections, training={"hub_token": "abc"})


def test_what_is_empty_or_looks_alike_is_accepted(recipe_values):
    recipe_values["training"] |= {"hub_token": None, "run_name": "hf_speculate_training"}
    recipe_values["target"]["revision"] = COMMIT
    recipe = recipe_from(recipe_values)
    assert recipe.target.revision == COMMIT
    assert recipe_from(yaml.safe_load(recipe.to_yaml())).to_yaml() == recipe.to_yaml()


@pytest.mark.parametrize("text", [f"training: {{hub_token: {TOKEN}", f"training:\n  hub_token: {TOKEN}: x\n"])
def test_errors_of_yaml_show_no_token(tmp_path, text):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError, match="is not YAML") as caught:
        read_recipe(tmp_path / "recipe.yaml")
    assert TOKEN not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("override", [f"hub_token.{TOKEN}", f"output.folder.x={TOKEN}", f"training.x={{{TOKEN}"])
def test_errors_of_overrides_show_no_token(recipe_values, tmp_path, override):
    with pytest.raises(RecipeError, match="--set") as caught:
        read_recipe(recipe_file(recipe_values, tmp_path), [override])
    assert TOKEN not in str(caught.value)


@pytest.fixture(scope="module")
def pushed(make_recipe_values, tmp_path_factory):
    """A run that was given much that is private, its folder, and a copy of what was uploaded."""
    place = tmp_path_factory.mktemp("private")
    values = make_recipe_values(place / "out")
    values["method"] = {"name": "medusa", "head": {"num_heads": 1}}
    values["training"] |= {"max_steps": 2, "run_name": f"{place}/run", "report_to": "none"}
    values["evaluation"]["num_prompts"] = 0
    values["output"] |= {"push_to_hub": "me/head", "notes": f"Made in {place}/notes."}
    with pytest.MonkeyPatch.context() as patch:
        arguments = ["--config", f"{place}/recipe.yaml", "--set", f"output.folder={place}/out"]
        patch.setattr("sys.argv", [f"{place}/bin/hf-speculate", "train", *arguments, TOKEN])
        uploads = iter(("uploaded", "again"))
        patch.setattr(HfApi, "whoami", lambda *_, **__: {"name": "me"})
        patch.setattr(HfApi, "create_repo", lambda self, repo_id, **_: SimpleNamespace(repo_id=repo_id))
        patch.setattr(HfApi, "list_repo_files", lambda *_, **__: [])
        patch.setattr(
            HfApi,
            "upload_folder",
            lambda self, *, folder_path, **_: shutil.copytree(folder_path, place / next(uploads)),
        )
        recipe = recipe_from(values)
        folder = train_head(recipe)
        (folder / "runs").mkdir()
        (folder / "runs" / "events").write_text(str(place))  # as a logger leaves it
        write_custom_generate(folder)
        push_folder(folder)
    return recipe, place


def test_nothing_private_is_uploaded(pushed, saved_target):
    _, place = pushed
    files = {str(path.relative_to(place / "uploaded")): path for path in (place / "uploaded").rglob("*")}
    for name in ("provenance.json", "recipe.yaml", "README.md"):  # somebody may upload the folder by hand
        files[f"out/{name}"] = place / "out" / name
    assert {"recipe.yaml", "provenance.json", "config.json", "README.md"} <= files.keys()
    assert not any(name.startswith("custom_generate") for name in files)
    assert not {LOCAL_RECIPE_FILE, "runs", "checkpoint-2"} & files.keys()
    again = {str(path.relative_to(place / "again")) for path in (place / "again").rglob("*")}
    code = {f"custom_generate{name}" for name in ("", "/generate.py", "/requirements.txt")}
    assert again == {name for name in files if not name.startswith("out/")} | code
    for name, path in files.items():
        if name.endswith("config.json"):  # the adapter's and the head's name the target as it was given
            continue
        for private in (str(place), str(saved_target), TOKEN, str(Path.home()) + "/"):
            assert path.is_dir() or private.encode() not in path.read_bytes(), f"{private} in {name}"
    found = json.loads((place / "uploaded" / "provenance.json").read_text())
    assert found["command"] == [
        "hf-speculate", "train", "--config", "recipe.yaml", "--set", "output.folder=out", "***"
    ]  # fmt: skip
    assert found["recipe"]["target"]["path"] == saved_target.name
    assert found["recipe"]["training"]["run_name"] == "run"


def test_the_recipe_with_its_paths_stays_on_the_machine(pushed):
    recipe, place = pushed
    kept = read_recipe(place / "out" / LOCAL_RECIPE_FILE)
    assert kept.data == recipe.data
    assert kept.output.folder == recipe.output.folder
    public = read_recipe(place / "out" / "recipe.yaml")
    assert (public.data.train, public.output.folder) == (Path(recipe.data.train).name, "out")


def test_runs_that_noted_their_paths_go_on(tmp_path):
    """Folders from before paths were left out; and whatever way a path is written, the data tell whether it is same."""
    before = {"name": "/home/me/target", "fingerprint": "a"}
    for now in ({"name": "target", "fingerprint": "a"}, {"name": "/elsewhere/target", "fingerprint": "a"}):
        check_same("target", before, now, tmp_path)
    with pytest.raises(SpeculateError, match="fingerprint: 'a' then, 'b' now"):
        check_same("target", before, {"name": "/home/me/target", "fingerprint": "b"}, tmp_path)
