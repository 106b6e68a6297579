"""Secrets are masked, paths of this machine are cut, everything else stays; log messages have a prefix."""

from __future__ import annotations

import logging
import re
import signal
import sys
from pathlib import Path

import pytest
import transformers
from tqdm import tqdm

from hf_speculate.messages import (
    _ROOTS,
    find_secret,
    masked,
)
from hf_speculate_tools.hub import public_recipe
from hf_speculate_tools.hub.public import publishable


# Put together here, so that nobody's scanner takes this file for a leak.
HUB = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz12345678"
COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize("secret", [HUB, "hf_" + "a" * 34, "hf_oauth_" + "a1" * 17])
@pytest.mark.parametrize("text", ["the token {} is mine", "'{}'", "https://host/x?q={}"])
def test_tokens_are_known_by_their_look(secret, text):
    assert masked(text.format(secret)) == text.format("***")
    assert find_secret({"a": {"b": [text.format(secret)]}}) == "a.b.0"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pass@host/x", "https://***@host/x"),
        ("https://abcdef@huggingface.co/x", "https://***@huggingface.co/x"),
        ("Basic bWU6cGFzc3dvcmQ=", "Basic ***"),
        ("Authorization: Bearer abcdefgh", "Authorization: Bearer ***"),
        ('{"authorization": "abcdefgh"}', '{"authorization": "***"}'),
        ("curl -H 'Bearer abcdefgh1'", "curl -H 'Bearer ***'"),
    ],
)
def test_headers_and_users_are_masked(text, shown):
    assert masked(text) == shown
    assert masked(shown) == shown


@pytest.mark.parametrize("name", ["hub_token", "token", "push_to_hub_token", "wandb_api_key", "hfToken", "db.password"])
def test_find_secret_knows_names_of_secrets(name):
    assert find_secret({"deep": {name: "abc"}}) == f"deep.{name}"
    assert publish_training({name: "abc", "seed": 1}) == {"seed": 1}
    for nothing in (None, "", True, 0.5):
        assert find_secret({name: nothing}) is None


def publish_training(settings):
    return public_recipe({"training": settings})["training"]


@pytest.mark.parametrize(
    "value",
    [
        {"pad_token": "[PAD]", "image_token": "<image>", "mask_token": "<|mask|>", "tokenizer": "x", "key": "a"},
        {"max_new_tokens": 8, "loss_per_token": 1.5, "num_new_tokens": 3, "seconds_per_token": 1, "monkey": "x"},
        {"revision": COMMIT, "fingerprint": "ab" * 32},
        f"https://huggingface.co/owner/name/tree/{COMMIT}",
        "hf_speculate_training.run, sk-learn-is-a-very-long-name, task-specific-adapter-for-2-models",
        "A token: its probability. The key: patience. tokens/s and/or `x/y`; special_tokens=3",
        "ssh://git@github.com/owner/name",
        "say /think, or /no_think; see [the data](/datasets/owner/name) and https://host/a/b",
        "../other/train.jsonl",
        "owner/name",
        "a = 3 / 4 // 5",
        "bearer of the standard",
    ],
)
def test_publishable_keeps_harmless_text(value):
    assert publishable(value) == value
    assert find_secret(value) is None


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/alice/runs/data.jsonl", "data.jsonl"),
        ("/home/alice/my runs/", "my runs"),
        ("~alice/runs/a", "a"),
        ("file:///home/alice/a.txt", "a.txt"),
        (r"C:\Users\alice\a.txt", "a.txt"),
        (r"\\server\share\a.txt", "a.txt"),
        ("--set=data.train=/home/alice/my runs/a.jsonl", "--set=data.train=a.jsonl"),
        ("data.train=[/home/alice/a, '/home/alice/b']", "data.train=[a, 'b']"),
        ("base_model:adapter:/home/alice/target", "base_model:adapter:target"),
        ("trained on /home/alice/a.jsonl.", "trained on a.jsonl."),
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


# What a pattern that looks ahead could begin with again and again.
REPEATED = (
    *("a", "a ", "://", "a://", "a://b", "http://a", "http://a:!", "http://a@", "x@", "/a", "~a", "~/", "C:\\"),
    *("](", "[](", "=:", "x.y", "hf_", "hf_oauth_", "authorization:", "authorization: ", "authorization: basic "),
    *("Bearer ", "basic a", "models--", "/models--a/snapshots"),
)


@pytest.mark.parametrize("piece", REPEATED)
def test_masking_takes_linear_time(piece):
    """A pattern that is quadratic takes far more seconds of the CPU than this allows."""

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
def test_log_messages_have_the_packages_prefix(verbosity, monkeypatch, capsys, name):
    assert warned(monkeypatch, capsys, f"{name}.part", []) == "[hf_speculate] drafts do not pay here.\n"


def test_messages_stand_above_progress_bars(verbosity, monkeypatch, capsys):
    """A bar has no end of line: a message after it would hang on it."""
    with tqdm(total=2, file=sys.stderr, ncols=40):
        assert re.search(
            r"\r\[hf_speculate\] drafts do not pay here\.\n", warned(monkeypatch, capsys, "hf_speculate.x", [])
        )


def test_transformers_verbosity_quietens_them(verbosity, monkeypatch, capsys):
    transformers.logging.set_verbosity_error()
    assert warned(monkeypatch, capsys, "hf_speculate.part", []) == ""


def test_a_program_that_has_set_up_logging_gets_them_once(verbosity, monkeypatch, capsys, caplog):
    assert warned(monkeypatch, capsys, "hf_speculate.part", [caplog.handler]) == ""
    assert caplog.messages == ["drafts do not pay here."]
