"""A server that answers anything, at any pace: right lines or one `ServerError`, and never too late."""

from __future__ import annotations

import json
import random
import threading
import time

import pytest
from datasets import Dataset
from transformers import LlamaConfig

from hf_speculate_training.regenerate import Planner, RegenerateOptions, write_answers
from hf_speculate_training.regenerate.answers import Job
from hf_speculate_training.regenerate.connection import Connection, ServerError
from hf_speculate_training.regenerate.journal import Journal
from hf_speculate_training.regenerate.server import ServerEngine

from ...support.hostile_replies import distorted
from ...support.openai_server import StandIn
from ...support.training import BYTE_VOCAB_SIZE


OPTIONS = RegenerateOptions(max_new_tokens=12, batch_size=4)
CONFIG = LlamaConfig(vocab_size=BYTE_VOCAB_SIZE, max_position_embeddings=256)
PAUSES = "openai._base_client.BaseClient._calculate_retry_timeout"
ANSWER = [70, 71, 72, 2]


@pytest.fixture
def server(byte_tokenizer, monkeypatch):
    monkeypatch.setattr(PAUSES, lambda *args, **kwargs: 0.0)
    with StandIn(byte_tokenizer, lambda ids: ANSWER).serving() as stand_in:
        yield stand_in


def new_job(byte_tokenizer, number: int) -> Job:
    text = f"text {number}"
    if number % 2:
        return Job(str(number), byte_tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    rendered = byte_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Job(str(number), byte_tokenizer(rendered)["input_ids"], messages=messages)


def check_lines(job: Job, tokenizer) -> None:
    [line] = job.lines(tokenizer)
    json.dumps(line, ensure_ascii=False).encode()
    assert job.finish in ("stop", "length")
    assert all(type(token) is int and 0 <= token < BYTE_VOCAB_SIZE for token in line["input_ids"])
    new = len(line["input_ids"]) - line["num_prompt_tokens"]
    assert 0 < new <= 2 * OPTIONS.max_new_tokens + 1
    assert sum(line["loss_mask"]) == new
    said = [message["content"] for message in line["messages"]] if "messages" in line else [line["completion"]]
    assert all(isinstance(text, str) for text in said)


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_any_reply_is_an_answer_or_an_error(server, monkeypatch, count):
    connection = Connection(server.url, timeout=20.0, retries=1)
    with monkeypatch.context() as patched:
        patched.setattr(connection, "close", lambda: None)  # a client for all cases: making one takes longest
        taken, refused = [], []
        for number in range(count):
            server.returns_tokens, rng = number % 3 > 0, random.Random(number)
            server.distort = lambda status, content, rng=rng: distorted(status, content, rng)
            engine = ServerEngine(connection, server.tokenizer, CONFIG, OPTIONS, model="stand-in", concurrency=1)
            job = new_job(server.tokenizer, number)
            try:
                for [done] in engine.answered([[job]]):
                    check_lines(done, server.tokenizer)
                    taken.append(number)
            except ServerError as error:
                refused.append(str(error))
            except Exception as error:
                pytest.fail(f"case {number}: {type(error).__name__}: {error}")
    connection.close()
    assert min(len(taken), len(refused)) > count / 10, "some of either kind"
    assert all("\n" not in said and len(said) < 1000 for said in refused)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_ids": [5, 259]}, "token 259, but the target has 259"),
        ({"token_ids": [True]}, "choices.0.token_ids.0: Input should be a valid integer, found True"),
        ({"token_ids": [5] * 13}, "an answer of 13 tokens where it was asked for 12"),
        ({"token_ids": [], "finish_reason": "length"}, "an empty answer that has not come to its end"),
        ({"token_ids": None, "text": None}, "an answer with neither text nor tokens"),
        ({"token_ids": None, "text": "x" * 10**6}, "an answer of 1000000 characters where it was asked for 12 tokens"),
        ({"finish_reason": "abort"}, "found 'abort'"),
        ({"prompt_token_ids": 5}, "prompt_token_ids: Input should be a valid array, found 5"),
    ],
)
def test_faults_are_named(server, tmp_path, change, said):
    def distort(status, content):
        reply = json.loads(content)
        reply["choices"][0] |= change
        return status, json.dumps(reply).encode()

    server.distort = distort
    with pytest.raises(ServerError, match=said.replace("(", r"\(")):
        run(server, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_text_of_more_tokens_than_were_asked_for_is_taken(server, tmp_path):
    """Encoded again, it may fall into other tokens than it was made of; its line says so."""

    def distort(status, content):
        reply = json.loads(content)
        reply["choices"][0] |= {"token_ids": None, "text": "x" * 40}
        return status, json.dumps(reply).encode()

    server.distort = distort
    run(server, tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines
    assert all("x" * 40 in json.dumps(line) for line in lines)


def test_a_server_that_stops_returning_tokens(server, tmp_path):
    answered = []

    def distort(status, content):
        answered.append(reply := json.loads(content))
        if len(answered) > 2:
            del reply["choices"][0]["token_ids"]
        return status, json.dumps(reply).encode()

    server.distort = distort
    with pytest.raises(ServerError, match="an answer without its tokens, after others that had them"):
        run(server, tmp_path / "out.jsonl")
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 2


@pytest.mark.parametrize("mishap", ["drip", "drip headers"])
def test_a_server_that_drips_is_given_up(server, tmp_path, mishap):
    """Every byte comes soon after the one before; only the whole takes too long. It drips for three seconds."""
    server.mishaps = [mishap] * 2
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"no answer in 2 attempts \(no whole answer within 0.4 s\)"):
        run(server, tmp_path / "out.jsonl", timeout=0.2)
    assert time.monotonic() - began < 2.5


def test_nobody_waits_for_a_server_that_hangs_once_writing_has_failed(server, tmp_path, monkeypatch):
    def interrupted(*_):
        server.mishaps = ["hang"] * 10
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "append", interrupted)
    server.mishaps = ["hang"]
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(server, tmp_path / "out.jsonl", timeout=60.0, concurrency=2)
    assert time.monotonic() - began < 2.0, "it hangs for three seconds"
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("regenerate")]


def run(server, output, timeout=20.0, concurrency=1):
    connection = Connection(server.url, retries=1, timeout=timeout)
    engine = ServerEngine(connection, server.tokenizer, CONFIG, OPTIONS, model="stand-in", concurrency=concurrency)
    records = Dataset.from_dict({"prompt": [f"text {number}" for number in range(6)]})
    return write_answers(engine, Planner(server.tokenizer, CONFIG, OPTIONS), records, output, show_progress=False)
