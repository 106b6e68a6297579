"""`hf-speculate serve` before a model is loaded: options, the missing extra, the port."""

from __future__ import annotations

import socket
import sys
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_speculate.errors import IncompatibleTransformersError, SpeculateError
from hf_speculate.speculator import attached_to
from hf_speculate_tools import cli
from hf_speculate_tools.cli import serve
from hf_speculate_tools.serving import check_extra, open_socket, run_server, server

from ..support.paths import REPOSITORY


TARGET = str(REPOSITORY / "examples" / "pycoder")


def run(*arguments):
    return CliRunner().invoke(cli.app, ["serve", "-t", TARGET, *map(str, arguments)])


@pytest.fixture
def no_model(monkeypatch):
    """Fails where a model would be loaded."""
    monkeypatch.setattr(serve.Loaded, "of", lambda _: pytest.fail("a model was loaded"))


@pytest.fixture
def has_extra(monkeypatch):
    monkeypatch.setattr(serve, "check_extra", lambda: None)


def test_help_says_second_that_it_is_not_for_many_users():
    shown = " ".join(run("--help").stdout.split())
    first, second = shown.partition("[OPTIONS] ")[2].split(". ")[:2]
    assert first == "Serve a model with a speculator over OpenAI's protocol"
    assert "one after the other: without continuous batching, so not for many users" in second


def test_without_the_extra_it_names_what_to_install(monkeypatch, no_model):
    monkeypatch.setattr(server, "find_spec", lambda name: None if name in ("fastapi", "uvicorn") else name)
    result = run()
    assert result.exit_code == 1
    assert result.stderr == ("hf-speculate: error: serve needs fastapi, uvicorn: pip install 'hf-speculate[serve]'.\n")


def test_an_older_transformers_is_refused(monkeypatch):
    monkeypatch.setattr(server, "find_spec", lambda name: name)
    monkeypatch.setattr("hf_speculate.compatibility.versions.installed_version", lambda: "5.20.0")
    with pytest.raises(SpeculateError, match=r"serve needs transformers >= 5\.24, but 5\.20\.0 is installed"):
        check_extra()


def test_a_server_that_transformers_has_changed_is_one_sentence(monkeypatch):
    def build_server(model_manager, brand_new_handler):
        pass

    stub: Any = ModuleType("stock")
    stub.build_app = lambda *_: build_server("a manager")
    monkeypatch.setitem(sys.modules, "hf_speculate_tools.serving.stock", stub)
    monkeypatch.setitem(sys.modules, "uvicorn", ModuleType("uvicorn"))
    nothing: Any = None
    with pytest.raises(IncompatibleTransformersError, match=r"has changed: .*'brand_new_handler'"):
        run_server(nothing, "name", nothing, nothing, nothing)


def test_a_port_in_use_is_refused_before_a_model_is_loaded(no_model, has_extra):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("--port", port)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"hf-speculate: error: cannot serve at 127.0.0.1:{port}: ")
    assert result.stderr.endswith("Pass another --port, or 0 for any free one.\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-s", "promt_lookup"), "Did you mean 'prompt_lookup'?"),
        (("--gguf-backend", "native"), "--gguf-backend is for GGUF files"),
        (("--host", "203.0.113.7"), "Pass another --host."),
        (("--port", "70000"), "--port"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(arguments, said, no_model, has_extra):
    result = run("--port", 0, *arguments)
    assert result.exit_code != 0
    assert said in result.stderr


def test_port_zero_takes_a_free_one():
    with open_socket("127.0.0.1", 0) as bound:
        assert bound.getsockname()[1] > 0
        assert bound.proto == socket.IPPROTO_TCP, "asyncio would hold small events back for 40 ms"


def test_the_command_serves_what_it_loads_with_the_speculator_attached(has_extra, monkeypatch):
    served = []
    monkeypatch.setattr(serve, "run_server", lambda *arguments: served.append(arguments))
    result = run("-s", "prompt_lookup", "--port", 0, "--device", "cpu", "--stats")
    assert result.exit_code == 0, result.stderr
    (bound, name, model, _, speculator) = served[0]
    assert name == TARGET
    assert attached_to(model) is speculator
    assert bound.fileno() == -1, "closed at the end"
    assert f"model '{TARGET}' at http://127.0.0.1:" in result.stderr
    assert "This model has no chat template: of the endpoints only /v1/completions works." in result.stderr
    assert "prompt_lookup: 0 calls" in result.stderr
