"""transformers' server with a model that is loaded already. No other module knows the server's classes.

The server takes no loaded model and has no hooks. So `_LoadedModel` is its `ModelManager` with one model from the
start, and `_MeasuredManager` its `GenerateManager` that passes on a `MeasuredModel`. `tests/serving/test_stock.py`
fails when a release of transformers moves these places.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request  # pyright: ignore[reportMissingImports]
from fastapi.responses import JSONResponse  # pyright: ignore[reportMissingImports]
from jinja2 import TemplateError
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager, TimedModel
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import GenerateManager, GenerationState

from hf_speculate.messages import message
from hf_speculate.speculator import Speculator
from hf_speculate.target import GenerativeModel

from .requests import MeasuredModel, RequestEnded, current_request


_BAD_REQUEST, _UNAVAILABLE = 400, 503


def build_app(name: str, model: GenerativeModel, tokenizer: Any, speculator: Speculator | None) -> FastAPI:
    """transformers' application for one model.

    Args:
        name: name of the model, which requests must use.
        tokenizer: the model's tokenizer, a fast one.
        speculator: speculator that is attached to the model; None for plain generation.
    """
    manager, state = _LoadedModel(name, model, tokenizer), _State(speculator)
    app = build_server(
        model_manager=manager,
        chat_handler=ChatCompletionHandler(manager, state),
        completion_handler=CompletionHandler(manager, state),
        response_handler=ResponseHandler(manager, state),
        transcription_handler=TranscriptionHandler(manager, state),
        systemone_handler=SystemOneHandler(manager, state),
        generation_state=state,
    )
    for kind in (ValueError, TemplateError):  # no chat template; a template that refuses; a wrong value
        app.add_exception_handler(kind, _refusal(_BAD_REQUEST))
    app.add_exception_handler(RequestEnded, _refusal(_UNAVAILABLE))
    for endpoint in (ChatCompletionHandler, CompletionHandler, ResponseHandler):
        logging.getLogger(endpoint.__module__).addFilter(_is_no_arrival)
    return app


class _LoadedModel(ModelManager):
    """A manager of one model, which never loads, unloads or renames."""

    def __init__(self, name: str, model: GenerativeModel, tokenizer: Any):
        super().__init__()
        self.force_model = name  # only now: the constructor would load it
        self.loaded_models[name] = TimedModel(model, timeout_seconds=-1, processor=tokenizer)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id

    def shutdown(self) -> None:
        """Keeps the model: any client may send `/reset`, and nothing could load the model again."""


class _MeasuredManager(GenerateManager):
    """A manager whose requests are measured and end when they must."""

    def __init__(self, speculator: Speculator | None):
        super().__init__()
        self._speculator = speculator

    def generate_streaming(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return super().generate_streaming(self._measured(model), *args, **kwargs)

    async def generate_non_streaming(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return await super().generate_non_streaming(self._measured(model), *args, **kwargs)

    def _measured(self, model: GenerativeModel) -> Any:
        return MeasuredModel(model, self._speculator, current_request.get())


class _State(GenerationState):
    """A state with one manager, hence one thread: requests run one after the other."""

    def __init__(self, speculator: Speculator | None):
        super().__init__()
        self._manager = _MeasuredManager(speculator)

    def get_manager(self, model_id: str, use_cb: bool = False) -> GenerateManager:
        return self._manager


def _refusal(status: int) -> Callable[[Request, Exception], JSONResponse]:
    """A handler that answers with the error's sentence. Stock logs a traceback and tells the client nothing."""

    def refuse(_request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": {"message": message(error), "type": type(error).__name__}}, status)

    return refuse


def _is_no_arrival(record: logging.LogRecord) -> bool:
    """Whether a log record is more than the news that a request has arrived: each has one line, at its end."""
    return not record.getMessage().startswith("[Request received]")
