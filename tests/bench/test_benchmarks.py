"""Benchmarks of `tests/benchmarks` at tiny sizes: each runs, and its figures belong together."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_speculate.errors import SpeculateError
from hf_speculate_gguf.named import QWEN_CODER, SMOLLM2

from ..benchmarks import (
    ahead,
    command,
    costs,
    edits,
    gguf,
    headline,
    headline_picture,
    heads,
    loss,
    rollouts,
    shapes,
    tools,
    train,
    vocabularies,
)
from ..benchmarks.command import run
from ..benchmarks.shapes import ModelShape
from ..support.models import build_tiny_model
from ..support.random_gguf import FileShape, one_type, write_random_file
from ..support.vocabularies import byte_level_tokenizer


MAKEFILE = Path(__file__).parents[2] / "Makefile"
EXAMPLES = MAKEFILE.parent / "examples"


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch):
    monkeypatch.setattr(shapes, "SHAPES", {"tiny": ModelShape(128, 192, 4, 4, 2, 128, False)})
    monkeypatch.setattr(costs, "_COPIED_BYTES", 1 << 20)


def test_every_benchmark_has_a_target_of_make():
    known = {path.stem for path in Path(ahead.__file__).parent.glob("*.py") if "run(" in path.read_text()} - {"command"}
    assert {f"bench-{name}" for name in known} <= set(MAKEFILE.read_text().split())


def test_rollouts_without_trl_say_where_it_is(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(SpeculateError, match="needs TRL: `make ecosystem` sets up"):
        rollouts.bench_rollouts(rollouts.RolloutSettings())


def test_the_command_ends_in_one_line_of_json(monkeypatch, capsys):
    arguments = "--shape tiny --rate 0.8 --depth 2 --rounds 4 --repeats 1 --context 8 --type Q8_0"
    monkeypatch.setattr(sys, "argv", ["ahead", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        run(ahead.AheadSettings, ahead.bench_ahead, ahead.tables)
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["weights"] == "Q8_0"
    assert [row["way"] for row in found["rows"]] == [ahead.WAITS, ahead.AHEAD, ahead.SIMULATED]
    monkeypatch.setattr(sys, "argv", ["ahead", "--shape", "70B"])
    with pytest.raises(SystemExit, match="error: unknown shape '70B'; there are tiny"):
        run(ahead.AheadSettings, ahead.bench_ahead, ahead.tables)


def test_drafting_ahead_is_measured():
    settings = ahead.AheadSettings(
        shape="tiny", rates=[1.0, 0.0], depths=[2], dtype="float32", context=8, rounds=6, repeats=1
    )
    result = ahead.bench_ahead(settings)
    rows = {(row["rate"], row["way"]): row for row in result["rows"]}
    for row in result["rows"]:
        assert row["round_ms"] == pytest.approx(sum(row[name] for name in ("target_ms", "drafter_ms", "rest_ms")))
    assert rows[1.0, ahead.AHEAD]["share_right"] > 0.7  # not where the text ends
    assert rows[0.0, ahead.AHEAD]["share_right"] == 0
    assert rows[0.0, ahead.WAITS]["speedup"] == 1
    assert len(ahead.tables(result)[0].rows) == 6


class TestHeadline:
    def test_all_methods_write_the_same_prompts_on_one_file(self, tmp_path):
        if SMOLLM2.find() is None:
            pytest.skip("SmolLM2 is not on this machine")
        pytest.importorskip("matplotlib")
        settings = headline.HeadlineSettings(target="smollm2", limit=1, max_new_tokens=6, llama_cpp=None)
        result = headline.bench_headline(settings)
        methods = [headline.STOCK, headline.PLAIN, "suffix", "smollm2-eagle3", "smollm2-eagle3+suffix"]
        assert [row["method"] for row in result["rows"]] == methods * 2
        shares = [(row["identical"] or {}).get("share") for row in result["rows"]]
        assert shares == [None, None, 1.0, 1.0, 1.0] * 2
        (table,) = headline.tables(result)
        assert [row[0] for row in table.rows] == methods
        (picture,) = headline_picture.draw(result, tmp_path / "new")
        assert picture.read_bytes().startswith(b"\x89PNG")

    def test_a_target_without_a_head_is_refused(self):
        with pytest.raises(SpeculateError, match="'gpt2' has no bundled head; possible are smollm2, qwen2"):
            headline.bench_headline(headline.HeadlineSettings(target="gpt2"))

    def test_bench_headline_names_missing_targets(self, monkeypatch, capsys):
        nothing = [replace(target, find=lambda: None) for target in (QWEN_CODER, SMOLLM2)]
        monkeypatch.setattr(headline, "QWEN_CODER", nothing[0])
        monkeypatch.setattr(headline, "SMOLLM2", nothing[1])
        with pytest.raises(SpeculateError, match="no GGUF file to measure"):
            headline.bench_headline(headline.HeadlineSettings())
        told = capsys.readouterr().err
        assert all(f"{target.name} is left out" in told for target in nothing)


def test_losses_of_bad_drafters_are_measured(bench_folders):
    settings = loss.LossSettings(
        target=str(bench_folders / "target"),
        max_new_tokens=12,
        repeats=2,
        adaptive=False,
        speculators=["prompt_lookup"],
        limit=2,
    )
    found = loss.bench_loss(settings)
    rows = {row["drafter"]: row for row in found["rows"]}
    assert list(rows) == ["random", "adversarial", "never", "prompt_lookup"]
    assert rows["never"]["drafted_share"] == 0
    # Never right: each of the 11 rounds emits one token, and every round but those at the end drafts.
    assert rows["adversarial"]["accepted_tokens"] == 0
    assert rows["adversarial"]["drafted_share"] == pytest.approx(10 / 11)
    assert rows["adversarial"]["drafted_tokens"] > 5 * 16
    assert json.loads(json.dumps(found)) == found
    assert len(loss.tables(found)[0].rows) == 4


def test_every_kind_of_head_is_measured():
    settings = heads.HeadSettings(shape="tiny", dtype="float32", context=8, rounds=4, repeats=1)
    result = heads.bench_heads(settings)
    assert [row["head"] for row in result["rows"]] == list(heads.HEADS)
    for row in result["rows"]:
        assert row["mean_acceptance_length"] == 1  # nothing is accepted
        assert row["nodes"] > 2
        assert row["round_ms"] == pytest.approx(row["target_ms"] + row["drafter_ms"] + row["rest_ms"])
    (grid,) = heads.tables(result)
    assert "x plain" not in grid.columns
    settings.heads, settings.acceptance, settings.nodes = ["eagle3-32k"], "1,1,1", 3
    result = heads.bench_heads(settings)
    assert result["rows"][0]["tokens_per_round"] > 3  # all rounds but the last emit three drafts and the bonus token
    assert "x plain" in heads.tables(result)[0].columns
    settings.heads = ["hydra"]
    with pytest.raises(SpeculateError, match="not hydra"):
        heads.bench_heads(settings)


def test_costs_of_a_shape_are_measured():
    settings = costs.CostSettings(
        contexts=[40, 16],
        shape="tiny",
        nodes=[3, 5],
        acceptance="1,1,1,1",
        dtype="float32",
        exact=True,
        max_new_tokens=10,
        repeats=1,
    )
    found = costs.bench_costs(settings)
    assert json.loads(json.dumps(found)) == found
    places = [(context, nodes) for context in (16, 40) for nodes in (1, 3, 5)]
    assert [(row["context"], row["nodes"]) for row in found["rows"]] == places
    assert all(set(row["verify_ms"]) == {"stock", "folded", "exact"} for row in found["rows"])
    methods = ["eager", "3 nodes", "5 nodes", "automatic"]
    assert [(row["context"], row["method"]) for row in found["rounds"]] == [(c, m) for c in (16, 40) for m in methods]
    fixed = found["rounds"][1]
    assert (fixed["tokens_per_round"], fixed["nodes"], fixed["host_waits"]) == (3, 3, None)  # right wherever it drafts
    steps, _ = costs.tables(found)
    assert [row[:2] for row in steps.rows] == [(str(c), str(n)) for c, n in places]


@pytest.mark.gpu
def test_host_waits_counts_synchronisations():
    ones = torch.ones(3, device="cuda")
    assert costs.host_waits(lambda: [ones.sum().item() for _ in range(3)], ones.device) >= 3


def test_a_file_is_measured_packed_and_dequantised(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_random_file(str(path), FileShape("llama", 96, 64, 64, 2, 4, 2, 256, is_tied=False), one_type("Q8_0"))
    settings = gguf.GgufSettings(
        file=path, backend="dequantize", nodes=[4], acceptance="1,1,1", context=8, max_new_tokens=9, repeats=1
    )
    result = gguf.bench_gguf(settings)
    rows = {row["method"]: row for row in result["rows"]}
    assert list(rows) == ["dequantised, plain", "dequantised, trees of 4", "packed, plain", "packed, trees of 4"]
    # Right at every level: eight tokens in two rounds, each model drafted for from its own text.
    for name in ("dequantised, trees of 4", "packed, trees of 4"):
        assert rows[name]["speculation"]["mean_acceptance_length"] == 4
    speed, forward, memory = gguf.tables(result)
    assert [row[0] for row in speed.rows] == list(rows)
    assert [row[0] for row in forward.rows] == ["packed", "dequantised"]
    assert "dequantize, rows" in memory


def test_edited_files_are_drafted_again(bench_folders):
    settings = edits.EditSettings(
        target=str(bench_folders / "target"), num_files=2, file_tokens=150, speculators=["prompt_lookup", "suffix"]
    )
    found = edits.bench_edits(settings)
    assert [row["speculator"] for row in found["rows"]] == ["prompt_lookup", "suffix"]
    for row in found["rows"]:
        assert row["tokens_per_round"] > 3
        assert row["drafted_nodes"] <= 8


def test_tool_calls_are_measured(bench_folders, monkeypatch):
    target = str(bench_folders / "target")
    settings = tools.ToolSettings(target=target, num_dialogues=2, max_new_tokens=6)
    with pytest.raises(SpeculateError, match="has no chat template"):
        tools.bench_tools(settings)
    load = command.load_target

    def with_template(*arguments):
        model, tokenizer = load(*arguments)
        tokenizer.chat_template = "{{ tools | length }} {{ messages[0].content }}"
        return model, tokenizer

    monkeypatch.setattr(command, "load_target", with_template)
    result = tools.bench_tools(settings)
    assert [(row["beginning"], row["schemas"]) for row in result["rows"]] == [
        (beginning, schemas) for beginning in ("free", "begun") for schemas in (False, True)
    ]
    assert all(len(row["texts"]) == 2 for row in result["rows"])
    for plain, helped in zip(result["rows"][::2], result["rows"][1::2], strict=True):
        assert plain["texts"] == helped["texts"]
    assert len(tools.tables(result)[0].rows) == 4
    assert len({*tools.tool_dialogues(30, 0)}) == 30


def test_a_draft_model_of_another_vocabulary_is_measured(tmp_path):
    tokenizer = byte_level_tokenizer(600)
    build_tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = vocabularies.VocabularySettings(
        target=str(EXAMPLES / "pycoder"), model=str(tmp_path), limit=2, max_new_tokens=8, repeats=1
    )
    result = vocabularies.bench_vocabularies(settings)
    assert [row["temperature"] for row in result["rows"]] == [0.0] * 4 + [1.0] * 4
    plain, stock, adaptive, fixed = result["rows"][:4]
    assert plain["tokens_per_round"] == plain["speedup"]["median"] == 1
    assert {row["same"] for row in (plain, stock, adaptive, fixed)} == {2}
    assert fixed["tokens_per_round"] >= 1
    assert len(vocabularies.tables(result)[0].rows) == 8


@pytest.mark.slow
def test_losses_of_training_are_measured():
    result = train.bench_train(train.TrainSettings(methods=[], vocab=128, entries=16, device="cpu"))
    forms = [("plain", "soft"), ("lean", "soft"), ("plain", "hard"), ("lean", "hard")]
    assert [(row["form"], row["kind"]) for row in result["losses"]] == forms
    assert [len(table.rows) for table in train.tables(result)] == [0, 4]


@pytest.mark.parametrize(
    ("python", "found"), [("/nowhere/python", "cannot run /nowhere/python"), (sys.executable, "needs torch")]
)
def test_an_interpreter_without_speculators_gets_a_clear_error(python, found):
    with pytest.raises(SpeculateError, match=found):
        train.measure_peer_loss(python, "soft", train.LossShape(num_entries=16, vocab_size=128), 1)
