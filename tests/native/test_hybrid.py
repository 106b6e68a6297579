"""Layers of hybrids: delta nets and attention are those of transformers' modules, token by token or together."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from transformers import DynamicCache

from hf_speculate import Speculator
from hf_speculate.cache import as_cache
from hf_speculate.testing import ScriptedDrafter
from hf_speculate_gguf import load_model
from hf_speculate_gguf.native import binding as native
from hf_speculate_gguf.native.hybrid import DeltaForward

from ..support.hybrid_gguf import EVERY, TILED, UNTILED, write_hybrid
from ..support.models import VOCAB_SIZE
from ..support.packed import OTHER_CPUS, ids, modules_only, padded, relative_error


pytestmark = pytest.mark.usefixtures("needs_kernel")
SHAPES = {"tiled": TILED, "untiled": UNTILED}
CASES = [("native", torch.float32), ("native", torch.bfloat16), ("native-int8", torch.bfloat16)]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    @cache
    def load(shape: str, backend: str, dtype: torch.dtype):
        path = tmp_path_factory.mktemp("hybrid") / "model.gguf"
        return load_model(write_hybrid(path, SHAPES[shape], "Q8_0"), dtype=dtype, backend=backend)

    return load


@pytest.fixture
def calls(monkeypatch):
    """How many native calls there were, by function."""
    found = {"run_delta": 0, "attend": 0}
    library = native.library()
    for name in found:
        monkeypatch.setattr(library, name, _counting(found, name, getattr(library, name)))
    return found


def _counting(found, name, function):
    def call(address):
        found[name] += 1
        return function(address)

    return call


@torch.no_grad()
def answers(model, text, sizes=None, **options):
    """Logits and cache of a text that is computed in pieces."""
    cache = DynamicCache(config=model.config)
    pieces = [text] if sizes is None else text.split(sizes, dim=1)
    found = [model(piece, **as_cache(cache), use_cache=True, **options).logits for piece in pieces]
    return torch.cat(found, dim=1), cache


def recurrent(cache):
    return [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]


def states_of(cache):
    return [(layer.conv_states[0], layer.recurrent_states[0]) for layer in recurrent(cache)]


@pytest.mark.parametrize("shape", SHAPES)
def test_hybrid_layers_equal_the_modules_in_logits_and_states(model_of, calls, shape):
    model, text = model_of(shape, "native", torch.float32), ids(2, 150)
    for sizes in (None, [90, 1, 1, 58]):
        found, cache = answers(model, text, sizes)
        assert calls["run_delta"]
        calls["run_delta"] = 0
        expected, wanted = answers(modules_only(model), text, sizes)
        assert not calls["run_delta"]
        assert relative_error(found, expected) < 2e-6
        for mine, theirs in zip(states_of(cache), states_of(wanted), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_hybrid_layers_give_the_same_bits_however_a_text_is_split(model_of, calls, backend, dtype):
    """Not of logits, nor of states: a chain that is verified has the bits of single steps."""
    model, text = model_of("tiled", backend, dtype), ids(1, 110)
    whole, cache = answers(model, text)
    for sizes in ([1] * 110, [5] * 22, [64, 1, 13, 32]):
        found, other = answers(model, text, sizes)
        assert torch.equal(found, whole), sizes
        for mine, theirs in zip(states_of(cache), states_of(other), strict=True):
            assert all(map(torch.equal, mine, theirs))
    assert calls["attend"] == 1 + 110 + 22 + 4


def test_hybrid_layers_give_a_row_the_same_bits_in_every_batch(model_of):
    """Left padding and neighbours change nothing."""
    model, lengths = model_of("tiled", "native", torch.float32), (9, 30, 17)
    batch = padded(lengths)
    text = batch.pop("input_ids")
    found, _ = answers(model, text, **batch)
    for row, length in enumerate(lengths):
        alone, _ = answers(model, text[row : row + 1, -length:])
        assert torch.equal(found[row : row + 1, -length:], alone)


def test_hybrid_attention_leaves_long_prompts_to_sdpa(model_of, calls):
    model, text = model_of("tiled", "native", torch.float32), ids(1, 200)
    found, cache = answers(model, text)
    assert calls == {"run_delta": EVERY - 1, "attend": 0}
    assert not any(layer.replay for layer in recurrent(cache))  # it would keep much memory
    assert relative_error(found, answers(modules_only(model), text)[0]) < 2e-6


def test_replay_advances_states_by_a_part_of_a_forward(model_of):
    """A rejection runs no layer again: the bits are those of single steps."""
    model, text = model_of("tiled", "native", torch.bfloat16), ids(2, 30)
    for count in range(9):
        _, cache = answers(model, text[:, :21])
        before = copy.deepcopy(states_of(cache))
        with torch.no_grad():
            model(text[:, 21:], **as_cache(cache), use_cache=True)
        for layer, states in zip(recurrent(cache), before, strict=True):
            layer.conv_states[0].copy_(states[0])
            layer.recurrent_states[0].copy_(states[1])
            layer.replay(count)
        expected = before if not count else states_of(answers(model, text[:, : 21 + count])[1])
        for mine, theirs in zip(states_of(cache), expected, strict=True):
            assert all(map(torch.equal, mine, theirs)), count


def test_replay_covers_only_the_last_native_forward_of_a_cache(model_of):
    model, text = model_of("tiled", "native", torch.float32), ids(1, 12)
    _, cache = answers(model, text)
    assert all(layer.replay for layer in recurrent(cache))
    assert not any(layer.replay for layer in recurrent(copy.deepcopy(cache)))
    with torch.no_grad():
        modules_only(model)(text, **as_cache(cache), use_cache=True)
    assert not any(layer.replay for layer in recurrent(cache))


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_rejected_chains_run_no_rows_again(model_of, monkeypatch, batch_size, do_sample):
    """Text, and the rows of every forward after the prompt: those of a chain, whatever was rejected before."""
    model, prompt = model_of("tiled", "native", torch.bfloat16), ids(batch_size, 20)
    request = {"max_new_tokens": 24, "do_sample": do_sample, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(2)
    plain = model.generate(prompt, **request)
    rows = []
    forward = type(model).forward

    def counting(self, *arguments, **named):
        rows.append(named["input_ids"].shape[1])
        return forward(self, *arguments, **named)

    monkeypatch.setattr(type(model), "forward", counting)
    script = ScriptedDrafter(plain[:, 20:], (1, 1, 1, 1), accuracy=0.6, vocab_size=VOCAB_SIZE)
    speculator = Speculator(script, adaptive=False)
    torch.manual_seed(2)
    assert torch.equal(model.generate(prompt, **request, speculator=speculator), plain)
    assert speculator.stats.accepted_tokens > 4
    assert max(rows[rows.index(20) + 1 :]) == 5  # before: those of a trial, in the first request


class TestModulesCompute:
    """What the kernel does not know is left to transformers' modules, with the same result."""

    def test_modules_compute_with_a_recording_cache(self, model_of, calls):
        model, text = model_of("tiled", "native", torch.float32), ids(1, 20)
        cache = DynamicCache(config=model.config)
        for layer in cache.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        with torch.no_grad():
            found = model(text, **as_cache(cache), use_cache=True).logits
        assert calls["run_delta"] == 0
        assert relative_error(found, answers(model, text)[0]) < 2e-6

    def test_modules_compute_with_gradients(self, model_of, calls):
        model = model_of("tiled", "native", torch.float32)
        states = torch.randn(1, 5, 256, requires_grad=True)
        net = model.model.layers[0].linear_attn
        net(states).sum().backward()
        assert calls["run_delta"] == 0
        assert states.grad is not None
        with torch.no_grad():
            net(states)
        assert calls["run_delta"] == 1

    def test_modules_compute_under_autocast(self, model_of, calls):
        model = model_of("tiled", "native", torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, _ = answers(model, ids(1, 9))
        assert calls["run_delta"] == 0
        assert relative_error(found, answers(model, ids(1, 9))[0]) < 3e-2

    @pytest.mark.parametrize("later", [False, True], ids=["at load", "later"])
    def test_modules_compute_another_attention(self, model_of, calls, later):
        path = model_of("tiled", "native", torch.float32).name_or_path
        named = {} if later else {"attn_implementation": "eager"}
        model = load_model(path, dtype=torch.float32, backend="native", **named)
        if later:
            model.set_attn_implementation("eager")
        with torch.no_grad():
            weights = model(ids(1, 9), output_attentions=True).attentions
        assert calls["attend"] == 0
        assert any(each is not None and each.shape == (1, 4, 9, 9) for each in weights)

    def test_modules_compute_float16(self, model_of, calls):
        path = model_of("tiled", "native", torch.float32).name_or_path
        model = load_model(path, dtype=torch.float16, backend="native")
        assert answers(model, ids(1, 9))[0].isfinite().all()
        assert calls == {"run_delta": 0, "attend": 0}

    def test_modules_compute_in_a_copy(self, model_of, calls):
        twin = copy.deepcopy(model_of("tiled", "native", torch.float32))
        assert isinstance(twin.model.layers[0].linear_attn.forward, DeltaForward)
        answers(twin, ids(1, 9))
        assert calls == {"run_delta": 0, "attend": 0}

    def test_modules_compute_adapters(self, model_of):
        peft = pytest.importorskip("peft")
        path = model_of("tiled", "native", torch.float32).name_or_path
        model = load_model(path, dtype=torch.float32, backend="native")
        config = peft.LoraConfig(target_modules=["in_proj_qkv", "out_proj", "q_proj"], init_lora_weights=False)
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, config).eval()
        text = ids(1, 12)
        with torch.no_grad():
            found, expected = adapted(text).logits, modules_only(adapted)(text).logits
        assert relative_error(found, expected) < 2e-6
        assert relative_error(found, answers(load_model(path, dtype=torch.float32), text)[0]) > 1e-3


@pytest.mark.rest
@pytest.mark.parametrize("flags", OTHER_CPUS)
def test_hybrid_layers_are_right_on_cpus_without_some_instructions(model_of, compiled, monkeypatch, flags):
    model, text = model_of("tiled", "native", torch.float32), ids(1, 40)
    expected, _ = answers(modules_only(model), text)
    library = compiled(flags)
    ours = native.library()
    for name in ("run_delta", "attend"):
        monkeypatch.setattr(ours, name, getattr(library, name))
    found, _ = answers(model, text, [7, 1, 32])
    assert relative_error(found, expected) < 2e-6
