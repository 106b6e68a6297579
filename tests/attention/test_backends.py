"""Attention backends of our forwards: cuDNN's is off inside them, and as it was outside.

The flags of torch exist without a GPU, too. Tests let a CPU take the part of a device that chooses by them.
"""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_speculate import DraftTree, Speculator
from hf_speculate.attention import backends, backends_in_use, tree_backends
from hf_speculate.attention import grouped as attention
from hf_speculate.cache import TreeCache
from hf_speculate.forward import Scorer, exact_scorer
from hf_speculate.graphs import GraphRunner
from hf_speculate.target import filler_cache
from hf_speculate.testing import RandomDrafter
from hf_speculate_plugins.eagle import EagleDrafter
from hf_speculate_plugins.heads import head as heads
from hf_speculate_plugins.prompt_lookup import PromptLookupDrafter
from hf_speculate_tools.commands import environment

from ..support.heads import VOCAB, target, write_head
from ..support.replays import stand_in


CPU = torch.device("cpu")
REQUEST = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def _kept_flags():
    yield
    is_on = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(True)
    assert is_on, "restored by whoever switched it off"


@pytest.fixture
def cpu_chooses(monkeypatch):
    monkeypatch.setattr(backends, "CHOOSING", frozenset({"cpu"}))


@pytest.fixture
def switched(monkeypatch):
    """Every value that cuDNN's flag was set to."""
    values: list[bool] = []
    enable = cuda.enable_cudnn_sdp
    monkeypatch.setattr(cuda, "enable_cudnn_sdp", lambda enabled: (values.append(enabled), enable(enabled))[1])
    return values


@pytest.mark.usefixtures("cpu_chooses")
class TestTreeBackends:
    def test_tree_backends_nest_and_restore_cudnn(self, switched):
        with tree_backends(CPU):
            with tree_backends(CPU):
                pass
            assert not cuda.cudnn_sdp_enabled()
            with pytest.raises(ValueError, match="inside"), tree_backends(CPU):
                raise ValueError("inside")
            assert not cuda.cudnn_sdp_enabled()
        assert switched == [False, True]

    def test_tree_backends_keep_cudnn_off_for_users_who_disabled_it(self, switched):
        cuda.enable_cudnn_sdp(False)
        with tree_backends(CPU):
            assert not cuda.cudnn_sdp_enabled()
        assert not cuda.cudnn_sdp_enabled()
        cuda.enable_cudnn_sdp(True)
        assert switched == [False, True]

    @pytest.mark.parametrize("chosen", [[SDPBackend.CUDNN_ATTENTION], [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]])
    def test_tree_backends_keep_cudnn_if_the_math_backend_is_off(self, chosen):
        """Without cuDNN no kernel would be left, which is an error of torch."""
        has_math = SDPBackend.MATH in chosen
        with sdpa_kernel(chosen):
            assert backends_in_use(CPU) == ("math" if has_math else "cuDNN")
            with tree_backends(CPU):
                assert cuda.cudnn_sdp_enabled() == (not has_math)
            assert cuda.cudnn_sdp_enabled()

    def test_tree_backends_restore_cudnn_after_the_last_thread(self):
        inside, may_leave, has_left = threading.Event(), threading.Event(), threading.Event()

        def other():
            with tree_backends(CPU):
                inside.set()
                may_leave.wait(5)
            has_left.set()

        thread = threading.Thread(target=other)
        with tree_backends(CPU):
            thread.start()
            assert inside.wait(5)
        assert not cuda.cudnn_sdp_enabled(), "the other thread is inside"
        may_leave.set()
        assert has_left.wait(5)
        thread.join()
        assert cuda.cudnn_sdp_enabled()

    @pytest.mark.usefixtures("fresh_dynamo")
    def test_tree_backends_do_nothing_in_a_compiled_function(self, switched):
        def attend(values):
            with tree_backends(values.device):
                return torch.nn.functional.scaled_dot_product_attention(values, values, values)

        torch.compile(attend, fullgraph=True, backend="eager")(torch.randn(1, 1, 3, 4))
        assert switched == []


class TestOtherDevices:
    def test_tree_backends_do_nothing_on_other_devices(self, switched):
        with tree_backends(CPU):
            assert cuda.cudnn_sdp_enabled()
        assert switched == []
        assert tree_backends(CPU) is tree_backends(torch.device("meta")), "the same object each time"
        assert backends_in_use(CPU) == ""
        assert "attention" not in environment(CPU)

    def test_tree_backends_disable_cudnn_on_a_gpu(self, switched):
        with tree_backends(torch.device("cuda", 1)):
            assert switched == [False]
        assert switched == [False, True]


@pytest.fixture
def attended(monkeypatch):
    """A target and what its first layer has seen: (number of queries, whether cuDNN was on) of each forward."""
    model, seen = copy.deepcopy(target()), []

    def note(module, arguments, keywords):
        seen.append((keywords["hidden_states"].shape[1], cuda.cudnn_sdp_enabled()))

    model.model.layers[0].self_attn.register_forward_pre_hook(note, with_kwargs=True)
    return SimpleNamespace(model=model, seen=seen)


@pytest.mark.usefixtures("cpu_chooses", "unchecked_shapes")
class TestGenerate:
    def test_plain_generate_leaves_cudnn_on(self, attended, prompt, switched):
        attended.model.generate(prompt(9), **REQUEST)
        assert switched == []
        assert {is_on for _, is_on in attended.seen} == {True}

    def test_speculative_generate_disables_cudnn_for_its_forwards_only(self, attended, prompt, switched):
        model = attended.model
        text = model.generate(prompt(9), **REQUEST)
        attended.seen.clear()
        assert torch.equal(
            model.generate(prompt(9), **REQUEST, speculator=Speculator(RandomDrafter(vocab_size=VOCAB))), text
        )
        assert attended.seen[0] == (9, False)
        assert {is_on for _, is_on in attended.seen} == {False}
        assert switched == [False, True] * (len(switched) // 2)
        attended.seen.clear()
        model.generate(prompt(9), **REQUEST)
        assert {is_on for _, is_on in attended.seen} == {True}

    def test_exact_prompt_keeps_cudnn(self, attended, prompt):
        model = attended.model.bfloat16()
        speculator = Speculator(RandomDrafter(vocab_size=VOCAB), exact=True)
        attended.seen.clear()
        model.generate(prompt(9), **REQUEST, speculator=speculator)
        assert (9, True) in attended.seen
        assert (9, False) not in attended.seen

    @pytest.mark.parametrize("is_exact", [False, True])
    def test_exact_forward_keeps_cudnn(self, attended, switched, is_exact):
        """They have to get the bits of plain `generate`."""
        model, tree = attended.model, DraftTree(torch.tensor([[5, 6, 7]]), [-1, 0, 0])
        cache = TreeCache(filler_cache(model, 1, 9), 1)
        attended.seen.clear()
        scorer = exact_scorer(model, cache, {}) if is_exact else Scorer(model, cache)
        scorer(tree, [9])
        assert attended.seen == [(3, is_exact)]
        assert switched == ([] if is_exact else [False, True])

    def test_head_forward_disables_cudnn(self, prompt, tmp_path, monkeypatch):
        model, seen, attend = target(), [], heads.scaled_dot_product_attention
        drafter = EagleDrafter.from_folder(write_head(tmp_path, "safeailab"), model, depth=3)

        def note(*arguments, **keywords):
            seen.append(cuda.cudnn_sdp_enabled())
            return attend(*arguments, **keywords)

        monkeypatch.setattr(heads, "scaled_dot_product_attention", note)
        model.generate(prompt(9), **REQUEST, speculator=Speculator(drafter))
        assert set(seen) == {False}

    @pytest.mark.usefixtures("fresh_dynamo")
    def test_compiled_forward_disables_cudnn(self, prompt, tmp_path, monkeypatch):
        """A compiled function cannot switch: its caller does. (Shape checks keep these from being compiled here.)"""
        model, seen, run = copy.deepcopy(target()), {}, GraphRunner.run

        def note(runner, module, device, key, function, *arguments):
            seen.setdefault(function.__name__, set()).add(cuda.cudnn_sdp_enabled())
            return run(runner, module, device, key, function, *arguments)

        monkeypatch.setattr(GraphRunner, "run", note)
        drafter = EagleDrafter.from_folder(write_head(tmp_path, "safeailab"), model, depth=2, top_k=2, max_nodes=4)
        model.generate(prompt(9), **REQUEST, speculator=Speculator(drafter, compile="eager"))
        assert len(seen) > 1
        assert {name for name, found in seen.items() if found != {False}} == set()

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    def test_environment_names_the_tree_kernel_if_it_is_used(self, prompt, switched, monkeypatch, interpreted):
        monkeypatch.setattr(attention, "kernel_fits", lambda *_: True)
        for compile, name in ((False, "flash"), (None, "kernel for trees")):
            with monkeypatch.context() as patch:
                stand_in(patch)
                speculator = Speculator(PromptLookupDrafter(), compile=compile)
                target().generate(prompt(9), **REQUEST | {"max_new_tokens": 3}, speculator=speculator)
            assert next(iter(speculator.stats.attention)).startswith(name)
