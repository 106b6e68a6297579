"""Random requests, equal to plain `generate` or a tie: processors x stops x batch shapes x drafters x tree shapes x
outputs x hooks x token types x windows x embeddings that are not finite x second turns on the returned cache x
torch's defaults, which other threads may change meanwhile.

Four parts of fifty fixed cases each, the first of them in `make test`; two thousand fresh ones in the nightly tier.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import HypothesisProvider
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from hf_speculate import Speculator
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.testing import EmptyDrafter, RandomDrafter, ScriptedDrafter
from hf_speculate.testing.lossless import TOLERANCE
from hf_speculate.verification.noise import Noise
from hf_speculate_plugins.combined import CombinedDrafter
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions
from hf_speculate_plugins.prompt_lookup import PromptLookupDrafter
from hf_speculate_plugins.suffix import SuffixDrafter

from ..support.block_heads import KINDS, random_block
from ..support.criteria import EndsRow
from ..support.inputs import character_tokenizer
from ..support.models import VOCAB_SIZE, build_tiny_gpt2
from ..support.tiers import quick
from ..support.tiny_heads import HIDDEN, random_eagle, random_medusa


shared_tokenizer = cache(character_tokenizer)


class Stateful(LogitsProcessor):
    """Unknown: every call counts, and the whole batch is looked at."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        return scores.roll(self.num_calls, dims=-1) + 0.1 * (input_ids[:1, -1:] % 7).float()


class Never(LogitsProcessor):
    """One token is never chosen; the last word on it."""

    row_wise = True

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores):
        forbidden = torch.arange(scores.shape[-1], device=scores.device) == self.token
        return scores.masked_fill(forbidden, torch.finfo(scores.dtype).min)


class EndsAfter(StoppingCriteria):
    """Unknown, and stateful by row."""

    def __init__(self, token):
        self.token, self.done = token, None

    def __call__(self, input_ids, scores, **kwargs):
        ends = input_ids[:, -1] == self.token
        self.done = ends if self.done is None else self.done | ends
        return self.done


def two_in_three(batch_id, text):
    return [token for token in range(3, VOCAB_SIZE) if (token + int(text[-1]) + batch_id) % 3]


def of(name, strategy):
    return strategy.map(lambda value: {name: value})


PROCESSORS = [
    of("repetition_penalty", st.sampled_from([0.8, 1.2, 1.7])),
    of("no_repeat_ngram_size", st.integers(1, 3)),
    of("encoder_repetition_penalty", st.sampled_from([0.7, 1.5])),
    of("encoder_no_repeat_ngram_size", st.integers(1, 2)),
    of("bad_words_ids", st.just([[5], [9, 11], [20, 21]])),
    of("sequence_bias", st.just([[[5], -3.0], [[7, 9], 4.0], [[30], 2.0]])),
    of("min_new_tokens", st.integers(1, 8)),
    of("forced_eos_token_id", st.integers(3, VOCAB_SIZE - 1)),
    of("forced_bos_token_id", st.integers(3, VOCAB_SIZE - 1)),
    of("suppress_tokens", st.just(list(range(10, 40)))),
    of("begin_suppress_tokens", st.just(list(range(3, 60)))),
    of("exponential_decay_length_penalty", st.just((2, 1.4))),
    of("remove_invalid_values", st.just(True)),
    of("renormalize_logits", st.just(True)),
    of("guidance_scale", st.sampled_from([0.5, 2.0])),
    of("prefix_allowed_tokens_fn", st.just(two_in_three)),
    of(
        "watermarking_config",
        st.sampled_from([WatermarkingConfig(bias=2.5), SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)]),
    ),
    of("stateful", st.just(True)),
]
WARPERS = [
    of("temperature", st.sampled_from([0.3, 0.8, 1.5])),
    of("top_k", st.sampled_from([0, 1, 5, 50])),
    of("top_p", st.sampled_from([0.5, 0.9])),
    of("min_p", st.sampled_from([0.05, 0.3])),
    of("top_h", st.just(0.5)),
    of("typical_p", st.just(0.7)),
    of("epsilon_cutoff", st.just(0.01)),
    of("eta_cutoff", st.just(0.01)),
]
A_TOKEN = st.integers(3, VOCAB_SIZE - 1)
BAD = VOCAB_SIZE - 1
"""The token whose embedding is not finite, where a case has one: drafted now and then, never written."""
STOPS = [
    of("eos_token_id", st.lists(A_TOKEN, min_size=1, max_size=12)),
    of("ends_after", A_TOKEN),
    of("ends_row", A_TOKEN),
    of("stop_strings", st.lists(st.text("abcdefgh XYZ", min_size=1, max_size=2), min_size=1, max_size=5)),
]
# What is recorded: nothing (rows that end leave the forwards), or something (they go on with padding).
OUTPUTS = [(), (), ("scores", "logits"), ("hidden_states",), ("attentions", "scores"), ("logits", "hidden_states")]
# Of a second turn on the returned cache: what is passed as the prompt, and whether it is speculative too.
SECOND_TURNS = [None, *((kind, again) for kind in ("whole text", "new tokens") for again in (False, True))]
# torch's default dtype and device during a request, or a thread that loads models meanwhile (`circumstances`).
DEFAULTS = [None, None, torch.bfloat16, torch.float16, torch.float64, "meta", "loading"]
# Processors of stock's that make tensors of the default dtype: what they do while a model loads is up to chance.
READ_DEFAULTS = {"bad_words_ids", "sequence_bias", "eta_cutoff"}
BRANCHINGS = st.lists(st.integers(1, 4), min_size=1, max_size=5)
SCRIPTED = st.tuples(st.just("scripted"), BRANCHINGS, st.sampled_from([0.0, 0.5, 0.8, 1.0]), st.integers(0, 99))
PARTS = st.one_of(
    SCRIPTED,
    st.tuples(st.just("random"), st.integers(1, 20), st.integers(0, 99)),
    st.tuples(st.just("suffix"), st.sampled_from([{}, {"depth": 3}]), st.booleans()),
    st.tuples(st.just("eagle"), st.integers(1, 4), st.integers(1, 4), st.integers(1, 12), st.booleans()),
    st.tuples(st.just("block"), st.sampled_from(sorted(KINDS)), st.integers(1, 12), st.integers(1, 4)),
)
DRAFTERS = st.one_of(
    SCRIPTED,
    PARTS,
    st.tuples(st.just("combined"), PARTS, PARTS),
    st.tuples(st.just("prompt_lookup"), st.integers(1, 3), st.integers(1, 6)),
    st.tuples(st.just("draft_model"), st.sampled_from([0, 1]), st.integers(1, 4), st.integers(1, 3)),
    st.tuples(st.just("medusa"), st.sampled_from([((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)), ((0,), (0, 0))])),
    st.just(("empty",)),
)


def merged(parts):
    return {key: value for part in parts for key, value in part.items()}


@st.composite
def cases(draw):
    do_sample = draw(st.booleans())
    choices = [*PROCESSORS, *WARPERS] if do_sample else PROCESSORS
    return Case(
        architecture=draw(st.sampled_from(["llama", "qwen2", "gpt2", "mistral"])),
        attention=draw(st.sampled_from(["eager", "sdpa"])),
        lengths=tuple(draw(st.lists(st.integers(1, 10), min_size=1, max_size=4))),
        num_return_sequences=draw(st.sampled_from([1, 1, 2])) if do_sample else 1,
        max_new_tokens=draw(st.integers(1, 20)),
        do_sample=do_sample,
        seed=draw(st.integers(0, 2**16)),
        processors=merged(draw(st.lists(st.one_of(choices), max_size=4))),
        stops=merged(draw(st.lists(st.one_of(STOPS), max_size=2))),
        drafter=draw(DRAFTERS),
        chunk=draw(st.sampled_from([None, None, 3])),
        outputs=draw(st.sampled_from(OUTPUTS)),
        hook=draw(st.sampled_from([None, None, None, "everywhere", "each row", "bound"])),
        second_turn=draw(st.sampled_from(SECOND_TURNS)),
        is_broken=draw(st.sampled_from([False, False, True])),
        defaults=draw(st.sampled_from(DEFAULTS)),
    )


@dataclass(frozen=True)
class Case:
    architecture: str
    attention: str
    lengths: tuple[int, ...]
    num_return_sequences: int
    max_new_tokens: int
    do_sample: bool
    seed: int
    processors: dict[str, Any] = field(default_factory=dict)
    stops: dict[str, Any] = field(default_factory=dict)
    drafter: tuple = ("empty",)
    chunk: int | None = None
    outputs: tuple[str, ...] = ("scores", "logits")
    hook: str | None = None
    second_turn: tuple[str, bool] | None = None
    is_broken: bool = False
    defaults: torch.dtype | str | None = None

    @property
    def batch_size(self) -> int:
        return len(self.lengths) * self.num_return_sequences

    def inputs(self, prompt):
        width = max(self.lengths)
        rows = [
            torch.nn.functional.pad(prompt(n, seed=self.seed % 50 + i)[0], (width - n, 0))
            for i, n in enumerate(self.lengths)
        ]
        mask = [(torch.arange(width) >= width - n).long() for n in self.lengths]
        ids = torch.stack(rows)
        inputs = {
            "input_ids": ids.masked_fill(ids == BAD, BAD - 1) if self.is_broken else ids,
            "attention_mask": torch.stack(mask),
        }
        if self.architecture == "gpt2":
            types = (inputs["input_ids"] * 7 + self.seed) % VOCAB_SIZE  # they have the embeddings of tokens
            inputs["token_type_ids"] = types.masked_fill(types == BAD, BAD - 1) if self.is_broken else types
        return inputs

    def request(self, inputs) -> dict[str, Any]:
        """A fresh one for every call: processors and criteria keep a state."""
        request = {**self.processors, **self.stops, "max_new_tokens": self.max_new_tokens, "do_sample": self.do_sample}
        request |= {"num_return_sequences": self.num_return_sequences, "prefill_chunk_size": self.chunk}
        criteria = [
            kind(request.pop(name))
            for name, kind in (("ends_after", EndsAfter), ("ends_row", EndsRow))
            if name in request
        ]
        processors = [Stateful()] if request.pop("stateful", False) else []
        processors += [Never(BAD)] if self.is_broken else []
        if "stop_strings" in request:
            request["tokenizer"] = shared_tokenizer()
        if "guidance_scale" in request:
            request["negative_prompt_ids"] = inputs["input_ids"].repeat_interleave(self.num_return_sequences, 0).flip(1)
        return {
            **request,
            "stopping_criteria": StoppingCriteriaList(criteria),
            "logits_processor": LogitsProcessorList(processors),
        }


def make_drafter(case, model, tiny_model, script):
    kind, *options = case.drafter
    if kind == "combined":
        parts = [make_drafter(replace(case, drafter=part), model, tiny_model, script) for part in options]
        return CombinedDrafter(parts)
    if case.architecture == "gpt2" and kind in ("eagle", "medusa", "draft_model"):
        kind, options = "scripted", ((2, 2, 1), 0.8, case.seed)  # those are made for the others
    if kind == "scripted":
        branching, accuracy, seed = options
        return ScriptedDrafter(script, branching, accuracy=accuracy, vocab_size=VOCAB_SIZE, seed=seed)
    if kind == "random":
        return RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=options[0], seed=options[1])
    if kind == "prompt_lookup":
        min_ngram, depth = options
        return PromptLookupDrafter.for_target(model, min_ngram=min_ngram, depth=depth)
    if kind == "suffix":
        return SuffixDrafter.for_target(model, **options[0], store=options[1])
    if kind == "draft_model":
        seed, depth, top_k = options
        draft = target(replace(case, attention="sdpa", is_broken=False), partial(tiny_model, seed=seed))
        return DraftModelDrafter(draft, DraftModelOptions(depth=depth, top_k=top_k))
    if kind == "eagle":
        depth, top_k, max_nodes, parallel = options
        return random_eagle(depth, top_k, max_nodes, model, parallel)
    if kind == "block":
        return random_block(options[0], model, max_nodes=options[1], top_k=options[2])
    return random_medusa(options[0], model) if kind == "medusa" else EmptyDrafter()


def target(case, tiny_model):
    if case.architecture == "gpt2":
        model = build_tiny_gpt2(case.attention)
    else:
        windows = {"sliding_window": 6} if case.architecture == "mistral" else {}
        model = tiny_model(case.architecture, attention=case.attention, **windows)
    return broken(model) if case.is_broken else model


@cache
def broken(model):
    """A copy with an embedding that nobody trained."""
    model = copy.deepcopy(model)
    embeddings = model.get_input_embeddings()
    embeddings.weight = torch.nn.Parameter(embeddings.weight.clone(), requires_grad=False)  # GPT-2's are tied
    embeddings.weight[BAD] = float("nan")
    return model


def add_bound(bias, module, args, output):
    return (output[0] if isinstance(output, tuple) else output) + bias


@contextmanager
def hooked(case, model):
    """A hook on a layer's MLP: the same for all, a value for each row, or one that is bound to it."""
    if case.hook is None:
        yield
        return
    num_rows = 1 if case.hook == "everywhere" else case.batch_size
    generator = torch.Generator().manual_seed(case.seed)
    bias = 0.5 * torch.randn(num_rows, 1, HIDDEN, generator=generator, dtype=torch.float32, device="cpu")
    hook = partial(add_bound, bias) if case.hook == "bound" else lambda *args: add_bound(bias, *args)
    layers = model.transformer.h if case.architecture == "gpt2" else model.model.layers
    handle = layers[0].mlp.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def circumstances(case, is_speculative):
    """torch's defaults of a case. In "loading" another thread sets the dtype again and again while the speculative
    request runs, as `from_pretrained` does."""
    before, ends = torch.get_default_dtype(), threading.Event()

    def load():
        while not ends.is_set():
            torch.set_default_dtype(torch.bfloat16)
            ends.wait(1e-4)
            torch.set_default_dtype(before)

    is_loading = case.defaults == "loading" and is_speculative and not case.processors.keys() & READ_DEFAULTS
    thread = threading.Thread(target=load) if is_loading else None
    if thread is not None:
        thread.start()
    elif isinstance(case.defaults, torch.dtype):
        torch.set_default_dtype(case.defaults)
    try:
        with torch.device("meta") if case.defaults == "meta" else nullcontext():
            yield
    finally:
        ends.set()
        if thread is not None:
            thread.join()
        torch.set_default_dtype(before)


def generate(model, case, inputs, speculator, outputs=None):
    torch.manual_seed(case.seed)
    recorded = {f"output_{name}": True for name in (case.outputs if outputs is None else outputs)}
    with warnings.catch_warnings(), hooked(case, model), circumstances(case, speculator is not None):
        warnings.simplefilter("ignore")
        output = model.generate(
            **inputs, **case.request(inputs), speculator=speculator, return_dict_in_generate=True, **recorded
        )
    return output, torch.get_rng_state()


def second_turn(model, case, inputs, first, speculator):
    """The next turn on the returned cache, padding masked; the cache is used up."""
    kind, is_speculative = case.second_turn
    width = inputs["input_ids"].shape[1]
    rows = inputs["attention_mask"].repeat_interleave(case.num_return_sequences, 0)
    later = torch.randint(3, VOCAB_SIZE, (len(rows), 3), generator=torch.Generator().manual_seed(case.seed))
    mask = torch.cat([rows, (first.sequences[:, width:] != 0).long(), torch.ones_like(later)], dim=1)
    text = torch.cat([first.sequences, later], dim=1)
    prompt = text if kind == "whole text" else text[:, cache_of(first).get_seq_length() :]
    request = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(
        prompt,
        attention_mask=mask,
        **as_cache(cache_of(first)),
        speculator=speculator if is_speculative else None,
        **request,
    )


def is_tie(case, plain, ours, width) -> bool:
    """Whether the first difference is one of rounding: equal logits but for their last bits, and a margin as small."""
    num_steps = min(plain.sequences.shape[1], ours.sequences.shape[1]) - width
    differs = (plain.sequences[:, width : width + num_steps] != ours.sequences[:, width : width + num_steps]).any(0)
    if not differs.any():
        return False
    step = int(differs.nonzero()[0])
    rows = (plain.sequences[:, width + step] != ours.sequences[:, width + step]).nonzero().flatten()
    logits = plain.logits[step][rows]
    allowed = TOLERANCE[torch.float32] * logits.abs().max()
    decision = plain.scores[step]
    if case.do_sample:
        torch.manual_seed(case.seed)
        noise = Noise(*decision.shape, decision.device).row(step)
        decision = torch.log_softmax(decision, dim=-1) - noise.log()
    best = decision[rows].topk(2).values
    margin = (best[:, 0] - best[:, 1]).max()
    scale = 1 / min(case.processors.get("temperature", 1.0), 1.0)
    is_right = (logits - ours.logits[step][rows]).abs().max() <= allowed
    return bool(is_right and margin <= 2 * scale * allowed)


def check(case, tiny_model, prompt, seen: Counter) -> None:
    model, inputs = target(case, tiny_model), case.inputs(prompt)
    width = inputs["input_ids"].shape[1]
    seen["cases"] += 1
    try:
        plain, rng = generate(model, case, inputs, None)
    except (RuntimeError, ValueError) as error:  # a request that is impossible in itself
        seen["refused"] += 1
        with pytest.raises(type(error)):
            generate(model, case, inputs, Speculator(RandomDrafter(vocab_size=VOCAB_SIZE)))
        return
    drafter = make_drafter(case, model, tiny_model, plain.sequences[:, width:])
    speculator = Speculator(drafter, ahead=drafter.drafts_ahead and case.chunk is None)
    ours, our_rng = generate(model, case, inputs, speculator)
    seen["accepted"] += ours.speculation.accepted_tokens > 0
    seen["leaving"] += len(case.lengths) > 1 and not case.outputs and case.hook is None
    seen["ahead"] += ours.speculation.drafts_ahead > 0
    seen["hooked"] += case.hook is not None
    seen["odd defaults"] += case.defaults is not None
    seen["scored again"] += any("not finite" in reason for reason in ours.speculation.fallbacks)
    seen["second turns"] += case.second_turn is not None
    seen["lock-step"] += any("lock-step" in reason for reason in ours.speculation.fallbacks)
    seen["ragged"] += len(case.lengths) > 1 and not any("lock-step" in r for r in ours.speculation.fallbacks)
    if not torch.equal(ours.sequences, plain.sequences):
        told = f"ours {ours.sequences.tolist()}, plain {plain.sequences.tolist()}"
        outputs = ("scores", "logits")
        again = [generate(model, case, inputs, chosen, outputs)[0] for chosen in (None, Speculator(drafter))]
        assert is_tie(case, *again, width), told
        seen["ties"] += 1
        return
    assert torch.equal(our_rng, rng), "equal text, but the RNG is elsewhere"
    assert_same_outputs(case, plain, ours)
    assert cache_of(ours).get_seq_length() == plain.sequences.shape[1] - 1
    if case.second_turn is not None:
        turns = [second_turn(model, case, inputs, first, speculator) for first in (plain, ours)]
        if not torch.equal(turns[0].sequences, turns[1].sequences):
            greedy = replace(case, do_sample=False, processors={})
            for turn in turns:
                turn.scores = turn.logits
            prompt_width = turns[0].sequences.shape[1] - 5
            assert is_tie(greedy, *turns, prompt_width), f"second turns {[turn.sequences.tolist() for turn in turns]}"
            seen["ties"] += 1


def assert_same_outputs(case, plain, ours) -> None:
    """Shapes and values of every step of every row."""
    for name in case.outputs:
        assert len(ours[name]) == len(plain[name]), name
        for mine, theirs in zip(ours[name], plain[name], strict=True):
            pairs = [(mine, theirs)] if torch.is_tensor(mine) else zip(mine, theirs, strict=True)
            for a, b in pairs:
                torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3, msg=lambda told, name=name: f"{name}: {told}")


def run(num_cases: int, tiny_model, prompt, part: int | None = None) -> Counter:
    """Fresh cases, or those of a fixed part."""
    seen: Counter = Counter()

    @settings(
        max_examples=num_cases, database=None, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
    )
    @given(cases())
    def equal_to_plain(case):
        check(case, tiny_model, prompt, seen)

    (equal_to_plain if part is None else seed(part)(equal_to_plain))()
    # A divergence is expected about once in 1e5 tokens of fp32, see the design.
    assert seen["ties"] <= 1, seen
    assert seen["refused"] < num_cases / 5, seen
    kinds = ("accepted", "lock-step", "ragged", "leaving", "hooked", "second turns", "odd defaults")
    assert seen["ahead"] >= num_cases // 200, seen
    assert min(seen[kind] for kind in kinds) > num_cases / 12, f"one-sided cases: {seen}"
    assert seen["scored again"] >= num_cases // 200, seen
    return seen


@pytest.fixture
def cases_are_fixed(monkeypatch):
    """Hypothesis draws some values from the constants in the modules that happen to be imported. Not here."""
    monkeypatch.setattr(HypothesisProvider, "_maybe_draw_constant", lambda *_, **__: None)


# Parts that are not one-sided.
@pytest.mark.parametrize("part", quick((11, 10, 7, 13)))
@pytest.mark.usefixtures("cases_are_fixed")
def test_fifty_random_requests_equal_plain(tiny_model, prompt, part):
    assert run(50, tiny_model, prompt, part)["cases"] >= 50


@pytest.mark.slow
def test_two_thousand_random_requests_equal_plain(tiny_model, prompt):
    assert run(2000, tiny_model, prompt)["cases"] >= 2000
