"""`hf-speculate serve`: a model with its speculator over OpenAI's protocol."""

from __future__ import annotations

from contextlib import closing

from hf_speculate import attach

from ..commands import say
from ..serving import check_extra, open_socket, run_server
from .options import ServeOptions, default_target
from .session import Loaded


def serve_model(options: ServeOptions) -> None:
    """Runs the command `serve`. What may be missing or in use is checked before weights are read."""
    check_extra()
    name = options.target or default_target()
    with closing(open_socket(options.host, options.port)) as bound:
        loaded = Loaded.of(options)
        if loaded.speculator is not None:
            attach(loaded.model, loaded.speculator)
        host, port = bound.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        say(f"{loaded.title}: model {name!r} at http://{address}/v1; Ctrl-C ends the server.", err=True)
        if not loaded.tokenizer.chat_template:
            say("This model has no chat template: of the endpoints only /v1/completions works.", err=True)
        run_server(bound, name, loaded.model, loaded.tokenizer, loaded.speculator)
    say("stopped.", err=True)
    if options.stats and loaded.speculator is not None:
        say(loaded.speculator.stats.summary(), err=True)
