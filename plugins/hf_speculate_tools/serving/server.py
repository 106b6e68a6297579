"""The server's start and end: the extra it needs, its port, uvicorn."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hf_speculate.compatibility import check_feature, installed_version
from hf_speculate.errors import IncompatibleTransformersError, SpeculateError, first_line

from .gateway import Gateway


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_speculate.speculator import Speculator
    from hf_speculate.target import GenerativeModel


_NEEDS = ("fastapi", "uvicorn", "openai", "pydantic")
_OLDEST = "5.24"  # the first version whose server is built from parts that take a loaded model
_PATIENCE = 10  # seconds until requests that do not end are cut off


def check_extra() -> None:
    """Raises `SpeculateError` if transformers' server or a package that it needs is not installed."""
    if missing := [name for name in _NEEDS if find_spec(name) is None]:
        raise SpeculateError(f"serve needs {', '.join(missing)}: pip install 'hf-speculate[serve]'.")
    check_feature("serve", _OLDEST)


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that is bound to the address and does not listen yet; port 0 takes a free one.

    Raises:
        SpeculateError: the address is in use, not one of this machine, or not allowed.
    """
    bound = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With its protocol: asyncio sends small events at once (TCP_NODELAY) only on a socket that names TCP.
        bound = socket.socket(family, kind, protocol)
        if os.name == "posix":  # elsewhere it would share the port with another server
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        return bound
    except OSError as error:
        if bound is not None:
            bound.close()
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        hint = "Pass another --port, or 0 for any free one." if is_port else "Pass another --host."
        raise SpeculateError(f"cannot serve at {host}:{port}: {error.strerror or error}. {hint}") from error


def run_server(
    bound: socket.socket,
    name: str,
    model: GenerativeModel,
    tokenizer: PreTrainedTokenizerBase,
    speculator: Speculator | None,
) -> None:
    """Serves a model until Ctrl-C, which ends the running requests within a round.

    Args:
        bound: socket of `open_socket`.
        name: name of the model, which requests must use.
        speculator: speculator that is attached to the model; None for plain generation.

    Raises:
        IncompatibleTransformersError: the server of this transformers is built in another way.
    """
    import uvicorn  # pyright: ignore[reportMissingImports]

    try:
        from .stock import build_app

        gateway = Gateway(build_app(name, model, tokenizer, speculator))
    except (ImportError, AttributeError, TypeError) as error:
        raise IncompatibleTransformersError(
            f"serve builds on the server of transformers {_OLDEST}, and that of {installed_version()} has changed: "
            f"{first_line(error)}"
        ) from error

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[Any] | None = None) -> None:
            gateway.end_all("the server stops")
            await super().shutdown(sockets)

    config = uvicorn.Config(
        gateway, log_level="warning", access_log=False, timeout_graceful_shutdown=_PATIENCE, lifespan="off"
    )
    with suppress(KeyboardInterrupt):  # uvicorn ends in order, and raises the signal again
        Server(config).run(sockets=[bound])
