"""`exact=True` with hooks and adapters of the user: the bits of plain `generate`, or a refusal."""

from __future__ import annotations

import copy
import random
from collections import Counter
from contextlib import ExitStack, contextmanager

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_speculate import Speculator
from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.testing import ScriptedDrafter
from hf_speculate_gguf import load_model

from ..support.inputs import random_prompt
from ..support.models import VOCAB_SIZE, build_tiny_model
from ..support.random_gguf import FileShape, one_type, write_random_file


def looks(_module, _inputs, _output):
    return None


def _changed(output, change):
    """The output with its states changed; outputs of whole models stay."""
    if isinstance(output, torch.Tensor):
        return change(output)
    return (change(output[0]), *output[1:]) if type(output) is tuple and torch.is_tensor(output[0]) else None


def scales(_module, _inputs, output):
    return _changed(output, lambda states: states * 1.01)


class Projects:
    """A hook that steers: a product whose rounding may depend on the number of rows."""

    def __init__(self, seed):
        self._random, self._matrix = torch.Generator().manual_seed(seed), None

    def __call__(self, _module, _inputs, output):
        return _changed(output, self._project)

    def _project(self, states):
        width = states.shape[-1]
        if self._matrix is None:
            self._matrix = torch.randn(width, width, generator=self._random).to(states.dtype) / 50
        return states + states @ self._matrix if states.is_floating_point() else states


def hook_of(choose):
    return choose.choice([looks, looks, scales, Projects(choose.randrange(99))])


@contextmanager
def hooked(model, choose):
    """The model with up to two hooks on any of its modules."""
    modules = [module for _, module in model.named_modules() if not isinstance(module, nn.ModuleList)]
    with ExitStack() as stack:
        for _ in range(choose.choice([0, 1, 1, 2])):
            handle = choose.choice(modules).register_forward_hook(hook_of(choose))
            stack.callback(handle.remove)
        yield


def adapted(model, choose):
    """The model with LoRA on some of its layers; sometimes it is switched off."""
    layers = choose.sample(range(model.config.num_hidden_layers), choose.randint(1, 2))
    config = LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        layers_to_transform=layers,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config).eval()


def outcome(target, choose):
    """ "equal", "refused" or "differs"."""
    prompt, seed = random_prompt(choose.randint(2, 30), seed=choose.randrange(999)), choose.randrange(999)
    request = {"max_new_tokens": 10, "do_sample": choose.random() < 0.7, "pad_token_id": 0, "eos_token_id": None}
    torch.manual_seed(seed)
    plain = target.generate(input_ids=prompt, **request)
    drafter = ScriptedDrafter(plain[:, prompt.shape[1] :], (3, 2, 1), accuracy=0.9, vocab_size=VOCAB_SIZE)
    torch.manual_seed(seed)
    try:
        found = target.generate(input_ids=prompt, **request, speculator=Speculator(drafter, exact=True, adaptive=False))
    except UnsupportedRequestError:
        return "refused"
    return "equal" if torch.equal(found, plain) else "differs"


def packed(path, backend):
    shape = FileShape("llama", VOCAB_SIZE, 256, 256, 3, 4, 2, 512, is_tied=False)
    write_random_file(str(path), shape, one_type("Q4_0"))
    return load_model(str(path), dtype=torch.bfloat16, backend=backend)


def dense(path, _backend):
    return copy.deepcopy(build_tiny_model("llama", dtype=torch.bfloat16, num_layers=3))


MODELS = {"dense": (dense, ""), "native": (packed, "native"), "native-int8": (packed, "native-int8")}


def outcomes(model, seeds, with_adapter):
    """How many requests came out how; a model with an adapter runs some requests with it switched off."""
    counts = Counter()
    for seed in seeds:
        choose = random.Random(seed)
        with ExitStack() as stack:
            if with_adapter and choose.random() < 0.4:
                stack.enter_context(model.disable_adapter())
            stack.enter_context(hooked(model, choose))
            counts[outcome(model, choose)] += 1
    return counts


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("with_adapter", [False, True], ids=["hooks", "hooks and adapters"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.rest) for part in range(1, 9))])
def test_requests_are_exact_or_refused(tmp_path, needs_kernel, name, with_adapter, part):
    make, backend = MODELS[name]
    choose, model = random.Random(part), make(tmp_path / "packed.gguf", backend)
    target = adapted(model, choose) if with_adapter else model
    counts = outcomes(target, range(100 * part, 100 * part + (12 if part == 0 else 40)), with_adapter)
    assert not counts["differs"], counts
    assert counts["equal"], counts
