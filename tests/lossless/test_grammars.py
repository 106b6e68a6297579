"""Constrained decoding by the libraries people use: the same valid JSON as plain constrained generation.

Optional test dependencies; each part is skipped where its package is absent.
"""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

from hf_speculate import Speculator
from hf_speculate.testing import RandomDrafter, ScriptedDrafter
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions

from ..support.models import VOCAB_SIZE


EOS = 95
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "kind": {"enum": ["cat", "dog", "bird"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """The printable ASCII characters, one token each (as byte-level BPE spells them), and an end of text."""
    characters = [chr(code) if code != 32 else "\u0120" for code in range(32, 127)]
    raw = Tokenizer(models.BPE({character: i for i, character in enumerate(characters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", pad_token="</s>")


def xgrammar_processor(model, tokenizer, batch_size):
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor as XGrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=VOCAB_SIZE, stop_token_ids=[EOS])
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    return XGrammar(compiled)


def llguidance_processor(model, tokenizer, batch_size):
    llguidance = pytest.importorskip("llguidance")
    from_tokenizer = pytest.importorskip("llguidance.hf").from_tokenizer
    bitmasks = pytest.importorskip("llguidance.torch")

    class LLGuidance(LogitsProcessor):
        """One matcher a row, fed with what was emitted since the last call (as the package's documentation has it)."""

        def __init__(self):
            own = from_tokenizer(tokenizer, n_vocab=VOCAB_SIZE, eos_token=EOS)
            schema = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
            self.matchers = [llguidance.LLMatcher(own, grammar) for _ in range(batch_size)]
            self.masks = bitmasks.allocate_token_bitmask(batch_size, own.vocab_size)
            self.is_first = True

        def __call__(self, input_ids, scores):
            for row, matcher in enumerate(self.matchers):
                if not self.is_first and not matcher.is_stopped():
                    matcher.consume_token(int(input_ids[row, -1]))
                    assert not matcher.is_error(), "was shown a token that the grammar forbids"
                bitmasks.fill_next_token_bitmask(matcher, self.masks, row)
                bitmasks.apply_token_bitmask_inplace(scores[row], self.masks[row])
            self.is_first = False
            return scores

    return LLGuidance()


def outlines_processor(model, tokenizer, batch_size):
    outlines = pytest.importorskip("outlines")
    from outlines.backends import get_json_schema_logits_processor

    own_model = outlines.from_transformers(model, tokenizer)
    return get_json_schema_logits_processor("outlines_core", own_model, json.dumps(SCHEMA))


LIBRARIES = {"xgrammar": xgrammar_processor, "llguidance": llguidance_processor, "outlines": outlines_processor}


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("library", LIBRARIES)
def test_json_stays_valid_and_equals_plain(tiny_model, prompt, tokenizer, library, batch_size, do_sample):
    model = tiny_model()
    ids = torch.cat([prompt(9, seed=seed).clamp(max=EOS - 1) for seed in range(batch_size)])

    def generate(speculator):
        torch.manual_seed(1)
        text = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=60,
            do_sample=do_sample,
            eos_token_id=EOS,
            pad_token_id=EOS,
            logits_processor=LogitsProcessorList([LIBRARIES[library](model, tokenizer, batch_size)]),
            speculator=speculator,
            return_dict_in_generate=True,
        )
        return text, torch.get_rng_state()

    plain, rng = generate(None)
    for row in plain.sequences[:, 9:]:
        document = json.loads(tokenizer.decode(row, skip_special_tokens=True))
        assert set(document) == {"name", "kind", "age"}
    for drafter in (
        ScriptedDrafter(plain.sequences[:, 9:], (2, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE),
        RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=20),
        DraftModelDrafter(tiny_model(seed=1), DraftModelOptions(depth=3, top_k=2)),
    ):
        ours, our_rng = generate(Speculator(drafter))
        assert torch.equal(ours.sequences, plain.sequences), drafter.name
        assert torch.equal(our_rng, rng)
        if drafter.name == "scripted":
            assert ours.speculation.accepted_tokens > 0
