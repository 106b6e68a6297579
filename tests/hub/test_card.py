"""Saving and pushing through `Speculator`: cards that claim what was given, and a Hub that is a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import LocalTokenNotFoundError

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.drafting import Drafter, SavedHead
from hf_speculate.errors import CheckpointError, SpeculateError, UploadError
from hf_speculate.speculator import publishing
from hf_speculate.testing.scripted import EmptyDrafter
from hf_speculate_tools.hub import check_upload
from hf_speculate_tools.hub.card import CARD_FILE, is_generated, write_card


CARD = {"base_model": "meta-llama/Llama-3.1-8B-Instruct", "algorithm": "eagle3", "layout": "speculators"}


class HeadDrafter(EmptyDrafter):
    """A drafter with one file of weights."""

    name = "house"

    def save_pretrained(self, path, layout=None):
        if layout == "impossible":
            raise CheckpointError("the impossible layout cannot express this head")
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / ("b.bin" if layout == "b" else "model.safetensors")).write_bytes(b"weights")
        (Path(path) / "config.json").write_text("{}")
        return SavedHead("house1", layout or "a", "owner/target")


class TestCard:
    def test_card_holds_metadata_and_a_snippet(self, tmp_path):
        assert write_card(tmp_path, **CARD, repo_id="me/head")
        card = ModelCard.load(tmp_path / CARD_FILE)
        assert card.data.base_model == CARD["base_model"]
        assert card.data.library_name == "hf-speculate"
        assert card.data.tags == ["speculative-decoding", "eagle3"]
        assert card.data.pipeline_tag == "text-generation"
        assert 'AutoSpeculator.from_pretrained("me/head", target=model)' in card.text
        assert "`speculators` layout" in card.text

    def test_card_shows_the_given_figures_only(self, tmp_path):
        write_card(tmp_path / "none", **CARD)
        card = ModelCard.load(tmp_path / "none" / CARD_FILE)
        assert card.data.eval_results is None
        assert "Nothing was measured" in card.text
        assert not any(character.isdigit() for character in card.text.partition("## Measured")[2])
        metrics = {"mean_acceptance_length": 3.12345, "acceptance_rate_by_depth": [0.75, 0.5], "rounds": 7, "on": "a|b"}
        write_card(
            tmp_path / "some", **CARD, metrics=metrics, measured_on="GSM8K, 20 prompts", notes="## Training\nYes."
        )
        card = ModelCard.load(tmp_path / "some" / CARD_FILE)
        for row in ("| mean acceptance length | 3.123 |", "| acceptance rate by depth | 0.75, 0.5 |", "| rounds | 7 |"):
            assert row in card.text
        assert "a\\|b" in card.text
        assert "On GSM8K, 20 prompts:" in card.text
        assert "## Training\nYes." in card.text
        results = {result.metric_type: result.metric_value for result in card.data.eval_results}
        assert results["acceptance_rate_by_depth_2"] == 0.5
        assert results["mean_acceptance_length"] == 3.123

    def test_a_path_of_this_machine_stays_out_of_metadata_and_text(self, tmp_path):
        (tmp_path / "secret" / "my-model").mkdir(parents=True)
        write_card(tmp_path / "head", **{**CARD, "base_model": str(tmp_path / "secret" / "my-model")})
        text = (tmp_path / "head" / CARD_FILE).read_text()
        assert "secret" not in text
        assert "made for `my-model`" in text
        assert ModelCard.load(tmp_path / "head" / CARD_FILE).data.base_model is None
        write_card(tmp_path / "head", **{**CARD, "base_model": None})
        assert "does not know" in (tmp_path / "head" / CARD_FILE).read_text()

    def test_a_card_of_a_person_is_kept_and_a_generated_one_replaced(self, tmp_path):
        write_card(tmp_path, **CARD, notes="first")
        assert write_card(tmp_path, **CARD, notes="second")
        text = (tmp_path / CARD_FILE).read_text()
        assert ("first" in text, "second" in text) == (False, True)
        (tmp_path / CARD_FILE).write_text("# Mine")
        assert not is_generated(tmp_path / CARD_FILE)
        assert not write_card(tmp_path, **CARD)
        assert (tmp_path / CARD_FILE).read_text() == "# Mine"


class TestSave:
    def test_save_pretrained_writes_weights_and_card(self, tmp_path):
        Speculator(HeadDrafter()).save_pretrained(tmp_path / "head", metrics={"rounds": 5})
        names = sorted(path.name for path in (tmp_path / "head").iterdir())
        assert names == [CARD_FILE, "config.json", "model.safetensors"]
        card = ModelCard.load(tmp_path / "head" / CARD_FILE)
        assert (card.data.base_model, card.data.tags[-1]) == ("owner/target", "house1")
        assert "| rounds | 5 |" in card.text

    def test_a_drafter_without_weights_says_so(self, tmp_path, tiny_model, hub):
        speculator = AutoSpeculator.from_name("prompt_lookup", target=tiny_model())
        with pytest.raises(CheckpointError, match="'prompt_lookup' has no weights"):
            speculator.save_pretrained(tmp_path / "head")
        with pytest.raises(CheckpointError, match="'prompt_lookup' has no weights"):
            speculator.push_to_hub("me/head")
        assert not (tmp_path / "head").exists()
        assert hub.calls == []
        with pytest.raises(CheckpointError, match="no weights"):
            Drafter.save_pretrained(EmptyDrafter(), tmp_path)


class TestPublisher:
    @pytest.fixture
    def no_provider(self, monkeypatch):
        """An installation without the tools."""
        monkeypatch.setattr(publishing, "_PROVIDER", "no_such_package.hub")
        monkeypatch.setattr(publishing, "_registered", [])

    def test_speculator_without_a_publisher_names_the_missing_package(self, no_provider, tmp_path):
        with pytest.raises(SpeculateError, match="need the package no_such_package, which is not installed"):
            Speculator(HeadDrafter()).save_pretrained(tmp_path / "head")
        assert not (tmp_path / "head").exists()

    def test_registered_publisher_gets_heads_and_contents(self, no_provider, tmp_path):
        calls = []

        class Own(publishing.Publisher):
            def write_card(self, folder, saved, **options):
                calls.append((Path(folder).name, saved.algorithm, options))

            def upload(self, folder, saved, repo_id, **options):
                return repo_id

        publishing.register_publisher(Own())
        speculator = Speculator(HeadDrafter())
        speculator.save_pretrained(tmp_path / "head", notes="N")
        contents = {"metrics": None, "notes": "N", "measured_on": None}
        assert calls == [("head", "house1", {"custom_generate": False, **contents})]
        assert speculator.push_to_hub("me/head") == "me/head"


class TestPush:
    def test_uploads_files_and_card_under_the_full_id(self, hub):
        result = Speculator(HeadDrafter()).push_to_hub("head", private=True, token="t", metrics={"rounds": 5})
        assert result.commit_url.endswith("me/head/commit/1")
        assert hub.calls == [
            ("create_repo", "me/head", True),
            ("upload", "me/head", "Upload house1 head (a layout)", None, False),
        ]
        assert set(hub.tokens) == {"t"}
        assert sorted(hub.list_repo_files("me/head")) == [CARD_FILE, "config.json", "model.safetensors"]
        card = (hub.folder("me/head") / CARD_FILE).read_text()
        assert 'from_pretrained("me/head", target=model)' in card
        assert "| rounds | 5 |" in card

    def test_code_for_custom_generate_if_it_is_asked_for(self, hub):
        speculator = Speculator(HeadDrafter())
        speculator.push_to_hub("me/head")
        assert "custom_generate" not in hub.list_repo_files("me/head")
        speculator.push_to_hub("me/head", custom_generate=True)
        files = {path.name for path in (hub.folder("me/head") / "custom_generate").iterdir()}
        assert files == {"generate.py", "requirements.txt"}
        card = (hub.folder("me/head") / CARD_FILE).read_text()
        assert 'custom_generate="me/head", trust_remote_code=True' in card

    def test_paths_of_this_machine_stay_here(self, hub):
        Speculator(HeadDrafter()).push_to_hub("me/head", notes="Trained on /home/me/data.jsonl.")
        assert "Trained on data.jsonl." in (hub.folder("me/head") / CARD_FILE).read_text()

    def test_revision_pull_request_and_message(self, hub):
        speculator = Speculator(HeadDrafter())
        speculator.push_to_hub("me/head", revision="v2", create_pr=True, commit_message="New head")
        assert hub.calls[1:] == [("create_branch", "v2"), ("upload", "me/head", "New head", "v2", True)]
        assert "config.json" in hub.list_repo_files("me/head", "v2")
        assert hub.list_repo_files("me/head") == []

    def test_a_card_of_a_person_is_kept(self, hub):
        speculator = Speculator(HeadDrafter())
        speculator.push_to_hub("me/head")
        speculator.push_to_hub("me/head", notes="again")
        card = hub.folder("me/head") / CARD_FILE
        assert "again" in card.read_text()
        card.write_text("# Mine")
        speculator.push_to_hub("me/head")
        assert card.read_text() == "# Mine"

    def test_other_weights_in_the_repository_are_not_shadowed(self, hub):
        speculator = Speculator(HeadDrafter())
        speculator.push_to_hub("me/head")
        with pytest.raises(CheckpointError, match=r"already holds the weights model\.safetensors.*instead of b\.bin"):
            speculator.push_to_hub("me/head", layout="b")
        assert "b.bin" not in hub.list_repo_files("me/head")

    def test_what_cannot_be_saved_makes_no_repository(self, hub):
        with pytest.raises(CheckpointError, match="impossible"):
            Speculator(HeadDrafter()).push_to_hub("me/head", layout="impossible")
        assert hub.calls == []


def scope(name: str, *allowed: str) -> dict:
    return {"entity": {"type": "user", "name": name}, "permissions": list(allowed)}


def token(role: str, *scopes: dict) -> dict:
    return {"accessToken": {"role": role, "fineGrained": {"scoped": list(scopes)}}}


class TestPermissions:
    """Whether a repository can be uploaded to, asked before there is anything to upload."""

    @pytest.fixture
    def organisations(self, hub):
        hub.user["orgs"] = [{"name": "lab", "roleInOrg": "write"}, {"name": "museum", "roleInOrg": "read"}]
        return hub

    @pytest.mark.parametrize(("given", "full"), [("head", "me/head"), ("me/head", "me/head"), ("lab/head", "lab/head")])
    def test_check_upload_returns_the_full_repository_name(self, organisations, given, full):
        assert check_upload(given, token="t") == full
        assert organisations.tokens == ["t"]
        assert organisations.calls == []  # nothing was made

    @pytest.mark.parametrize(
        ("auth", "repo_id", "message"),
        [
            (token("write"), "a/b/c", "cannot be the name of a repository"),
            (token("write"), "you/head", "cannot upload to you/head: you is not one of me, lab, museum"),
            (token("write"), "museum/head", "the role in museum is to read"),
            (token("read"), "me/head", "the token of me may not write to me/head.*hf-speculate push FOLDER"),
            (token("fineGrained", scope("me", "repo.content.read")), "me/head", "may not write"),
            (token("fineGrained", scope("lab", "repo.write")), "me/head", "may not write"),
        ],
    )
    def test_check_upload_refuses_names_and_tokens_without_permission(self, organisations, auth, repo_id, message):
        organisations.user["auth"] = auth
        with pytest.raises(UploadError, match=message):
            check_upload(repo_id)

    @pytest.mark.parametrize("name", ["me", "me/head"])
    def test_a_fine_grained_token_of_the_owner_or_of_the_repository(self, organisations, name):
        organisations.user["auth"] = token("fineGrained", scope("lab"), scope(name, "repo.write"))
        assert check_upload("me/head") == "me/head"

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (LocalTokenNotFoundError("x"), "not logged in. `hf auth login`"),
            (ConnectionError("offline mode"), "cannot check with the Hub .*offline mode.*push FOLDER"),
            (RuntimeError(""), "cannot check with the Hub .*RuntimeError"),
        ],
    )
    def test_check_upload_reports_a_hub_that_does_not_answer(self, organisations, monkeypatch, error, message):
        def whoami():
            raise error

        monkeypatch.setattr(organisations, "whoami", whoami)
        with pytest.raises(UploadError, match=message):
            check_upload("me/head")


class TestAcceptanceOptions:
    def test_acceptance_options_are_refused_before_a_head_is_read(self, tiny_model):
        for make in (AutoSpeculator.from_name, AutoSpeculator.from_pretrained):
            with pytest.raises(ValueError, match="'match' or 'typical'"):
                make("absent", target=tiny_model(), acceptance="lucky")
            with pytest.raises(ValueError, match="posterior_alpha are thresholds of acceptance='typical'"):
                make("absent", target=tiny_model(), posterior_alpha=0.1)
