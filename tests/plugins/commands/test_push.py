"""`push` and `card`: what leaves the machine, under which name, and what a failure leaves behind."""

from __future__ import annotations

import json
import shutil

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from hf_speculate_tools import cli
from tests.support.paths import REPOSITORY


HEAD = REPOSITORY / "examples" / "pycoder-medusa"


@pytest.fixture
def head(tmp_path):
    """A trained head as a run leaves it: with checkpoints, logs and a recipe that names paths."""
    folder = tmp_path / "my-head"
    shutil.copytree(HEAD, folder)
    for name in ("checkpoint-4", "runs"):
        (folder / name).mkdir()
        (folder / name / "state").write_text("x")
    (folder / "recipe.local.yaml").write_text(str(tmp_path))
    (folder / ".train.lock").write_text("")
    return folder


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


class TestPush:
    def test_the_head_with_its_card_and_nothing_private(self, hub, head):
        result = run("push", head, "--repo-id", "me/other", "--private")
        assert result.exit_code == 0, result.output
        assert "https://huggingface.co/me/other/commit/1" in result.stdout
        assert hub.calls[0] == ("create_repo", "me/other", True)
        uploaded = {path.name for path in hub.folder("me/other").iterdir()}
        assert uploaded == {path.name for path in HEAD.iterdir()}
        text = (hub.folder("me/other") / "README.md").read_text()
        assert 'AutoSpeculator.from_pretrained("me/other", target=model)' in text
        card = ModelCard.load(hub.folder("me/other") / "README.md")
        kept = ModelCard.load(HEAD / "README.md")
        assert card.data.eval_results == kept.data.eval_results
        assert card.text.partition("## Measured")[2] == kept.text.partition("## Measured")[2]
        assert (head / "README.md").read_bytes() == (HEAD / "README.md").read_bytes()

    def test_push_takes_its_name_from_recipe_or_folder(self, hub, head):
        assert run("push", head).exit_code == 0
        assert hub.calls[0][1] == "me/my-head"
        found = json.loads((head / "provenance.json").read_text())
        found["recipe"]["output"]["push_to_hub"] = "me/asked-for"
        (head / "provenance.json").write_text(json.dumps(found))
        assert run("push", head).exit_code == 0
        assert hub.calls[2][1] == "me/asked-for"

    def test_a_failure_is_one_line_and_loses_nothing(self, hub, head):
        before = {path: path.read_bytes() for path in head.rglob("*") if path.is_file()}
        hub.problem = RuntimeError("the cable was cut")
        result = run("push", head)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"hf-speculate: error: {head} could not be uploaded to my-head: the cable was")
        assert {path: path.read_bytes() for path in head.rglob("*") if path.is_file()} == before

    @pytest.mark.parametrize(("folder", "message"), [("absent", "is not a folder"), (".", "no installed drafter")])
    def test_push_of_another_folder_makes_no_repository(self, hub, tmp_path, folder, message):
        result = run("push", tmp_path / folder)
        assert result.exit_code == 1
        assert message in result.stderr
        assert hub.calls == []

    def test_push_refuses_an_owner_that_is_not_the_users(self, hub, head):
        assert "you is not one of me" in run("push", head, "--repo-id", "you/head").stderr
        assert hub.calls == []


class TestCard:
    def test_card_is_written_from_provenance(self, head):
        (head / "README.md").unlink()
        result = run("card", head, "--repo-id", "me/head", "--print")
        assert result.exit_code == 0, result.output
        card = ModelCard.load(head / "README.md")
        assert card.data.tags == ["speculative-decoding", "medusa"]
        metrics = json.loads((head / "provenance.json").read_text())["metrics"]
        (figure,) = card.data.eval_results
        assert figure.metric_value == round(metrics["eval_mean_acceptance_length"], 3)
        assert 'from_pretrained("me/head", target=model)' in result.stdout
        assert "Trained with hf-speculate, method `medusa`" in card.text

    def test_card_keeps_figures_without_provenance(self, head):
        (head / "provenance.json").unlink()
        kept = ModelCard.load(head / "README.md")
        assert run("card", head, "--repo-id", "me/head").exit_code == 0
        card = ModelCard.load(head / "README.md")
        assert card.data.eval_results[0].metric_value == kept.data.eval_results[0].metric_value
        assert 'from_pretrained("pycoder")' in card.text
        (head / "README.md").unlink()
        assert run("card", head).exit_code == 0
        assert "Nothing was measured" in (head / "README.md").read_text()
