"""The places of transformers' server that `hf_speculate_tools.serving.stock` builds upon.

A release that moves one fails here, by name and without the extra. `tests/optional/ecosystem/test_serve.py` runs the
server.
"""

from __future__ import annotations

import inspect

import pytest

from ..support.versions import needs_transformers


model_manager = pytest.importorskip("transformers.cli.serving.model_manager")
server = pytest.importorskip("transformers.cli.serving.server")
utils = pytest.importorskip("transformers.cli.serving.utils")

pytestmark = needs_transformers("5.24", "serve needs it")


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_the_server_is_built_from_these_parts():
    assert parameters(server.build_server) == [
        "model_manager",
        "chat_handler",
        "completion_handler",
        "response_handler",
        "transcription_handler",
        "systemone_handler",
        "generation_state",
        "enable_cors",
    ], "`build_app` passes all parts to `build_server`: add the new ones"


def test_a_manager_holds_a_loaded_model_under_its_name(tiny_model):
    manager = model_manager.ModelManager()
    model, tokenizer = tiny_model(), object()
    manager.loaded_models["name"] = model_manager.TimedModel(model, timeout_seconds=-1, processor=tokenizer)
    assert manager.load_model_and_processor("name", gguf_file=None) == (model, tokenizer)
    manager.force_model = "name"
    assert isinstance(inspect.getattr_static(model_manager.ModelManager, "process_model_name"), staticmethod)
    assert parameters(model_manager.ModelManager.shutdown) == ["self"], "`/reset` calls it"


def test_generation_goes_through_a_manager_that_gets_the_model():
    for name in ("generate_streaming", "generate_non_streaming"):
        assert parameters(getattr(utils.GenerateManager, name))[:2] == ["self", "model"]
    assert parameters(utils.GenerationState.get_manager) == ["self", "model_id", "use_cb"]


@pytest.mark.parametrize("name", ["generate_streaming", "generate_non_streaming"])
def test_a_manager_takes_nothing_of_the_model_but_generate(name):
    """`MeasuredModel` has no other attribute."""
    source = inspect.getsource(getattr(utils.GenerateManager, name))
    used = {
        word.partition("(")[0].partition(",")[0] for word in source.replace("model.generate()", "").split("model.")[1:]
    }
    assert used <= {"generate"}, f"{name} uses {sorted(used)} of the model"
