"""Targets with tokens that a head does not know: the text is theirs, and the drafts are what they were before."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from transformers import LogitsProcessor

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.errors import TargetMismatchError
from hf_speculate_plugins.block import BlockDrafter, BlockHead, BlockOptions
from hf_speculate_plugins.checkpoints import LoadReport
from hf_speculate_plugins.combined import CombinedDrafter
from hf_speculate_plugins.eagle import EagleDrafter
from hf_speculate_plugins.heads import LoadedHead
from hf_speculate_plugins.medusa import MedusaDrafter, StaticTree

from ..support.block_heads import KINDS, random_block, spec_of
from ..support.heads import (
    EAGLE_LAYOUTS,
    MEDUSA_CHOICES,
    PLAIN,
    SHAPES,
    VOCAB,
    batch_of,
    extended_target,
    random_heads,
    target,
    write_head,
    write_medusa_heads,
)
from ..support.tiers import quick, quick_quarter


pytestmark = pytest.mark.usefixtures("unchecked_shapes")


def _eagle(layout):
    return lambda model, folder: EagleDrafter.from_folder(write_head(folder, layout), model, **SHAPES["dynamic"])


def _medusa(**heads):
    return lambda model, _: MedusaDrafter(random_heads(**heads), model, tree=StaticTree.of(MEDUSA_CHOICES))


def _block(kind):
    return lambda model, _: random_block(kind, model)


def _own_block(model, _):
    """Embeddings and output matrix of its own."""
    head, generator = BlockHead(spec_of("dspark")), torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1)
    loaded = LoadedHead(head.eval().requires_grad_(False), None, LoadReport("made here"))
    return BlockDrafter(loaded, model, BlockOptions(max_nodes=12, top_k=3))


def _combined(model, folder):
    lookup = AutoSpeculator.from_name("prompt_lookup", target=model, min_ngram=1, depth=2).drafter
    return CombinedDrafter([_eagle("eagle1")(model, folder), lookup])


DRAFTERS = {
    **{layout: _eagle(layout) for layout in EAGLE_LAYOUTS},
    **{kind: _block(kind) for kind in KINDS},
    "own block": _own_block,
    "medusa": _medusa(),
    "medusa, target's matrix": _medusa(outputs=0),
    "medusa, truncated": _medusa(truncated=40),
    "combined": _combined,
}
# Nothing says how many tokens these were made for.
ALL_TOKENS = "medusa, target's matrix"
REQUEST = {**PLAIN, "max_new_tokens": 32}


class Insists(LogitsProcessor):
    """The first new token at every fifth position."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] % 5 == 0:
            scores = scores.clone()
            scores[:, VOCAB] = 1e3
        return scores


@pytest.mark.parametrize("name", quick_quarter(DRAFTERS))
def test_texts_without_new_tokens_have_the_same_drafts(tmp_path, prompt, drafts, name):
    seen, texts = [], []
    for place, model in (("before", target()), ("after", extended_target())):
        speculator = Speculator(DRAFTERS[name](model, tmp_path / place))
        texts.append(model.generate(**batch_of(prompt, 3), **REQUEST, do_sample=False, speculator=speculator))
        seen.append(list(drafts))
        drafts.clear()
    assert torch.equal(*texts)
    assert len(seen[0]) > 2
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", quick_quarter(DRAFTERS))
@pytest.mark.parametrize(
    "sampling", quick([{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 40}]), ids=str
)
def test_new_tokens_are_read_and_never_drafted(tmp_path, prompt, drafts, name, sampling):
    model, batch = extended_target(factor=2.0), batch_of(prompt, 3)
    batch["input_ids"][:, -2] = VOCAB + 2  # in the prompt, too
    speculator = Speculator(DRAFTERS[name](model, tmp_path / "head"))
    texts = []
    for chosen in (None, speculator):
        torch.manual_seed(5)
        texts.append(model.generate(**batch, **REQUEST, **sampling, logits_processor=[Insists()], speculator=chosen))
    assert torch.equal(*texts)
    assert (texts[0][:, 13:] == VOCAB).sum() >= 3 * 6
    assert len(drafts) > 2
    if name != ALL_TOKENS:
        assert all(token < VOCAB for tokens, _ in drafts for row in tokens for token in row[1:])


def test_embeddings_that_are_the_targets_have_its_new_rows(tmp_path):
    head = _eagle("eagle1")(extended_target(), tmp_path / "eagle1").head  # its file has a copy
    new = torch.tensor([[VOCAB + 1]])
    assert torch.equal(head.embed(new)[0], extended_target().model.embed_tokens.weight[VOCAB + 1 : VOCAB + 2])
    own = _eagle("speculators")(extended_target(), tmp_path / "own").head
    assert not own.embed(new).any()
    assert torch.equal(own.embed(new - 2)[0, 0], own.embed_tokens.weight[VOCAB - 1])


@pytest.mark.parametrize("name", ["safeailab", "speculators", "own block", "medusa"])
def test_target_extended_after_loading_gives_plain_text(tmp_path, prompt, name):
    model = copy.deepcopy(target())
    speculator = Speculator(DRAFTERS[name](model, tmp_path / "head"))
    model.resize_token_embeddings(VOCAB + 5, mean_resizing=False)
    request = {**batch_of(prompt, 1), **REQUEST, "do_sample": False, "logits_processor": [Insists()]}
    assert torch.equal(model.generate(**request), model.generate(**request, speculator=speculator))
    assert speculator.stats.rounds > 2


def test_check_target_refuses_a_head_loaded_before_the_extension(tmp_path):
    drafter = _eagle("safeailab")(target(), tmp_path / "head")
    with pytest.raises(TargetMismatchError, match=r"loaded for a target of 96 tokens; this one has 101. Load it again"):
        drafter.check_target(extended_target())
    _eagle("speculators")(target(), tmp_path / "own").check_target(extended_target())


@pytest.mark.parametrize("name", ["eagle1", "dflash", "safeailab", "medusa"])
@pytest.mark.parametrize("num_tokens", [VOCAB - 6, 2 * VOCAB + 1])
def test_other_tokenizers_are_refused(tmp_path, name, num_tokens):
    with pytest.raises(TargetMismatchError, match=f"made for a target of vocabulary 96, but .* has {num_tokens}"):
        DRAFTERS[name](extended_target(num_tokens), tmp_path).check_target(extended_target(num_tokens))


def test_added_tokens_are_logged_once(tmp_path, caplog, monkeypatch):
    for name in ("transformers", "hf_speculate"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    _eagle("safeailab")(extended_target(128), tmp_path / "padded")  # to a multiple of 64
    assert not caplog.messages
    for _ in range(2):
        drafter = _eagle("safeailab")(extended_target(103), tmp_path / "head")
        drafter.check_target(extended_target(103))
    (message,) = caplog.messages
    assert "knows 96 tokens and never drafts the others of the 103 that LlamaForCausalLM has" in message
    assert "`hf-speculate check HEAD" in message


@pytest.mark.parametrize("name", ["eagle1", "safeailab", "speculators", "dflash", "dspark", "dflash2"])
def test_saved_heads_are_those_of_the_vocabulary_that_they_know(tmp_path, name):
    drafter = DRAFTERS[name](extended_target(), tmp_path / "head")
    drafter.save_pretrained(tmp_path / "saved")
    again = type(drafter).from_folder(str(tmp_path / "saved"), target())
    assert again.spec.vocab_size == VOCAB
    expected = DRAFTERS[name](target(), tmp_path / "expected").head
    assert expected.state_dict().keys() == again.head.state_dict().keys()
    assert all(map(torch.equal, expected.state_dict().values(), again.head.state_dict().values()))


def test_save_pretrained_of_medusa_heads_keeps_their_vocabulary(tmp_path):
    folder = write_medusa_heads(tmp_path / "head")
    MedusaDrafter.from_folder(str(folder), extended_target()).save_pretrained(tmp_path / "saved", "vllm")
    assert MedusaDrafter.from_folder(str(tmp_path / "saved"), target()).heads.vocab_size == VOCAB
