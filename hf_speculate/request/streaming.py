"""`stream` and `rounds`: generation as a generator, without a thread."""

from __future__ import annotations

import atexit
from collections.abc import Generator, Mapping
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import TextStreamer

from ..errors import UnsupportedRequestError
from ..speculator import Speculator, attached_to
from ..target import unwrap
from ..tree import Round
from .call import PreparedCall, streamed


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_Generation = TypeVar("_Generation", bound=Generator[Any, None, Any])

_open: WeakSet[Generator[Any, None, Any]] = WeakSet()


@atexit.register
def _close_open() -> None:
    """Ends what a script leaves unfinished, while the modules that this needs still exist."""
    for generation in list(_open):
        with suppress(ValueError):  # another thread is running it
            generation.close()


def _closed_at_exit(generation: _Generation) -> _Generation:
    _open.add(generation)
    return generation


class _Pieces(TextStreamer):
    """Text of a `TextStreamer`, collected instead of printed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, decode_kwargs: Mapping[str, Any]):
        super().__init__(tokenizer, **decode_kwargs)
        self._pieces: list[str] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._pieces.append(text)

    def take(self) -> str:
        text = "".join(self._pieces)
        self._pieces.clear()
        return text


@overload
def stream(
    model: nn.Module,
    inputs: Tensor | None = None,
    *,
    speculator: Speculator | str | None = None,
    tokenizer: None = None,
    **generate_kwargs: Any,
) -> Generator[list[list[int]], None, Any]: ...
@overload
def stream(
    model: nn.Module,
    inputs: Tensor | None = None,
    *,
    speculator: Speculator | str | None = None,
    tokenizer: PreTrainedTokenizerBase,
    decode_kwargs: Mapping[str, Any] | None = None,
    **generate_kwargs: Any,
) -> Generator[str, None, Any]: ...
def stream(model, inputs=None, *, speculator=None, tokenizer=None, decode_kwargs=None, **generate_kwargs):
    """Generates, and yields the tokens of every round as soon as they are known.

        for text in hf_speculate.stream(model, **inputs, speculator=speculator, tokenizer=tokenizer):
            print(text, end="", flush=True)

    Nothing runs between two items: leaving the loop, `close()` or an exception ends the generation there. A cache that
    was passed in then holds the prompt and the yielded tokens but the last. The RNG is where `generate` would have left
    it after these tokens; between items too, so that the consumer may draw random numbers.

    Args:
        model: the target; it may be wrapped by PEFT or compiled.
        inputs: the prompt, see `generate`; or `input_ids=...` in `generate_kwargs`.
        speculator: see `generate`; None: the attached one.
        tokenizer: decodes the tokens to text; `generate` gets it too, for `stop_strings`.
        decode_kwargs: options of `tokenizer.decode`, see `TextStreamer`; special tokens are left out by default.
        generate_kwargs: the rest of the request.
    Returns:
        A generator. Without a tokenizer it yields a list of new token ids for each row, empty for a row that emitted
        nothing in this round; nothing is padded. With a tokenizer it yields pieces of text of a single sequence, cut
        where `TextStreamer` cuts them. Its return value (`output = yield from stream(...)`) is the result of
        `generate`. The prompt runs at once, before the first item is asked for.
    Raises:
        UnsupportedRequestError: there is no speculator, or the request cannot be streamed (`streamer=`, per-row
            adapters, text of several rows) or cannot run with a speculator at all.
        TypeError: `decode_kwargs` were given without a tokenizer.
    """
    if tokenizer is None and decode_kwargs is not None:
        raise TypeError("decode_kwargs= has options for the tokenizer: give tokenizer= too.")
    if tokenizer is None:
        return _closed_at_exit(_tokens(_prepared("stream", "rounds", model, inputs, speculator, generate_kwargs)))
    generate_kwargs["tokenizer"] = tokenizer
    pieces = _Pieces(tokenizer, {"skip_special_tokens": True} | dict(decode_kwargs or {}))
    return _closed_at_exit(_text(_prepared("stream", "text", model, inputs, speculator, generate_kwargs), pieces))


def rounds(
    model: nn.Module,
    inputs: Tensor | None = None,
    *,
    speculator: Speculator | str | None = None,
    **generate_kwargs: Any,
) -> Generator[Round, None, Any]:
    """Generates, and yields every round that emitted something: its draft tree, accepted tokens and seconds.

        for round in hf_speculate.rounds(model, **inputs, speculator=speculator, max_new_tokens=64):
            print(round.draw(tokenizer))

    The first round is the prompt's; its tree is the root alone. Everything else is as in `stream`.

    Args:
        model, inputs, speculator, generate_kwargs: see `stream`.
    Returns:
        A generator of `Round`s; its return value is the result of `generate`.
    Raises:
        UnsupportedRequestError: see `stream`.
    """
    call = _prepared("rounds", "rounds", model, inputs, speculator, generate_kwargs)
    return _closed_at_exit(_rounds_and_output(call))


def _prepared(
    caller: str,
    what: Literal["rounds", "text"],
    model: nn.Module,
    inputs: Tensor | None,
    speculator: Speculator | str | None,
    generate_kwargs: dict[str, Any],
) -> PreparedCall:
    """The prepared call of `generate`, whose prompt has run.

    Args:
        caller: name of the function that the user called, for errors.
        what: kind of the items to yield.
    """
    chosen = speculator if speculator is not None else attached_to(unwrap(model))
    if chosen is None:
        raise UnsupportedRequestError(f"{caller} needs speculator=, or a speculator that was attached to the model.")
    for name, reason in (("streamer", "both consume the tokens"), ("adapter_names", "PEFT sets them up for one call")):
        if generate_kwargs.get(name) is not None:
            raise UnsupportedRequestError(f"{caller} does not take {name}= ({reason}): use generate.")
    token = streamed.set(what)
    try:
        call = model.generate(inputs, speculator=chosen, **generate_kwargs)  # type: ignore[operator]
    finally:
        streamed.reset(token)
    if not isinstance(call, PreparedCall):
        raise UnsupportedRequestError(f"{type(model).__name__}.generate does not return what its loop returns.")
    return call


def _rounds(call: PreparedCall) -> Generator[Round]:
    """The rounds of a call; between two of them the RNG is where stock leaves it after their tokens."""
    noise, sequences = call.run.sampler.noise, call.run.rows.sequences
    with closing(call.rounds()) as rounds:
        for round in rounds:
            if noise is None:
                yield round
            else:
                noise.pause(sequences.new_shape[1])
                yield round
                noise.resume()


def _rounds_and_output(call: PreparedCall) -> Generator[Round, None, Any]:
    yield from _rounds(call)
    return call.output()


def _tokens(call: PreparedCall) -> Generator[list[list[int]], None, Any]:
    with closing(_rounds(call)) as rounds:
        for round in rounds:
            yield list(map(list, round.tokens))
    return call.output()


def _text(call: PreparedCall, pieces: _Pieces) -> Generator[str, None, Any]:
    with closing(_rounds(call)) as rounds:
        for round in rounds:
            for token in round.tokens[0]:
                pieces.put(torch.tensor([token], dtype=torch.long, device="cpu"))
            if text := pieces.take():
                yield text
    pieces.end()
    if text := pieces.take():
        yield text
    return call.output()
