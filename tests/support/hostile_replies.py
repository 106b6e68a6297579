"""Replies of a server with faults in them: a fixed sequence for a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any


_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 5, 258, 259, 10**6, 2**63, 10**30, 1.5, 1e308, float("nan"), float("inf")),
    *("", "abc", "stop", "length", "tool_calls", "abort", "a\ud800b", "\x00\x1b[2J[/red]", "x " * 5000, "é日本👩"),
    *([], {}, [None], [[1, 2]], ["a"], [True, False], [1.0], [7] * 5000, [10**6], {"a": 1}, [{"type": "text"}]),
)
_STATUSES = (200,) * 12 + (201, 204, 400, 401, 404, 413, 422, 429, 500, 503)
_FIELDS = ("token_ids", "prompt_token_ids", "text", "content", "message", "finish_reason", "usage", "choices", "error")


def distorted(status: int, content: bytes, rng: random.Random) -> tuple[int, bytes]:
    """A reply with up to three faults in its fields, in its bytes, or in its status."""
    reply = json.loads(content)
    for _ in range(rng.randrange(4)):
        reply = _with_fault(reply, rng)
    data = json.dumps(reply).encode()
    if rng.random() < 0.1:
        data = _damaged(data, rng)
    elif rng.random() < 0.05:
        depth = rng.choice((100, 100_000))
        data = b'{"choices":' + b"[" * depth + b"]" * depth + b"}"
    return (rng.choice(_STATUSES) if status == 200 else status), data


def _with_fault(reply: Any, rng: random.Random) -> Any:
    places = list(_places(reply))
    if not places:
        return rng.choice(_VALUES)
    holder, key = rng.choice(places)
    fault = rng.randrange(5)
    if fault == 0:
        del holder[key]
    elif fault == 1:
        holder[key] = [holder[key]]
    elif fault == 2 and isinstance(holder, dict):
        holder[rng.choice(_FIELDS)] = rng.choice(_VALUES)
    else:
        holder[key] = rng.choice(_VALUES)
    return reply


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every item of every object and list: holder and key."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        if not isinstance(value, list) or not isinstance(item, int):
            yield from _places(item)


def _damaged(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return rng.choice(
        (
            data[:place],
            data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :],
            data[:place] + b"\\ud800" + data[place:],
            data + data,
            b"\xef\xbb\xbf" + data,
            b"<html>" + data,
            b"",
        )
    )
