"""LiLiCorr heads: the lattice against a plain one of torch's own modules, its trees, its noise, and its files."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from hf_speculate.drafting import DraftRequest, DraftState
from hf_speculate.errors import CheckpointError
from hf_speculate_plugins.block import BlockDrafter, BlockHead, write_head
from hf_speculate_plugins.block.scores import BlockRequest, BlockScores
from hf_speculate_tools.check import check_head

from ...support.block_heads import HIDDEN, LATTICE, edited, random_block, spec_of
from ...support.block_sessions import nodes_of, shown, state_for
from ...support.heads import target


ROOT = 7


def saved(tmp_path, change=lambda config: None, rename=lambda name: name):
    """The folder of a head with other keys in `dflash_config`, and other names of its tensors."""
    folder = tmp_path / "head"
    random_block("lilicorr", target()).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return edited(folder, lambda config: change(config["dflash_config"]))


def scores_after(session, drafter) -> BlockScores:
    request = BlockRequest.of(drafter._loaded, drafter.options, state_for([ROOT]), drafter.spec.max_depth)
    slots = session._steps.slots(request.anchors)
    session._head_cache.drop()
    request = request._replace(last=session._steps.last)
    return BlockScores.of_block(drafter.head, request, slots, drafter.spec.max_depth)


def cells_of(lattice, embeddings, log_probs, states):
    """States of the cells of one block [S * K, w], cell by cell, by `nn.MultiheadAttention`."""
    slots, count = log_probs.shape
    places = [(slot, rank) for slot in range(slots) for rank in range(count)]
    cells = []
    for slot, rank in places:
        own = log_probs[slot, rank]
        facts = torch.stack([own, own.exp(), own - log_probs[slot].max(), own.new_tensor(rank / (count - 1))])
        facts = torch.cat([facts, facts.new_tensor([float(rank == 0)])])
        cell = lattice.token_proj(embeddings[slot, rank]) + lattice.pass_hidden_proj(states[slot])
        cell = cell + lattice.feature_mlp(functional.layer_norm(facts, (5,), *lattice.feature_norm.parameters()))
        cells.append(cell + lattice.slot_embedding[0, 0, slot, 0] + lattice.rank_embedding[0, 0, 0, rank])
    cells, heads = torch.stack(cells), lattice.sizes.num_heads
    bias = torch.zeros(heads, len(places), len(places), dtype=cells.dtype)
    for one, (slot, _) in enumerate(places):
        for two, (other, _) in enumerate(places):
            bias[:, one, two] = lattice.relative_slot_bias[:, slot - other + slots]
            bias[:, one, two] += lattice.same_slot_bias * (slot == other)
    for layer in lattice.layers:
        attention = torch.nn.MultiheadAttention(cells.shape[-1], heads, batch_first=True, dtype=cells.dtype)
        attention.load_state_dict(layer.attn.state_dict())
        normed = layer.attn_norm(cells)[None]
        cells = cells + attention(normed, normed, normed, attn_mask=bias, need_weights=False)[0][0]
        cells = cells + layer.mlp(layer.mlp_norm(cells))
    return lattice.output_norm(cells)


@torch.no_grad()
def test_the_scores_are_those_of_a_plain_lattice():
    drafter = random_block("lilicorr", target(dtype=torch.float64))
    lattice, generator = drafter.head.lilicorr, torch.Generator().manual_seed(3)
    size = (drafter.spec.max_depth, LATTICE.candidate_topk)
    embeddings, states, anchor = (
        torch.randn(*shape, HIDDEN, generator=generator, dtype=torch.float64) for shape in (size, size[:1], ())
    )
    log_probs = torch.randn(*size, generator=generator, dtype=torch.float64).log_softmax(-1).sort(descending=True)[0]
    cells = cells_of(lattice, embeddings, log_probs, states)
    anchor_state = lattice.anchor_norm(lattice.context_proj(anchor))
    joined = torch.stack([torch.cat([cell, anchor_state, cell * anchor_state]) for cell in cells])
    factors = functional.silu(lattice.factor_input_proj(joined))
    into, out, start = (
        vectors / vectors.norm(dim=-1, keepdim=True)
        for vectors in (lattice.in_head(factors), lattice.out_head(factors), lattice.anchor_out_head(anchor_state))
    )
    found = lattice(embeddings[None], log_probs[None], states[None], anchor[None])[0]
    expected = 12.0 * (out @ into.T).unflatten(0, size).unflatten(-1, size)
    for slot in range(1, size[0]):
        torch.testing.assert_close(found[slot].double(), expected[slot - 1, :, slot], atol=1e-5, rtol=1e-5)
    first = 12.0 * (into @ start)[: size[1]].expand_as(found[0])
    torch.testing.assert_close(found[0].double(), first, atol=1e-5, rtol=1e-5)


def test_trees_are_the_best_nodes_of_the_lattice(prompt):
    """Against every path of candidates; a draft that ends early is the beginning of the whole one."""
    model = target(dtype=torch.float64)
    drafter = random_block("lilicorr", model, max_nodes=40, top_k=6)
    session = shown(drafter, model, {"input_ids": prompt(12)})
    scores = scores_after(session, drafter)
    values, tokens = scores.steps[0].log_softmax(-1).tolist(), scores.candidates[0].tolist()
    paths, level = {}, {(): (0.0, 0)}
    for depth in range(2):
        level = {
            (*path, tokens[depth][rank]): (value + values[depth][last][rank], rank)
            for path, (value, last) in level.items()
            for rank in range(6)
        }
        paths |= {path: value for path, (value, _) in level.items()}
    found = nodes_of(session.draft(state_for([ROOT], max_depth=2)))
    wanted = sorted(paths.items(), key=lambda item: -item[1])[:40]
    assert [path for path, _ in found] == [path for path, _ in wanted]
    assert [value for _, value in found] == pytest.approx([value for _, value in wanted], rel=1e-4)


def test_sampled_chains_draw_from_the_lattice_with_the_noise_of_the_steps(prompt, monkeypatch):
    model = target(dtype=torch.float64)
    drafter = random_block("lilicorr", model, top_k=1)
    session = shown(drafter, model, {"input_ids": prompt(12)})
    plain = scores_after(session, drafter)
    chains = set()
    for seed in range(4):
        noise = torch.empty(1, 4, 96, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(seed))
        monkeypatch.setattr(DraftState, "log_noise", lambda *args, noise=noise, **kwargs: noise.log())
        chain = session.draft(state_for([ROOT], _warpers=LogitsProcessorList([TemperatureLogitsWarper(2.0)])))
        expected, rank = [], 0
        for slot, columns in enumerate(plain.candidates[0]):
            shares = (plain.steps[0, slot, rank].double() / 2.0).softmax(-1)
            rank = int((shares / noise[0, slot, columns]).argmax())
            expected.append(int(columns[rank]))
        assert chain.token_ids[0, 1:].tolist() == expected
        chains.add(tuple(expected))
    assert len(chains) > 1


def test_the_anchor_is_the_last_context_entry(prompt):
    """It changes with what the session was told, and a row that was told nothing keeps its own."""
    model = target(dtype=torch.float64)
    drafter = random_block("lilicorr", model)
    ids = prompt(9).repeat(2, 1)
    session = drafter.start(DraftRequest(target=model, input_ids=ids))
    generator = torch.Generator().manual_seed(2)
    told = {layer: torch.randn(2, 9, HIDDEN, generator=generator, dtype=torch.float64) for layer in (0, 2)}
    session.observe(ids, told, torch.tensor([9, 9]))
    context = drafter.head.fuse(list(told.values()))
    torch.testing.assert_close(session._steps.last, context[:, -1])
    more = {layer: states[:, :3] for layer, states in told.items()}
    session.observe(ids[:, :3], more, torch.tensor([2, 0]))
    torch.testing.assert_close(session._steps.last, torch.stack([context[0, 1], context[1, -1]]))


@pytest.mark.parametrize("name", LATTICE.stated())
def test_from_folder_names_a_missing_lattice_key(tmp_path, name):
    folder = saved(tmp_path, lambda nested: nested.pop(name))
    with pytest.raises(CheckpointError, match=rf"dflash_config in config\.json lacks {name}\. LiLiCorr heads need"):
        BlockDrafter.from_folder(folder, target())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidate_topk": 0}, "lilicorr_candidate_topk in config.json is 0, expected an integer from 1 to 16384"),
        ({"candidate_topk": 8}, "lilicorr.rank_embedding has shape"),
        ({"hidden_size": -3}, "lilicorr_hidden_size in config.json is -3, expected an integer"),
        ({"num_heads": 5}, "lilicorr_num_heads in config.json is 5, expected a divisor of the lattice's width, 12"),
        ({"num_layers": 3}, "missing: lilicorr.layers.2."),
        ({"num_layers": 1}, "unknown: lilicorr.layers.1."),
        ({"mlp_ratio": "wide"}, "lilicorr_mlp_ratio in config.json is 'wide', expected a number"),
        ({"factor_dim": 4}, "lilicorr.out_head.weight has shape (5, 12)"),
        ({"vector_eps": 0}, "lilicorr_vector_eps in config.json is 0, expected a number above 0"),
        ({"logit_scale": -1.0}, "lilicorr_logit_scale in config.json is -1.0, expected a finite number"),
    ],
)
def test_from_folder_refuses_impossible_lattice_keys(tmp_path, changes, message):
    folder = saved(tmp_path, lambda nested: nested.update({f"lilicorr_{key}": value for key, value in changes.items()}))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        BlockDrafter.from_folder(folder, target())


def test_another_first_slot_has_no_place_in_the_lattice(tmp_path):
    with pytest.raises(CheckpointError, match=r"lilicorr\.slot_embedding has shape \(1, 1, 4, 1, 12\)"):
        BlockDrafter.from_folder(saved(tmp_path), target(), first_slot=0)


def test_from_folder_reads_modelopts_lattice_names(tmp_path):
    """ModelOpt's exporter keeps the places of modules in a sequence, and writes keys that others leave out."""
    places = {"feature_norm.": "feature_mlp.0.", "feature_mlp.up_proj.": "feature_mlp.1."}
    places |= {"feature_mlp.down_proj.": "feature_mlp.3.", ".mlp.up_proj.": ".mlp.0.", ".mlp.down_proj.": ".mlp.2."}

    def rename(name):
        for ours, theirs in places.items() if name.startswith("lilicorr.") else ():
            name = name.replace(ours, theirs)
        return name

    keys = {"projector_type": "lilicorr", "lilicorr_enabled": True, "causal": False}
    found = BlockDrafter.from_folder(saved(tmp_path, lambda nested: nested.update(keys), rename), target())
    assert {"lilicorr.feature_norm.bias", "lilicorr.layers.1.mlp.down_proj.weight"} <= set(found.report.used)
    ours, theirs = random_block("lilicorr", target()).head.state_dict(), found.head.state_dict()
    assert found.spec == spec_of("lilicorr")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_lattice_as_wide_as_its_head_has_no_projection_of_tokens(tmp_path):
    model = target()
    wide = dataclasses.replace(LATTICE, hidden_size=HIDDEN, num_heads=4)
    head = BlockHead(spec_of("lilicorr", lattice=wide), model.get_input_embeddings(), model.get_output_embeddings())
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    write_head(tmp_path / "head", head, None, "zlab")
    assert not any("token_proj" in name for name in load_file(tmp_path / "head" / "model.safetensors"))
    for size in (0, HIDDEN):
        folder = edited(tmp_path / "head", lambda c, size=size: c["dflash_config"].update(lilicorr_hidden_size=size))
        assert BlockDrafter.from_folder(folder, model).spec.lattice == wide


def test_from_folder_ignores_keys_of_a_disabled_lattice(tmp_path):
    folder = tmp_path / "head"
    random_block("dflash", target()).save_pretrained(folder, "zlab")
    stated = {**LATTICE.stated(), "lilicorr_enabled": False}
    edited(folder, lambda config: config["dflash_config"].update(stated))
    assert BlockDrafter.from_folder(str(folder), target()).spec.method == "dflash"
    edited(folder, lambda config: config["dflash_config"].update(lilicorr_enabled=True))
    with pytest.raises(CheckpointError, match=r"missing: .*lilicorr\."):
        BlockDrafter.from_folder(str(folder), target())


def test_lilicorr_heads_are_checked_and_described(tmp_path):
    model, folder = target(), saved(tmp_path)
    assert BlockDrafter.describe(folder).algorithm == "lilicorr"
    found = check_head(folder, model, [torch.tensor([5, 9, 11, 3])], depth=2, max_new_tokens=12, try_alternatives=True)
    problems = {str(trial.options): trial.problem for trial in found.trials}
    assert "slot_embedding" in problems["{'first_slot': 0}"]
    assert not problems["{'causal': True}"]
