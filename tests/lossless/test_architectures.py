"""Which causal LMs of transformers speculate, and how: tiny random models of each, text compared with plain `generate`.

`docs/architectures.md`, and the list of classes that need no trial at run time, are what
`hf_speculate.request.trial` finds; `HF_SPECULATE_WRITE_DOCS=1 pytest -k in_the_docs`
writes them again, and a stale file fails. The page's second part is that of `tests/training/test_classes.py`.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from transformers import DynamicCache

import hf_speculate
from hf_speculate import Speculator
from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.forward.recurrent import has_recurrent_layers, target_shape
from hf_speculate.request import trial
from hf_speculate.request.trial import INPUT_PREPARATION, minor_version, run_trial
from hf_speculate.target import has_own_method
from hf_speculate.testing import RandomDrafter, ScriptedDrafter, check_lossless

from ..support.architectures import CASES, CHAINS, HEADS, NOTHING, TREES, build
from ..support.inputs import padded_batch
from ..support.models import VOCAB_SIZE
from ..support.tiers import quick_quarter


def drafters(continuation):
    """Right in everything, in half of it, in nothing (but by chance)."""
    yield "perfect", ScriptedDrafter(continuation, (3, 2, 1, 1), vocab_size=VOCAB_SIZE)
    yield "adversarial", ScriptedDrafter(continuation, (2, 2, 1), accuracy=0.5, vocab_size=VOCAB_SIZE)
    yield "random", RandomDrafter(vocab_size=VOCAB_SIZE)


SPECULATING = [name for name, case in CASES.items() if case.drafts != NOTHING]


@pytest.mark.parametrize("name", quick_quarter(SPECULATING))
def test_text_is_that_of_plain_generate_whatever_is_drafted(name, prompt):
    model, case, ids = build(name), CASES[name], prompt(13)
    plain = model.generate(ids, max_new_tokens=17)
    for kind, drafter in drafters(plain[0, 13:]):
        speculator = Speculator(drafter)
        text = model.generate(ids, max_new_tokens=17, speculator=speculator)
        if not torch.equal(text, plain):  # then it is a proven tie, or this raises
            check_lossless(model, Speculator(drafter), [ids], max_new_tokens=17)
        said = " ".join(speculator.stats.fallbacks)
        assert (case.why in said) if case.why else not said, f"{kind}: fallbacks say {said!r}"
        if kind == "perfect":
            assert speculator.stats.mean_acceptance_length == 5, "four drafted tokens and the bonus token per round"


@pytest.mark.parametrize("name", quick_quarter(SPECULATING))
def test_rows_of_a_padded_batch_are_those_of_plain_generate(name, prompt):
    model, inputs = build(name), padded_batch(prompt, (11, 4, 9))
    plain = model.generate(**inputs, max_new_tokens=12)
    drafter = ScriptedDrafter(plain[:, 11:], (2, 2, 1), accuracy=0.6, vocab_size=VOCAB_SIZE)
    text = model.generate(**inputs, max_new_tokens=12, speculator=Speculator(drafter))
    assert torch.equal(text, plain)


@pytest.mark.parametrize("name", quick_quarter(name for name, case in CASES.items() if case.drafts == NOTHING))
def test_models_that_cannot_speculate_give_the_reason_or_run_plain(name, prompt):
    model, speculator = build(name), Speculator(RandomDrafter(vocab_size=VOCAB_SIZE))
    with pytest.raises(UnsupportedRequestError, match=CASES[name].why):
        model.generate(prompt(9), max_new_tokens=4, speculator=speculator)
    hf_speculate.attach(model, speculator)
    text = model.generate(prompt(9), max_new_tokens=8)
    hf_speculate.detach(model)
    assert torch.equal(text, model.generate(prompt(9), max_new_tokens=8))
    assert CASES[name].why in " ".join(speculator.stats.fallbacks)


@cache
def found_by_trial(name) -> str:
    """What the trial finds, for any class whatever is known of it."""
    model = build(name)
    shape, reason = target_shape(model, DynamicCache(config=model.config))
    if shape != "single":
        shape, _ = run_trial(model, shape, reason)
    return {"tree": TREES, "chain": CHAINS, "single": NOTHING}[shape]


@pytest.mark.parametrize("name", quick_quarter(CASES))
def test_trial_agrees_with_the_table_of_models(name):
    assert found_by_trial(name) == CASES[name].drafts


@pytest.mark.rest
def test_the_table_in_the_docs_and_the_list_of_classes_are_what_the_trial_finds(request):
    list_path = Path(trial.__file__).with_name("tried_classes.json")
    listed = json.loads(list_path.read_text())
    is_writing = bool(os.environ.get("HF_SPECULATE_WRITE_DOCS"))
    if not is_writing and minor_version() not in listed:
        pytest.skip("they are about other minor versions of transformers; every model is tried with this one")
    made = {
        list_path: json.dumps(dict(sorted((listed | {minor_version(): tried_classes()}).items())), indent=1) + "\n",
    }
    if Version(minor_version()) >= max(map(Version, listed)):
        page = request.config.rootpath / "docs" / "architectures.md"
        made[page] = document() + "".join(page.read_text().partition(HEADS)[1:])
    for path, text in made.items():
        if is_writing:
            path.write_text(text)
        assert path.read_text() == text, "stale: run this test with HF_SPECULATE_WRITE_DOCS=1"


def tried_classes() -> list[str]:
    """Those that the trial finds no narrower than their config says."""
    names = set()
    for name in CASES:
        model = build(name)
        cache = DynamicCache(config=model.config)
        is_widest = {"tree": TREES, "chain": CHAINS}.get(target_shape(model, cache)[0]) == found_by_trial(name)
        has_own = any(has_own_method(model, method) for method in INPUT_PREPARATION)
        if is_widest and not has_own and not has_recurrent_layers(cache):  # others are tried whatever this list says
            names.add(type(model).__name__)
    return sorted(names)


HEAD = """# Architectures

Causal LMs of transformers that were tried at tiny random size in fp32 (`tests/lossless/test_architectures.py`, which
also writes this page): with a drafter that is always right, one that is right half of the time and one that guesses,
alone and in a left-padded batch, the text is that of plain `generate`. Others work the same way where their forward
takes position ids, a 4-D mask (or one for each layer type) and a `Cache` of attention layers.

- **trees**: every draft tree is scored in one forward. Sliding windows and chunks keep about 1.5 windows of entries.
- **chains**: one branch per round; why is in `stats.fallbacks`. For recurrent layers one copy of their states is held,
  however long the text; accepted tokens of a chain that was rejected in part are run again with the next one (16 at
  most), and the rows of a batch advance together.
- **no drafts**: an explicit `speculator=` raises the error given; an attached one steps aside with a warning.

The column *drafts* is what a trial finds. It also runs before the first request of a model whose class is not in this
table, whose class prepares its inputs its own way, or that has recurrent layers: stock's loop and ours write a tiny
left-padded batch, with drafts that are accepted, in part accepted and rejected, and the logits of every step are
compared.

For `zamba2` and `nemotron_h` the result depends on the weights. transformers raises time steps below `time_step_min`,
but only in forwards over several tokens. A model with such steps takes no drafts.

| `model_type` | drafts | remarks |
|---|---|---|
"""


def document() -> str:
    rows = []
    for name, case in CASES.items():
        remarks = "; ".join(part for part in (case.note, case.why) if part)
        rows.append(f"| `{name}` | {found_by_trial(name)} | {remarks} |\n")
    return HEAD + "".join(rows)
