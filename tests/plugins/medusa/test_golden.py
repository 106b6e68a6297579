"""The medusa drafter against vectors computed by FasterDecoding/Medusa itself (`../shared/golden`, see its README)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteriaList
from transformers.generation.logits_process import LogitsProcessorList

from hf_speculate import AutoSpeculator, DraftTree, Speculator
from hf_speculate.loop import loop
from hf_speculate.verification import Sampler, Verifier
from hf_speculate.verification.records import Records
from hf_speculate.verification.sequences import Sequences
from hf_speculate.verification.stopping import Stopping
from hf_speculate.verification.typical import TypicalAcceptance
from hf_speculate_plugins.medusa import StaticTree
from hf_speculate_plugins.medusa.drafter import MedusaSession

from ...support.tiers import quick


FOLDERS = ("medusa1-base", "medusa1-2layers", "medusa2-full", "medusa-v2-sharedhead")
WITH_ACCEPTANCE = FOLDERS[:3]
WITH_E2E = ("medusa1-base", "medusa2-full")
TREES = ("small", "wide", "mc_sim_7b_63")
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@dataclass(frozen=True)
class Golden:
    """One golden folder with its target; `speculator(tree)` drafts the tree of that name."""

    folder: Path
    meta: dict
    vectors: dict[str, Tensor]
    target: PreTrainedModel

    def __getitem__(self, name: str) -> Tensor:
        return self.vectors[name]

    def choices(self, tree: str) -> list[tuple[int, ...]]:
        return [tuple(rank for rank in row if rank >= 0) for row in self[f"{tree}_choices"].tolist()]

    def speculator(self, tree: str) -> Speculator:
        speculator = AutoSpeculator.from_pretrained(self.folder / "head", target=self.target)
        speculator.drafter.tree = StaticTree.of(self.choices(tree))
        return speculator

    def draft_tree(self, tree: str) -> DraftTree:
        return DraftTree(self[f"{tree}_tree_tokens"][None], self[f"{tree}_parents"].tolist())


@cache
def load_golden(root: Path, name: str) -> Golden:
    folder = root / name
    meta = json.loads((folder / "meta.json").read_text())
    target = folder / "head" if name == "medusa2-full" else root / meta["target"]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval().requires_grad_(False)
    return Golden(folder, meta, load_file(folder / "vectors.safetensors"), model)


@pytest.fixture
def golden(golden_root, request) -> Golden:
    return load_golden(golden_root, request.param)


def folders(*names: str):
    return pytest.mark.parametrize("golden", names, indirect=True)


trees = pytest.mark.parametrize("tree", TREES)
scored_trees = pytest.mark.parametrize("tree", TREES[:2])


@folders(*FOLDERS)
def test_golden_head_count_is_that_of_the_tensors(golden):
    heads = golden.speculator("small").drafter.heads
    assert (heads.num_heads, heads.num_layers) == (golden.meta["num_heads"], golden.meta["num_layers"])


@folders(*FOLDERS)
def test_golden_feature_and_logits(golden):
    drafter = golden.speculator("small").drafter
    output = golden.target(golden["token_ids"][None], output_hidden_states=True)
    features = output.hidden_states[drafter.feature_layers[0]][0]
    torch.testing.assert_close(features, golden["target_last_hidden"], **CLOSE)
    torch.testing.assert_close(output.logits[0], golden["base_logits"], **CLOSE)
    logits = drafter.heads(golden["target_last_hidden"], golden.target.get_output_embeddings())
    torch.testing.assert_close(logits, golden["medusa_logits"], **CLOSE)


@folders(*FOLDERS)
@trees
def test_golden_tree_buffers(golden, tree):
    static = golden.speculator(tree).drafter.tree
    plan = DraftTree(torch.zeros(1, len(static.parents), dtype=torch.long), static.parents).plan
    assert list(static.parents) == golden[f"{tree}_parents"].tolist()
    assert torch.equal(plan.ancestors[0], golden[f"{tree}_mask"])
    assert torch.equal(plan.depths[0], golden[f"{tree}_position_ids"])
    # The reference's flat index: 10 ranks a head, 0 for the root.
    indices = [choice[-1] + 10 * (len(choice) - 1) + 1 for choice in static.paths]
    assert [0, *indices] == golden[f"{tree}_tree_indices"].tolist()
    leaves = set(range(len(static.parents))) - set(static.parents)
    paths = {tuple(plan.ancestors[0, leaf].nonzero()[:, 0].tolist()) for leaf in leaves}
    expected = {tuple(n for n in row if n >= 0) for row in golden[f"{tree}_retrieve_indices"].tolist()}
    assert paths == expected


@folders(*WITH_ACCEPTANCE)
@trees
def test_golden_first_round_of_generate(golden, tree, monkeypatch):
    """Drafted tokens, the target's logits over the tree, the heads at its end and the accepted length of one round."""
    speculator, rounds = golden.speculator(tree), []
    original = loop.score

    def score(run, drafted):
        output = original(run, drafted)
        rounds.append((drafted, output))
        return output

    monkeypatch.setattr(loop, "score", score)
    golden.target.generate(
        golden["token_ids"][None], max_new_tokens=7, do_sample=False, eos_token_id=None, speculator=speculator
    )
    drafted, output = rounds[0]
    assert drafted.host.token_ids[0] == golden[f"{tree}_tree_tokens"].tolist()
    for path, candidates in zip(
        golden[f"{tree}_retrieve_indices"].tolist(), golden[f"{tree}_cart_candidates"].tolist(), strict=True
    ):
        real = [node for node in path if node >= 0]
        assert [drafted.host.token_ids[0][node] for node in real] == candidates[: len(real)]
    first_histogram = _accepted_lengths(golden, speculator, golden["token_ids"].tolist(), 1)
    assert first_histogram == [int(golden[f"{tree}_greedy_len"])]
    if tree != "mc_sim_7b_63":
        nodes = golden[f"{tree}_retrieve_indices"]  # -1 indexes the last node, in the reference as here
        torch.testing.assert_close(output.logits[0][nodes], golden[f"{tree}_path_logits"], **CLOSE)
        ends = output.hidden_states[speculator.drafter.feature_layers[0]][0][nodes[:, -1]]
        torch.testing.assert_close(speculator.drafter.heads(ends), golden[f"{tree}_path_medusa_logits_last"], **CLOSE)


@folders(*WITH_ACCEPTANCE)
@scored_trees
def test_golden_greedy_acceptance(golden, tree):
    drafted = golden.draft_tree(tree)
    paths = golden[f"{tree}_retrieve_indices"]
    path_logits = torch.zeros(drafted.num_nodes, golden["base_logits"].shape[-1])
    path_logits[paths[paths >= 0]] = golden[f"{tree}_path_logits"][paths >= 0]
    for prefix, logits in (("", path_logits), ("syn_", golden[f"{tree}_typ_node_logits"])):
        sampler = Sampler(LogitsProcessorList(), None, Records())
        sequences = Sequences(golden["token_ids"][None], None)
        verifier = Verifier(sampler, Stopping(StoppingCriteriaList()), sequences, lockstep=True)
        verdict = verifier.verify(logits[None], drafted)
        assert verdict.num_accepted == [int(golden[f"{tree}_{prefix}greedy_len"])]
        best = paths[int(golden[f"{tree}_{prefix}greedy_best"])].tolist()
        assert verdict.paths[0] == best[: verdict.num_accepted[0] + 1]


@folders(*WITH_ACCEPTANCE)
@scored_trees
@pytest.mark.parametrize("case", range(4))
def test_golden_typical_acceptance(golden, tree, case):
    drafted, name = golden.draft_tree(tree), f"{tree}_typ{case}"
    temperature, epsilon, delta = golden[f"{name}_params"].tolist()
    rule = TypicalAcceptance(posterior_threshold=epsilon, posterior_alpha=delta)
    scores = golden[f"{tree}_typ_node_logits"] / temperature
    probs = torch.softmax(scores, dim=-1)
    thresholds, entropies = rule.thresholds(probs)
    paths, candidates = golden[f"{tree}_retrieve_indices"], golden[f"{tree}_cart_candidates"]
    torch.testing.assert_close(thresholds[paths[:, :-1]], golden[f"{name}_threshold"], **CLOSE)
    torch.testing.assert_close(entropies[paths[:, :-1]], golden[f"{name}_entropy"], **CLOSE)
    candidate_probs = probs[paths[:, :-1], candidates[:, 1:]]
    torch.testing.assert_close(candidate_probs, golden[f"{name}_candidate_prob"], **CLOSE)
    real = ~golden[f"{tree}_candidates_are_padding"][:, 1:]
    accepted = candidate_probs > thresholds[paths[:, :-1]]
    assert torch.equal(accepted[real], golden[f"{name}_accepted"][real])
    last = int(rule.last_nodes(scores[None], drafted)[0])
    length = int(golden[f"{name}_accept_length"])
    assert int(drafted.plan.depths[0, last]) == length
    assert last == int(paths[int(golden[f"{name}_best_candidate"]), length])


def _accepted_lengths(golden: Golden, speculator: Speculator, prompt: list[int], rounds: int, **kwargs) -> list[int]:
    return _run(golden, speculator, prompt, rounds, **kwargs)[1]


def _run(golden: Golden, speculator: Speculator, prompt: list[int], rounds: int, new_tokens=24, **kwargs):
    """(new tokens, accepted draft tokens of the first `rounds` rounds) of a real `generate`."""
    lengths: list[int] = []
    original = MedusaSession.observe

    def observe(self, tokens, features, observed):
        lengths.append(int(observed[0]) - 1)
        original(self, tokens, features, observed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MedusaSession, "observe", observe)
        output = golden.target.generate(
            torch.tensor([prompt]),
            max_new_tokens=new_tokens,
            eos_token_id=None,
            speculator=speculator,
            **{"do_sample": False} | kwargs,
        )
    return output[0, len(prompt) :].tolist(), lengths[1 : 1 + rounds]


@folders(*WITH_E2E)
@pytest.mark.parametrize("tree", quick(TREES))
@pytest.mark.parametrize("rule", ["greedy", "typical"])
def test_golden_end_to_end(golden, tree, rule):
    """`medusa_generate` of the reference: the same text, the same accepted length in each of its rounds."""
    runs = [
        run
        for run in golden.meta["e2e_medusa_generate"]
        if run["choices"] == tree and (run["temperature"] == 0) == (rule == "greedy")
    ]
    assert runs
    drafter = golden.speculator(tree).drafter
    for run in runs:
        speculator, kwargs = Speculator(drafter), {}
        if rule == "typical":
            thresholds = {name: run[name] for name in ("posterior_threshold", "posterior_alpha")}
            speculator = Speculator(drafter, acceptance="typical", **thresholds)
            kwargs = {"do_sample": True, "temperature": run["temperature"], "top_k": 0}
        # Ten tokens more than the reference wrote: near the end of the budget trees are cut.
        text, lengths = _run(
            golden, speculator, run["prompt"], len(run["accept_lengths"]), len(run["output"]) + 10, **kwargs
        )
        assert text[: len(run["output"])] == run["output"]
        assert lengths == run["accept_lengths"]


def test_golden_medusa2_heads_want_their_own_backbone(golden_root, caplog):
    golden = load_golden(golden_root, "medusa2-full")
    stock = AutoModelForCausalLM.from_pretrained(golden_root / "targets" / "llama", dtype=torch.float32)
    AutoSpeculator.from_pretrained(golden.folder / "head", target=stock)
    assert "Load the target from that checkpoint" in caplog.text
