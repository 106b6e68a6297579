"""A server on the loopback address that speaks as much of OpenAI's protocol as `regenerate` asks for, and misbehaves on
cue."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StandIn:
    """What it answers, and what it was asked.

    Attributes:
        answer: makes the token ids of an answer of those of a prompt.
        returns_tokens: takes `return_token_ids`, and returns them; else it refuses the field.
        takes_tokens: prompts of texts may be token ids; else it refuses them.
        mishaps: what happens to the next requests, each once: an HTTP status, "hang" (until the client gives up), "cut"
            (the line ends in the middle of the answer), "garbage" (no JSON), "drip" and "drip headers" (a byte now and
            then, for longer than anybody waits).
        distort: makes other status and bytes of those of an answer.
        bodies: of all requests that were understood.
        headers: of all requests, names in lower case.
        most_at_once: requests that were under way together.
    """

    def __init__(self, tokenizer: Any, answer: Callable[[list[int]], list[int]]):
        self.tokenizer, self.answer = tokenizer, answer
        self.returns_tokens = self.takes_tokens = True
        self.mishaps: list[int | str] = []
        self.distort: Callable[[int, bytes], tuple[int, bytes]] = lambda status, content: (status, content)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and content."""
        if "return_token_ids" in body and not self.returns_tokens:
            return 422, {"detail": "Unexpected fields in the request: {'return_token_ids'}"}
        if path.endswith("/chat/completions"):
            text = self.tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        elif isinstance(body["prompt"], list) and not self.takes_tokens:
            return 400, {"detail": "prompt must be a string."}
        else:
            prompt = body["prompt"]
            ids = prompt if isinstance(prompt, list) else self.tokenizer(prompt)["input_ids"]
        self.bodies.append(body)
        found = self.answer(ids)[: body["max_tokens"]]
        ended = bool(found) and found[-1] == self.tokenizer.eos_token_id
        text = self.tokenizer.decode(found, skip_special_tokens=True)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if ended else "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if "chat" in path else {"text": text}
        if body.get("return_token_ids"):
            choice |= {"token_ids": found, "prompt_token_ids": ids}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": len(found)}}

    @contextmanager
    def serving(self) -> Iterator[StandIn]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.send(200, json.dumps({"data": [{"id": "stand-in"}]}).encode())

            def do_POST(self) -> None:
                with stand_in.counted():
                    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                    stand_in.headers.append({name.lower(): value for name, value in self.headers.items()})
                    mishap = stand_in.mishaps.pop(0) if stand_in.mishaps else None
                    if mishap == "hang":
                        time.sleep(3.0)
                        return
                    if isinstance(mishap, str) and mishap.startswith("drip"):
                        self.drip(b"HTTP/1.0 200 OK\r\n" + b"\r\n" * (mishap == "drip"))
                        return
                    status, content = stand_in.reply(self.path, body) if mishap is None else (200, {})
                    if isinstance(mishap, int):
                        status, content = mishap, {"error": {"message": "out of order"}}
                    data = b"<html>" if mishap == "garbage" else json.dumps(content).encode()
                    self.send(*stand_in.distort(status, data), mishap == "cut")

            def drip(self, start: bytes) -> None:
                with suppress(OSError):  # the client has gone
                    self.wfile.write(start)
                    for _ in range(60):
                        time.sleep(0.05)
                        self.wfile.write(b"x")

            def send(self, status: int, content: bytes, cut: bool = False) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content) + 100 * cut))
                if status == 429:
                    self.send_header("Retry-After", "0.1")
                self.end_headers()
                self.wfile.write(content)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    @contextmanager
    def counted(self) -> Iterator[None]:
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            yield
        finally:
            with self._lock:
                self._at_once -= 1
