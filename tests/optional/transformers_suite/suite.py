"""The tests of transformers' source distribution, bound to tiny models. `../test_transformers_suite.py` runs this file,
once without hf_speculate and once with a speculator attached to everything."""

from __future__ import annotations

import unittest
from unittest import mock

from transformers import AutoModelForCausalLM

from .sdist import load
from .tiny import MODELS, TinyModel


modeling = load("test_modeling_common")
training = load("test_training_mixin")
tensor_parallel = load("test_tensor_parallel_mixin")
executorch = load("test_executorch")
GenerationTesterMixin = load("generation.test_utils").GenerationTesterMixin

# Theirs is a short list of types, to save time; tiny models are quick.
tensor_parallel.TP_DISTRIBUTED_TEST_MODEL_TYPES = None


class TensorParallel(tensor_parallel.TensorParallelTesterMixin):
    """A model in two processes against the same model in one; `generate` too."""


class Overfit(training.TrainingTesterMixin):
    """A model is trained on a text and must write it, without a cache."""


class OverfitPromptLookup(Overfit):
    """With the cache, which a speculator needs."""

    drafter = "prompt_lookup"
    generate_options = {"use_cache": True}  # noqa: RUF012


class OverfitHalfRight(Overfit):
    generate_options = {"use_cache": True}  # noqa: RUF012


class Export(executorch.ExecutorchTest):
    """Their model comes from the Hub; ours is made here."""

    def setUp(self):
        model = AutoModelForCausalLM.from_config(self.model_tester.get_config())
        with mock.patch.object(AutoModelForCausalLM, "from_pretrained", return_value=model):
            super().setUp()


class Modeling(modeling.ModelTesterMixin, GenerationTesterMixin):
    """Everything else that is tested of a model: attention, outputs, training, loading, saving."""


# These would pass whatever happens: the models have no such features, and that mixin may be a stand-in.
for _name in dir(Modeling):
    if _name.startswith("test_get_") or _name == "test_generation_tester_mixin_inheritance":
        setattr(Modeling, _name, None)


def bind(kind: type, model_type: str) -> type:
    """`kind` as a test case for one type of model."""
    tiny = TinyModel(model_type)
    bases = (kind,) if issubclass(kind, unittest.TestCase) else (kind, unittest.TestCase)
    contents = {"model_tester": tiny, "all_model_classes": (tiny.base_model_class, tiny.causal_lm_class)}
    return type(f"{kind.__name__}_{model_type}", bases, contents | {"__module__": __name__})


# Forks come first: what other tests leave behind (threads of a compiler) is not theirs.
_kinds = (TensorParallel, Overfit, OverfitPromptLookup, OverfitHalfRight, Export, Modeling)
_bound = [bind(kind, model_type) for kind in _kinds for model_type in MODELS]
globals().update({case.__name__: case for case in _bound})
del Export  # pytest would run it unbound
