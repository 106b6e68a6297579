"""`check` reads one-pass heads as decoding does, and finds how a mislabelled one was meant."""

from __future__ import annotations

import json

import pytest
import torch

from hf_speculate.drafting import DraftRequest, DraftState
from hf_speculate_plugins.block import BlockReader
from hf_speculate_plugins.check import accepted_lengths, write_texts
from hf_speculate_plugins.commands.check import check_checkpoint

from ...support.block_heads import random_block
from ...support.heads import target


LAYOUT = {"dflash2": "zlab", "dflash": "zlab", "jetspec": "zlab", "reduced": "speculators", "windows": "speculators"}


def written(tmp_path, kind):
    random_block(kind, target()).save_pretrained(tmp_path / "head", LAYOUT.get(kind, "deepspec"))
    return str(tmp_path / "head")


@pytest.mark.parametrize("kind", ["dflash", "jetspec", "windows", "dspark", "gated", "rnn", "reduced", "dflash2"])
def test_chains_at_all_roots_are_those_of_decoding(tmp_path, prompt, kind):
    """Compared on a text of the drafts themselves, or next to nothing would be accepted."""
    model = target()
    text = write_texts(model, [prompt(12)[0]], max_new_tokens=24)[0]
    drafter, depth = random_block(kind, model), 3
    chains = []
    for root in text.roots(depth):
        session = drafter.start(DraftRequest(target=model, input_ids=text.token_ids[None, :root]))
        features = {layer: text.states[layer][None, :root] for layer in drafter.feature_layers}
        session.observe(text.token_ids[None, 1 : root + 1], features, torch.tensor([root]))
        state = DraftState(
            root_ids=text.token_ids[root][None], active=(True,), max_depth=depth, chains_only=True, num_emitted=(1,)
        )
        chains.append(session.draft(state).token_ids[0, 1:])
    # Every other root's continuation is what was drafted there.
    tokens = text.token_ids.clone()
    for root, chain in list(zip(text.roots(depth), chains, strict=True))[:: depth + 1]:
        tokens[root + 1 : root + 1 + depth] = chain
    changed = type(text)(tokens, text.num_prompt, text.states)
    roots = list(text.roots(depth))[:: depth + 1]
    expected = accepted_lengths(torch.stack(chains[:: depth + 1]), changed, roots)
    assert set(expected.tolist()) == {depth}
    found = BlockReader(written(tmp_path, kind), model).accepted({}, [changed], depth)
    same_root = torch.tensor([int(tokens[root]) == int(text.token_ids[root]) for root in roots])
    assert same_root.sum() > 2
    assert torch.equal(found[:: depth + 1][same_root], expected[same_root])


def test_a_mislabelled_first_slot_is_found(tmp_path, prompt, monkeypatch):
    """A head that drafts what the target writes if its slots are read one place off."""
    model = target()
    folder = written(tmp_path, "dflash")
    prompts = [prompt(12, seed=seed)[0] for seed in range(4)]
    texts = write_texts(model, prompts, max_new_tokens=32)
    successors = {}
    for text in texts:
        for root in text.roots(1):
            ids = text.token_ids.tolist()
            successors[tuple(ids[: root + 1])] = ids[root + 1 : root + 6]

    def states(head, token_ids, context, anchors):
        found = torch.zeros(len(anchors), head.spec.block_size, 32)
        for row, anchor in enumerate(anchors.tolist()):
            for slot, token in enumerate(successors[tuple(token_ids[: anchor + 1].tolist())]):
                found[row, slot, :2] = torch.tensor([token + 1.0, 1.0])
        return found

    def logits(self, slots):
        return torch.nn.functional.one_hot(slots[..., 0].long().sub(1).clamp(min=0), 96).float()

    monkeypatch.setattr("hf_speculate_plugins.block.calibration.block_states", states)
    monkeypatch.setattr("hf_speculate_plugins.block.head.BlockHead.logits", logits)
    found = check_checkpoint(folder, model, prompts, max_new_tokens=32, depth=3)
    assert found.verdict == "mislabelled"
    assert found.fix == {"first_slot": 0}
    assert "first_slot=0" in found.code


def test_every_alternative_can_be_read(tmp_path, prompt):
    model = target()
    texts = write_texts(model, [prompt(12)[0]], max_new_tokens=16)
    reader = BlockReader(written(tmp_path, "dspark"), model)
    alternatives = reader.alternatives({})
    assert {next(iter(each.options)) for each in alternatives} == {
        "feature_layers",
        "first_slot",
        "causal",
        "rope_theta",
    }
    for each in alternatives:
        assert len(reader.accepted(each.options, texts, 3)) == len(texts[0].roots(3))
    json.dumps([each.options for each in alternatives])
