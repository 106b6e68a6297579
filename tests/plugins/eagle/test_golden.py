"""The eagle drafter against outputs of the reference implementations, see `../shared/golden/README.md`."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import DynamicCache

from hf_speculate.drafting import RAW_LAST, DraftRequest
from hf_speculate.tree import DraftTree
from hf_speculate_plugins.checkpoints import read_checkpoint
from hf_speculate_plugins.eagle import EagleConventions, EagleDrafter, EagleOptions, load_head
from hf_speculate_plugins.eagle.loading import canonical_name
from hf_speculate_plugins.heads import CachedAttention

from ...support.golden import CLOSE, GOLDEN, meta_of, run_of, state_for, target_of, unpadded, vectors_of
from ...support.recording import Recording
from ...support.tiers import quick_quarter


HEADS = [
    "eagle1-llama3-nobias",
    "eagle1-qwen2-qkvbias",
    "eagle1-vicuna-fcbias",
    "eagle3-safeai-base",
    "eagle3-safeai-fullvocab",
    "eagle3-safeai-targethidden",
    "eagle3-safeai-theta1e6-safetensors",
    "eagle3-specforge-31-fcnorm",
    "eagle3-specforge-base",
    "eagle3-specforge-fullvocab-normoutput-false",
    "eagle3-specforge-llama3rope-auxids",
    "eagle3-specforge-targethidden-headdim",
    "eagle3-specforge-yarn",
    "eagle3-speculators-2layer-fcnorm-llama3rope-4aux",
    "eagle3-speculators-llama-nbr-false-fullvocab",
    "eagle3-speculators-llama-nbr-true",
    "eagle3-speculators-qwen3-31",
    "eagle3-speculators-qwen3-defaults",
]
PARALLEL = ["peagle-specforge-llama", "peagle-speculators-llama-4layers", "peagle-speculators-qwen3-nbf"]
WITH_TREES = [name for name in HEADS if name.startswith(("eagle1-", "eagle3-safeai-"))]
WITH_RUNS = [name for name in WITH_TREES if name != "eagle3-safeai-targethidden"]


@cache
def loaded_head(name: str):
    # SpecForge's files do not say which token the masks of P-EAGLE are.
    mask = meta_of(name)["mask_token_id"] if "peagle-specforge" in name else None
    return load_head(str(GOLDEN / name / "head"), target_of(name), EagleConventions(mask_token_id=mask))


def drafter_of(name: str, **options) -> EagleDrafter:
    return EagleDrafter(loaded_head(name), target_of(name), EagleOptions(**options))


def start(name: str, drafter: EagleDrafter, prefix: str = "", rows: int = 1):
    """A session that was shown the vectors' N entries."""
    vectors, target = vectors_of(name), target_of(name)
    ids = vectors[f"{prefix}token_ids"].expand(rows, -1)
    session = drafter.start(DraftRequest(target=target, input_ids=ids[:, :-1]))
    session.observe(ids[:, 1:], features_of(name, drafter, prefix), torch.full((rows,), ids.shape[1] - 1))
    return session


def features_of(name: str, drafter: EagleDrafter, prefix: str = "") -> dict[int, torch.Tensor]:
    vectors = vectors_of(name)
    if drafter.spec.version == 1:
        return {drafter.entry_layers[0]: vectors[f"{prefix}target_last_hidden"][None]}
    states = vectors[f"{prefix}aux_hidden_states"]
    return {layer: state[None] for layer, state in zip(drafter.entry_layers, states, strict=True)}


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """Token path of every draft node, sorted."""
    tokens, parents = tree.host.token_ids[0], tree.host.parents[0]
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        paths.append((*paths[parents[node]], tokens[node]))
    return sorted(paths[1:])


def test_golden_folders_are_all_covered(golden_root):
    found = {path.name for path in golden_root.iterdir() if path.name.startswith(("eagle1-", "eagle3-", "peagle-"))}
    assert found == {*HEADS, *PARALLEL}


@pytest.mark.parametrize("name", HEADS + PARALLEL)
class TestForward:
    def test_golden_feature_layers(self, golden_root, name):
        drafter, vectors = drafter_of(name), vectors_of(name)
        if drafter.spec.version == 1:
            assert drafter.feature_layers == (target_of(name).config.num_hidden_layers,)
            return
        assert drafter.entry_layers == tuple(vectors["aux_hf_indices"].tolist())
        assert RAW_LAST not in drafter.entry_layers
        output = target_of(name)(vectors["token_ids"][None, :-1], output_hidden_states=True)
        for layer, expected in zip(drafter.entry_layers, vectors["aux_hidden_states"], strict=True):
            torch.testing.assert_close(output.hidden_states[layer][0], expected, **CLOSE)

    def test_golden_every_key_is_accounted_for(self, golden_root, name):
        drafter = drafter_of(name)
        in_file = {canonical_name(key) for key in read_checkpoint(str(golden_root / name / "head")).tensors}
        report = drafter.report
        assert {*report.used, *report.shared, *report.ignored} >= in_file
        assert set(report.used) <= in_file
        assert set(report.ignored) <= {"norm.weight"}

    def test_golden_teacher_forced_pass(self, golden_root, name):
        drafter, vectors = drafter_of(name), vectors_of(name)
        head, ids = drafter.head, vectors["token_ids"][None]
        fused = head.fuse(list(features_of(name, drafter).values()))
        torch.testing.assert_close(head.embed(ids[:, 1:])[0], vectors["input_embeds"], **CLOSE)
        if drafter.spec.version == 1:
            joined = head.fc(torch.cat([head.embed(ids[:, 1:]), fused], dim=-1))
            torch.testing.assert_close(joined[0], vectors["fused"], **CLOSE)
        else:
            torch.testing.assert_close(fused[0], vectors["fused"], **CLOSE)
        cache = DynamicCache()
        attend = CachedAttention(cache, is_causal=True)
        hidden = head(ids[:, 1:], fused, vectors["position_ids"][None], attend)
        logits, fed_back = head.read(hidden)
        torch.testing.assert_close(hidden[0], vectors["tf_hidden"], **CLOSE)
        if "tf_feedback" in vectors:
            torch.testing.assert_close(fed_back[0], vectors["tf_feedback"], **CLOSE)
        torch.testing.assert_close(logits[0], vectors["tf_logits"], **CLOSE)
        drafted = logits[0].argmax(-1)
        assert torch.equal(drafted, vectors["tf_draft_ids"])
        mapped = drafted if drafter.target_ids is None else drafter.target_ids[drafted]
        assert torch.equal(mapped, vectors["tf_target_ids"])
        if "tf_key_cache" in vectors:
            torch.testing.assert_close(cache.layers[0].keys[0], vectors["tf_key_cache"], **CLOSE)
            torch.testing.assert_close(cache.layers[0].values[0], vectors["tf_value_cache"], **CLOSE)

    def test_golden_chain(self, golden_root, name, monkeypatch):
        if name in PARALLEL:
            return  # see `test_golden_parallel_rollouts`
        drafter, vectors = drafter_of(name, depth=5, top_k=1), vectors_of(name)
        session = start(name, drafter)
        seen = []
        read = drafter.head.read
        monkeypatch.setattr(drafter.head, "read", lambda hidden: seen.append((hidden, *read(hidden))) or seen[-1][1:])
        tree = session.draft(state_for(int(vectors["token_ids"][-1])))
        assert tree.token_ids[0, 1:].tolist() == vectors["chain_target_ids"].tolist()
        for column, key in enumerate(("chain_hidden", "chain_logits", "chain_feedback")):
            if key in vectors:
                torch.testing.assert_close(torch.cat([step[column][0] for step in seen]), vectors[key], **CLOSE)


@pytest.mark.parametrize("name", PARALLEL)
def test_golden_parallel_rollouts(golden_root, name, monkeypatch):
    """A draft behind each of the entries, in a session that was shown the text up to there."""
    vectors = vectors_of(name)
    ids, rollouts = vectors["token_ids"], vectors["parallel_logits"]
    depth = rollouts.shape[1]
    drafter = drafter_of(name, depth=depth, top_k=1)
    head, features = drafter.head, features_of(name, drafter)
    torch.testing.assert_close(head.masks(1, 1)[1][0, 0], vectors["mask_fused"], **CLOSE)
    seen = []
    read = head.read
    monkeypatch.setattr(head, "read", lambda hidden: seen.append((hidden, *read(hidden))) or seen[-1][1:])
    for anchor in range(len(rollouts)):
        session = drafter.start(DraftRequest(target=target_of(name), input_ids=ids[None, : anchor + 1]))
        known = {layer: states[:, : anchor + 1] for layer, states in features.items()}
        session.observe(ids[None, 1 : anchor + 2], known, torch.tensor([anchor + 1]))
        seen.clear()
        tree = session.draft(state_for(int(ids[anchor + 1])))
        assert tree.token_ids[0, 1:].tolist() == vectors["parallel_target_ids"][anchor].tolist()
        hidden, logits = (torch.cat([step[column][0] for step in seen]) for column in (0, 1))
        torch.testing.assert_close(hidden, vectors["parallel_hidden"][anchor], **CLOSE)
        torch.testing.assert_close(logits, rollouts[anchor], **CLOSE)


@pytest.mark.parametrize("name", WITH_TREES)
@pytest.mark.parametrize("index", range(4))
def test_golden_dynamic_trees_over_two_rounds(golden_root, name, index):
    vectors = vectors_of(name)
    total, depth, top_k = vectors[f"tree{index}_settings"].tolist()
    drafter = drafter_of(name, depth=depth + 1, top_k=top_k, max_nodes=total - 1)
    session = start(name, drafter)
    ids = vectors["token_ids"]
    for number in (1, 2):
        if number == 2:
            ids = vectors["round2_token_ids"]
            session.observe(ids[None, -3:], features_of(name, drafter, "round2_"), torch.tensor([3]))
        tree = session.draft(state_for(int(ids[-1])))
        assert paths_of(tree) == sorted(unpadded(vectors[f"tree{index}_round{number}_node_paths"]))


class Recorded(Recording, EagleDrafter):
    pass


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("name", quick_quarter(WITH_RUNS))
def test_golden_accepted_lengths_of_the_references_own_runs(golden_root, name):
    target, loaded = target_of(name), loaded_head(name)
    runs = meta_of(name)["e2e_eagenerate"]
    assert len(runs) > 5
    for run in runs:
        total, depth, top_k = (run["settings"][key] for key in ("total_token", "depth", "top_k"))
        options = EagleOptions(depth=depth + 1, top_k=top_k, max_nodes=total - 1)
        drafter = Recorded(loaded, target, options)
        assert run_of(target, drafter, run, num_more=depth + 2) == run["output"]
        assert drafter.accepted[: len(run["accept_lengths"])] == run["accept_lengths"]
