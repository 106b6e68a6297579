"""`check`: acceptance is that of decoding; each mislabelled convention is found; a head without hope is told so."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_speculate import AutoSpeculator
from hf_speculate.drafting import CalibrationTable, DraftRequest, DraftState
from hf_speculate.errors import CheckpointError, SpeculateError, TargetMismatchError
from hf_speculate.stats import HeadRecord
from hf_speculate_plugins.eagle import EagleDrafter, EagleHead, EagleSpec, write_head
from hf_speculate_plugins.medusa import MedusaDrafter
from hf_speculate_plugins.medusa.saving import write_heads
from hf_speculate_tools import cli
from hf_speculate_tools.check import AcceptanceRates, HeadCheck, check_head, write_calibration, write_texts
from hf_speculate_tools.check.acceptance import replayed
from hf_speculate_tools.check.search import Trial
from hf_speculate_tools.heads.check import as_json

from ...support.block_heads import random_block
from ...support.eagle_chains import chain_logits
from ...support.heads import EAGLE_LAYOUTS, random_heads
from ...support.heads import target as tiny_target
from ...support.heads import write_head as write_random_head
from ...support.models import build_tiny_model


HIDDEN, VOCAB, LAYERS, CHAIN = 32, 96, 7, 3


def target() -> LlamaForCausalLM:
    rope = (("rope_type", "default"), ("rope_theta", 100.0))
    return build_tiny_model(seed=3, num_layers=LAYERS, rope=rope)


@cache
def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (6,), generator=generator) for _ in range(5)]


@cache
def texts():
    return write_texts(target(), prompts(), max_new_tokens=48)


def fitted_head(**conventions) -> EagleHead:
    """A head that drafts the target's texts right, because it was fitted to them with these conventions."""
    spec = EagleSpec(
        dialect="speculators",
        version=3,
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        num_layers=1,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        **{"feature_layers": (2, 3, 5), "rope": {"rope_type": "default", "rope_theta": 100.0}, **conventions},
    )
    torch.manual_seed(1)
    head = EagleHead(spec)
    head.embed_tokens.weight.data.mul_(0.3)
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
    for _ in range(90):
        loss = torch.zeros(())
        for text in texts():
            roots = text.roots(CHAIN)
            states = head.fuse([text.states[layer][None].clone() for layer in spec.feature_layers])
            tokens = text.token_ids.clone()
            logits = chain_logits(head, tokens, states, [root - 1 for root in roots], CHAIN)
            wanted = tokens[torch.tensor(roots)[:, None] + torch.arange(1, CHAIN + 1)]
            loss = loss + cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def good_head(tmp_path_factory) -> Path:
    """Unusual in everything that can be mislabelled."""
    folder = tmp_path_factory.mktemp("fitted") / "head"
    head = fitted_head(norm_before_residual=False, feed_back_normed=True)
    write_head(folder, head, None, "speculators", num_target_layers=LAYERS)
    return folder


@pytest.fixture
def relabelled(good_head, tmp_path):
    """The fitted head with another config or other tensors."""

    def make(change_config=None, change_tensors=None) -> Path:
        folder = tmp_path / "relabelled"
        shutil.copytree(good_head, folder)
        config = json.loads((folder / "config.json").read_text())
        if change_config is not None:
            change_config(config)
            (folder / "config.json").write_text(json.dumps(config))
        if change_tensors is not None:
            tensors = load_file(folder / "model.safetensors")
            change_tensors(tensors)
            save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def check(folder, **kwargs) -> HeadCheck:
    return check_head(folder, target(), prompts(), **{"depth": CHAIN, "max_new_tokens": 48, **kwargs})


class TestMeasure:
    def test_a_good_head_is_plausible(self, good_head):
        found = check(good_head)
        assert found.stated.by_depth[0] > 0.95
        assert (found.verdict, found.trials, found.fix) == ("plausible", (), {})
        assert found.stated.num_positions == sum(len(text.roots(CHAIN)) for text in texts())

    def test_acceptance_rates_count_by_depth(self):
        found = AcceptanceRates.of(torch.tensor([0, 1, 2, 2, 0]), 3)
        assert found.by_depth == (0.6, 0.4, 0.0)
        assert found.conditional == (0.6, 2 / 3, 0.0)
        assert found.mean_length == 2.0
        assert AcceptanceRates.of(torch.tensor([0, 0]), 2).conditional == (0.0, None)

    def test_low_is_what_is_less_than_the_head_recorded(self):
        found = AcceptanceRates.of(torch.tensor([0, 2, 2, 2, 0, 0, 0, 2, 2, 0]), 2)
        assert found.by_depth == (0.5, 0.5)
        assert [found.is_low(HeadRecord(accuracy=share)) for share in (None, 0.54, 0.64)] == [True, False, True]
        check = HeadCheck("head", "eagle", found, record=HeadRecord(True, 0.54))
        assert "as expected (0.50 at depth 1; 0.54 in training): nothing to fix" in check.message
        low = HeadCheck("head", "eagle", found, record=HeadRecord(True, 0.9))
        assert "The target is the one that the head was trained for." in low.message
        assert "Is this the target" in HeadCheck("head", "eagle", found, record=HeadRecord(None, 0.9)).message

    def test_a_head_that_learned_too_little_is_not_asked_about_its_prompts(self):
        """It was as bad at the end of its training, so neither prompts nor templates explain it."""
        found = AcceptanceRates.of(torch.tensor([1] + [0] * 11), 2)
        check = HeadCheck("head", "eagle", found, record=HeadRecord(True, 0.08, 1.1, steps=12))
        assert check.is_low
        assert check.verdict == "untrained"
        assert "trained too little (0.08 at depth 1; 0.08 in training, 12 steps)" in check.message
        assert "?" not in check.message
        worse = HeadCheck("head", "eagle", AcceptanceRates.of(torch.tensor([0, 0]), 2), record=HeadRecord(True, 0.08))
        assert worse.verdict == "untrained"
        trained = HeadCheck("head", "eagle", found, record=HeadRecord(True, 0.5, steps=12))
        assert trained.verdict == "unexplained"


MISLABELLED = {
    "layers +1": (lambda c: c.update(eagle_aux_hidden_state_layer_ids=[3, 4, 6]), {"feature_layers": [2, 3, 5]}),
    "layers -1": (lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 4]), {"feature_layers": [2, 3, 5]}),
    "residual": (lambda c: c.update(norm_before_residual=True), {"norm_before_residual": False}),
    "feedback": (lambda c: c.update(norm_output=False), {"feed_back_normed": True}),
    "rope": (
        lambda c: c["transformer_layer_config"]["rope_parameters"].update(rope_theta=1e6),
        {"rope_theta": 100.0},
    ),
}

RARER = ("layers -1", "residual", "feedback")  # 10 s each; together with others they are tried below


class TestMislabelled:
    """Each convention mislabelled in turn; the fix must be that one, and must work."""

    @pytest.mark.parametrize("name", ["layers +1", "rope", *(pytest.param(n, marks=pytest.mark.slow) for n in RARER)])
    def test_check_finds_the_wrong_convention(self, relabelled, name):
        change, fix = MISLABELLED[name]
        found = check(relabelled(change), try_alternatives=True)
        assert found.fix == fix
        assert found.verdict == ("mislabelled" if found.stated.is_low(found.record) else "better")
        assert found.stated.mean_length + 0.1 < found.best.mean_length
        assert found.best.by_depth[0] > 0.95
        scope = {"AutoSpeculator": AutoSpeculator, "model": target()}
        exec(found.code, scope)
        assert scope["speculator"].drafter.entry_layers == (2, 3, 5)

    def test_check_finds_two_wrong_conventions(self, relabelled):
        def change(config):
            config["eagle_aux_hidden_state_layer_ids"] = [3, 4, 6]
            config["norm_before_residual"] = True

        found = check(relabelled(change), try_alternatives=True)
        assert found.fix == {"feature_layers": [2, 3, 5], "norm_before_residual": False}
        assert " and " in found.message

    def test_embeddings_in_the_file_that_look_random(self, relabelled):
        """The head's own are as good as unrelated to the target's; unless the config says so, they are not used."""
        found = check(relabelled(lambda config: config.update(embed_requires_grad=False)))
        assert (found.verdict, found.fix) == ("mislabelled", {"embeddings": "own"})

    def test_check_reports_a_random_head_as_unexplained(self, relabelled):
        def scramble(tensors):
            for name, tensor in tensors.items():
                if tensor.dim() == 2:
                    tensors[name] = torch.randn(tensor.shape) * 0.3

        found = check(relabelled(change_tensors=scramble))
        assert (found.verdict, found.fix) == ("unexplained", {})
        assert len(found.trials) > 8
        assert "no convention helps" in found.message


def test_golden_fitted_head_is_found_out_of_its_mislabelled_copies(golden_root, tmp_path):
    """SafeAILab's reference fitted this head to its last prompts; see `../shared/golden/README.md`."""
    name = "eagle3-safeai-base"
    meta = json.loads((golden_root / name / "meta.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(golden_root / meta["target"]).eval()
    fitted = [torch.tensor(run["prompt"]) for run in meta["e2e_eagenerate"] if max(run["accept_lengths"]) >= 3][:3]
    assert fitted
    source = golden_root / name / "head"
    stated = check_head(source, model, fitted, depth=3, max_new_tokens=40)
    copy_of = tmp_path / "head"
    shutil.copytree(source, copy_of)
    config = json.loads((copy_of / "config.json").read_text())
    wrong = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}}  # as outputs of layers: one too low
    (copy_of / "config.json").write_text(json.dumps(config | wrong))
    found = check_head(copy_of, model, fitted, depth=3, max_new_tokens=40, try_alternatives=True)
    assert found.stated.mean_length < stated.stated.mean_length
    assert found.fix["feature_layers"] == [2, 4, 5]
    assert found.best.mean_length == pytest.approx(stated.stated.mean_length)


@pytest.mark.parametrize(
    "kind",
    [
        *("eagle1", "safeailab", "speculators", "speculators-parallel", "medusa"),
        *("dflash", "windows", "rnn", "dflash2", "lilicorr"),
    ],
)
def test_replayed_chains_are_those_of_decoding(tmp_path, prompt, kind):
    """Texts with prompts of several lengths, whose every fourth continuation is what a session drafted there."""
    model, depth = tiny_target(), 3
    drafter = drafter_of(kind, model, tmp_path)
    texts = write_texts(model, [prompt(size, seed=size)[0] for size in (12, 7, 9)], max_new_tokens=20)
    changed = []
    for text in texts:
        tokens = text.token_ids.clone()
        for root in text.roots(depth)[:: depth + 1]:
            session = drafter.start(DraftRequest(target=model, input_ids=tokens[None, :root]))
            features = {layer: text.states[layer][None, :root] for layer in drafter.feature_layers}
            session.observe(tokens[None, 1 : root + 1], features, torch.tensor([root]))
            given = {"max_depth": depth, "chains_only": True, "num_emitted": (1,)}
            tree = session.draft(DraftState(root_ids=tokens[root][None], active=(True,), **given))
            tokens[root + 1 : root + 1 + depth] = tree.token_ids[0, 1:]
        changed.append(type(text)(tokens, text.num_prompt, text.states))
    for accepted in replayed(drafter, model, changed, depth):
        assert len(accepted) == 17
        assert set(accepted[:: depth + 1].tolist()) == {depth}


def drafter_of(kind, model, folder):
    if kind == "medusa":
        return MedusaDrafter(random_heads(4), model)
    if kind in EAGLE_LAYOUTS:
        return EagleDrafter.from_folder(str(write_random_head(folder / "head", kind)), model)
    return random_block(kind, model)


def test_chains_are_no_deeper_than_medusa_has_heads(tmp_path):
    write_heads(tmp_path / "head", random_heads(4), "vllm", vocab_size=VOCAB)
    found = check_head(tmp_path / "head", tiny_target(), prompts(), depth=9, max_new_tokens=20)
    assert len(found.stated.by_depth) == 4


def test_a_form_of_the_prompts_that_drafts_better_is_named(good_head):
    """The head was fitted to the texts after `prompts()`."""
    generator = torch.Generator().manual_seed(7)
    unknown = [torch.randint(3, VOCAB, (6,), generator=generator) for _ in range(5)]
    given = {"depth": CHAIN, "max_new_tokens": 48, "uses_template": True}
    forms = {"without the chat template": prompts()}
    found = check_head(good_head, target(), unknown, other_forms=forms, try_forms=True, **given)
    (finding,) = found.findings
    assert (finding.kind, list(finding.acceptance)) == (
        "chat template",
        ["with the chat template", "without the chat template"],
    )
    assert "it was trained on texts without the chat template" in found.message
    assert check_head(good_head, target(), prompts(), other_forms=forms, try_forms=True, **given).findings == ()


class TestCommand:
    @pytest.fixture
    def target_folder(self, tmp_path) -> Path:
        from tokenizers import Tokenizer, models, pre_tokenizers

        vocab = {f"w{i}": i for i in range(VOCAB)}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(tmp_path / "target")
        target().save_pretrained(tmp_path / "target")
        return tmp_path / "target"

    def run(self, *arguments):
        return CliRunner().invoke(cli.app, ["check", *map(str, arguments)])

    @pytest.fixture
    def prompt_file(self, tmp_path) -> Path:
        words = [" ".join(f"w{i}" for i in prompt.tolist()) for prompt in prompts()]
        file = tmp_path / "prompts.jsonl"
        file.write_text("\n".join(json.dumps({"prompt": text}) for text in words))
        return file

    def test_check_prints_table_verdict_and_code(self, relabelled, target_folder, prompt_file):
        folder = relabelled(MISLABELLED["layers -1"][0])
        arguments = [folder, "--target", target_folder, "--prompts", prompt_file, "--depth", CHAIN]
        arguments += ["--max-new-tokens", 48, "--alternatives"]
        result = self.run(*arguments)
        assert result.exit_code == 0, result.output
        assert "drafts better with: layers +1, hidden states [2, 3, 5]" in " ".join(result.stdout.split())
        assert "target=model, feature_layers=[2, 3, 5])" in result.stdout

    def test_check_prints_json(self, good_head, target_folder, prompt_file):
        arguments = [good_head, "--target", target_folder, "--prompts", prompt_file, "--depth", CHAIN]
        found = json.loads(self.run(*arguments, "--max-new-tokens", 48, "--json").stdout)
        assert (found["verdict"], found["fix"]) == ("plausible", {})
        assert len(found["stated"]["by_depth"]) == CHAIN

    def test_errors_are_one_line(self, good_head, target_folder):
        result = self.run(good_head, "--target", target_folder, "--prompts", "absent.jsonl")
        assert result.exit_code == 1
        assert "cannot read prompts from absent.jsonl" in result.stderr
        assert result.stderr.startswith("hf-speculate: error: ")

    def test_a_head_that_cannot_get_a_table_is_refused_before_the_target_is_loaded(self):
        result = self.run("someone/some-head", "--target", "someone/some-target", "--calibrate")
        assert result.exit_code == 1
        assert "someone/some-head is not a local folder" in " ".join(result.stderr.split())

    def test_check_refuses_draft_models_other_targets_and_short_texts(self, good_head, target_folder):
        with pytest.raises(CheckpointError, match="'draft_model', which reads no states"):
            check(target_folder)
        other = LlamaForCausalLM(LlamaConfig(**{**target().config.to_dict(), "hidden_size": 64, "head_dim": 16}))
        with pytest.raises(TargetMismatchError, match="hidden size 32"):
            check_head(good_head, other, prompts())
        with pytest.raises(SpeculateError, match="wrote too little"):
            check(good_head, max_new_tokens=3)

    def test_json_holds_what_could_not_be_tried(self):
        acceptance = AcceptanceRates.of(torch.tensor([0, 0]), 1)
        found = HeadCheck("h", "eagle", acceptance, (Trial({"a": 1}, "a", problem="no"),), {}, acceptance)
        assert json.loads(json.dumps(as_json(found)))["trials"][0]["problem"] == "no"


class TestCalibration:
    def test_write_calibration_saves_a_table_that_loading_uses(self, good_head, tmp_path):
        """The fitted head is nearly always right: what it is sure of comes true."""
        folder = shutil.copytree(good_head, tmp_path / "head")
        before = AutoSpeculator.from_pretrained(folder, target=target()).drafter.calibration
        assert before == CalibrationTable()
        write_calibration(folder, target(), prompts(), max_new_tokens=32)
        table = AutoSpeculator.from_pretrained(folder, target=target()).drafter.calibration
        assert table.start(samples=False).share(-0.01) > 0.9
        assert table.greedy != table.sampled
        assert table == CalibrationTable.load(folder)

    def test_a_repository_gets_no_file(self):
        with pytest.raises(CheckpointError, match="not a local folder"):
            write_calibration("someone/some-head", target(), prompts())

    def test_a_broken_table_is_refused_before_anything_runs(self, good_head, tmp_path):
        folder = shutil.copytree(good_head, tmp_path / "head")
        (folder / "calibration.json").write_text("{")
        with pytest.raises(CheckpointError, match=r"cannot read .*calibration\.json"):
            AutoSpeculator.from_pretrained(folder, target=target())

    def test_a_broken_table_is_written_anew(self, good_head, tmp_path):
        folder = shutil.copytree(good_head, tmp_path / "head")
        (folder / "calibration.json").write_text("{")
        write_calibration(folder, target(), prompts()[:1], max_new_tokens=8)
        assert AutoSpeculator.from_pretrained(folder, target=target()).drafter.calibration.greedy
