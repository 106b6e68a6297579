"""`hf-speculate serve` with its clients: OpenAI's, `transformers chat`, and ones that hang up (`make ecosystem`)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...support.paths import REPOSITORY
from .conftest import HEAD, TARGET


pytest.importorskip("uvicorn", reason="the extra serve is not installed: `make ecosystem` sets it up")
pytest.importorskip("fastapi", reason="the extra serve is not installed: `make ecosystem` sets it up")
openai = pytest.importorskip("openai", reason="the extra serve is not installed: `make ecosystem` sets it up")

NAME = "coder"  # a folder, so requests have a short name
# Its end is the anchor of the rules by which transformers finds tool calls.
TEMPLATE = (
    "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"
    "{% if tools %}# {{ tools | length }} tools\n{% endif %}{{ '<|im_start|>assistant\n' }}"
)
MESSAGES = [{"role": "user", "content": "class Stack:\n    def __init__(self):"}]
PROMPT = MESSAGES[0]["content"]
TOKENS = 40
LONG = 1500
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


class Server:
    """A server in a process of its own, with the lines of its log."""

    def __init__(self, folder: Path, *arguments: str):
        paths = [str(REPOSITORY / part) for part in ("", "plugins", "training")]
        command = [sys.executable, "-m", "hf_speculate", "serve", "-t", NAME, "--device", "cpu", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        self.address = re.search(r"http://\S+?(?=/v1)", self.wait_for("Ctrl-C ends"))[0]
        self.client = openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=120)
        for _ in range(200):
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=5).close()
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise AssertionError("no server")

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line)

    def wait_for(self, text: str, start: int = 0) -> str:
        """The first line with this text, after so many lines."""
        for _ in range(1200):
            if found := next((line for line in self.lines[start:] if text in line), None):
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise AssertionError(f"no {text!r} in {self.lines}")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The bundled model in float32, with a chat template."""
    place = tmp_path_factory.mktemp("serve")
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place / NAME)
    AutoModelForCausalLM.from_pretrained(TARGET, dtype="float32").save_pretrained(place / NAME)
    return place


@pytest.fixture(scope="module")
def server(folder):
    server = Server(folder, "-s", str(HEAD))
    yield server
    if server.process.poll() is None:
        server.stop()


@pytest.fixture(scope="module")
def plain(folder):
    """A function from token ids, int64 [1, S], to the text of plain `generate`."""
    model, tokenizer = (kind.from_pretrained(folder / NAME) for kind in (AutoModelForCausalLM, AutoTokenizer))

    def text(ids):
        output = model.generate(**ids, max_new_tokens=TOKENS, do_sample=False)
        return tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)

    text.tokenizer = tokenizer
    return text


@pytest.fixture(scope="module")
def chat_text(plain):
    ids = plain.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return plain(ids)


def check_drafts(usage):
    assert usage.speculation["accepted_tokens"] > 5
    assert usage.speculation["tokens_per_round"] > 1.3


def test_chat_completions_are_plains(server, chat_text):
    request = {"model": NAME, "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0}
    for _ in range(2):
        whole = server.client.chat.completions.create(**request)
        assert whole.choices[0].message.content == chat_text
        check_drafts(whole.usage)
    chunks = list(server.client.chat.completions.create(**request, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat_text
    assert len(chunks) > 10
    check_drafts(chunks[-1].usage)


def test_responses_are_plains(server, chat_text):
    request = {"model": NAME, "input": MESSAGES, "max_output_tokens": TOKENS, "temperature": 0}
    whole = server.client.responses.create(**request, stream=False)
    assert whole.output_text == chat_text
    check_drafts(whole.usage)
    with server.client.responses.stream(**request) as events:
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == chat_text
        check_drafts(events.get_final_response().usage)


def test_completions_are_plains(server, plain):
    request = {"model": NAME, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    text = plain(plain.tokenizer(PROMPT, return_tensors="pt"))
    whole = server.client.completions.create(**request)
    assert whole.choices[0].text == text
    check_drafts(whole.usage)
    chunks = list(server.client.completions.create(**request, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text


def test_tool_calls_come_out_whole_and_streamed(server, plain):
    """A small model calls no tools by itself: each token of the call is forced once the tokens before it are there."""
    ids = [*plain.tokenizer(CALL).input_ids, plain.tokenizer.eos_token_id]
    script = [[ids[: count + 1], 1000.0 * (count + 1)] for count in range(len(ids))]
    forced = {"sequence_bias": script, "max_new_tokens": len(ids), "do_sample": False, "eos_token_id": ids[-1]}
    request = {
        "model": NAME,
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": TOOL}],
        "extra_body": {"generation_config": json.dumps(forced)},
    }
    whole = server.client.chat.completions.create(**request)
    assert whole.choices[0].finish_reason == "tool_calls"
    chunks = server.client.chat.completions.create(**request, stream=True)
    streamed = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    response = server.client.responses.create(
        model=NAME,
        input=MESSAGES,
        tools=[{"type": "function", **TOOL}],
        stream=False,
        extra_body={"generation_config": json.dumps(forced)},
    )
    called = next(item for item in response.output if item.type == "function_call")
    for call in (whole.choices[0].message.tool_calls[0].function, streamed[0].function, called):
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})


def test_every_request_has_a_line(server):
    start = len(server.lines)
    server.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=33, temperature=0)
    line = server.wait_for("33 new tokens", start)  # no other request has as many; lines of earlier ones may be late
    assert re.search(r"\d+ prompt tokens, 33 new tokens, [\d.]+ s, [\d.]+ tokens/s, [\d.]+ tokens per round$", line)
    time.sleep(0.2)
    assert sum("33 new tokens" in line for line in server.lines[start:]) == 1


class TestHangingUp:
    """The next request need not wait until the text of the one that hung up is complete. (`tests/serving` counts: it
    ends at its next token.)"""

    @pytest.fixture
    def long(self, server):
        # No end of text, so a request that goes on would hold the model for its 1500 tokens.
        config = {"max_new_tokens": LONG, "do_sample": False, "eos_token_id": -1}
        return {
            "model": NAME,
            "prompt": PROMPT,
            "extra_body": {"generation_config": json.dumps(config)},
        }

    def check_free(self, server, start):
        assert server.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=1, temperature=0).choices
        line = server.wait_for("; the client hung up", start)
        assert int(re.search(r"(\d+) new tokens", line)[1]) < LONG // 2

    def test_a_stream(self, server, long):
        start = len(server.lines)
        stream = server.client.completions.create(**long, stream=True)
        next(iter(stream))
        stream.close()
        self.check_free(server, start)

    def test_a_whole_answer(self, server, long):
        start = len(server.lines)
        with pytest.raises(openai.APITimeoutError):
            server.client.with_options(timeout=0.5).completions.create(**long)
        self.check_free(server, start)

    def test_a_request_that_waits(self, server, long):
        start = len(server.lines)
        stream = server.client.completions.create(**long, stream=True)
        next(iter(stream))
        with pytest.raises(openai.APITimeoutError):
            server.client.with_options(timeout=0.3).completions.create(**long)
        stream.close()
        self.check_free(server, start)
        server.wait_for("the client hung up before its turn", start)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "another", "messages": MESSAGES}, 400, "pinned to 'coder'"),
        ({"model": NAME, "messages": []}, 400, "at least one message"),
        ({"model": NAME, "messages": MESSAGES, "nonsense": 1}, 422, "nonsense"),
    ],
)
def test_wrong_requests_get_a_sentence(server, body, status, said):
    request = urllib.request.Request(
        f"{server.address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=60)
    assert raised.value.code == status
    assert said in raised.value.read().decode()


def test_the_model_stays_after_a_reset(server):
    assert [model.id for model in server.client.models.list()] == [NAME]
    urllib.request.urlopen(urllib.request.Request(f"{server.address}/reset", b""), timeout=60).close()
    answer = server.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=TOKENS, temperature=0)
    check_drafts(answer.usage)


def test_transformers_chat_is_a_client(server, tmp_path):
    start = len(server.lines)
    command = [sys.executable, "-m", "transformers.cli.transformers", "chat", NAME, server.address]
    flags = ["max_new_tokens=8", "do_sample=False"]
    asked = "Hello\nn\n!exit\n"  # n: it offers to continue an answer of 8 tokens
    online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}  # it forbids any address
    done = subprocess.run(
        [*command, *flags], input=asked, cwd=tmp_path, env=online, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "8 tokens in" in done.stdout
    assert "8 new tokens" in server.wait_for("/v1/chat/completions", start)


def test_ctrl_c_ends_the_server_and_its_requests(folder):
    server = Server(folder, "-s", "none")
    config = json.dumps({"max_new_tokens": LONG, "do_sample": False, "eos_token_id": -1})
    body = {"model": NAME, "prompt": PROMPT, "stream": True, "extra_body": {"generation_config": config}}
    stream = iter(server.client.completions.create(**body))
    next(stream)
    assert server.stop() == 0
    with pytest.raises(openai.APIError) as raised:
        list(stream)
    assert "the server stops" in raised.value.body
    assert server.lines[-1] == "stopped.\n"
    line = server.wait_for("the server stops")
    assert "per round" not in line
    assert int(re.search(r"(\d+) new tokens", line)[1]) < LONG


def test_a_port_is_refused_before_the_model_is_read(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "hf_speculate", "serve", "-t", str(folder / NAME), "-s", "suffix"]
        port = str(taken.getsockname()[1])
        done = subprocess.run([*command, "--port", port], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "Pass another --port" in done.stderr
