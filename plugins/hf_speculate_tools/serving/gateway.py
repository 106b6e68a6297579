"""The server's first and last station (ASGI): it notices clients that hang up, and adds the drafts to `usage`.

It works on OpenAI's protocol and not on transformers' code, so whole answers and streams of all endpoints are the same
to it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .requests import HUNG_UP, ServedRequest, current_request


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Gateway:
    """An ASGI application around another one.

    Args:
        app: application that answers the requests.
    """

    def __init__(self, app: Callable[[Any, Receive, Send], Awaitable[None]]):
        self._app = app
        self._running: set[ServedRequest] = set()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = ServedRequest(scope["path"])
        self._running.add(request)
        current_request.set(request)
        client, answer = _Client(receive, request), _Answer(send, request)
        try:
            await self._app(scope, client.receive, answer.send)
        finally:
            client.leave()
            self._running.discard(request)
            if answer.status >= 400 and not request.is_logged:
                request.log(f"refused with status {answer.status}")

    def end_all(self, reason: str) -> None:
        """Ends every request that runs or waits."""
        for request in list(self._running):
            request.end(reason)


class _Client:
    """The client of a request. After its body, it is watched: if it hangs up, the request ends."""

    def __init__(self, receive: Receive, request: ServedRequest):
        self._receive, self._request = receive, request
        self._watcher: asyncio.Task[None] | None = None

    async def receive(self) -> Message:
        if self._watcher is not None:
            await asyncio.shield(self._watcher)
            return {"type": "http.disconnect"}
        message = await self._receive()
        if not message.get("more_body"):
            self._watcher = asyncio.create_task(self._watch(message))
        return message

    def leave(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()

    async def _watch(self, message: Message) -> None:
        while message["type"] != "http.disconnect":
            message = await self._receive()
        self._request.end(HUNG_UP)


class _Answer:
    """The way of an answer to the client. The drafts join its `usage`.

    Attributes:
        status: HTTP status; 0 before the answer began.
    """

    def __init__(self, send: Send, request: ServedRequest):
        self._send, self._request = send, request
        self._start: Message | None = None  # held until the length of a whole answer is known
        self._body = b""
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if dict(message["headers"]).get(b"content-type") == b"application/json":
                self._start = message
                return
        elif self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._send_whole(self._start)
            return
        elif self._request.speculation is not None and message["type"] == "http.response.body":
            lines = message.get("body", b"").split(b"\n")
            message = {**message, "body": b"\n".join(self._event_line(line) for line in lines)}
        await self._send(message)

    async def _send_whole(self, start: Message) -> None:
        body = self._with_drafts(self._body)
        headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
        await self._send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})

    def _event_line(self, line: bytes) -> bytes:
        name, mark, data = line.partition(b": ")
        return name + mark + self._with_drafts(data) if name == b"data" and b'"usage"' in data else line

    def _with_drafts(self, text: bytes) -> bytes:
        """A JSON text of OpenAI's protocol whose `usage` also has `speculation`."""
        if self._request.speculation is None:
            return text
        value = json.loads(text)
        usage = value.get("usage") or (value.get("response") or {}).get("usage")
        if not usage:
            return text
        usage["speculation"] = self._request.speculation
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
