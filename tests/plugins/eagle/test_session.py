"""An EAGLE head never changes the text, whatever its layout and the shape of its drafts."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import dispatch_model

import hf_speculate
from hf_speculate import Speculator
from hf_speculate.policy import UNLIMITED, DraftPolicy, PolicySession
from hf_speculate.testing import check_drafter, check_lossless
from hf_speculate_plugins.eagle import EagleDrafter, EagleOptions, EagleSession

from ...support.heads import DEPTH, EAGLE_LAYOUTS, PLAIN, SHAPES, batch_of, target
from ...support.inputs import random_prompt
from ...support.tiers import quick_quarter
from ...support.tiny_heads import random_eagle


KINDS = [("llama", False, 1), ("llama", False, 3), ("llama", True, 3), ("qwen2", False, 3)]
# A layout is loaded alike whatever the target: one with all of them, and one target for each of the others.
PAIRS = [("safeailab", *kind) for kind in KINDS] + [
    (layout, *KINDS[1 + index % 3])
    for index, layout in enumerate(layout for layout in EAGLE_LAYOUTS if layout != "safeailab")
]


class TestTextIsTheTargets:
    @pytest.mark.parametrize("pair", quick_quarter(PAIRS), ids=str)
    def test_eagle_drafts_give_plain_text(self, head, prompt, pair):
        layout, architecture, tied, size = pair
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
        "pair",
        quick_quarter(
            [
                ("eagle1", "chain"),
                ("speculators", "dynamic"),
                ("speculators-parallel", "chain"),
                ("speculators-parallel", "dynamic"),
            ]
        ),
    )
    def test_eagle_drafter_keeps_the_contract(self, head, prompt, pair):
        layout, shape = pair
        drafter = EagleDrafter.from_folder(head(layout), target(), **SHAPES[shape])
        check_drafter(drafter, target(), [prompt(11)[0], prompt(6)[0]], 12)

    @pytest.mark.parametrize("layout", quick_quarter(EAGLE_LAYOUTS))
    def test_bfloat16_differences_are_ties(self, head, prompt, layout):
        folder = head(layout)
        for architecture, tied, request in (("llama", False, {}), ("qwen2", True, {"do_sample": True, "seeds": (1,)})):
            model = target(architecture, tied, torch.bfloat16)
            speculator = Speculator(EagleDrafter.from_folder(folder, model, **SHAPES["dynamic"]))
            request = {**PLAIN, "max_new_tokens": 16, "do_sample": False, **request}
            report = check_lossless(model, speculator, [prompt(9)[0]], **request)  # raises unless proven
            assert (report.num_cases, report.num_tokens) == (1, 16)
            assert speculator.stats.rounds > 0

    @pytest.mark.parametrize(("layout", "offloaded"), [("eagle1", "layers"), ("specforge", "layers and output")])
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


@pytest.mark.parametrize("is_shown", [False, True])
def test_last_round_is_observed_for_a_later_turn_only(head, prompt, monkeypatch, is_shown):
    model = target()
    speculator = Speculator(EagleDrafter.from_folder(head("safeailab"), model), adaptive=False)
    told, observe = [], EagleSession.observe
    monkeypatch.setattr(EagleSession, "observe", lambda self, *a: told.append(self) or observe(self, *a))
    output = model.generate(
        prompt(9), **PLAIN, do_sample=False, return_dict_in_generate=is_shown, speculator=speculator
    )
    num_rounds = speculator.stats.rounds
    assert len(told) == num_rounds + is_shown  # the prompt, all rounds but the last, and that
    text = output.sequences if is_shown else output
    assert text.shape[1] == 9 + PLAIN["max_new_tokens"]


def num_children(model, top_k, do_sample, **options):
    """Children of the first root. A random head finds all tokens about equally probable: they are as many as may be."""
    speculator = Speculator(random_eagle(3, top_k, 24, model, False), **options)
    request = {"max_new_tokens": 8, "do_sample": do_sample, "speculator": speculator}
    rounds = hf_speculate.rounds(model, random_prompt(9), **request)
    return next(round.tree.host.parents[0].count(0) for round in rounds if round.tree.num_nodes > 1)


@pytest.mark.parametrize(("top_k", "do_sample", "expected"), [(None, False, 4), (None, True, 8), (3, True, 3)])
def test_top_k_sets_the_children_of_a_node(tiny_model, top_k, do_sample, expected):
    assert num_children(tiny_model(), top_k, do_sample, adaptive=False) == expected


@pytest.mark.parametrize(("num_nodes", "expected"), [(None, 8), (1.0, 2), (6.0, 2), (6.5, 3), (100.0, 8)])
def test_tree_width_follows_the_policys_number_of_nodes(tiny_model, num_nodes, expected):
    class Saying(DraftPolicy, PolicySession):
        def start(self, request):
            return self

        def choose(self, situation):
            return UNLIMITED

        def num_nodes(self):
            return num_nodes

    assert num_children(tiny_model(), None, True, policy=Saying()) == expected
    assert EagleOptions(top_k=5).width(True, num_nodes) == 5, "what the user chose stays"
