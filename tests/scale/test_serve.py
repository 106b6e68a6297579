"""Answers by `transformers serve`, a process of its own on the loopback address."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import httpx2
import pytest
from typer.testing import CliRunner

from hf_speculate_tools.cli import app

from ..support.training import save_target


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Folder of the model that is served, and the address."""
    folder = tmp_path_factory.mktemp("serve") / "target"
    save_target(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "transformers.cli.transformers",
            "serve",
            str(folder),
            "--port",
            str(port),
            "--device",
            "cpu",
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url, process)
        yield folder, url
    finally:
        process.kill()
        process.wait()


def wait_for(url, process, seconds=120.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, process.stdout.read()
        try:
            if httpx2.get(f"{url}/health").is_success:
                return
        except httpx2.TransportError:
            time.sleep(0.2)
    raise AssertionError("the server did not start")


def regenerate(folder, output, data, *options):
    arguments = ["--target", str(folder), "--data", str(data), "--output", str(output), "--max-new-tokens", "8"]
    result = CliRunner().invoke(app, ["regenerate", *arguments, "--temperature", "0", *options])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    return json.loads(result.stdout.splitlines()[-1]), {line["id"]: line for line in lines}


@pytest.mark.parametrize("chat", [True, False])
def test_server_answers_equal_the_targets(server, tmp_path, chat):
    """Greedily. This server returns no tokens: lines say so."""
    folder, url = server
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"number {number}"}) + "\n" for number in range(6)))
    options = ["--chat"] if chat else []
    report, served = regenerate(
        folder,
        tmp_path / "served.jsonl",
        data,
        *options,
        "--engine",
        "server",
        "--server",
        url,
        "--server-model",
        str(folder),
    )
    _, local = regenerate(folder, tmp_path / "local.jsonl", data, *options, "--speculator", "none")
    assert report["num_written"] == report["num_reencoded"] == 6
    assert served.keys() == local.keys()
    key = "messages" if chat else "completion"
    for name, line in served.items():
        assert line["reencoded"]
        assert line[key] == local[name][key]
        count = line["num_prompt_tokens"]
        assert line["input_ids"][:count] == local[name]["input_ids"][:count]
