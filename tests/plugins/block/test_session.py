"""One-pass heads in requests: contract, batches, padding, trees and their plain reference, noise."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from transformers import LogitsProcessorList, TopKLogitsWarper

from hf_speculate import Speculator
from hf_speculate.drafting import DraftRequest, DraftState
from hf_speculate.testing import check_drafter
from hf_speculate_plugins.block import BlockDrafter, BlockOptions
from hf_speculate_plugins.block.scores import BlockRequest, BlockScores

from ...support.block_heads import KINDS, loaded_block, random_block
from ...support.block_sessions import nodes_of, shown, state_for
from ...support.heads import PLAIN, batch_of, left_padded, target
from ...support.pretended_device import PretendedDevice
from ...support.tiers import quick, quick_quarter


PAIRED = ("dspark", "gated", "reduced")


def slots_of(session, anchor):
    """States of all slots of a block."""
    states = session._steps.slots(torch.tensor([anchor]))
    session._head_cache.drop()
    return states


def scores_of(drafter, state, slots):
    request = BlockRequest.of(drafter._loaded, drafter.options, state, slots.shape[1])
    return BlockScores(drafter.head, request, slots)


@pytest.mark.parametrize("kind", quick_quarter(KINDS))
def test_block_drafter_keeps_the_contract(prompt, kind):
    model = target(dtype=torch.float64)
    check_drafter(random_block(kind, model), model, [prompt(10)[0], prompt(4, seed=1)[0]], max_new_tokens=10)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", quick([{"do_sample": True, "temperature": 0.8, "top_p": 0.9}, {}]))
def test_block_drafts_give_plain_text(prompt, kind, sampling):
    model = target(dtype=torch.float64)
    inputs = batch_of(prompt, 3)
    texts = []
    for speculator in (None, Speculator(random_block(kind, model))):
        torch.manual_seed(1)
        texts.append(
            model.generate(**inputs, **({"speculator": speculator} if speculator else {}), **PLAIN, **sampling)
        )
    assert torch.equal(*texts)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_neighbours_do_not_matter(prompt, kind):
    """A row drafts in a padded batch what it drafts alone, in rounds of different lengths too."""
    model = target(dtype=torch.float64)
    drafter = random_block(kind, model)
    rows = [prompt(n, seed=n)[0] for n in (9, 4, 13)]
    roots = [int(row[-1]) for row in rows]
    together = shown(drafter, model, left_padded(rows))
    alone = [shown(drafter, model, {"input_ids": row[None]}) for row in rows]
    generator = torch.Generator().manual_seed(0)
    for lengths in ((1, 1, 1), (2, 0, 3), (1, 4, 1)):
        trees = together.draft(state_for(roots))
        for row, session in enumerate(alone):
            tree = session.draft(state_for(roots[row : row + 1]))
            found, wanted = nodes_of(trees, row), nodes_of(tree)
            assert [path for path, _ in found] == [path for path, _ in wanted]
            assert [value for _, value in found] == pytest.approx([value for _, value in wanted], rel=1e-4)
        tokens = torch.randint(3, 90, (3, max(lengths)), generator=generator)
        features = {
            layer: torch.randn(3, max(lengths), 32, generator=generator, dtype=torch.float64)
            for layer in drafter.feature_layers
        }
        together.observe(tokens, features, torch.tensor(lengths))
        for row, (session, length) in enumerate(zip(alone, lengths, strict=True)):
            own = {layer: states[row : row + 1, :length] for layer, states in features.items()}
            if length:
                session.observe(tokens[row : row + 1, :length], own, torch.tensor([length]))
                roots[row] = int(tokens[row, length - 1])


@pytest.mark.parametrize("kind", [*PAIRED, "dflash", "rnn", "domino", "xpress"])
def test_trees_are_the_best_nodes_of_all(prompt, monkeypatch, kind):
    """Against every path of the vocabulary's best children, scored one by one with the whole matrix."""
    monkeypatch.setattr("hf_speculate_plugins.block.scores._CANDIDATES", 96)
    model = target(dtype=torch.float64)
    drafter = random_block(kind, model, max_nodes=15, top_k=4)
    session = shown(drafter, model, {"input_ids": prompt(12)})
    tree = session.draft(state_for([7], max_depth=3))
    head, ids = drafter.head, drafter.target_ids
    slots = slots_of(session, 7)
    states = slots[:, drafter.spec.first_slot :]
    logits = head.logits(states)[0]
    is_xpress = kind == "xpress"  # the one head that reads the anchor's slot, and the token before the anchor
    seen = head.markov_head.refiner.features(slots) if is_xpress else states
    start = [int(prompt(12)[0, -2]), 7] if is_xpress else [7]

    def shares(path):
        carried, found = None, logits[len(path)]
        if drafter.spec.markov is not None:
            for place, previous in enumerate([*start, *path]):
                code = head.codes(torch.tensor([[previous]]))
                inputs, carried = head.markov_head.inputs(seen[:, place, None], code, carried, place)
            found = found + head.markov_head.bias(inputs)[0, 0]
        best, columns = found.log_softmax(-1).topk(4)
        return best.tolist(), (columns if ids is None else ids[columns]).tolist()

    everything = {(): 0.0}
    for depth in range(3):
        for path in [path for path in everything if len(path) == depth]:
            everything |= {(*path, token): everything[path] + share for share, token in zip(*shares(path), strict=True)}
    del everything[()]
    wanted = sorted(everything.items(), key=lambda item: -item[1])[:15]
    found = nodes_of(tree)
    assert [path for path, _ in found] == [path for path, _ in wanted]
    assert [value for _, value in found] == pytest.approx([value for _, value in wanted], rel=1e-4)


@pytest.mark.parametrize("kind", ["dspark", "dflash", "rnn", "dflash2"])
def test_a_part_of_a_tree_is_the_smaller_tree(prompt, kind):
    model = target(dtype=torch.float64)
    session = shown(random_block(kind, model, max_nodes=20), model, {"input_ids": prompt(12)})
    small = shown(random_block(kind, model, max_nodes=6), model, {"input_ids": prompt(12)})
    assert nodes_of(session.draft(state_for([7])))[:6] == nodes_of(small.draft(state_for([7])))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("kind", ["dflash", "dspark", "rnn"])
def test_drafts_know_the_noise_of_their_steps(prompt, kind, monkeypatch):
    """A head whose logits are the target's own drafts what will be sampled: with the noise nearly all is accepted."""
    model = target(dtype=torch.float64, initializer_range=0.05)
    flat = torch.zeros(96, dtype=torch.float64)
    head = loaded_block(kind, model).head
    monkeypatch.setattr(head, "logits", lambda states: flat.expand(*states.shape[:-1], 96))
    if head.spec.markov is not None:
        monkeypatch.setattr(
            head.markov_head, "rows", lambda columns: torch.zeros(*columns.shape, 4, dtype=torch.float64)
        )
    # What the target samples from is nearly flat at this temperature.
    request = {"do_sample": True, "temperature": 50.0, "top_k": 0, **PLAIN}
    lengths = []
    for with_noise in (True, False):
        drafter = random_block(kind, model, top_k=1)
        if not with_noise:
            monkeypatch.setattr(DraftState, "log_noise", lambda *args, **kwargs: None)
        torch.manual_seed(0)
        output = model.generate(
            prompt(8), speculator=Speculator(drafter, adaptive=False), return_dict_in_generate=True, **request
        )
        lengths.append(output.speculation.mean_acceptance_length)
    assert lengths[0] > 3
    assert lengths[1] < 1.5


def test_features_may_lie_on_several_devices(prompt):
    """Those of a target whose layers are spread over devices."""
    model, ids, together = target(), prompt(9), []
    drafter = random_block("dspark", model)
    states = model(ids[:, :-1], output_hidden_states=True).hidden_states
    with PretendedDevice() as device:
        for elsewhere in ((), drafter.feature_layers[-1:]):
            session = drafter.start(DraftRequest(target=model, input_ids=ids[:, :-1]))
            features = {n: states[n].to(device.name) if n in elsewhere else states[n] for n in drafter.feature_layers}
            session.observe(ids[:, 1:], features, torch.tensor([ids.shape[1] - 1]))
            together.append(nodes_of(session.draft(state_for([5]))))
    assert together[0] == together[1]


@pytest.mark.parametrize("kind", ["dspark", "dflash", "rnn"])
def test_chains_only_gives_a_chain(prompt, kind):
    model = target(dtype=torch.float64)
    drafter = random_block(kind, model)
    session = shown(drafter, model, {"input_ids": prompt(9)})
    tree = session.draft(state_for([5], chains_only=True))
    assert tree.host.parents[0] == list(range(-1, drafter.spec.max_depth))
    assert session.draft(state_for([5], max_depth=2)).max_depth == 2
    assert session.draft(state_for([5], max_depth=0)).num_nodes == 1


def test_sampled_requests_score_more_candidates(prompt, monkeypatch):
    monkeypatch.setattr("hf_speculate_plugins.block.scores._CANDIDATES", 3)
    monkeypatch.setattr("hf_speculate_plugins.block.scores._SAMPLED_CANDIDATES", 7)
    model = target(dtype=torch.float64)
    drafter = random_block("dspark", model)
    slots = slots_of(shown(drafter, model, {"input_ids": prompt(9)}), 5)
    assert scores_of(drafter, state_for([5]), slots).candidates.shape[-1] == 3
    monkeypatch.setattr(DraftState, "log_noise", lambda *args, **kwargs: torch.zeros(1, 5, 96, dtype=torch.float64))
    assert scores_of(drafter, state_for([5]), slots).candidates.shape[-1] == 7


def test_candidates_are_chosen_with_the_noise(prompt, monkeypatch):
    """A token that only the noise lifts must be among those that are scored behind others."""
    model = target(dtype=torch.float64)
    monkeypatch.setattr("hf_speculate_plugins.block.scores._SAMPLED_CANDIDATES", 2)
    drafter = random_block("dspark", model)
    session = shown(drafter, model, {"input_ids": prompt(9)})
    noise = torch.zeros(1, 5, 96, dtype=torch.float64)
    noise[..., 33] = -40.0
    monkeypatch.setattr(DraftState, "log_noise", lambda *args, **kwargs: noise)
    slots = slots_of(session, 5)
    scores = scores_of(drafter, state_for([5]), slots)
    assert 33 in scores.candidates[0, 1].tolist()
    tree = session.draft(state_for([5]))
    assert [path for path, _ in nodes_of(tree)][:3] == [(33,), (33, 33), (33, 33, 33)]


def test_scores_keep_candidates_that_warpers_cut_at_a_single_slot(prompt, monkeypatch):
    """Top-k of 1 leaves one token of every slot; what the token before says may lift another one."""
    model = target(dtype=torch.float64)
    monkeypatch.setattr("hf_speculate_plugins.block.scores._SAMPLED_CANDIDATES", 10)
    drafter = random_block("dspark", model)
    session = shown(drafter, model, {"input_ids": prompt(9)})
    monkeypatch.setattr(DraftState, "log_noise", lambda *args, **kwargs: torch.zeros(1, 5, 96, dtype=torch.float64))
    state = state_for([5], _warpers=LogitsProcessorList([TopKLogitsWarper(1)]))
    slots = slots_of(session, 5)
    scores = scores_of(drafter, state, slots)
    assert scores.ranked[0, 0].isfinite().sum() == 1
    wanted = drafter.head.logits(slots).float().topk(10).indices
    assert torch.equal(scores.candidates, wanted)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("kind", "dtype"), list(itertools.product(["dspark", "dflash2", "lilicorr"], [torch.bfloat16, torch.float16]))
)
def test_generate_runs_in_half_precision(prompt, kind, dtype):
    model = target(dtype=dtype)
    output = model.generate(prompt(9), speculator=Speculator(random_block(kind, model)), **PLAIN)
    assert output.shape[1] == 9 + PLAIN["max_new_tokens"]


@pytest.mark.usefixtures("needs_kernel")
def test_requests_multiply_in_8_bits_and_the_text_is_plains(prompt):
    model = target()
    loaded = copy.deepcopy(loaded_block("dspark", model))
    loaded.head._quantized = None  # whoever asked the cached one before
    drafter = BlockDrafter(loaded, model, BlockOptions(max_nodes=12))
    request = {"input_ids": prompt(9), **PLAIN, "do_sample": False}
    assert torch.equal(model.generate(**request, speculator=Speculator(drafter)), model.generate(**request))
    assert drafter.head.is_quantized
