"""`generate(custom_generate=...)` with the folder of a head: nothing of the call is lost, the text is the target's."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

import hf_speculate
from hf_speculate import Speculator, custom_generate
from hf_speculate.errors import CheckpointError, SpeculateError, UnsupportedRequestError
from hf_speculate_tools.hub.card import CARD_FILE

from ..support.inputs import character_tokenizer, padded_batch
from ..support.paths import REPOSITORY
from ..support.tiny_heads import random_medusa


CHOICES = ((0,), (1,), (0, 0))


@pytest.fixture(autouse=True)
def _own_modules_cache(tmp_path, monkeypatch):
    """transformers copies the code there and puts it on the path; neither outlives the test."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "custom_generate" in name and "hf_speculate" not in name:
            del sys.modules[name]


@pytest.fixture
def head(tmp_path, tiny_model):
    """A folder with random Medusa heads for the tiny model, and the code."""
    folder = tmp_path / "head"
    Speculator(random_medusa(CHOICES, tiny_model())).save_pretrained(folder, custom_generate=True)
    return folder


def by_code(model, folder, **arguments):
    return model.generate(**arguments, custom_generate=str(folder), trust_remote_code=True)


class Collecting(BaseStreamer):
    def __init__(self):
        self.ids, self.ended = [], False

    def put(self, value):
        self.ids += value.reshape(-1).tolist()

    def end(self):
        self.ended = True


class TestText:
    @pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.9, "top_k": 20}])
    def test_custom_generate_gives_plain_text(self, head, tiny_model, prompt, sampling):
        model, arguments = tiny_model(), {**padded_batch(prompt, (5, 9)), "max_new_tokens": 16, **sampling}
        torch.manual_seed(7)
        plain = model.generate(**arguments)
        torch.manual_seed(7)
        output = by_code(model, head, **arguments, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain)
        assert output.speculation.rounds

    def test_the_head_is_the_one_in_the_folder(self, head, tiny_model, prompt):
        (head / "config.json").unlink(missing_ok=True)
        for weights in (*head.glob("*.safetensors"), *head.glob("*.pt")):
            weights.unlink()
        with pytest.raises(CheckpointError, match=str(head)):
            by_code(tiny_model(seed=5), head, input_ids=prompt(5), max_new_tokens=4)

    def test_a_folder_may_be_called_as_a_drafter_is(self, head, tiny_model, prompt, monkeypatch):
        monkeypatch.chdir(head.rename(head.with_name("prompt_lookup")).parent)
        arguments = {"input_ids": prompt(8), "max_new_tokens": 6, "return_dict_in_generate": True}
        output = by_code(tiny_model(), "prompt_lookup", **arguments)
        known = hf_speculate.speculators(tiny_model())
        assert output.speculation.rounds
        assert known[os.path.abspath("prompt_lookup")].drafter.name == "medusa"


class TestArguments:
    def test_streamer_inputs_and_processors_arrive(self, head, tiny_model, prompt):
        model, ids, seen = tiny_model(), prompt(6), []

        def only_even(_batch, text):
            seen.append(len(text))
            return list(range(0, model.config.vocab_size, 2))

        streamers = Collecting(), Collecting()
        arguments = {"max_new_tokens": 9, "prefix_allowed_tokens_fn": only_even}
        plain = model.generate(ids, **arguments, streamer=streamers[0])
        num_plain = len(seen)
        output = by_code(model, head, inputs=ids, **arguments, streamer=streamers[1])
        assert torch.equal(output, plain)
        assert streamers[0].ids == streamers[1].ids
        assert streamers[1].ended
        assert len(seen) > num_plain

    def test_stop_strings_find_their_tokenizer(self, head, tiny_model, prompt, capsys):
        model, ids, tokenizer = tiny_model(), prompt(6), character_tokenizer()
        text = tokenizer.decode(model.generate(ids, max_new_tokens=20)[0, 6:])
        arguments = {"max_new_tokens": 20, "stop_strings": [text[7:9]], "tokenizer": tokenizer}
        plain = model.generate(ids, **arguments)
        output = by_code(model, head, inputs=ids, **arguments, streamer=TextStreamer(tokenizer, skip_prompt=True))
        assert output.shape[1] < 26
        assert torch.equal(output, plain)
        assert capsys.readouterr().out.strip() == tokenizer.decode(plain[0, 6:]).strip()

    def test_synced_gpus_is_refused_as_with_a_speculator(self, head, tiny_model, prompt):
        with pytest.raises(UnsupportedRequestError, match="synced_gpus"):
            by_code(tiny_model(), head, inputs=prompt(4), max_new_tokens=2, synced_gpus=True)

    def test_custom_generate_passes_revision_and_token_on_to_the_download(self, head, tiny_model, prompt, monkeypatch):
        asked = []

        def had_from(name, **where):
            asked.append((name, where))
            return str(head)

        monkeypatch.setattr(custom_generate, "_asked_for", lambda: "me/head")
        monkeypatch.setattr(custom_generate, "local_folder", had_from)
        where = {"revision": "v2", "token": "t", "local_files_only": True}
        model, ids = tiny_model(), prompt(6)
        output = custom_generate.generate(model, inputs=ids, max_new_tokens=5, **where)
        assert asked == [("me/head", where)]
        assert torch.equal(output, model.generate(ids, max_new_tokens=5))

    def test_custom_generate_refuses_a_speculator_argument(self, head, tiny_model, prompt):
        arguments = {"inputs": prompt(4), "max_new_tokens": 2, "speculator": "prompt_lookup"}
        with pytest.raises(UnsupportedRequestError, match="give one of them"):
            by_code(tiny_model(), head, **arguments)
        with pytest.raises(UnsupportedRequestError, match="give one of them"):
            custom_generate.generate(tiny_model(), **arguments)

    def test_custom_generate_called_without_its_folder_is_an_error(self, tiny_model, prompt):
        with pytest.raises(SpeculateError, match="cannot know where the head is"):
            custom_generate.generate(tiny_model(), inputs=prompt(4))


class TestFiles:
    def test_files_with_code_are_written_on_request_only(self, tmp_path, tiny_model):
        Speculator(random_medusa(CHOICES, tiny_model())).save_pretrained(tmp_path)
        assert not (tmp_path / "custom_generate").exists()
        card = ModelCard.load(tmp_path / CARD_FILE)
        assert "custom_generate" not in card.text
        assert "custom_generate" not in card.data.tags

    def test_the_code_is_a_call_and_nothing_else(self, head):
        code = (head / "custom_generate" / "generate.py").read_text()
        statements = ast.parse(code).body[1:]  # behind the docstring
        assert [ast.unparse(each) for each in statements] == [
            "from hf_speculate.custom_generate import generate as generate"
        ]
        assert (head / "custom_generate" / "requirements.txt").read_text() == "hf-speculate>=0.1.0\n"


IN_A_FRESH_PROCESS = """
import sys
target, head, state, repository = sys.argv[1:]
if state == "absent":
    sys.path[:] = [path for path in sys.path if not path.startswith(repository) or "site-packages" in path]
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(target)
ids = torch.arange(3, 9)[None]
plain = model.generate(ids, max_new_tokens=12)
assert "hf_speculate" not in sys.modules
where = {"revision": "v2"} if state == "on the Hub" else {}
try:
    output = model.generate(ids, max_new_tokens=12, custom_generate=head, trust_remote_code=True, **where)
    print("equal" if torch.equal(plain, output) else "different", "hf_speculate" in sys.modules)
except ImportError as error:
    print(error)
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cache_as_repository(head, home):
    """Lays a head where a download of revision v2 of me/head would lie; returns its id."""
    repository = home / "hub" / "models--me--head"
    shutil.copytree(head, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "v2").write_text(COMMIT)
    return "me/head"


@pytest.mark.rest
@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("in a folder", "equal True"),
        ("on the Hub", "equal True"),
        ("absent", "hf_speculate. Run `pip install hf_speculate`"),
    ],
)
def test_custom_generate_works_before_the_package_is_imported(head, tiny_model, tmp_path, state, said):
    tiny_model().save_pretrained(tmp_path / "target")
    name = cache_as_repository(head, tmp_path / "home") if state == "on the Hub" else str(head)
    settings = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS, str(tmp_path / "target"), name, state, str(REPOSITORY)],
        env={key: value for key, value in os.environ.items() if not key.startswith("HF_")} | settings,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().endswith(said)
