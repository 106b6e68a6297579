"""The server's gateway: drafts in `usage`, clients that hang up, lines of refused requests."""

from __future__ import annotations

import asyncio
import json

import pytest

from hf_speculate_tools.serving.gateway import Gateway
from hf_speculate_tools.serving.requests import HUNG_UP, ServedRequest, current_request


DRAFTS = {"rounds": 3, "drafted_tokens": 9, "accepted_tokens": 9, "tokens_per_round": 4.0}
SCOPE = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
BODY = {"type": "http.request", "body": b"{}", "more_body": False}


def answered(app, *messages, scope=SCOPE):
    """The messages that a client gets, which sends these and stays until the end."""

    async def run():
        sent, waiting = [], list(messages or (BODY,))

        async def receive():
            if waiting:
                return waiting.pop(0)
            return await asyncio.Future()

        async def send(message):
            sent.append(message)

        await asyncio.wait_for(Gateway(app)(scope, receive, send), 30)
        return sent

    return asyncio.run(run())


def application(*bodies: bytes, kind: bytes, status: int = 200, speculation=DRAFTS):
    """An application that answers with these parts of a body."""

    async def app(_scope, receive, send):
        await receive()
        current_request.get().speculation = speculation
        headers = [(b"content-type", kind), (b"content-length", b"1"), (b"x-request-id", b"7")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for body in bodies:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


def test_the_drafts_join_the_usage_of_a_whole_answer():
    text = json.dumps({"text": "naïve", "usage": {"total_tokens": 5}}, ensure_ascii=False).encode()
    start, body = answered(application(text[:9], text[9:], kind=b"application/json"))
    assert json.loads(body["body"]) == {"text": "naïve", "usage": {"total_tokens": 5, "speculation": DRAFTS}}
    headers = dict(start["headers"])
    assert headers[b"content-length"] == str(len(body["body"])).encode()
    assert len(headers) == len(start["headers"])
    assert headers[b"x-request-id"] == b"7"
    assert not body.get("more_body")


@pytest.mark.parametrize("place", [("usage",), ("response", "usage")])
def test_the_drafts_join_the_event_of_a_stream_that_has_usage(place):
    usage, event = {"total_tokens": 5}, {}
    inner = event
    for name in place[:-1]:
        inner = inner.setdefault(name, {})
    inner[place[-1]] = usage
    first = 'data: {"delta":"say \\"usage\\" äh"}\n\n'.encode()
    parts = [first, b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n"]
    _, *bodies = answered(application(*parts, kind=b"text/event-stream; charset=utf-8"))
    assert bodies[0]["body"] == first
    line, _, done, *_ = bodies[1]["body"].split(b"\n")
    inner[place[-1]] = usage | {"speculation": DRAFTS}
    assert json.loads(line.removeprefix(b"data: ")) == event
    assert done == b"data: [DONE]"


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
def test_plain_generation_leaves_answers_as_they_are(kind):
    text = b'data: {"usage": {"total_tokens": 5}}\n\n' if b"event" in kind else b'{"usage": {"total_tokens": 5}}'
    _, *bodies = answered(application(text, kind=kind, speculation=None))
    assert b"".join(body["body"] for body in bodies) == text


def test_a_client_that_hangs_up_ends_its_request_while_the_endpoint_waits():
    seen: list[ServedRequest] = []

    async def app(_scope, receive, _send):
        await receive()
        seen.append(current_request.get())
        while not seen[0].reason:  # an endpoint that waits for a whole text does not listen
            await asyncio.sleep(0.001)

    answered(app, BODY, {"type": "http.disconnect"})
    assert seen[0].reason == HUNG_UP


def test_an_endpoint_that_listens_is_told_too():
    async def app(_scope, receive, _send):
        await receive()
        assert await receive() == {"type": "http.disconnect"}
        assert current_request.get().reason == HUNG_UP

    answered(app, BODY, {"type": "http.disconnect"})


def test_a_long_body_arrives_in_all_its_parts():
    async def app(_scope, receive, _send):
        parts = [await receive(), await receive()]
        assert [part["body"] for part in parts] == [b"{", b"}"]
        assert not current_request.get().reason

    answered(app, {**BODY, "body": b"{", "more_body": True}, {**BODY, "body": b"}"})


def test_refused_requests_have_a_line(capsys):
    answered(application(b'{"detail":"no"}', kind=b"application/json", status=422, speculation=None))
    assert capsys.readouterr().err.endswith("/v1/chat/completions: refused with status 422\n")
    answered(application(b"{}", kind=b"application/json", speculation=None))
    assert capsys.readouterr().err == ""


def test_other_requests_go_through_untouched():
    seen = []

    async def app(scope, receive, send):
        seen.append((scope["method"], receive, send))

    answered(app, scope=SCOPE | {"method": "GET"})
    assert seen[0][0] == "GET"


def test_all_requests_end_with_the_server():
    async def run():
        requests = []

        async def app(_scope, receive, _send):
            await receive()
            requests.append(current_request.get())
            while not requests[-1].reason:
                await asyncio.sleep(0.001)

        async def receive():
            return BODY if not requests else await asyncio.Future()

        gateway = Gateway(app)
        running = asyncio.create_task(gateway(SCOPE, receive, None))
        while not requests:
            await asyncio.sleep(0.001)
        gateway.end_all("the server stops")
        await asyncio.wait_for(running, 30)
        assert requests[0].reason == "the server stops"

    asyncio.run(run())
