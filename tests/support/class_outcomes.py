"""Heads for each class of `architectures`: made, trained for two steps, saved, loaded, and drafted with; or refused."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path

import torch
from datasets import Dataset

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.errors import SpeculateError, UnsupportedRequestError
from hf_speculate_training import HeadTrainingArguments, TrainingMethod
from hf_speculate_training.data import Collator, RowDataset
from hf_speculate_training.run.builder import build as build_run
from hf_speculate_training.states import TargetReader

from .architectures import build
from .inputs import random_prompt
from .mtp import FAMILIES, load_target, write_target


METHODS = ("eagle3", "dspark", "medusa", "mtp")
# Outcome -> pattern of the sentences that refuse.
REFUSALS = {
    "takes no drafts": r"does not score several tokens at once|needs a transformers Cache|needs transformers >= ",
    "other logits": r"the logits of \w+ are not its output matrix times its last hidden state",
    "no such layers": r"of which a draft layer \(MTP\) is made",
    "not alone": r"cannot run alone as a draft layer \(MTP\)|cannot be made as a draft layer \(MTP\)",
}
WORKS = "yes"


@cache
def outcome(name: str, method: str) -> tuple[str, str]:
    """The outcome of training a new head for a class: `WORKS`, or a key of `REFUSALS` and the sentence.

    Only what is refused before the first step is an outcome; anything else raises.
    """
    target = build(name)
    try:
        parts = build_run(_arguments(), target, method, _rows())
        reader = TargetReader(target, parts.method.feature_layers)
        parts.method.drafter(target).check_layout()
    except SpeculateError as error:
        return _named(error)
    _train(parts.method, reader)
    with tempfile.TemporaryDirectory() as folder:
        parts.method.save(folder, target)
        _assert_drafted(target, AutoSpeculator.from_pretrained(folder, target))
    return WORKS, ""


@cache
def outcome_of_suffix(name: str) -> tuple[str, str]:
    """The outcome of drafting without a head."""
    target = build(name)
    try:
        _assert_drafted(target, AutoSpeculator.from_name("suffix", target), is_certain=False)
    except UnsupportedRequestError as error:
        return _named(error)
    return WORKS, ""


@cache
def outcome_of_checkpoint(name: str) -> tuple[str, str]:
    """The outcome of drafting with the draft layers of a checkpoint; "" for families that publish none."""
    if name not in FAMILIES:
        return "", ""
    with tempfile.TemporaryDirectory() as folder:
        target = load_target(write_target(Path(folder), name))
        speculator = AutoSpeculator.from_name("mtp", target)
        try:
            _assert_drafted(target, speculator)
        except UnsupportedRequestError as error:
            return _named(error)
    return WORKS, ""


@cache
def _arguments() -> HeadTrainingArguments:
    return HeadTrainingArguments(output_dir=tempfile.gettempdir(), use_cpu=True, report_to=[])


def _train(method: TrainingMethod, reader: TargetReader) -> None:
    """Two steps, without a trainer's hundreds of milliseconds."""
    batch = Collator()(list(_rows()))
    optimizer = torch.optim.AdamW([each for each in method.parameters() if each.requires_grad], lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        method(batch, reader(batch)).loss.backward()
        optimizer.step()


@cache
def _rows() -> RowDataset:
    ids = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(0)).tolist()
    documents = {"input_ids": ids, "loss_mask": [[True] * 16] * 2, "length": [16] * 2}
    return RowDataset(Dataset.from_dict(documents), 16)


def _assert_drafted(target, speculator: Speculator, is_certain: bool = True) -> None:
    """Asserts that a text of some tokens is that of plain `generate`, and, of heads, that something was drafted."""
    ids = random_prompt(11)
    plain = target.generate(ids, max_new_tokens=12)
    assert torch.equal(target.generate(ids, max_new_tokens=12, speculator=speculator), plain)
    assert speculator.stats.drafted_tokens or not is_certain


def _named(error: SpeculateError) -> tuple[str, str]:
    sentence = str(error)
    return next(name for name, pattern in REFUSALS.items() if re.search(pattern, sentence)), sentence
