"""Log messages: a prefix that says whose they are, and transformers' verbosity."""

from __future__ import annotations

import logging

import pytest
import transformers

from hf_speculate.messages import _ROOTS, PrefixHandler, install_handler


@pytest.fixture
def verbosity():
    """As a program finds it."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    yield
    transformers.logging.set_verbosity(before)


def warned(monkeypatch, capsys, name, handlers):
    """What a warning writes to stderr where the root logger has these handlers (pytest puts its own there)."""
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
