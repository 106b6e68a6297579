"""Answers by a server: its tokens where it returns them; right lines or one `ServerError`, whatever it answers."""

from __future__ import annotations

import json
import threading
import time

import pytest
from datasets import Dataset
from transformers import LlamaConfig

from hf_speculate.errors import SpeculateError
from hf_speculate_training.data import DataOptions, load_records, prepare_data
from hf_speculate_training.regenerate import Planner, RegenerateOptions, write_answers
from hf_speculate_training.regenerate.connection import KEY_VARIABLE, Connection, ServerError
from hf_speculate_training.regenerate.journal import Journal
from hf_speculate_training.regenerate.server import ServerEngine

from ...support.openai_server import StandIn
from ...support.training import BYTE_VOCAB_SIZE, build_byte_tokenizer, chats


OPTIONS = RegenerateOptions(max_new_tokens=12, batch_size=4)
CONFIG = LlamaConfig(vocab_size=BYTE_VOCAB_SIZE, max_position_embeddings=256)
TEXTS = Dataset.from_dict({"prompt": [f"text {number}" for number in range(6)]})
PAUSES = "openai._base_client.BaseClient._calculate_retry_timeout"


def answer_of(ids: list[int]) -> list[int]:
    """Small letters that depend on the whole prompt; some come to their end."""
    first = 67 + sum(ids) % 20
    return [first, first + 1, first + 2, 2] if first % 3 else [first] * 20


@pytest.fixture
def server(byte_tokenizer, monkeypatch):
    monkeypatch.setattr(PAUSES, lambda *args, **kwargs: 0.01)
    with StandIn(byte_tokenizer, answer_of).serving() as stand_in:
        yield stand_in


def run(server, records, output, options=OPTIONS, retries=2, timeout=5.0, tokenizer=None, **arguments):
    tokenizer = tokenizer or server.tokenizer
    connection = Connection(server.url, retries=retries, timeout=timeout)
    engine = ServerEngine(connection, tokenizer, CONFIG, options, **arguments)
    return write_answers(engine, Planner(tokenizer, CONFIG, options), records, output, show_progress=False)


def lines_of(path) -> dict[str, dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines), "nothing twice"
    return {line["id"]: line for line in lines}


@pytest.mark.parametrize("returns_tokens", [True, False])
def test_server_engine_answers_chats(server, tmp_path, returns_tokens):
    server.returns_tokens = returns_tokens
    report = run(server, chats(9, turns=2), tmp_path / "out.jsonl")
    lines = lines_of(tmp_path / "out.jsonl")
    assert len(lines) == 9
    assert report.num_reencoded == (0 if returns_tokens else 9)
    for line in lines.values():
        assert line.get("reencoded", False) != returns_tokens
        written = [place for place, mark in enumerate(line["loss_mask"]) if mark]
        prompt, answer = line["input_ids"][: line["num_prompt_tokens"]], answer_of(line["input_ids"][: written[0]])
        assert prompt == line["input_ids"][: written[0]]
        if returns_tokens:
            assert line["input_ids"][written[0] :][: len(answer[:12])] == answer[:12]
        assert line["finish"] in ("stop", "length")
    ended = [line for line in lines.values() if line["finish"] == "stop"]
    assert ended
    assert all(line["input_ids"][-1] == server.tokenizer.eos_token_id for line in ended)
    assert all(len(line["messages"]) == 4 for line in ended), "both turns"
    prepared = prepare_data(load_records(str(tmp_path / "out.jsonl")), server.tokenizer, DataOptions(max_length=256))
    assert len(prepared.train) == 9


@pytest.mark.parametrize(("returns_tokens", "takes_tokens"), [(True, True), (False, True), (False, False)])
def test_server_engine_continues_texts(server, tmp_path, returns_tokens, takes_tokens):
    server.returns_tokens, server.takes_tokens = returns_tokens, takes_tokens
    run(server, TEXTS, tmp_path / "out.jsonl")
    lines = lines_of(tmp_path / "out.jsonl")
    assert [lines[str(number)]["prompt"] for number in range(6)] == TEXTS["prompt"]
    assert all(isinstance(body["prompt"], list) == takes_tokens for body in server.bodies)


def test_sampling_is_the_servers_own_or_what_was_asked_for(server, tmp_path):
    run(server, chats(3), tmp_path / "own.jsonl")
    assert not {"temperature", "top_p", "seed"} & server.bodies[-1].keys()
    sampled = RegenerateOptions(max_new_tokens=12, temperature=0.7, top_p=0.9, top_k=5, seed=3)
    run(server, chats(3), tmp_path / "sampled.jsonl", sampled)
    asked = server.bodies[-3:]
    assert all((body["temperature"], body["top_p"], body["top_k"]) == (0.7, 0.9, 5) for body in asked)
    assert len({body["seed"] for body in asked}) == 3
    run(server, chats(3), tmp_path / "again.jsonl", sampled)
    by_question = [
        {body["messages"][0]["content"]: body["seed"] for body in part} for part in (asked, server.bodies[-3:])
    ]
    assert by_question[0] == by_question[1]


@pytest.mark.parametrize("mishap", [500, 503, 429, "cut", "garbage", "hang"])
def test_server_engine_retries_temporary_failures(server, tmp_path, mishap):
    server.mishaps = [mishap] * 2
    run(server, chats(5), tmp_path / "out.jsonl", timeout=0.5 if mishap == "hang" else 5.0)
    assert len(lines_of(tmp_path / "out.jsonl")) == 5


@pytest.mark.parametrize("mishap", [500, "garbage"])
def test_server_engine_keeps_answers_of_a_server_that_breaks(server, tmp_path, mishap):
    """What was answered is there; the same command goes on."""
    answer, served = server.answer, []

    def breaks(ids):
        served.append(ids)
        if len(served) == 4:
            server.mishaps = [mishap] * 100
        return answer(ids)

    server.answer = breaks
    with pytest.raises(ServerError, match=r"/v1/chat/completions (failed 3 times|gave no answer in 3 attempts)"):
        run(server, chats(9), tmp_path / "out.jsonl", timeout=0.3, concurrency=2)
    before = lines_of(tmp_path / "out.jsonl")
    assert 3 <= len(before) < 9
    server.answer, server.mishaps = answer, []
    report = run(server, chats(9), tmp_path / "out.jsonl")
    assert (report.num_found, report.num_written) == (len(before), 9 - len(before))
    after = lines_of(tmp_path / "out.jsonl")
    assert len(after) == 9
    assert {name: after[name] for name in before} == before


def test_a_request_that_is_refused_ends_the_run_at_once(server, tmp_path):
    server.mishaps = [403]
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"refuses a request: .*out of order"):
        run(server, chats(3), tmp_path / "out.jsonl", concurrency=1)
    assert time.monotonic() - began < 5
    assert len(server.headers) == 1


def test_another_chat_template_is_noticed(server, tmp_path):
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    for returns_tokens in (True, False):
        server.returns_tokens = returns_tokens
        with pytest.raises(ServerError, match=r"reads a prompt otherwise than the target's tokenizer: .* tokens there"):
            run(server, chats(3), tmp_path / "out.jsonl", tokenizer=build_byte_tokenizer(template))


def test_answers_that_were_taken_apart_are_refused(server, tmp_path):
    server.returns_tokens, reply = False, server.reply

    def apart(path, body):
        status, content = reply(path, body)
        for choice in content.get("choices", []):
            choice["message"]["reasoning_content"] = "hm"
        return status, content

    server.reply = apart
    with pytest.raises(ServerError, match="takes answers apart"):
        run(server, chats(3), tmp_path / "out.jsonl")


def test_the_key_goes_to_the_server_and_nowhere_else(server, tmp_path, monkeypatch, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv(KEY_VARIABLE, "sesame-sesame")
    run(server, chats(3), tmp_path / "out.jsonl")
    assert server.headers[-1]["authorization"] == "Bearer sesame-sesame"
    assert "sesame" not in caplog.text
    assert all("sesame" not in path.read_text() for path in tmp_path.iterdir())


def test_server_engine_reports_an_absent_server(tmp_path, byte_tokenizer):
    stand_in = StandIn(byte_tokenizer, answer_of)
    stand_in.url = "http://127.0.0.1:9"
    with pytest.raises(ServerError, match="gave no answer in 1 attempts"):
        run(stand_in, chats(3), tmp_path / "out.jsonl", retries=0)
    assert not (tmp_path / "out.jsonl").exists()
    with pytest.raises(SpeculateError, match="not the address of a server"):
        Connection("localhost:8000")


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
def test_server_engine_names_faults_of_an_answer(server, tmp_path, change, said):
    def distort(status, content):
        reply = json.loads(content)
        reply["choices"][0] |= change
        return status, json.dumps(reply).encode()

    server.distort = distort
    with pytest.raises(ServerError, match=said.replace("(", r"\(")):
        run(server, TEXTS, tmp_path / "out.jsonl", concurrency=1)
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_server_that_stops_returning_tokens(server, tmp_path):
    answered = []

    def distort(status, content):
        answered.append(reply := json.loads(content))
        if len(answered) > 2:
            del reply["choices"][0]["token_ids"]
        return status, json.dumps(reply).encode()

    server.distort = distort
    with pytest.raises(ServerError, match="an answer without its tokens, after others that had them"):
        run(server, TEXTS, tmp_path / "out.jsonl", concurrency=1)
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 2


def test_a_server_that_drips_is_given_up(server, tmp_path):
    """Every byte comes soon after the one before; only the whole takes too long. It drips for three seconds."""
    server.mishaps = ["drip"] * 2
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"no answer in 2 attempts \(no whole answer within 0.4 s\)"):
        run(server, TEXTS, tmp_path / "out.jsonl", retries=1, timeout=0.2)
    assert time.monotonic() - began < 2.5


def test_nobody_waits_for_a_server_that_hangs_once_writing_has_failed(server, tmp_path, monkeypatch):
    def interrupted(*_):
        server.mishaps = ["hang"] * 10
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "append", interrupted)
    server.mishaps = ["hang"]
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(server, TEXTS, tmp_path / "out.jsonl", timeout=60.0, concurrency=2)
    assert time.monotonic() - began < 2.0, "it hangs for three seconds"
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("regenerate")]
