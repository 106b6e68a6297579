"""The eagle drafter on heads made here: losslessness, draft logits from scratch, layouts, conventions, broken files."""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.drafter import RAW_LAST
from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate.hub import drafter_class_for
from hf_speculate.testing import check_drafter, check_lossless
from hf_speculate_plugins.eagle import EagleDrafter, EagleOptions, EagleSession, StaticTree
from hf_speculate_plugins.eagle.attention import CachedAttention
from hf_speculate_plugins.eagle.reading import Reading


HIDDEN, VOCAB, DEPTH = 32, 96, 7
PLAIN = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
STATIC = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1), (0, 0, 0, 0), (1, 0, 1, 0))
SHAPES = {
    "dynamic": {"depth": 4, "top_k": 6, "max_nodes": 20},
    "chain": {"depth": 4, "top_k": 1},
    "static": {"tree": STATIC},
}


@cache
def target(architecture: str = "llama", tied: bool = False, dtype: torch.dtype = torch.float32, depth: int = DEPTH):
    config_class, model_class = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[
        architecture
    ]
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(3)
    model = model_class(config).eval().to(dtype).requires_grad_(False)
    model.generation_config.pad_token_id = 0
    return model


def layer_tensors(prefix: str, rand, hidden, kv=16, head_dim=8, inputs=None, qk_norm=False, qkv_bias=False) -> dict:
    inputs = inputs or hidden
    sizes = {"q": (4 * head_dim, inputs), "k": (kv, inputs), "v": (kv, inputs), "o": (hidden, 4 * head_dim)}
    tensors = {f"{prefix}self_attn.{name}_proj.weight": rand(*size) for name, size in sizes.items()}
    if qkv_bias:
        tensors |= {f"{prefix}self_attn.{name}_proj.bias": rand(sizes[name][0]) for name in "qkv"}
    if qk_norm:
        tensors |= {f"{prefix}self_attn.{name}_norm.weight": 1 + rand(head_dim) for name in "qk"}
    tensors |= {f"{prefix}mlp.{name}_proj.weight": rand(48, hidden) for name in ("gate", "up")}
    tensors |= {f"{prefix}mlp.down_proj.weight": rand(hidden, 48)}
    return tensors | {f"{prefix}post_attention_layernorm.weight": 1 + rand(hidden)}


def draft_vocabulary(size: int, rand) -> dict:
    ids = torch.randperm(VOCAB)[:size].sort().values
    members = torch.zeros(VOCAB, dtype=torch.bool)
    members[ids] = True
    return {"d2t": ids - torch.arange(size), "t2d": members}


def make_tensors(layout: str, rand) -> tuple[dict, dict]:
    """config.json and tensors of a random head in a published layout."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
    }
    if layout == "eagle1":
        tensors = {"embed_tokens.weight": target().model.embed_tokens.weight.clone()}
        tensors |= layer_tensors("layers.0.", rand, HIDDEN, qkv_bias=True)
        return config, tensors | {"fc.weight": rand(HIDDEN, 2 * HIDDEN), "fc.bias": rand(HIDDEN)}
    hidden = 24 if layout == "safeailab-narrow" else HIDDEN
    prefix = "layers.0." if layout in ("speculators", "deepspec") else "midlayer."
    qk_norm = layout in ("speculators", "deepspec")
    size = VOCAB if layout == "deepspec" else 48
    num_features = {"deepspec": 5, "speculators": 4}.get(layout, 3)
    tensors = layer_tensors(prefix, rand, hidden, inputs=2 * hidden, qk_norm=qk_norm)
    tensors |= {f"{prefix}hidden_norm.weight": 1 + rand(hidden), f"{prefix}input_layernorm.weight": 1 + rand(hidden)}
    tensors |= {"fc.weight": rand(hidden, num_features * HIDDEN), "norm.weight": 1 + rand(hidden)}
    tensors |= {"lm_head.weight": rand(size, hidden)}
    if size != VOCAB:
        tensors |= draft_vocabulary(size, rand)
        config["draft_vocab_size"] = size
    config["hidden_size"] = hidden
    if layout == "safeailab-narrow":
        config |= {"target_hidden_size": HIDDEN, "rope_theta": 5e5}
        tensors["embed_tokens.weight"] = rand(VOCAB, hidden)
    elif layout == "specforge":
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "dtype": "float32",
            "norm_output": False,
            "fc_norm": True,
        }
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 3, DEPTH - 1]}
        tensors |= {f"fc_norm.{i}.weight": 1 + rand(HIDDEN) for i in range(3)}
    elif layout == "speculators":
        tensors |= layer_tensors("layers.1.", rand, hidden, qk_norm=True)
        tensors |= {"layers.1.input_layernorm.weight": 1 + rand(hidden), "input_norm.weight": 1 + rand(4 * HIDDEN)}
        tensors["embed_tokens.weight"] = rand(VOCAB, hidden)
        nested = {**config, "model_type": "qwen3", "head_dim": 8, "num_hidden_layers": 2}
        nested |= {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}
        config = {"speculators_model_type": "eagle3", "speculators_version": "0.9.0", "draft_vocab_size": size}
        config |= {"transformer_layer_config": nested, "eagle_aux_hidden_state_layer_ids": [1, 2, 4, 5]}
        config |= {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
        config["embed_requires_grad"] = True
    elif layout == "deepspec":
        config |= {"target_layer_ids": [0, 1, 3, 4, 5], "num_target_layers": DEPTH, "head_dim": 8}
    return config, tensors


LAYOUTS = ["eagle1", "safeailab", "safeailab-narrow", "specforge", "speculators", "deepspec"]


def write_head(folder, layout: str = "safeailab", change=None, file: str | None = None) -> str:
    """Writes a random head; `change(config, tensors)` may edit it before."""
    torch.manual_seed(LAYOUTS.index(layout))
    config, tensors = make_tensors(layout, lambda *shape: torch.randn(*shape) * 0.3)
    if change is not None:
        change(config, tensors)
    file = file or ("pytorch_model.bin" if layout in ("eagle1", "safeailab") else "model.safetensors")
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, file)
    if file.endswith(".safetensors"):
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    with open(os.path.join(folder, "config.json"), "w") as config_file:
        json.dump(config, config_file)
    return str(folder)


@pytest.fixture
def head(tmp_path):
    """Factory of head folders, see `write_head`."""
    number = count()
    return lambda *args, **kwargs: write_head(tmp_path / f"head{next(number)}", *args, **kwargs)


def left_padded(prompts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    width = max(len(p) for p in prompts)
    ids = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0)) for p in prompts])
    masks = [torch.nn.functional.pad(torch.ones_like(p), (width - len(p), 0)) for p in prompts]
    return {"input_ids": ids, "attention_mask": torch.stack(masks)}


def batch_of(prompt, size: int) -> dict[str, torch.Tensor]:
    return left_padded([prompt(n, seed=n)[0] for n in (9, 4, 13)[:size]])


class TestTextIsTheTargets:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("llama", True), ("qwen2", False)])
    @pytest.mark.parametrize("size", [1, 3])
    def test_greedy_and_sampled(self, head, prompt, layout, architecture, tied, size):
        model = target(architecture, tied)
        every_shape = layout == "safeailab" and architecture == "llama" and not tied
        shapes = SHAPES if every_shape else {"dynamic": SHAPES["dynamic"]}
        folder, batch = head(layout), batch_of(prompt, size)
        for options in shapes.values():
            speculator = Speculator(EagleDrafter.from_folder(folder, model, **options))
            for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 40}):
                torch.manual_seed(5)
                plain = model.generate(**batch, **PLAIN, **sampling)
                torch.manual_seed(5)
                assert torch.equal(plain, model.generate(**batch, **PLAIN, **sampling, speculator=speculator))
            assert speculator.stats.rounds > 0

    @pytest.mark.parametrize(
        ("layout", "shape"), [("eagle1", "chain"), ("speculators", "dynamic"), ("safeailab", "static")]
    )
    def test_conformance(self, head, prompt, layout, shape):
        drafter = EagleDrafter.from_folder(head(layout), target(), **SHAPES[shape])
        check_drafter(drafter, target(), [prompt(11)[0], prompt(6)[0]], 12)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_bfloat16_differences_are_ties(self, head, prompt, layout):
        folder = head(layout)
        for architecture, tied, request in (("llama", False, {}), ("qwen2", True, {"do_sample": True, "seeds": (1,)})):
            model = target(architecture, tied, torch.bfloat16)
            speculator = Speculator(EagleDrafter.from_folder(folder, model, **SHAPES["dynamic"]))
            request = {**PLAIN, "max_new_tokens": 16, "do_sample": False, **request}
            report = check_lossless(model, speculator, [prompt(9)[0]], **request)  # raises unless proven
            assert (report.num_cases, report.num_tokens) == (1, 16)
            assert speculator.stats.rounds > 0

    @pytest.mark.parametrize("offloaded", ["layers", "layers and output"])
    @pytest.mark.parametrize("layout", ["eagle1", "specforge"])
    def test_device_map_with_offloading(self, head, prompt, tmp_path, layout, offloaded):
        """Taps of layers that are fetched from disk; a shared output matrix that is nowhere until it is called."""
        model = copy.deepcopy(target())
        device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
        device_map |= {f"model.layers.{i}": "disk" if i > 3 else "cpu" for i in range(DEPTH)}
        device_map["lm_head"] = "disk" if "output" in offloaded else "cpu"
        model = dispatch_model(model, device_map, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
        assert model.model.layers[-1].mlp.up_proj.weight.device.type == "meta"
        drafter = EagleDrafter.from_folder(head(layout), model)
        assert drafter.head.device.type == "cpu"
        speculator = Speculator(drafter)
        output = model.generate(prompt(9), **PLAIN, do_sample=False, speculator=speculator)
        assert torch.equal(output, target().generate(prompt(9), **PLAIN, do_sample=False))
        assert speculator.stats.rounds > 0

    def test_bfloat16_head_follows_the_target(self, head, prompt):
        model = target(dtype=torch.bfloat16)
        drafter = EagleDrafter.from_folder(head(), model)
        assert {p.dtype for p in drafter.head.parameters()} == {torch.bfloat16}
        assert drafter.head.rotary.inv_freq.dtype == torch.float32
        output = model.generate(prompt(9), **PLAIN, do_sample=False, speculator=Speculator(drafter))
        assert output.shape == (1, 9 + 24)


def from_scratch(module, states, tokens, first_position: int, path, memo: dict):
    """Logits after `path` and the state fed back: the row run anew, without a cache, for every token of the path."""
    if path not in memo:
        if path:
            _, state = from_scratch(module, states, tokens, first_position, path[:-1], memo)
            previous = memo[path[:-1]][2]
            states, tokens = torch.cat([previous[0], state[None]]), torch.cat([previous[1], torch.tensor(path[-1:])])
        count = len(tokens)
        distance = torch.arange(count)[:, None] - torch.arange(count)
        masks = []
        for window in module.spec.windows:
            hidden_pairs = (distance < 0) | (distance >= (window or count))
            masks.append(torch.zeros(1, 1, count, count, dtype=states.dtype).masked_fill(hidden_pairs, -torch.inf))
        positions = first_position + torch.arange(count)[None]
        hidden = module(tokens[None], states[None], positions, CachedAttention(DynamicCache(), masks))
        logits, fed_back = module.read(hidden[0, -1])
        memo[path] = (logits, fed_back, (states, tokens))
    return memo[path][:2]


class Watch:
    """Compares every draft logit of the sessions of one drafter with `from_scratch`."""

    def __init__(self, monkeypatch, drafter, mask=None, first_position: int = 0):
        self.head, self.first_position = drafter.head, first_position
        self.mask = None if mask is None else mask.bool()
        self.worst, self.num_nodes, self.num_rounds, self.accepted = 0.0, 0, 0, 0
        self.rows, self.forest, self.active, self.memo = [], None, (), {}
        observe, draft, expand, drop = EagleSession.observe, EagleSession.draft, Reading.expand, Reading.drop
        monkeypatch.setattr(EagleSession, "observe", lambda s, *args: self.observe(observe, s, *args))
        monkeypatch.setattr(EagleSession, "draft", lambda s, state: self.draft(draft, s, state))
        monkeypatch.setattr(Reading, "expand", lambda r, *args: self.expand(expand, r, *args))
        monkeypatch.setattr(Reading, "drop", lambda r: self.drop(drop, r))

    def observe(self, original, session, tokens, features, lengths):
        original(session, tokens, features, lengths)
        states = self.head.fuse([features[layer] for layer in session._layers])
        for row, length in enumerate(lengths.tolist()):
            real = torch.arange(tokens.shape[1]) < length
            if not self.memo and len(self.rows) < len(lengths):
                real = real if self.mask is None else self.mask[row, -tokens.shape[1] :]
                self.rows.append((states[row, real], tokens[row, real]))
                continue
            self.accepted += max(length - 1, 0)
            old = self.rows[row]
            self.rows[row] = (torch.cat([old[0], states[row, real]]), torch.cat([old[1], tokens[row, real]]))

    def draft(self, original, session, state):
        self.active, self.memo = state.active, {row: {} for row in range(len(self.rows))}
        self.num_rounds += 1
        session._read_pending()
        self.compare(session._root_hidden[:, None], [[()]] * len(self.rows))
        for row, (_, tokens) in enumerate(self.rows):
            if state.active[row]:
                assert tokens[-1] == state.root_ids[row]
        return original(session, state)

    def expand(self, original, reading, token_ids, states, plan):
        hidden = original(reading, token_ids, states, plan)
        self.forest = token_ids if self.forest is None else torch.cat([self.forest, token_ids], dim=1)
        ancestors = plan.ancestors.expand(len(self.rows), -1, -1)
        paths = [
            [tuple(self.forest[row, ancestors[row, node]].tolist()) for node in range(*self.new(plan, token_ids))]
            for row in range(len(self.rows))
        ]
        self.compare(hidden, paths)
        return hidden

    def new(self, plan, token_ids):
        return plan.num_nodes - token_ids.shape[1], plan.num_nodes

    def drop(self, original, reading):
        self.forest = None
        original(reading)

    def compare(self, hidden, paths):
        logits, _ = self.head.read(hidden)
        for row, row_paths in enumerate(paths):
            for node, path in enumerate(row_paths):
                if self.active[row]:
                    expected, _ = from_scratch(self.head, *self.rows[row], self.first_position, path, self.memo[row])
                    self.worst = max(self.worst, float((logits[row, node] - expected).abs().max()))
                    self.num_nodes += 1


class TestDraftLogitsFromScratch:
    """fp64: at every round, every node's draft logits are those of an uncached forward over its own path."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize(("shape", "size"), [("dynamic", 3), ("chain", 1), ("static", 3)])
    def test_every_node_of_every_round(self, head, prompt, monkeypatch, layout, size, shape):
        model, batch = target(dtype=torch.float64), batch_of(prompt, size)
        options = {**SHAPES[shape], **({"top_k": 12, "max_nodes": 60} if shape == "dynamic" else {})}
        drafter = EagleDrafter.from_folder(head(layout), model, **options)
        watch = Watch(monkeypatch, drafter, batch["attention_mask"])
        model.generate(**batch, **PLAIN, do_sample=True, speculator=Speculator(drafter))
        assert watch.worst < 1e-6
        assert watch.num_rounds > 5
        assert watch.num_nodes > 2 * watch.num_rounds
        if shape == "dynamic":
            assert watch.accepted > 0

    def test_second_turn(self, head, prompt, monkeypatch):
        model = target(dtype=torch.float64)
        drafter = EagleDrafter.from_folder(head("speculators"), model, **SHAPES["dynamic"])
        first = model.generate(
            prompt(9), **PLAIN, do_sample=False, speculator=Speculator(drafter), return_dict_in_generate=True
        )
        text = torch.cat([first.sequences, prompt(6, seed=4)], dim=1)
        known_from = first.past_key_values.get_seq_length()
        cold = EagleDrafter.from_folder(head("speculators"), model, **SHAPES["dynamic"])  # knows nothing of turn one
        watch = Watch(monkeypatch, cold, first_position=known_from)
        plain = model.generate(text, **PLAIN, do_sample=False)
        second = model.generate(
            text, **PLAIN, do_sample=False, speculator=Speculator(cold), past_key_values=first.past_key_values
        )
        assert torch.equal(plain, second)
        last_round = drafter.options.depth + 1  # nothing was drafted after it, so it was not told
        assert len(watch.rows[0][1]) >= text.shape[1] - known_from + PLAIN["max_new_tokens"] - 1 - last_round
        assert watch.num_rounds > 3
        assert watch.worst < 1e-6

    @pytest.mark.parametrize("layout", ["safeailab", "speculators"])
    def test_long_prompts_are_read_in_parts(self, head, prompt, monkeypatch, layout):
        monkeypatch.setattr("hf_speculate_plugins.eagle.reading._CHUNK", 5)
        model, batch = target(dtype=torch.float64), batch_of(prompt, 3)
        drafter = EagleDrafter.from_folder(head(layout), model)
        watch = Watch(monkeypatch, drafter, batch["attention_mask"])
        model.generate(**batch, **PLAIN, do_sample=False, speculator=Speculator(drafter))
        assert watch.num_rounds > 5
        assert watch.worst < 1e-6

    def test_features_are_the_targets_states_on_the_text(self, head, prompt, monkeypatch):
        model = target(dtype=torch.float64)
        drafter = EagleDrafter.from_folder(head("specforge"), model, depth=3, top_k=12, max_nodes=60)
        assert drafter.entry_layers == (1, 4, RAW_LAST)
        watch = Watch(monkeypatch, drafter)
        text = model.generate(prompt(9), **PLAIN, do_sample=True, speculator=Speculator(drafter))
        raw = []
        hook = model.model.layers[-1].register_forward_hook(lambda *args: raw.append(args[-1]))
        output = model(text, output_hidden_states=True)
        hook.remove()
        torch.testing.assert_close(model.model.norm(raw[0]), output.hidden_states[-1])
        expected = drafter.head.fuse([output.hidden_states[1], output.hidden_states[4], raw[0]])
        states, tokens = watch.rows[0]
        assert torch.equal(tokens, text[0, 1 : len(tokens) + 1])
        torch.testing.assert_close(states, expected[0, : len(states)], atol=1e-5, rtol=1e-5)
        hooks = model.model.layers[-1]._forward_hooks.values()
        assert not any(hook.__module__.startswith("hf_speculate") for hook in hooks)

    @pytest.mark.parametrize("depth", [1, 4])
    def test_a_round_costs_one_forward_of_the_head_per_level(self, head, prompt, monkeypatch, depth):
        drafter = EagleDrafter.from_folder(head(), target(), depth=depth, top_k=4)
        calls, forward = [], drafter.head.forward
        monkeypatch.setattr(
            drafter.head, "forward", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs)
        )
        speculator = Speculator(drafter)
        target().generate(prompt(9), **{**PLAIN, "max_new_tokens": 60}, do_sample=False, speculator=speculator)
        # One for the prompt, which expands the first tree's root; less where the budget ends.
        assert depth * (speculator.stats.rounds - 4) < len(calls) <= depth * speculator.stats.rounds + 1


class TestLayouts:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_from_pretrained_finds_the_drafter(self, head, layout):
        folder = head(layout)
        assert drafter_class_for(folder) is EagleDrafter
        drafter = AutoSpeculator.from_pretrained(folder, target=target(), depth=3).drafter
        assert drafter.options == EagleOptions(depth=3)
        assert drafter.spec.dialect == layout.removesuffix("-narrow")
        assert not any(p.requires_grad for p in drafter.head.parameters())

    def test_from_name_takes_a_folder(self, head):
        drafter = AutoSpeculator.from_name("eagle", target=target(), head=head(), top_k=1).drafter
        assert drafter.options.top_k == 1
        with pytest.raises(TypeError, match="trained head"):
            AutoSpeculator.from_name("eagle", target=target())
        with pytest.raises(TypeError, match="colour"):
            AutoSpeculator.from_name("eagle", target=target(), head=head(), colour="red")

    def test_switches_come_from_tensors_and_config(self, head):
        spec = EagleDrafter.from_folder(head("speculators"), target()).spec
        assert (spec.num_layers, spec.num_features, spec.qk_norm, spec.windows) == (2, 4, True, (None, 6))
        assert spec.norm_before_residual
        assert spec.feed_back_normed
        assert spec.norm_before_fc
        spec = EagleDrafter.from_folder(head("specforge"), target()).spec
        assert (spec.norm_logits, spec.feed_back_normed, spec.fc_norm) == (False, False, True)
        assert spec.rope["rope_theta"] == 1e6
        assert EagleDrafter.from_folder(head("safeailab"), target()).entry_layers == (2, 3, 4)
        assert EagleDrafter.from_folder(head("deepspec"), target()).entry_layers == (1, 2, 4, 5, 6)
        assert EagleDrafter.from_folder(head("eagle1"), target()).entry_layers == (DEPTH,)

    @pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.module.model."])
    def test_wrapper_prefixes_do_not_matter(self, head, prefix):
        def wrap(config, tensors):
            for name in list(tensors):
                tensors[prefix + name] = tensors.pop(name)

        plain, wrapped = (
            EagleDrafter.from_folder(head(), target()),
            EagleDrafter.from_folder(head(change=wrap), target()),
        )
        for one, other in zip(plain.head.state_dict().items(), wrapped.head.state_dict().items(), strict=True):
            assert one[0] == other[0]
            assert torch.equal(one[1], other[1])

    def test_sharded_files(self, head, tmp_path):
        folder = head("speculators")
        tensors = load_file(f"{folder}/model.safetensors")
        names = sorted(tensors)
        shards = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
        for shard, members in shards.items():
            save_file({name: tensors[name] for name in members}, f"{folder}/{shard}")
        weight_map = {name: shard for shard, members in shards.items() for name in members}
        expected = EagleDrafter.from_folder(folder, target()).head.state_dict()
        os.remove(f"{folder}/model.safetensors")
        with open(f"{folder}/model.safetensors.index.json", "w") as file:
            json.dump({"weight_map": weight_map}, file)
        found = EagleDrafter.from_folder(folder, target()).head.state_dict()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        os.remove(f"{folder}/model-00002-of-00002.safetensors")
        with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors"):
            EagleDrafter.from_folder(folder, target())

    def test_embeddings_of_the_target_are_shared_not_copied(self, head):
        drafter = EagleDrafter.from_folder(head("eagle1"), target())
        assert drafter.head.shared["embed_tokens"] is target().get_input_embeddings()
        assert drafter.head.shared["lm_head"] is target().get_output_embeddings()
        assert not any("embed" in name or "lm_head" in name for name in drafter.head.state_dict())
        assert drafter.report.shared["embed_tokens.weight"] == "equal to the target's"

    def test_trained_embeddings_are_used_and_random_ones_are_not(self, head):
        assert EagleDrafter.from_folder(head("speculators"), target()).head.shared["embed_tokens"] is None

        def untrained(config, tensors):
            config["embed_requires_grad"] = False

        folder = head("speculators", change=untrained)
        drafter = EagleDrafter.from_folder(folder, target())
        assert drafter.head.shared["embed_tokens"] is not None
        assert "random" in drafter.report.shared["embed_tokens.weight"]
        assert EagleDrafter.from_folder(folder, target(), embeddings="own").head.shared["embed_tokens"] is None

    def test_conventions_can_be_overridden(self, head):
        drafter = EagleDrafter.from_folder(
            head(), target(), feature_layers=[1, 3, DEPTH], rope_theta=5e5, feed_back_normed=True
        )
        assert drafter.entry_layers == (1, 3, RAW_LAST)
        assert drafter.spec.rope["rope_theta"] == 5e5
        assert drafter.spec.feed_back_normed
        with pytest.raises(TargetMismatchError, match="3 target layers, but 2"):
            EagleDrafter.from_folder(head(), target(), feature_layers=[1, 3])

    @pytest.mark.parametrize(
        ("rope", "expected"),
        [
            ({}, {"rope_type": "default", "rope_theta": 10000.0}),
            ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rope_theta": 1e6}),
            ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_theta": 10000.0}),
            (
                {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "factor": 8.0}},
                {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0},
            ),
            ({"rope_scaling": {"rope_type": "mrope", "mrope_section": [1, 1, 2]}}, {"rope_type": "default"}),
        ],
    )
    def test_rope_is_found_wherever_configs_put_it(self, rope, expected):
        from hf_speculate_plugins.checkpoints.config import Values
        from hf_speculate_plugins.eagle.checkpoint.layouts import _rope

        found = _rope(Values("head", rope), "safeailab")
        assert expected.items() <= found.items()

    def test_t2d_alone_gives_the_vocabulary(self, head):
        expected = EagleDrafter.from_folder(head(), target()).target_ids
        drafter = EagleDrafter.from_folder(head(change=lambda _, tensors: tensors.pop("d2t")), target())
        assert torch.equal(drafter.target_ids, expected)


class TestSaving:
    """What is written in a layout is read back as the same head."""

    @pytest.mark.parametrize(
        ("source", "layout"),
        [
            ("eagle1", "safeailab"),
            ("safeailab", "safeailab"),
            ("safeailab", "specforge"),
            ("safeailab", "speculators"),
            ("safeailab-narrow", "specforge"),
            ("safeailab-narrow", "speculators"),
            ("specforge", "specforge"),
            ("speculators", "speculators"),
            ("deepspec", "speculators"),
        ],
    )
    def test_round_trip(self, head, tmp_path, source, layout):
        overrides = {"rope_theta": 3e5} if source != "specforge" else {}
        first = EagleDrafter.from_folder(head(source), target(), **overrides)
        first.save_pretrained(tmp_path / "saved", layout=layout)
        second = EagleDrafter.from_folder(str(tmp_path / "saved"), target())
        assert second.spec.dialect == (layout if source != "eagle1" else "eagle1")
        same = {"dialect": "safeailab", "feature_layers": None}
        assert replace(first.spec, **same) == replace(second.spec, **same)
        assert first.entry_layers == second.entry_layers
        assert (first.target_ids is None) == (second.target_ids is None)
        assert first.target_ids is None or torch.equal(first.target_ids, second.target_ids)
        before, after = first.head.state_dict(), second.head.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert first.head.shared == second.head.shared

    def test_what_a_layout_cannot_say_is_refused(self, head, tmp_path):
        drafter = EagleDrafter.from_folder(head("speculators"), target())
        with pytest.raises(CheckpointError, match=r"specforge layout cannot .* more than one layer, norms of queries"):
            drafter.save_pretrained(tmp_path / "saved", layout="specforge")
        drafter = EagleDrafter.from_folder(head("specforge"), target())
        for layout in ("safeailab", "speculators"):
            with pytest.raises(CheckpointError, match="logits without a norm"):
                drafter.save_pretrained(tmp_path / "saved", layout=layout)
        with pytest.raises(CheckpointError, match=r"other layers than \[2, 3, 4\]"):
            EagleDrafter.from_folder(head(), target(), feature_layers=[1, 3, 4]).save_pretrained(
                tmp_path / "saved", layout="safeailab"
            )
        with pytest.raises(CheckpointError, match="a head size other than"):
            EagleDrafter.from_folder(head("safeailab-narrow"), target()).save_pretrained(
                tmp_path / "saved", layout="safeailab"
            )
        with pytest.raises(ValueError, match="unknown layout"):
            drafter.save_pretrained(tmp_path / "saved", layout="onnx")
        assert not (tmp_path / "saved").exists()


class TestStaticTrees:
    def test_cut(self):
        # All paths whose ranks, counted from 1, add up to at most 5: the 1 + 2 + 4 + 8 + 16 compositions of 1 … 5.
        paths = (path for depth in range(1, 6) for path in itertools.product(range(5), repeat=depth))
        tree = StaticTree.from_choices([path for path in paths if sum(path) + len(path) <= 5])
        assert len(tree.choices) == 31
        assert max(map(len, tree.cut(2).choices)) == 2
        assert sum(len(level.children) for level in tree.levels) == 31

    def test_more_ranks_than_tokens(self, head):
        with pytest.raises(ValueError, match="60 children"):
            EagleDrafter.from_folder(head(), target(), tree=[(59,)])


class TestBadInput:
    def refused(self, folder, match, error=CheckpointError, model=None):
        with pytest.raises(error, match=match):
            AutoSpeculator.from_pretrained(folder, target=model or target())

    @pytest.mark.parametrize("layout", ["safeailab", "specforge"])
    def test_truncated_file(self, head, layout):
        folder = head(layout)
        path = next(f"{folder}/{name}" for name in os.listdir(folder) if not name.endswith("json"))
        content = Path(path).read_bytes()
        for size in (len(content) - 50, len(content) // 2, 4, 0):
            Path(path).write_bytes(content[:size])
            self.refused(folder, "cannot read|refused")

    def test_pickle_with_code_is_not_run(self, head, tmp_path):
        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "pwned"),)

        folder = head()
        for save in (torch.save, lambda content, path: Path(path).write_bytes(pickle.dumps(content))):
            save({"fc.weight": Evil()}, f"{folder}/pytorch_model.bin")
            self.refused(folder, "refused to load")
        assert not (tmp_path / "pwned").exists()

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_missing_and_unknown_keys_are_named(self, head, layout):
        def change(config, tensors):
            gate = next(name for name in tensors if name.endswith("up_proj.weight"))
            del tensors[gate]
            tensors["surplus.weight"] = torch.zeros(3)

        self.refused(head(layout, change=change), "missing: .*up_proj.weight; unknown: surplus.weight")

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_nan_weights(self, head, value):
        self.refused(head(change=lambda _, tensors: tensors["norm.weight"].fill_(value)), r"NaN.*norm\.weight")

    def test_wrong_shape(self, head):
        def change(config, tensors):
            tensors["norm.weight"] = torch.ones(31)

        self.refused(head(change=change), r"norm\.weight has shape \(31,\), expected \(32,\)")

    def test_other_target(self, head):
        wide = LlamaForCausalLM(replace_config(hidden_size=64, num_attention_heads=4)).eval()
        self.refused(head(), "hidden size 32, .* has 64", TargetMismatchError, wide)
        other = LlamaForCausalLM(replace_config(vocab_size=128)).eval()
        self.refused(head(), "vocabulary 96, .* has 128", TargetMismatchError, other)
        shallow = target(depth=3)
        self.refused(head("specforge"), r"\[1, 4, 7\].* 3 layers", TargetMismatchError, shallow)
        drafter = EagleDrafter.from_folder(head(), target())
        with pytest.raises(TargetMismatchError, match="has 64"):
            wide.generate(torch.tensor([[5, 6]]), speculator=Speculator(drafter), **PLAIN)

    def test_contradicting_vocabulary_maps(self, head):
        def absolute(config, tensors):
            tensors["d2t"] = tensors["d2t"] + torch.arange(48)

        self.refused(head(change=absolute), "contradict each other")

        def outside(config, tensors):
            tensors["d2t"] = tensors["d2t"] + 90
            del tensors["t2d"]

        self.refused(head(change=outside), "the vocabulary has 96")

        def none(config, tensors):
            del tensors["d2t"], tensors["t2d"]
            tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)

        self.refused(head(change=none), "neither d2t nor t2d")

    def test_config_that_is_absent_broken_or_lies(self, head):
        folder = head()
        os.remove(f"{folder}/config.json")
        self.refused(folder, "num_attention_heads")
        Path(f"{folder}/config.json").write_text("{")
        self.refused(folder, r"cannot read .*config\.json")
        self.refused(head(change=lambda config, _: config.update(num_attention_heads=5)), "5 heads")
        folder = head(change=lambda config, _: config.pop("model_type"))
        EagleDrafter.from_folder(folder, target())

    def test_no_weights(self, tmp_path):
        self.refused(str(tmp_path), "no installed drafter")
        with pytest.raises(CheckpointError, match="no weights"):
            EagleDrafter.from_folder(str(tmp_path), target())

    def test_options(self):
        with pytest.raises(ValueError, match="depth must be at least 1"):
            EagleOptions(depth=0)


def replace_config(**changes) -> LlamaConfig:
    config = target().config.to_dict()
    config.pop("head_dim")
    return LlamaConfig(**{**config, **changes})
