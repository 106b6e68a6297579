"""Secrets are masked, paths of this machine are cut, everything else stays; log messages have a prefix."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest
import transformers

from hf_speculate.messages import (
    _ROOTS,
    PrefixHandler,
    find_secret,
    install_handler,
    is_secret_name,
    masked,
    masked_arguments,
)
from hf_speculate_tools.hub import publishable


# Put together here, so that nobody's scanner takes this file for a leak.
HUB = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz12345678"
OPENAI = "sk-" + "proj-a1B2c3D4e5F6g7H8i9J0k1L2"
WANDB = "0123456789abcdef" * 2 + "01234567"
COMMIT = WANDB[::-1]


@pytest.mark.parametrize(
    "secret",
    [
        HUB,
        "hf_" + "a" * 34,
        "hf_" + "THISISASECRETTOKEN123456",
        OPENAI,
        "sk-" + "ant-api03-a1B2c3D4e5F6g7H8",
        "api_org_" + "a" * 34,
        "ghp_" + "a1" * 18,
        "github_pat_" + "a1" * 20,
        "wandb_v1_" + "a1" * 20,
        "AKIA" + "A1B2C3D4E5F6G7H8",
        "AIza" + "a1B2" * 9,
        "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dBjftJeZ4CVP",
        WANDB,
    ],
)
@pytest.mark.parametrize("text", ["{}", "the token {} is mine", "a={}", "'{}'", "https://host/x?q={}", "[1, {}]"])
def test_tokens_are_known_by_their_look(secret, text):
    found = masked({"notes": [text.format(secret)]})["notes"][0]
    assert secret not in found
    assert found == ("https://host/x?***" if "?" in text else text.format("***"))
    assert (find_secret({"a": {"b": [text.format(secret)]}}) == "a.b.0") == (secret != WANDB)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pass@host/x", "https://***@host/x"),
        ("https://abcdef@huggingface.co/x", "https://***@huggingface.co/x"),
        ("training.hub_token=abc", "training.hub_token=***"),
        ("{api_key: abc, x: 1}", "{api_key: ***, x: 1}"),
        ('{"token": "abc def"}', '{"token": "***"}'),
        ("WANDB_API_KEY=abc python train.py", "WANDB_API_KEY=*** python train.py"),
        ("password: abc", "password: ***"),
        ("https://host/data?token=abc&x=1", "https://host/data?***"),
        ("see https://host/data?X-Amz-Signature=abc.", "see https://host/data?***"),
        ("https://me:a/b?c#d@host:80/x", "https://***@host:80/x"),
        ("https://me:a'b@host/x", "https://***'b@host/x"),
        ("Basic bWU6cGFzc3dvcmQ=", "Basic ***"),
        ("my password is: abc", "my password is: ***"),
        ("Authorization: Bearer abcdefgh", "Authorization: Bearer ***"),
        ("curl -H 'Bearer abcdefgh1'", "curl -H 'Bearer ***'"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx", "***\nx"),
    ],
)
def test_tokens_are_known_by_what_stands_beside_them(text, shown):
    assert masked(text) == shown
    assert masked(shown) == shown


@pytest.mark.parametrize("name", ["hub_token", "token", "push_to_hub_token", "wandb_api_key", "hfToken", "db.password"])
def test_names_of_secrets(name):
    assert is_secret_name(name)
    assert masked({"deep": {name: "abc"}}) == {"deep": {name: "***"}}
    assert find_secret({"deep": {name: "abc"}}) == f"deep.{name}"
    for nothing in (None, "", True, 0.5):
        assert masked({name: nothing}) == {name: nothing}
        assert find_secret({name: nothing}) is None


@pytest.mark.parametrize(
    "value",
    [
        {"pad_token": "[PAD]", "image_token": "<image>", "mask_token": "<|mask|>", "tokenizer": "x", "key": "a"},
        {"max_new_tokens": 8, "loss_per_token": 1.5, "num_new_tokens": 3, "seconds_per_token": 1, "monkey": "x"},
        {"revision": COMMIT, "_commit_hash": COMMIT, "sha256": WANDB, "fingerprint": "ab" * 32},
        f"target.revision={COMMIT}",
        f"https://huggingface.co/owner/name/tree/{COMMIT}",
        "hf_speculate_training.run, sk-learn-is-a-very-long-name, task-specific-adapter-for-2-models",
        "A token: its probability. The key: patience. tokens/s and/or `x/y`; special_tokens=3",
        "ssh://git@github.com/owner/name",
        "say /think, or /no_think; see [the data](/datasets/owner/name) and https://host/a/b",
        "data/train.jsonl",
        "../other/train.jsonl",
        "owner/name",
        "a = 3 / 4 // 5",
        "bearer of the standard",
    ],
)
def test_what_stays_as_it_is(value):
    assert publishable(value) == value
    assert find_secret(value) is None


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/alice/runs/data.jsonl", "data.jsonl"),
        ("/home/alice/my runs/", "my runs"),
        ("/data", "data"),
        ("~/runs/a", "a"),
        ("~alice/runs/a", "a"),
        ("file:///home/alice/a.txt", "a.txt"),
        (r"C:\Users\alice\a.txt", "a.txt"),
        (r"\\server\share\a.txt", "a.txt"),
        ("/home/alice/*.jsonl", "*.jsonl"),
        ("data.train=/home/alice/my runs/a.jsonl", "data.train=a.jsonl"),
        ("--set=data.train=/home/alice/my runs/a.jsonl", "--set=data.train=a.jsonl"),
        ("data.train=[/home/alice/a, '/home/alice/b']", "data.train=[a, 'b']"),
        ("base_model:adapter:/home/alice/target", "base_model:adapter:target"),
        ("trained on /home/alice/a.jsonl.", "trained on a.jsonl."),
        ("see file:///home/alice/a.txt", "see a.txt"),
        ("PATH=/usr/bin:/home/alice/bin", "PATH=bin"),
        (f"/home/alice/.cache/huggingface/hub/models--owner--name/snapshots/{COMMIT}", "owner/name"),
        (f"/home/alice/hub/models--owner--name/snapshots/{COMMIT}/a.gguf", "owner/name/a.gguf"),
        (f"/home/alice/{COMMIT}", f"alice/{COMMIT}"),
        (Path("/home/alice/a"), "a"),
    ],
)
def test_paths_of_this_machine_are_cut(path, shown):
    assert publishable({"x": [path]}) == {"x": [shown]}
    assert publishable(shown) == shown


def test_command_lines():
    given = ["train.py", "--hub-token", "abc", "--token=abc", "--password", "a b", "--dry-run", "--config", "x"]
    shown = ["train.py", "--hub-token", "***", "--token=***", "--password", "***", "--dry-run", "--config", "x"]
    assert masked_arguments(given) == shown
    assert masked_arguments(["--set", "a.password=two words", HUB]) == ["--set", "a.password=***", "***"]


# What a pattern that looks ahead could begin with again and again.
REPEATED = (
    *("a", "a ", "://", "a://", "a://b", "http://a", "http://a:!", "http://a@", "x@", "/a", "~a", "~/", "C:\\"),
    *("](", "[](", "token=", "token is ", "password is: ", '"token": "', "a_token", "_key", "=:", "x.y", "token='"),
    *("hf_", "sk-", "eyJ", "eyJ-", "eyJ.", "glpat-", "xoxb-", "-----BEGIN A", "-----BEGIN PRIVATE KEY-----", "AKIA"),
    *("Bearer ", "basic a", "authorization: basic ", "0123456789abcdef", "models--", "/models--a/snapshots"),
)


@pytest.mark.parametrize("piece", REPEATED)
def test_masking_ends(piece):
    """In time linear in the text: a pattern that is quadratic takes far more seconds of the CPU than this allows."""

    def give_up(*_):
        raise AssertionError(f"no end for {piece!r}")

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, 2)
    try:
        for beginning in ("/", "x "):
            publishable({"x": beginning + piece * (100_000 // len(piece))})
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@pytest.fixture
def verbosity():
    """transformers' default verbosity, as a program finds it."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    yield
    transformers.logging.set_verbosity(before)


def warned(monkeypatch, capsys, name, handlers):
    """The text on stderr of a warning if the root logger has these handlers (pytest adds its own)."""
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", handlers)
        logging.getLogger(name).warning("drafts do not pay here.")
    return capsys.readouterr().err


@pytest.mark.parametrize("name", _ROOTS)
def test_messages_say_whose_they_are(verbosity, monkeypatch, capsys, name):
    assert warned(monkeypatch, capsys, f"{name}.part", []) == "[hf_speculate] drafts do not pay here.\n"


def test_transformers_verbosity_quietens_them(verbosity, monkeypatch, capsys):
    transformers.logging.set_verbosity_error()
    assert warned(monkeypatch, capsys, "hf_speculate.part", []) == ""


def test_a_program_that_has_set_up_logging_gets_them_once(verbosity, monkeypatch, capsys, caplog):
    assert warned(monkeypatch, capsys, "hf_speculate.part", [caplog.handler]) == ""
    assert caplog.messages == ["drafts do not pay here."]


def test_installing_twice_writes_once():
    install_handler()
    for name in _ROOTS:
        assert sum(isinstance(handler, PrefixHandler) for handler in logging.getLogger(name).handlers) == 1
