"""A smaller causal LM as drafter: its drafts are what it would say without any cache."""

from __future__ import annotations

import copy
import json
import random

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hf_speculate import AutoSpeculator, DraftRequest, DraftState, Speculator
from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions
from hf_speculate_plugins.trees import grow_tree

from ...support.heads import left_padded
from ...support.tiny_heads import write_eagle_head


NEW_TOKENS = 25


def drafter_for(target, model, **options):
    return DraftModelDrafter(model, DraftModelOptions(**options))


def generate(model, drafter, inputs, **request):
    torch.manual_seed(0)
    return model.generate(**inputs, **request, speculator=Speculator(drafter), return_dict_in_generate=True)


def padded(prompt, *lengths):
    return left_padded([prompt(n, seed=i)[0] for i, n in enumerate(lengths)])


REQUESTS = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "warped": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
}


class TestTargetAsItsOwnDrafter:
    @pytest.mark.parametrize("request_name", REQUESTS)
    @pytest.mark.parametrize("depth", [1, 2, 3, 4, 7])
    def test_a_chain_is_accepted_to_its_end_every_round(self, tiny_model, prompt, depth, request_name):
        model = tiny_model("qwen2")
        output = generate(
            model,
            drafter_for(model, model, depth=depth),
            {"input_ids": prompt(9)},
            max_new_tokens=1 + 4 * (depth + 1),
            **REQUESTS[request_name],
        )
        stats = output.speculation
        assert stats.acceptance_rate_by_depth == dict.fromkeys(range(1, depth + 1), 1.0)
        assert stats.rounds == stats.target_forwards == 4

    @pytest.mark.parametrize("request_name", REQUESTS)
    def test_the_roots_child_in_a_tree_is_always_accepted(self, tiny_model, prompt, request_name):
        model = tiny_model()
        drafter = drafter_for(model, model, depth=3, top_k=3)
        output = generate(model, drafter, {"input_ids": prompt(9)}, max_new_tokens=NEW_TOKENS, **REQUESTS[request_name])
        assert output.speculation.acceptance_rate_by_depth[1] == 1.0


class Uncached:
    """What the draft model says about whole texts, without a cache."""

    def __init__(self, model, prompts):
        self.model = model
        self.prompts = prompts

    def logits(self, row, text):
        return self.model(torch.tensor([self.prompts[row] + text])).logits[0, -1]

    def chain(self, row, text, depth):
        drafted = []
        for _ in range(depth):
            drafted.append(int(self.logits(row, text + drafted).argmax()))
        return drafted

    def tree(self, texts, *, depth, top_k, max_nodes):
        def expand(frontier):
            host, rows = frontier.forest.host, []
            for row, text in enumerate(texts):
                paths = []
                for token, parent in zip(host.token_ids[row], host.parents[row], strict=True):
                    paths.append([*(paths[parent] if parent >= 0 else []), token])
                rows.append(torch.stack([self.logits(row, text + path) for path in paths[frontier.num_cached :]]))
            return torch.stack(rows)

        roots = torch.tensor([text[-1] for text in texts])
        root_logits = torch.stack([self.logits(row, text) for row, text in enumerate(texts)])
        return grow_tree(roots, root_logits, expand, depth=depth, top_k=top_k, max_nodes=max_nodes)


@pytest.mark.parametrize("lengths", [(8,), (6, 6), (8, 3, 1)], ids=["one", "batch", "padded"])
@pytest.mark.parametrize("top_k", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_after_any_rejections_are_those_of_an_uncached_model(tiny_model, prompt, lengths, top_k, seed):
    model, choose = tiny_model("qwen2", dtype=torch.float64), random.Random(seed)
    inputs, batch_size = padded(prompt, *lengths), len(lengths)
    mask = inputs["attention_mask"]
    uncached = Uncached(model, [prompt(n, seed=i)[0].tolist() for i, n in enumerate(lengths)])
    options = {"depth": 3, "top_k": top_k, "max_nodes": 8}
    session = drafter_for(model, model, **options).start(
        DraftRequest(target=model, input_ids=inputs["input_ids"], attention_mask=None if mask.all() else mask)
    )
    texts = [[choose.randrange(3, 96)] for _ in lengths]
    first = torch.tensor(texts)
    with torch.no_grad():
        session.observe(torch.cat([inputs["input_ids"][:, 1:], first], 1), {}, torch.full((batch_size,), max(lengths)))
        for _ in range(5):
            state = DraftState(
                root_ids=torch.tensor([text[-1] for text in texts]),
                active=(True,) * batch_size,
                max_depth=choose.choice([1, 3, 9]),
                chains_only=False,
                num_emitted=tuple(map(len, texts)),
            )
            tree, depth = session.draft(state), min(3, state.max_depth)
            if top_k == 1:
                assert tree.host.token_ids == [
                    [text[-1], *uncached.chain(row, text, depth)] for row, text in enumerate(texts)
                ]
            else:
                expected = uncached.tree(texts, depth=depth, top_k=3, max_nodes=8)
                assert tree.host == expected.host
            new = [verdict_of_a_stranger(choose, tree, row) for row in range(batch_size)]
            width = max(map(len, new))
            for text, tokens in zip(texts, new, strict=True):
                text += tokens
            session.observe(
                torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in new]),
                {},
                torch.tensor([len(tokens) for tokens in new]),
            )


def verdict_of_a_stranger(choose, tree, row):
    """Tokens that a target might emit: some way down the tree, then any token; nothing for a row that is finished."""
    if choose.random() < 0.15:
        return []
    tokens, node = [], 0
    while choose.random() < 0.7:
        children = [n for n, parent in enumerate(tree.host.parents[row]) if parent == node]
        if not children:
            break
        node = choose.choice(children)
        tokens.append(tree.host.token_ids[row][node])
    return [*tokens, choose.randrange(3, 96)]


@pytest.mark.parametrize(("do_sample", "top_k"), [(False, 1), (True, 3)], ids=["greedy chain", "sampled tree"])
def test_a_batch_whose_rows_end_at_different_steps_is_plain_text(tiny_model, prompt, do_sample, top_k):
    model, inputs = tiny_model("qwen2", vocab_size=24), {}
    inputs = padded(lambda n, seed: prompt(n, seed, vocab_size=24), 9, 4, 6)
    drafter = drafter_for(model, tiny_model("qwen2", vocab_size=24, seed=1), depth=3, top_k=top_k)
    num_ragged = 0
    for eos in range(3, 8):
        request = {"max_new_tokens": NEW_TOKENS, "eos_token_id": eos, "do_sample": do_sample}
        torch.manual_seed(0)
        plain = model.generate(**inputs, **request)
        assert torch.equal(generate(model, drafter, inputs, **request).sequences, plain)
        num_ragged += len({row.tolist().index(eos) if eos in row else -1 for row in plain[:, 9:]}) > 1
    assert num_ragged > 2, "the rows of these texts end together: they test nothing"


class TestRefusals:
    def test_draft_model_refuses_the_target_itself(self, tiny_model, tmp_path):
        target = tiny_model()
        tiny_model().save_pretrained(tmp_path / "same")
        for same in (target, copy.deepcopy(target), str(tmp_path / "same")):
            with pytest.raises(TargetMismatchError, match=r"is the target itself \(0\.0M parameters of 0\.0M\)"):
                AutoSpeculator.from_name("draft_model", target=target, model=same)
        with pytest.raises(TargetMismatchError, match="is the target itself"):
            AutoSpeculator.from_pretrained(tmp_path / "same", target=target)

    def test_draft_model_takes_a_copy_in_another_dtype(self, tiny_model):
        target, smaller = tiny_model(), tiny_model(dtype=torch.bfloat16)
        assert AutoSpeculator.from_name("draft_model", target=target, model=smaller).drafter.model is smaller

    def test_draft_model_refuses_weights_that_contradict_the_config(self, tiny_model, tmp_path):
        tiny_model(seed=1).save_pretrained(tmp_path)
        stated = json.loads((tmp_path / "config.json").read_text())
        for change, message in (
            ({"vocab_size": 90}, r"has shape \(96, 32\), by config.json it has \(90, 32\)"),
            ({"intermediate_size": 40}, r"shape \(32, 48\), by config.json it has \(32, 40\)"),
            ({"num_hidden_layers": 3}, r"announces weights that the files lack: model\.layers\.2\."),
        ):
            (tmp_path / "config.json").write_text(json.dumps(stated | change))
            with pytest.raises(CheckpointError, match=message):
                AutoSpeculator.from_pretrained(tmp_path, target=tiny_model())

    def test_draft_model_refuses_a_head(self, tiny_model, prompt, tmp_path):
        head = write_eagle_head(tmp_path / "head", 32, 96)
        with pytest.raises(CheckpointError, match=f"head is a head of the drafter 'eagle', .* speculator='{head}'"):
            tiny_model().generate(prompt(4), max_new_tokens=2, speculator=f"draft_model:model={head}")

    def test_draft_model_refuses_a_folder_without_a_model(self, tiny_model, tmp_path):
        (tmp_path / "page.md").touch()
        for found in ("it has no config.json", "its config.json has no model_type"):
            with pytest.raises(CheckpointError, match=f"is not a draft model: {found}\\. .*page\\.md"):
                AutoSpeculator.from_name("draft_model", tiny_model(), model=tmp_path)
            (tmp_path / "config.json").write_text("{}")

    @pytest.mark.parametrize("size", [24, 1000])
    def test_draft_model_refuses_another_vocabulary(self, tiny_model, size):
        target, model = tiny_model(vocab_size=500), tiny_model(vocab_size=size)
        with pytest.raises(TargetMismatchError, match=f"vocabulary of {size} tokens, the target of 500"):
            AutoSpeculator.from_name("draft_model", target=target, model=model)

    @pytest.mark.parametrize(
        ("name", "theirs", "shown"), [("bos_token_id", 2, r"\[2\]"), ("eos_token_id", [2, 3], r"\[2, 3\]")]
    )
    def test_draft_model_refuses_other_special_tokens(self, tiny_model, name, theirs, shown):
        target, model = copy.deepcopy(tiny_model()), copy.deepcopy(tiny_model())
        setattr(target.config, name, theirs)
        setattr(model.config, name, 5)
        with pytest.raises(TargetMismatchError, match=rf"{name} is \[5\], the target's {shown}"):
            drafter_for(target, model).check_target(target)
        setattr(model.config, name, 2)
        drafter_for(target, model).check_target(target)

    def test_draft_model_must_be_given(self, tiny_model):
        with pytest.raises(TypeError, match="needs the draft model"):
            AutoSpeculator.from_name("draft_model", target=tiny_model())

    def test_draft_model_refuses_a_cache_that_forgets(self, tiny_model):
        config = Lfm2Config(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            layer_types=["conv", "full_attention"],
        )
        with pytest.raises(TargetMismatchError, match="Lfm2ForCausalLM cannot be a draft model"):
            drafter_for(tiny_model(), Lfm2ForCausalLM(config))


@pytest.mark.parametrize("top_k", [1, 3], ids=["chain", "tree"])
def test_a_draft_model_with_sliding_windows_drafts_as_it_would_write(tiny_model, prompt, top_k):
    """The target is its own draft model: every draft is accepted, over many windows."""
    config = Qwen2Config(
        **tiny_model("qwen2").config.to_dict()
        | {"layer_types": None, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    model.generation_config.pad_token_id = 0
    plain = model.generate(prompt(12), max_new_tokens=60)
    speculator = Speculator(DraftModelDrafter(model, DraftModelOptions(depth=3, top_k=top_k)))
    assert torch.equal(model.generate(prompt(12), max_new_tokens=60, speculator=speculator), plain)
    assert speculator.stats.acceptance_rate_by_depth[1] > 0.95


@pytest.mark.parametrize("size", [90, 110])
@pytest.mark.parametrize(("do_sample", "top_k"), [(False, 1), (True, 2)], ids=["greedy chain", "sampled tree"])
def test_the_vocabularies_may_be_padded_differently(tiny_model, prompt, size, do_sample, top_k):
    target, model = tiny_model(vocab_size=96), tiny_model(vocab_size=size)
    drafter = drafter_for(target, model, depth=3, top_k=top_k)
    drafter.check_target(target)
    request = {"max_new_tokens": NEW_TOKENS, "do_sample": do_sample}
    inputs = {"input_ids": torch.cat([prompt(9), torch.tensor([[95]])], dim=1)}  # 95 is beyond the smaller one
    torch.manual_seed(0)
    plain = target.generate(**inputs, **request)
    assert torch.equal(generate(target, drafter, inputs, **request).sequences, plain)


class TestCheckpoints:
    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, True),
            ({"model_type": "qwen2"}, False),
            ({"model_type": "bert", "architectures": ["BertModel"]}, False),
            ({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "draft_vocab_size": 9}, False),
            ({"medusa_num_heads": 3, "architectures": ["X"], "model_type": "m"}, False),
            (None, False),
        ],
    )
    def test_a_causal_lm_is_recognised_and_a_head_is_not(self, tmp_path, config, expected):
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        assert DraftModelDrafter.recognizes(str(tmp_path)) is expected

    def test_a_saved_model_is_loaded_beside_the_target(self, tiny_model, prompt, tmp_path):
        target = tiny_model()
        tiny_model(seed=1).save_pretrained(tmp_path)
        speculator = AutoSpeculator.from_pretrained(tmp_path, target=target, depth=2)
        assert speculator.drafter.options == DraftModelOptions(depth=2)
        assert speculator.drafter.model.dtype == target.dtype
        ids = prompt(6)
        text = target.generate(ids, max_new_tokens=NEW_TOKENS, speculator=speculator)
        assert torch.equal(text, target.generate(ids, max_new_tokens=NEW_TOKENS))
        assert speculator.stats.rounds > 0
