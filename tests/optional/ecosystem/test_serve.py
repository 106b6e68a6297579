"""`transformers serve` started from Python, with a speculator attached to what it loads (`make ecosystem`)."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request

import pytest
from transformers.cli.serve import Serve
from transformers.cli.serving import model_manager

import hf_speculate

from .conftest import HEAD, TARGET


pytest.importorskip("uvicorn", reason="transformers[serving] is not installed: `make ecosystem` sets it up")
pytest.importorskip("fastapi", reason="transformers[serving] is not installed: `make ecosystem` sets it up")

REQUEST = {
    "model": str(TARGET),
    "prompt": "class Stack:\n    def __init__(self):",
    "max_tokens": 40,
    "temperature": 0.0,
}


class SpeculativeModelManager(model_manager.ModelManager):
    """As in docs/ecosystem.md."""

    def load_model_and_processor(self, *args, **kwargs):
        model, processor = super().load_model_and_processor(*args, **kwargs)
        self.speculator = hf_speculate.attach(model, HEAD)
        return model, processor


@pytest.fixture
def serve(monkeypatch):
    """A function that serves with a class of model managers: returns the server and its address."""
    servers = []

    def start(manager_class):
        monkeypatch.setattr(model_manager, "ModelManager", manager_class)
        with socket.socket() as found:
            found.bind(("localhost", 0))
            port = found.getsockname()[1]
        server = Serve(force_model=str(TARGET), device="cpu", dtype="float32", port=port, non_blocking=True)
        servers.append(server)
        address = f"http://localhost:{port}"
        wait_for(address)
        return server, address

    yield start
    for server in servers:
        server.kill_server()


def wait_for(address):
    for _ in range(200):
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise AssertionError(f"no server at {address}")


def answers(address):
    """The text of one request, as a whole and as a stream."""
    return ask(address, REQUEST), ask(address, REQUEST | {"stream": True})


def ask(address, body):
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        content = response.read().decode()
    if not body.get("stream"):
        return json.loads(content)["choices"][0]["text"]
    chunks = [line.removeprefix("data: ") for line in content.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for chunk in chunks for choice in json.loads(chunk)["choices"])


def test_completions_are_plains(serve):
    _, address = serve(model_manager.ModelManager)
    plain = answers(address)
    server, address = serve(SpeculativeModelManager)
    assert answers(address) == plain
    assert plain[0] == plain[1]
    stats = server._model_manager.speculator.stats
    assert stats.calls == 2
    assert stats.accepted_tokens > 20
    assert not stats.fallbacks
