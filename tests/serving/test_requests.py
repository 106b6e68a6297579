"""Requests of the server: they are measured, and end before their next token when they must."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import GenerationConfig

from hf_speculate import Speculator, attach, detach
from hf_speculate.speculator import attached_to
from hf_speculate.testing import ScriptedDrafter
from hf_speculate_tools.serving.requests import HUNG_UP, MeasuredModel, RequestEnded, ServedRequest

from ..support.models import VOCAB_SIZE


NEW = 13


class ServersStreamer:
    """The server's own streamer. It keeps what it gets, and can hang up after a number of tokens."""

    def __init__(self, request, hangs_up_after=None):
        self.request, self.hangs_up_after = request, hangs_up_after
        self.puts, self.known_at_end = [], "no end"

    def put(self, value):
        self.puts.append(value.flatten().tolist())
        if len(self.puts) - 1 == self.hangs_up_after:
            self.request.end(HUNG_UP)

    def end(self):
        self.known_at_end = (self.request.speculation, self.request.seconds)


@pytest.fixture
def served(tiny_model, prompt):
    """Model, prompt, its plain text, and an attached speculator whose chains of three are always right."""
    model, ids = tiny_model(), prompt(6)
    text = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
    speculator = Speculator(ScriptedDrafter(text, (1, 1, 1), vocab_size=VOCAB_SIZE))
    attach(model, speculator)
    yield model, ids, text, speculator
    if attached_to(model) is not None:
        detach(model)  # other tests share it


def arguments(ids, **more):
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, **more)
    return {"input_ids": ids, "generation_config": config}


def test_a_request_is_measured_alone(served, capsys):
    model, ids, text, speculator = served
    for _ in range(2):
        request = ServedRequest("/v1/completions")
        result = MeasuredModel(model, speculator, request).generate(**arguments(ids))
        assert result[0, ids.shape[1] :].tolist() == text
        assert (request.prompt_tokens, request.new_tokens) == (6, NEW)
        # The first token is the prompt's; the other twelve come in three rounds, three drafted and one more each.
        assert request.speculation == {
            "rounds": 3,
            "drafted_tokens": 9,
            "accepted_tokens": 9,
            "tokens_per_round": 4.0,
        }
    lines = capsys.readouterr().err.splitlines()
    expected = (
        r"\d\d:\d\d:\d\d /v1/completions: 6 prompt tokens, 13 new tokens, \d+\.\d\d s, \d+\.\d tokens/s, "
        r"4\.00 tokens per round"
    )
    assert len(lines) == 2
    assert all(re.fullmatch(expected, line) for line in lines)


def test_a_stream_gets_its_tokens_and_knows_the_drafts_before_it_ends(served):
    model, ids, text, speculator = served
    request = ServedRequest("/v1/completions")
    streamer = ServersStreamer(request)
    MeasuredModel(model, speculator, request).generate(**arguments(ids), streamer=streamer)
    assert streamer.puts == [ids[0].tolist(), *([token] for token in text)]
    speculation, seconds = streamer.known_at_end
    assert speculation["tokens_per_round"] == 4.0
    assert seconds == request.seconds


@pytest.mark.parametrize("after", [1, 4])
def test_a_client_that_hangs_up_frees_the_model_at_the_next_token(served, after, capsys):
    model, ids, _, speculator = served
    request = ServedRequest("/v1/completions")
    streamer = ServersStreamer(request, hangs_up_after=after)
    with pytest.raises(RequestEnded, match=rf"the client hung up: the text ends after {after} tokens"):
        MeasuredModel(model, speculator, request).generate(**arguments(ids), streamer=streamer)
    assert request.new_tokens == after
    assert streamer.known_at_end == "no end"
    assert capsys.readouterr().err.rstrip().endswith("; the client hung up")


def test_a_request_that_must_end_before_its_turn_runs_no_forward(served, capsys, monkeypatch):
    model, ids, _, speculator = served
    monkeypatch.setattr(type(model), "generate", lambda *_, **__: pytest.fail("it ran"))
    request = ServedRequest("/v1/completions")
    request.end(HUNG_UP)
    with pytest.raises(RequestEnded):
        MeasuredModel(model, speculator, request).generate(**arguments(ids))
    assert capsys.readouterr().err.endswith("/v1/completions: the client hung up before its turn\n")


def test_a_client_that_leaves_after_the_end_has_not_hung_up(served):
    model, ids, _, speculator = served
    request = ServedRequest("/v1/completions")
    MeasuredModel(model, speculator, request).generate(**arguments(ids))
    request.end(HUNG_UP)
    assert request.reason == ""


def test_plain_generation_has_no_speculation(served, capsys):
    model, ids, text, _ = served
    request = ServedRequest("/v1/completions")
    detach(model)
    result = MeasuredModel(model, None, request).generate(**arguments(ids))
    assert result[0, ids.shape[1] :].tolist() == text
    assert request.speculation is None
    assert "per round" not in capsys.readouterr().err


def test_a_temperature_samples_where_the_model_does_not_say(served):
    """The generation config of a GGUF file says nothing. Stock's server would decode greedily."""
    model, ids, text, speculator = served
    torch.manual_seed(1)
    sampled = model.generate(ids, max_new_tokens=NEW, do_sample=True, temperature=0.9, pad_token_id=0, speculator=None)
    assert sampled[0, ids.shape[1] :].tolist() != text
    torch.manual_seed(1)
    config = GenerationConfig(max_new_tokens=NEW, temperature=0.9, pad_token_id=0)
    result = MeasuredModel(model, speculator, ServedRequest("/")).generate(input_ids=ids, generation_config=config)
    assert result.tolist() == sampled.tolist()


def test_a_temperature_of_zero_is_greedy_without_a_warning(served, logged):
    model, ids, text, speculator = served
    config = GenerationConfig(max_new_tokens=NEW, pad_token_id=0)
    config.temperature, config.do_sample = 0.0, False
    result = MeasuredModel(model, speculator, ServedRequest("/")).generate(input_ids=ids, generation_config=config)
    assert result[0, ids.shape[1] :].tolist() == text
    assert not [line for line in logged() if "temperature" in line]


def test_beams_run_plain_and_without_a_streamer(served):
    model, ids, _, speculator = served
    request = ServedRequest("/v1/completions")
    result = MeasuredModel(model, speculator, request).generate(**arguments(ids, num_beams=2))
    assert request.new_tokens == result.shape[1] - ids.shape[1] > 0
    assert request.speculation is None
    assert request.seconds is not None


def test_a_request_that_fails_is_logged_with_its_reason(served, capsys):
    model, ids, _, speculator = served
    request = ServedRequest("/v1/completions")
    with pytest.raises(ValueError, match="temperature"):
        MeasuredModel(model, speculator, request).generate(
            input_ids=ids, generation_config=GenerationConfig(do_sample=True, temperature=-1.0, max_new_tokens=NEW)
        )
    assert "temperature" in capsys.readouterr().err
    assert request.is_logged
