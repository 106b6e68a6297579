"""The medusa drafter on heads made here: layouts, losslessness, indices, trees, broken files."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from safetensors.torch import load_file, save_file

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.drafter import DraftRequest, DraftState
from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate.testing import check_drafter, check_lossless
from hf_speculate_plugins.checkpoints import read_checkpoint
from hf_speculate_plugins.medusa import (
    MedusaDrafter,
    MedusaHeads,
    MedusaOptions,
    computed_choices,
    measured_accuracies,
)
from hf_speculate_plugins.medusa import (
    drafter as drafter_module,
)
from hf_speculate_plugins.medusa.checkpoint.layouts import read_heads, recognizes, write_heads
from hf_speculate_plugins.medusa.choices import DEFAULT_ACCURACIES, static_tree


HIDDEN, VOCAB = 32, 96
TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0))


def random_heads(
    num_heads=3, num_layers=1, *, bias=True, outputs: int | None = None, vocab_size=VOCAB, truncated=0, seed=0
):
    """Random heads; `outputs` matrices (default: one a head, 0: the target's)."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator) * 0.3

    outputs = num_heads if outputs is None else outputs
    token_ids = torch.randperm(vocab_size, generator=generator)[:truncated].sort().values if truncated else None
    return MedusaHeads(
        randn(num_heads, num_layers, HIDDEN, HIDDEN),
        randn(num_heads, num_layers, HIDDEN) if bias else None,
        randn(outputs, truncated or vocab_size, HIDDEN) if outputs else None,
        token_ids,
    )


LAYOUTS = {
    "medusa1": ("fasterdecoding", random_heads()),
    "medusa1-2layers": ("fasterdecoding", random_heads(num_layers=2)),
    "v2": ("fasterdecoding", random_heads(outputs=0)),
    "vllm": ("vllm", random_heads(num_layers=2)),
    "vllm-nobias": ("vllm", random_heads(bias=False)),
    "vllm-original-lm-head": ("vllm", random_heads(outputs=1)),
    "vllm-truncated": ("vllm", random_heads(truncated=40)),
}


def write(path, name="medusa1") -> Path:
    layout, heads = LAYOUTS[name]
    write_heads(str(path), heads, layout, vocab_size=VOCAB)
    return path


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(str(folder), strip=()).tensors)


def rewrite(folder: Path, change) -> Path:
    """Applies `change` to the tensors of a Medusa-1 folder."""
    tensors = {name: tensor.clone() for name, tensor in tensors_of(folder).items()}
    change(tensors)
    torch.save(tensors, folder / "medusa_lm_head.pt")
    return folder


def left_padded(prompt, lengths=(9, 4, 7)):
    width = max(lengths)
    input_ids = torch.cat([torch.nn.functional.pad(prompt(n, seed=n), (width - n, 0)) for n in lengths])
    mask = torch.stack([torch.arange(width) >= width - n for n in lengths]).long()
    return {"input_ids": input_ids, "attention_mask": mask}


# --- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_round_trips_exactly(tmp_path, name):
    folder = write(tmp_path, name)
    assert recognizes(str(folder))
    heads = LAYOUTS[name][1]
    read = read_heads(str(folder)).heads
    assert read.state_dict().keys() == heads.state_dict().keys()
    for key, value in heads.state_dict().items():
        assert torch.equal(read.state_dict()[key], value), key
        assert read.state_dict()[key].dtype == value.dtype


def test_files_and_configs_are_those_of_the_layouts(tmp_path):
    assert sorted(os.listdir(write(tmp_path / "a", "medusa1"))) == ["config.json", "medusa_lm_head.pt"]
    assert sorted(os.listdir(write(tmp_path / "b", "v2"))) == ["config.json", "medusa_lm_head.safetensors"]
    assert json.loads((tmp_path / "b" / "config.json").read_text())["version"] == "2"
    truncated = write(tmp_path / "c", "vllm-truncated")
    config = json.loads((truncated / "config.json").read_text())
    assert config["model_type"] == "medusa"
    assert (config["truncated_vocab_size"], config["vocab_size"]) == (40, VOCAB)
    assert config["medusa_fc_bias"] is True
    assert set(tensors_of(truncated)) >= {"blocks.0.layers.0.weight", "lm_heads.2.weight", "token_map"}


def test_save_pretrained_of_a_loaded_drafter(tmp_path, tiny_model):
    target = tiny_model()
    drafter = MedusaDrafter.from_folder(str(write(tmp_path / "a")), target)
    drafter.save_pretrained(tmp_path / "b", layout="vllm")
    again = MedusaDrafter.from_folder(str(tmp_path / "b"), target)
    assert all(torch.equal(again.heads.state_dict()[k], v) for k, v in drafter.heads.state_dict().items())


def test_a_layout_that_cannot_express_the_heads_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="vllm"):
        write_heads(str(tmp_path), LAYOUTS["vllm-truncated"][1], "fasterdecoding", vocab_size=VOCAB)
    with pytest.raises(CheckpointError, match="fasterdecoding"):
        write_heads(str(tmp_path), LAYOUTS["v2"][1], "vllm", vocab_size=VOCAB)
    with pytest.raises(ValueError, match="unknown layout"):
        write_heads(str(tmp_path), LAYOUTS["v2"][1], "onnx", vocab_size=VOCAB)


def test_vllm_prefix_and_full_matrices_beside_a_token_map(tmp_path):
    """vLLM strips `medusa_heads.` and takes the mapped rows of full output matrices."""
    heads = random_heads(truncated=40)
    full = torch.randn(3, VOCAB, HIDDEN)
    full[:, heads.token_ids] = heads.output_weight.detach()
    write_heads(str(tmp_path), heads, "vllm", vocab_size=VOCAB)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"lm_heads.{h}.weight": full[h].clone() for h in range(3)}
    save_file({f"medusa_heads.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    read = read_heads(str(tmp_path)).heads
    assert torch.equal(read.output_weight, heads.output_weight)
    assert torch.equal(read.token_ids, heads.token_ids)


def test_an_original_lm_head_equal_to_the_targets_is_shared_not_copied(tmp_path, tiny_model):
    target = tiny_model()
    own = random_heads(outputs=0)
    stored = MedusaHeads(own.block_weight.data, own.block_bias.data, target.lm_head.weight.detach()[None].clone())
    write_heads(str(tmp_path), stored, "vllm", vocab_size=VOCAB)
    assert MedusaDrafter.from_folder(str(tmp_path), target).heads.output_weight is None
    assert MedusaDrafter.from_folder(str(write(tmp_path / "other", "vllm-original-lm-head")), target).heads.vocab_size


def test_head_count_is_read_off_the_tensors_and_config_may_be_absent(tmp_path, tiny_model):
    folder = write(tmp_path)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 7}))
    assert read_heads(str(folder)).heads.num_heads == 3
    (folder / "config.json").unlink()
    speculator = AutoSpeculator.from_pretrained(folder, target=tiny_model())
    assert speculator.drafter.name == "medusa"
    assert (speculator.drafter.heads.num_heads, speculator.drafter.heads.num_layers) == (3, 1)


# --- Medusa-2 --------------------------------------------------------------------------------------------------------


def medusa2(folder: Path, target, sharded=False) -> Path:
    target.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    write_heads(str(folder / "heads"), random_heads(), "fasterdecoding", vocab_size=VOCAB)
    tensors |= {f"medusa_head.{name}": tensor for name, tensor in tensors_of(folder / "heads").items()}
    if sharded:
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        shards = {name: f"model-{1 + 2 * i // len(names):05}-of-00002.safetensors" for i, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        for shard in set(shards.values()):
            held = {name: tensor for name, tensor in tensors.items() if shards[name] == shard}
            save_file(held, folder / shard, metadata={"format": "pt"})
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"medusa_num_heads": 3}))
    return folder


@pytest.mark.parametrize("sharded", [False, True])
def test_medusa2_heads_are_read_and_another_backbone_is_refused(tmp_path, tiny_model, sharded):
    target = tiny_model()
    folder = medusa2(tmp_path, target, sharded)
    speculator = AutoSpeculator.from_pretrained(folder, target=target)
    assert speculator.drafter.heads.num_heads == 3
    with pytest.raises(TargetMismatchError, match=r"differs by .*Load the target from that checkpoint"):
        AutoSpeculator.from_pretrained(folder, target=tiny_model(seed=1))
    AutoSpeculator.from_pretrained(folder, target=tiny_model(seed=1), check_backbone=False)


def test_a_slightly_tuned_backbone_is_refused_and_a_cast_one_is_not(tmp_path, tiny_model):
    folder = medusa2(tmp_path, tiny_model())
    MedusaDrafter.from_folder(str(folder), tiny_model(dtype=torch.bfloat16))
    tuned = copy.deepcopy(tiny_model())
    for parameter in tuned.parameters():
        parameter.add_(0.03 * parameter.std() * torch.randn_like(parameter))
    with pytest.raises(TargetMismatchError, match="differs by"):
        MedusaDrafter.from_folder(str(folder), tuned)


# --- the text is the target's ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("qwen2", True)])
def test_text_is_the_targets_in_every_layout(tmp_path, tiny_model, prompt, name, do_sample, architecture, tied):
    target = tiny_model(architecture, tied)
    speculator = AutoSpeculator.from_pretrained(write(tmp_path, name), target=target)
    for inputs in ({"input_ids": prompt(8)}, left_padded(prompt)):
        kwargs = {**inputs, "do_sample": do_sample, "max_new_tokens": 24}
        kwargs |= {"temperature": 1.3, "top_k": 20} if do_sample else {}
        torch.manual_seed(7)
        expected = target.generate(**kwargs)
        torch.manual_seed(7)
        assert torch.equal(target.generate(**kwargs, speculator=speculator), expected)
    assert speculator.stats.rounds > 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_bfloat16_differences_are_ties(tmp_path, tiny_model, prompt, name):
    folder = write(tmp_path, name)
    for architecture, tied, request in (("llama", False, {}), ("qwen2", True, {"do_sample": True, "seeds": (1,)})):
        target = tiny_model(architecture, tied, dtype=torch.bfloat16)
        speculator = AutoSpeculator.from_pretrained(folder, target=target)
        report = check_lossless(
            target, speculator, [prompt(8)[0]], max_new_tokens=24, **request
        )  # raises unless proven
        assert (report.num_cases, report.num_tokens) == (1, 24)
        assert speculator.stats.rounds > 0


@pytest.mark.parametrize("name", ["medusa1", "v2", "vllm-original-lm-head"])
def test_device_map_with_offloading(tmp_path, tiny_model, prompt, name):
    """The output matrix of the target is nowhere until it is called; the heads sit where it computes."""
    model = copy.deepcopy(tiny_model())
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    offload_dir = str(tmp_path / "offloaded")
    model = dispatch_model(model, device_map, main_device="cpu", offload_dir=offload_dir, force_hooks=True)
    assert model.lm_head.weight.device.type == "meta"
    speculator = AutoSpeculator.from_pretrained(write(tmp_path / "head", name), target=model)
    assert speculator.drafter.heads.device.type == "cpu"
    output = model.generate(prompt(8), max_new_tokens=24, do_sample=False, speculator=speculator)
    assert torch.equal(output, tiny_model().generate(prompt(8), max_new_tokens=24, do_sample=False))
    assert speculator.stats.rounds > 0


@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("qwen2", False)])
def test_text_is_the_targets_with_eos_penalty_and_a_second_turn(tiny_model, prompt, architecture, tied):
    target = tiny_model(architecture, tied)
    speculator = Speculator(MedusaDrafter(random_heads(4), target, MedusaOptions(choices=TREE)))
    kwargs = {"max_new_tokens": 16, "repetition_penalty": 1.2, "eos_token_id": [5, 9, 17]}
    for inputs in ({"input_ids": prompt(8)}, left_padded(prompt)):
        expected = target.generate(**inputs, **kwargs)
        assert torch.equal(target.generate(**inputs, **kwargs, speculator=speculator), expected)
    first = target.generate(prompt(8), max_new_tokens=12, return_dict_in_generate=True, speculator=speculator)
    turn = torch.cat([first.sequences, prompt(5, seed=3)], dim=1)
    again = target.generate(turn, past_key_values=first.past_key_values, max_new_tokens=12, speculator=speculator)
    assert torch.equal(again, target.generate(turn, max_new_tokens=12))


@pytest.mark.parametrize("name", ["medusa1-2layers", "v2", "vllm-truncated"])
def test_medusa_keeps_the_contract_of_drafters(tiny_model, prompt, name):
    target = tiny_model()
    drafter = MedusaDrafter(copy.deepcopy(LAYOUTS[name][1]), target, MedusaOptions(choices=TREE))
    check_drafter(drafter, target, [prompt(7)[0], prompt(4, seed=2)[0]])


def test_heads_take_the_targets_dtype_and_do_not_keep_it_alive(tmp_path, tiny_model, prompt):
    target = copy.deepcopy(tiny_model(dtype=torch.bfloat16))
    speculator = AutoSpeculator.from_pretrained(write(tmp_path, "v2"), target=target)
    assert speculator.drafter.heads.dtype == torch.bfloat16
    assert target.generate(prompt(8), max_new_tokens=12, speculator=speculator).shape == (1, 20)
    alive = weakref.ref(target)
    del target
    gc.collect()
    assert alive() is None


# --- features, heads and nodes are the right ones ---------------------------------------------------------------------


def permutation_target(tiny_model, num_heads: int):
    """A target that maps token v to perm[v], and heads that know it: head h on the state of v scores perm^(h+2)[v].

    The layers add nothing, and the rows of the embedding are distinct enough for the right logit to be the largest.
    """
    target = copy.deepcopy(tiny_model())
    generator = torch.Generator().manual_seed(1)
    perm = torch.randperm(VOCAB, generator=generator)
    state = torch.randn(VOCAB, HIDDEN, generator=generator)
    state = state / state.norm(dim=-1, keepdim=True)
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    target.model.embed_tokens.weight.data = state
    powers = [perm]
    for _ in range(num_heads):
        powers.append(perm[powers[-1]])
    matrices = []
    for power in powers:
        matrix = torch.zeros(VOCAB, HIDDEN)
        matrix[power] = state
        matrices.append(matrix)
    target.lm_head.weight.data = matrices[0]
    zeros = torch.zeros(num_heads, 1, HIDDEN, HIDDEN)
    return target.requires_grad_(False), MedusaHeads(
        zeros, torch.zeros(num_heads, 1, HIDDEN), torch.stack(matrices[1:])
    )


@pytest.mark.parametrize("batch", [False, True], ids=["B=1", "left-padded"])
@pytest.mark.parametrize("truncated", [False, True])
def test_heads_that_know_a_permutation_target_are_accepted_at_every_depth(tiny_model, prompt, batch, truncated):
    target, heads = permutation_target(tiny_model, num_heads=4)
    if truncated:  # a shuffled map of all tokens: ids go through it in both directions
        token_ids = torch.randperm(VOCAB)
        heads = MedusaHeads(
            heads.block_weight.data, heads.block_bias.data, heads.output_weight[:, token_ids], token_ids
        )
    speculator = Speculator(MedusaDrafter(heads, target, MedusaOptions(choices=TREE)))
    inputs = left_padded(prompt) if batch else {"input_ids": prompt(8)}
    output = target.generate(**inputs, max_new_tokens=41, speculator=speculator)
    assert torch.equal(output, target.generate(**inputs, max_new_tokens=41))
    assert set(speculator.stats.accepted_histogram) == {4}
    assert speculator.stats.acceptance_rate_by_depth == dict.fromkeys(range(1, 5), 1.0)


@pytest.mark.parametrize("batch", [False, True], ids=["B=1", "left-padded"])
@pytest.mark.parametrize("truncated", [False, True])
def test_a_request_that_samples_is_drafted_with_its_own_noise(tiny_model, prompt, batch, truncated):
    """A target with one distribution for every token, and heads that have it too: the noise of step and row decides."""
    target = copy.deepcopy(tiny_model())
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    target.model.embed_tokens.weight[:] = target.model.embed_tokens.weight[5].clone()
    token_ids = torch.randperm(VOCAB) if truncated else None
    output = target.lm_head.weight[slice(None) if token_ids is None else token_ids]
    heads = MedusaHeads(torch.zeros(4, 1, HIDDEN, HIDDEN), None, output.expand(4, -1, -1).clone(), token_ids)
    speculator = Speculator(MedusaDrafter(heads, target, MedusaOptions(choices=[(0,) * d for d in range(1, 5)])))
    inputs = left_padded(prompt) if batch else {"input_ids": prompt(8)}
    kwargs = {**inputs, "do_sample": True, "temperature": 1.5, "top_k": 30, "max_new_tokens": 41}
    torch.manual_seed(3)
    expected = target.generate(**kwargs)
    torch.manual_seed(3)
    assert torch.equal(target.generate(**kwargs, speculator=speculator), expected)
    assert len(expected[0, -41:].unique()) > 10
    assert set(speculator.stats.accepted_histogram) == {4}


def test_only_the_right_rank_is_accepted(tiny_model, prompt):
    target, heads = permutation_target(tiny_model, num_heads=3)
    speculator = Speculator(MedusaDrafter(heads, target, MedusaOptions(choices=[(1,), (2,), (1, 0)])))
    target.generate(prompt(8), max_new_tokens=12, speculator=speculator)
    assert set(speculator.stats.accepted_histogram) == {0}


def test_a_target_that_takes_no_trees_gets_the_chain_of_best_tokens(tiny_model):
    """Whatever the choices are: here not even the root's best child is one."""
    target, heads = permutation_target(tiny_model, num_heads=3)
    session = MedusaDrafter(heads, target, MedusaOptions(choices=[(1,)])).start(
        DraftRequest(target=target, input_ids=torch.tensor([[4]]))
    )
    states = target(torch.tensor([[4]]), output_hidden_states=True).hidden_states
    text = target.generate(torch.tensor([[4]]), max_new_tokens=4)[0, 1:]
    session.observe(text[None, :1], {2: states[2]}, torch.tensor([1]))
    state = DraftState(root_ids=text[:1], active=(True,), max_depth=9, chains_only=True, num_emitted=(1,))
    tree = session.draft(state)
    assert tree.token_ids.tolist() == [text.tolist()]
    assert tree.host.parents == [[-1, 0, 1, 2]]


@pytest.mark.parametrize("batch", [False, True], ids=["B=1", "left-padded"])
def test_the_feature_of_every_round_is_that_of_a_plain_forward(tiny_model, prompt, batch, monkeypatch):
    """fp64: after rejections, in padded rows, at every round: the state is the one the root was chosen from."""
    target = tiny_model(dtype=torch.float64)
    speculator = Speculator(MedusaDrafter(random_heads(4).double(), target, MedusaOptions(choices=TREE)))
    used = []
    original = drafter_module.MedusaSession.draft

    def draft(self, state):
        used.append((self._features.clone(), state))
        return original(self, state)

    monkeypatch.setattr(drafter_module.MedusaSession, "draft", draft)
    inputs = left_padded(prompt) if batch else {"input_ids": prompt(8)}
    sequences = target.generate(**inputs, max_new_tokens=20, speculator=speculator)
    width = inputs["input_ids"].shape[1]
    mask = torch.nn.functional.pad(inputs.get("attention_mask", torch.ones(1, width).long()), (0, 20), value=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    states = target(sequences, attention_mask=mask[:, : sequences.shape[1]], position_ids=positions,
                    output_hidden_states=True).hidden_states[-1]  # fmt: skip
    assert len(used) > 5
    for features, state in used:
        for row, is_active in enumerate(state.active):
            if is_active:
                root = width + state.num_emitted[row] - 1
                assert sequences[row, root] == state.root_ids[row]
                torch.testing.assert_close(features[row], states[row, root - 1], atol=1e-9, rtol=1e-9)


def test_drafted_tokens_are_the_ranked_tokens_of_the_heads(tiny_model, prompt, monkeypatch):
    target = tiny_model()
    heads = random_heads(4)
    speculator = Speculator(MedusaDrafter(heads, target, MedusaOptions(choices=TREE)))
    drafted = []
    original = drafter_module.MedusaSession.draft

    def draft(self, state):
        tree = original(self, state)
        tree.check(VOCAB)
        drafted.append((self._features, state, tree))
        return tree

    monkeypatch.setattr(drafter_module.MedusaSession, "draft", draft)
    target.generate(prompt(8), max_new_tokens=20, speculator=speculator)
    for features, state, tree in drafted:
        kept = [choice for choice in TREE if len(choice) <= state.max_depth]
        for node, choice in enumerate(kept, start=1):
            depth = len(choice)
            state_h = features[0]
            state_h = state_h + torch.nn.functional.silu(
                heads.block_weight[depth - 1, 0] @ state_h + heads.block_bias[depth - 1, 0]
            )
            ranked = (heads.output_weight[depth - 1] @ state_h).argsort(descending=True)
            assert tree.host.token_ids[0][node] == ranked[choice[-1]]


def test_forward_of_a_part_of_the_heads_and_of_leading_dimensions(tiny_model):
    heads, features = random_heads(3, 2), torch.randn(2, 5, HIDDEN)
    logits = heads(features)
    assert logits.shape == (3, 2, 5, VOCAB)
    torch.testing.assert_close(heads(features, num_heads=2), logits[:2])
    torch.testing.assert_close(heads(features[1, 3]), logits[:, 1, 3])
    lm_head = tiny_model().lm_head
    assert random_heads(outputs=0)(features, lm_head).shape == (3, 2, 5, VOCAB)
    with pytest.raises(TypeError, match="lm_head"):
        random_heads(outputs=0)(features)


def test_untrained_heads_say_what_the_target_says(tiny_model):
    target = tiny_model()
    features = torch.randn(4, HIDDEN)
    logits = MedusaHeads.untrained(3, 1, target.lm_head.weight)(features)
    torch.testing.assert_close(logits, target.lm_head(features).expand(3, -1, -1))


# --- trees -----------------------------------------------------------------------------------------------------------


def test_computed_choices_are_the_best_tree():
    accuracies = ((0.6, 0.2), (0.5, 0.1))
    # Values: 0 .6, 00 .3, 1 .2, 10 .1, 01 .06, 11 .02
    assert computed_choices(accuracies, 3) == ((0,), (1,), (0, 0))
    assert computed_choices(accuracies, 5) == ((0,), (1,), (0, 0), (0, 1), (1, 0))
    assert len(computed_choices(accuracies, 100)) == 6
    assert computed_choices(((0.0, 0.4),), 5) == ((1,),)  # a rank that is never right has no place


def test_the_default_tree_has_the_shape_of_the_papers():
    """mc_sim_7b_63 has 10, 28, 23 and 2 nodes at depths 1 to 4."""
    choices = computed_choices(DEFAULT_ACCURACIES, 63)
    by_depth = [sum(len(choice) == depth for choice in choices) for depth in range(1, 5)]
    assert len(choices) == 63
    assert all(abs(ours - theirs) <= 6 for ours, theirs in zip(by_depth, (10, 28, 23, 2), strict=True))


def test_accuracies_are_measured_at_the_right_offset():
    text = torch.arange(10)
    logits = torch.zeros(2, 10, 20)
    for position in range(10):
        logits[0, position, position + 2] = 1.0  # head 0: right with rank 0
        logits[1, position, position + 3] = 1.0  # head 1: right with rank 1
        logits[1, position, 0] = 2.0
    assert measured_accuracies(logits, text, max_ranks=3) == ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))
    token_ids = torch.arange(19, -1, -1)
    mapped = measured_accuracies(logits.flip(-1), text, max_ranks=2, draft_token_ids=token_ids)
    assert mapped == ((1.0, 0.0), (0.0, 1.0))


def test_trees_are_cut_to_the_heads_and_the_budget(tiny_model):
    drafter = MedusaDrafter(random_heads(2), tiny_model(), MedusaOptions(choices=TREE))
    assert drafter.tree.max_depth == 2
    assert drafter.tree.widths == (3, 2)
    assert drafter.tree.to_depth(1).choices == TREE[:3]
    assert drafter.tree.to_depth(0).parents == (-1,)
    assert static_tree(TREE).columns == (0, 1, 2, 3, 4, 3, 5, 6)
    assert MedusaDrafter(random_heads(2), tiny_model(), MedusaOptions(max_nodes=5)).tree.parents.count(0) < 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"choices": [(0,)], "max_nodes": 4}, "whole tree"),
        ({"max_nodes": 0}, "at least 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MedusaOptions(**options)


def test_a_rank_beyond_the_vocabulary_is_refused(tiny_model):
    with pytest.raises(ValueError, match="rank 40"):
        MedusaDrafter(random_heads(truncated=40), tiny_model(), MedusaOptions(choices=[(40,)]))


def test_options_reach_the_drafter_and_unknown_ones_raise(tmp_path, tiny_model):
    folder = write(tmp_path)
    speculator = AutoSpeculator.from_name("medusa", target=tiny_model(), heads=folder, max_nodes=7)
    assert len(speculator.drafter.tree.choices) == 7
    assert "7 nodes" in repr(speculator)
    with pytest.raises(TypeError, match="unknown"):
        AutoSpeculator.from_pretrained(folder, target=tiny_model(), unknown=1)
    with pytest.raises(TypeError, match="needs its heads"):
        AutoSpeculator.from_name("medusa", target=tiny_model())
    with pytest.raises(AttributeError):
        replace(MedusaOptions(), max_nodes=3).max_nodes = 4


# --- broken files and wrong targets ----------------------------------------------------------------------------------


def test_another_target_is_refused_with_both_numbers(tmp_path, tiny_model):
    folder = write(tmp_path)
    with pytest.raises(TargetMismatchError, match=r"96.*128"):
        MedusaDrafter.from_folder(str(folder), tiny_model(vocab_size=128))
    heads = random_heads(truncated=40)
    with pytest.raises(TargetMismatchError, match=r"vocabulary has 50"):
        MedusaDrafter(heads, tiny_model(), MedusaOptions()).check_target(tiny_model(vocab_size=50))
    wide = MedusaHeads(torch.zeros(1, 1, 48, 48), None, torch.zeros(1, VOCAB, 48))
    with pytest.raises(TargetMismatchError, match=r"size 48.*have 32"):
        MedusaDrafter(wide, tiny_model()).check_target(tiny_model())
    drafter = MedusaDrafter.from_folder(str(folder), tiny_model())
    drafter._num_target_layers = 5
    with pytest.raises(TargetMismatchError, match=r"5 layers.*has 2"):
        drafter.check_target(tiny_model())


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path):
    cases = [
        (lambda t: t.pop("1.0.linear.weight"), r"missing: 1\.0\.linear\.weight"),
        (lambda t: t.pop("2.0.linear.bias"), r"missing: 2\.0\.linear\.bias"),
        (lambda t: t.pop("0.1.weight"), r"missing: 0\.1\.weight"),
        (lambda t: t.update({"extra.weight": torch.zeros(2)}), r"unknown: extra\.weight"),
        (lambda t: t.update({"1.0.linear.bias": torch.zeros(7)}), r"1\.0\.linear\.bias has shape \(7,\)"),
        (lambda t: t.update({"1.1.weight": torch.zeros(7, HIDDEN)}), r"different vocabularies"),
    ]
    for index, (change, message) in enumerate(cases):
        folder = rewrite(write(tmp_path / str(index)), change)
        with pytest.raises(CheckpointError, match=message):
            read_heads(str(folder))


def test_token_maps_with_doubles_are_refused(tmp_path):
    folder = write(tmp_path, "vllm-truncated")
    tensors = load_file(folder / "model.safetensors")
    tensors["token_map"][1] = tensors["token_map"][0]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="token_map must hold different"):
        read_heads(str(folder))


def test_truncated_files_are_refused(tmp_path, tiny_model):
    for name, file in (("medusa1", "medusa_lm_head.pt"), ("v2", "medusa_lm_head.safetensors")):
        path = write(tmp_path / name, name) / file
        path.write_bytes(path.read_bytes()[:-500])
        with pytest.raises(CheckpointError, match=file):
            AutoSpeculator.from_pretrained(path.parent, target=tiny_model())


class _Code:
    def __reduce__(self):
        return (os.mkdir, ("executed",))


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "head")
    with open(folder / "medusa_lm_head.pt", "wb") as file:
        pickle.dump({"0.0.linear.weight": _Code()}, file, protocol=2)
    with pytest.raises(CheckpointError, match=r"medusa_lm_head\.pt"):
        AutoSpeculator.from_pretrained(folder, target=tiny_model())
    assert not (tmp_path / "executed").exists()


def test_nan_weights_are_refused(tmp_path):
    folder = rewrite(write(tmp_path), lambda t: t["0.1.weight"].fill_(float("nan")))
    with pytest.raises(CheckpointError, match="NaN"):
        read_heads(str(folder))


def test_other_folders_are_not_recognised(tmp_path, tiny_model):
    assert not MedusaDrafter.recognizes(str(tmp_path))
    assert not MedusaDrafter.recognizes(str(tmp_path / "absent"))
    tiny_model().save_pretrained(tmp_path)
    assert not MedusaDrafter.recognizes(str(tmp_path))
