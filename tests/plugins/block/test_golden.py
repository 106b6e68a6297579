"""The block drafter against outputs of the reference implementations, see `../shared/golden/README.md`."""

from __future__ import annotations

import heapq
import json
from functools import cache

import pytest
import torch
from transformers import DynamicCache

from hf_speculate.drafting import DraftRequest
from hf_speculate_plugins.block import BlockDrafter, BlockFiles, BlockOptions, load_head
from hf_speculate_plugins.block.head import block_masks
from hf_speculate_plugins.block.scores import BlockRequest, BlockScores
from hf_speculate_plugins.checkpoints import read_checkpoint
from hf_speculate_plugins.heads import CachedAttention

from ...support.golden import CLOSE, GOLDEN, meta_of, run_of, state_for, target_of, unpadded, vectors_of
from ...support.recording import Recording
from ...support.tiers import quick_quarter


WITH_ROUNDS = [
    "dflash-deepspec",
    "dflash-zlab-base",
    "dflash-zlab-defaults",
    "dflash2-zlab-base",
    "dflash2-zlab-mixed",
    "dspark-deepspec-gated",
    "dspark-deepspec-rnn",
    "dspark-deepspec-vanilla",
    "jetspec-causal",
    "jetspec-causal-defaults",
    "lfm2-dspark-interleaved",
    "modelopt-dflash-causal",
    "modelopt-dflash-sinks-swa",
    "modelopt-domino",
    "modelopt-dspark-flat",
    "modelopt-dspark-rnn-swa",
    "nemotron-dspark-sinks",
    "sglang-lilicorr",
]
WITH_ANCHORS = [
    "dflash-speculators-fullvocab-swa",
    "dflash-speculators-reducedvocab",
    "dflash2-speculators",
    "dspark-speculators-reducedvocab",
    "speculators-xpress",
]
# Keys or tensors left out as speculators 0.9 leaves them out.
WITHOUT_DEFAULTS = ["speculators-dflash2-defaults", "speculators-dspark-fullvocab"]
WITH_PATHS = [name for name in WITH_ROUNDS if "dspark" in name or "domino" in name]
DDTREES = {"ddtree-zlab-base": "dflash-zlab-base", "ddtree-zlab-defaults": "dflash-zlab-defaults"}


@cache
def loaded_head(name):
    return load_head(str(GOLDEN / name / "head"), target_of(name))


def drafter_of(name, **options) -> BlockDrafter:
    return BlockDrafter(loaded_head(name), target_of(name), BlockOptions(**options))


def start(name, drafter):
    """A session that was shown the vectors' N tokens."""
    ids = vectors_of(name)["token_ids"][None]
    session = drafter.start(DraftRequest(target=target_of(name), input_ids=ids[:, :-1]))
    session.observe(ids[:, 1:], features_of(name, drafter), torch.tensor([ids.shape[1] - 1]))
    return session


def features_of(name, drafter, prefix=""):
    states = vectors_of(name)[f"{prefix}aux_hidden_states"]
    return {layer: state[None] for layer, state in zip(drafter.spec.feature_layers, states, strict=True)}


def rounds_of(name, drafter):
    """(number, root, session) of both rounds."""
    session, ids = start(name, drafter), vectors_of(name)["token_ids"]
    yield 1, ids[-1], session
    ids = vectors_of(name)["round2_token_ids"]
    session.observe(ids[None, -3:], features_of(name, drafter, "round2_"), torch.tensor([3]))
    yield 2, ids[-1], session


def scores_of(drafter, session, root, **state):
    spec = drafter.spec
    slots = slots_of(session, root)[:, spec.first_slot :]
    request = BlockRequest.of(drafter._loaded, drafter.options, state_for(root, **state), spec.max_depth)
    return BlockScores(drafter.head, request, slots)


def slots_of(session, root):
    states = session._steps.slots(torch.tensor([int(root)]))
    session._head_cache.drop()
    return states


def path_logits(head, hidden, previous):
    """Logits of the slots [1, S, H] along a path, of which `previous` [S or more] are the tokens before each slot."""
    markov, found, carried = head.markov_head, [], None
    seen = markov.refiner.features(hidden) if head.spec.markov == "xpress" else hidden
    for slot, logits in enumerate(head.logits(hidden)[0]):
        inputs, carried = markov.inputs(seen[:, slot, None], head.codes(previous[None, slot, None]), carried, slot)
        found.append(logits + markov.bias(inputs)[0, 0])
    return torch.stack(found)


def test_golden_folders_are_all_covered(golden_root):
    families = ("dflash", "dspark", "jetspec", "ddtree", "lfm2", "modelopt", "nemotron", "sglang")
    found = {path.name for path in golden_root.iterdir() if path.name.startswith(families)}
    assert found == {*WITH_ROUNDS, *WITH_ANCHORS, *DDTREES} - {"speculators-xpress"}


@pytest.mark.parametrize("name", WITH_ROUNDS + WITH_ANCHORS + WITHOUT_DEFAULTS)
def test_golden_feature_layers_and_keys(golden_root, name):
    drafter, vectors = drafter_of(name), vectors_of(name)
    assert drafter.spec.feature_layers == tuple(vectors["aux_hf_indices"].tolist())
    assert drafter.spec.block_size == json.loads((golden_root / name / "head" / "config.json").read_text()).get(
        "block_size", drafter.spec.block_size
    )
    report = drafter.report
    in_file = set(BlockFiles.canonical(read_checkpoint(str(golden_root / name / "head")).tensors))
    assert {*report.used, *report.shared, *report.ignored} >= in_file
    assert not report.ignored
    context = drafter.head.fuse(list(features_of(name, drafter).values()))
    torch.testing.assert_close(context[0], vectors["ctx"], **CLOSE)


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_golden_blocks_of_two_rounds(golden_root, name):
    drafter, vectors = drafter_of(name), vectors_of(name)
    head = drafter.head
    for number, root, session in rounds_of(name, drafter):
        hidden, logits = slots_of(session, root), vectors[f"round{number}_block_logits"]
        torch.testing.assert_close(hidden[0], vectors[f"round{number}_block_hidden"], **CLOSE)
        torch.testing.assert_close(head.logits(hidden)[0, -len(logits) :], logits, **CLOSE)


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_golden_greedy_chains(golden_root, name):
    drafter, vectors = drafter_of(name), vectors_of(name)
    for number, root, session in rounds_of(name, drafter):
        expected = vectors[f"round{number}_draft_ids"].tolist()
        tree = session.draft(state_for(root, chains_only=True))
        assert tree.token_ids[0, 1:].tolist() == expected
        branching = session.draft(state_for(root))
        assert branching.num_nodes == drafter.options.max_nodes + 1


@pytest.mark.parametrize("name", WITH_ANCHORS + WITHOUT_DEFAULTS)
def test_golden_blocks_behind_anchors(golden_root, name):
    drafter, vectors = drafter_of(name), vectors_of(name)
    head, spec = drafter.head, drafter.spec
    context = head.fuse(list(features_of(name, drafter).values()))
    for block, anchor in enumerate(vectors["anchor_positions"].tolist()):
        cache, places = DynamicCache(), torch.arange(anchor)[None]
        head.read(context[:, :anchor], places, lambda layer, *found, cache=cache: cache.update(*found, layer))
        positions = vectors["block_position_ids"][block][None]
        masks = block_masks(spec, positions, places, None, torch.float32)
        ids = head.block_ids(vectors["token_ids"][anchor][None])
        hidden = head(ids, positions, CachedAttention(cache, masks))
        logits = head.logits(hidden)
        torch.testing.assert_close(hidden[0], vectors["block_hidden"][block], **CLOSE)
        expected = vectors["block_logits"][block]
        torch.testing.assert_close(logits[0, -len(expected) :], expected, **CLOSE)
        if "path_logits" in vectors:
            found = path_logits(head, hidden, vectors["path_prev_ids"][block])
            torch.testing.assert_close(found, vectors["path_logits"][block], **CLOSE)


@pytest.mark.parametrize("name", WITH_ANCHORS + WITHOUT_DEFAULTS)
def test_golden_greedy_chains_behind_anchors(golden_root, name):
    vectors, drafter = vectors_of(name), drafter_of(name)
    ids = vectors["token_ids"][None]
    for anchor, expected in zip(vectors["anchor_positions"].tolist(), vectors["block_target_ids"], strict=True):
        session = drafter.start(DraftRequest(target=target_of(name), input_ids=ids[:, :anchor]))
        features = {layer: states[:, :anchor] for layer, states in features_of(name, drafter).items()}
        session.observe(ids[:, 1 : anchor + 1], features, torch.tensor([anchor]))
        tree = session.draft(state_for(ids[0, anchor], chains_only=True))
        assert tree.token_ids[0, 1:].tolist() == expected[-drafter.spec.max_depth :].tolist()


@pytest.mark.parametrize("name", ["dflash2-speculators", "speculators-dflash2-defaults"])
def test_golden_selector_scores_behind_anchors(golden_root, name):
    drafter, vectors = drafter_of(name), vectors_of(name)
    selector = drafter.head.candidate_selector
    for block, anchor in enumerate(vectors["anchor_positions"].tolist()):
        hidden = vectors["block_hidden"][block][None, 1:]
        candidates = vectors["candidate_ids"][block][None]
        chosen = vectors["block_target_ids"][block]
        previous = torch.cat([vectors["token_ids"][anchor][None], chosen[:-1]])[None]
        bias = selector.bias(selector.inputs(hidden, previous)[:, :, None], candidates)[:, :, 0]
        logits = vectors["block_logits"][block][-hidden.shape[1] :]
        scores = logits.gather(-1, candidates[0]) + bias[0]
        torch.testing.assert_close(scores, vectors["path_scores"][block], **CLOSE)
        best = candidates[0].gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
        assert torch.equal(best, vectors["block_draft_ids"][block])


@pytest.mark.parametrize("name", ["dflash2-zlab-base", "dflash2-zlab-mixed"])
def test_golden_selector_probabilities(golden_root, name):
    drafter, vectors = drafter_of(name), vectors_of(name)
    for number, root, session in rounds_of(name, drafter):
        scores = scores_of(drafter, session, root)
        given = vectors["cond_parent_ids"].expand(1, drafter.spec.max_depth, -1)
        for depth, candidates in enumerate(scores.candidates[0].tolist()):
            expected_ids = vectors[f"round{number}_candidate_ids"][depth].tolist()
            assert set(candidates) == set(expected_ids)
            order = [candidates.index(token) for token in expected_ids]
            found = scores.following(depth, given[:, depth])[0][0]
            torch.testing.assert_close(found[:, order], vectors[f"round{number}_cond_log_q"][:, depth], **CLOSE)


@pytest.mark.parametrize("name", ["sglang-lilicorr"])
def test_golden_lattice_scores(golden_root, name):
    drafter, vectors = drafter_of(name), vectors_of(name)
    head, depth = drafter.head, drafter.spec.max_depth
    for number, root, session in rounds_of(name, drafter):
        prefix, slots = f"round{number}", slots_of(session, root)
        request = BlockRequest.of(drafter._loaded, drafter.options, state_for(root), depth)
        scores = BlockScores.of_block(head, request._replace(last=session._steps.last), slots, depth)
        assert torch.equal(scores.candidates[0], vectors[f"{prefix}_candidate_ids"])
        log_probs = head.logits(slots[:, 1:]).log_softmax(-1).gather(-1, scores.candidates)
        torch.testing.assert_close(log_probs[0], vectors[f"{prefix}_candidate_log_probs"], **CLOSE)
        start = vectors[f"{prefix}_start_scores"]
        torch.testing.assert_close(scores.steps[0, 0], start.expand(len(start), -1), **CLOSE)
        torch.testing.assert_close(scores.steps[0, 1:], vectors[f"{prefix}_pair_scores"], **CLOSE)
        chain = session.draft(state_for(root, chains_only=True)).token_ids[0, 1:, None]
        assert torch.equal((scores.candidates[0] == chain).long().argmax(-1), vectors[f"{prefix}_path_ranks"])


@pytest.mark.parametrize("name", WITH_PATHS)
def test_golden_logits_behind_given_tokens(golden_root, name):
    """`path_logits`: along random paths; `cond_logits`: every slot behind the same token."""
    drafter, vectors = drafter_of(name), vectors_of(name)
    head = drafter.head
    for number, root, session in rounds_of(name, drafter):
        hidden = slots_of(session, root)[:, head.spec.first_slot :]
        logits = head.logits(hidden)[0]
        for path, expected in zip(vectors["path_ids"], vectors[f"round{number}_path_logits"], strict=True):
            found = path_logits(head, hidden, torch.cat([root[None], path[:-1]]))
            torch.testing.assert_close(found, expected, **CLOSE)
        if head.spec.confidence and f"round{number}_confidence_logits" in vectors:
            along = torch.cat([root[None], vectors[f"round{number}_draft_ids"][:-1]])[None]
            expected = vectors[f"round{number}_confidence_logits"]
            torch.testing.assert_close(head.confidence(hidden, along)[0], expected, **CLOSE)
        if "cond_parent_ids" not in vectors:
            continue
        for index, parent in enumerate(vectors["cond_parent_ids"]):
            codes = head.markov_head.codes(parent.expand(1, hidden.shape[1]))
            inputs, _ = head.markov_head.inputs(hidden, codes)
            expected = vectors[f"round{number}_cond_logits"][index]
            torch.testing.assert_close(logits + head.markov_head.bias(inputs)[0], expected, **CLOSE)
            if f"round{number}_cond_confidence_logits" in vectors:
                confidence = head.confidence(hidden, parent.expand(1, hidden.shape[1]))[0]
                torch.testing.assert_close(confidence, vectors[f"round{number}_cond_confidence_logits"][index], **CLOSE)


@pytest.mark.parametrize("name", DDTREES)
def test_golden_ddtree_node_sets(golden_root, name):
    """The same nodes in the same order, with the same values; no other limit on children than the vocabulary."""
    head, vectors = DDTREES[name], vectors_of(name)
    for budget in vectors["budgets"].tolist():
        drafter = drafter_of(head, max_nodes=budget, top_k=96)
        for number, root, session in rounds_of(head, drafter):
            tree = session.draft(state_for(root)).host
            prefix = f"round{number}_budget{budget}"
            assert tree.token_ids[0] == vectors[f"{prefix}_tokens"].tolist()
            assert tree.parents[0] == vectors[f"{prefix}_parents"].tolist()
            torch.testing.assert_close(torch.tensor(tree.values[0]), vectors[f"{prefix}_scores"], **CLOSE)


def jetspec_tree(logits, width, budget, root):
    """JetSpec's rule, written down plainly: of the node taken, all children at once."""
    shares, tokens = logits.log_softmax(-1).topk(width)
    nodes, heap = [((), 0.0)], [(0.0, 0, ())]
    while heap and len(nodes) < budget:
        negative, _, path = heapq.heappop(heap)
        if len(path) == len(shares):
            continue
        for share, token in zip(shares[len(path)].tolist(), tokens[len(path)].tolist(), strict=True):
            if len(nodes) == budget:
                break
            nodes.append(((*path, token), share - negative))
            heapq.heappush(heap, (negative - share, len(nodes), (*path, token)))
    return dict(nodes)


@pytest.mark.parametrize("name", ["jetspec-causal", "jetspec-causal-defaults"])
def test_golden_jetspec_trees_by_its_own_rule_and_by_ours(golden_root, name):
    """With our scores its rule makes its trees; our rule makes one that is worth at least as much."""
    vectors = vectors_of(name)
    for index in range(4):
        width, budget = vectors[f"tree{index}_settings"].tolist()
        drafter = drafter_of(name, max_nodes=budget - 1, top_k=96)
        for number, root, session in rounds_of(name, drafter):
            logits = drafter.head.logits(slots_of(session, root))[0, 1:]
            theirs = jetspec_tree(logits, width, budget, int(root))
            prefix = f"round{number}_tree{index}"
            paths = [path[1:] for path in unpadded(vectors[f"{prefix}_node_paths"])]  # theirs begin with the root
            expected = dict(zip(paths, vectors[f"{prefix}_node_path_scores"].tolist(), strict=True))
            assert theirs == pytest.approx(expected, abs=1e-4)
            ours = session.draft(state_for(root)).host
            assert torch.tensor(ours.values[0]).exp().sum() >= torch.tensor(list(theirs.values())).exp().sum() - 1e-5


class Recorded(Recording, BlockDrafter):
    pass


RUNS = {
    **{name: ("e2e_dflash_generate", name) for name in WITH_ROUNDS if name.startswith("dflash") and "zlab" in name},
    **{name: ("e2e_deepspec_generate", name) for name in WITH_ROUNDS if "deepspec" in name},
    **{name: ("e2e_jetspec", name) for name in WITH_ROUNDS if name.startswith("jetspec")},
    **{name: ("e2e_ddtree_generate", head) for name, head in DDTREES.items()},
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("name", quick_quarter(RUNS))
def test_golden_accepted_lengths_of_the_references_own_runs(golden_root, name):
    key, head = RUNS[name]
    target, loaded, num_compared = target_of(head), loaded_head(head), 0
    for run in meta_of(name)[key]:
        if run.get("mode") == "tree" or run.get("mask_tokens_deleted_by_the_reference"):
            continue  # its trees are compared node by node; what it deletes, nobody should
        if run.get("confidence_threshold", 0.0):
            continue  # nothing here cuts a draft by the head's own confidence
        budget = run.get("budget")
        options = BlockOptions(top_k=96, max_nodes=budget) if budget else BlockOptions(top_k=1)
        drafter = Recorded(loaded, target, options)
        assert run_of(target, drafter, run, num_more=20) == run["output"]
        if lengths := run.get("acceptance_lengths_incl_bonus"):
            # dflash 0.1.0 shortens the blocks at the end; all count the last round's tokens as far as they were wanted.
            expected = [length - 1 for length in lengths]
            expected = expected[: -loaded.spec.block_size] if name.startswith("dflash2") else expected[:-1]
            assert drafter.accepted[: len(expected)] == expected
            num_compared += len(expected)
    assert num_compared > 50 or key == "e2e_jetspec"
