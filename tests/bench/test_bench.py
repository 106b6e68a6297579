"""`bench generate` and what it reads: equal work, honest identity, prompts and speculators by name. No times."""

from __future__ import annotations

import json
import logging
import shutil
from functools import partial

import pytest
from transformers import AutoTokenizer, CompileConfig, GenerationMixin

from hf_speculate import SpeculateError
from hf_speculate.cache import CACHE_NAME
from hf_speculate.speculator.registry import SpeculatorSpec
from hf_speculate_tools.bench import GenerateSettings, bench_generate, methods
from hf_speculate_tools.bench.workload import WorkloadSettings, load_workload
from hf_speculate_tools.commands import Prompt, read_prompts, tokenize

from ..support.bench import bench, last_line
from ..support.inputs import character_tokenizer


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
TINY = ("--limit", "2", "--max-new-tokens", "8", "--repeats", "2")


def test_generate_reports_every_method(bench_folders, tmp_path):
    out = tmp_path / "result.json"
    speculators = ("-s", "prompt_lookup", "-s", f"draft_model:model={bench_folders / 'draft'},depth=2,top_k=2")
    result = bench("generate", "--target", bench_folders / "target", *speculators, *TINY, "--threads", 1, "--out", out)
    found = last_line(result)
    assert found == json.loads(out.read_text())
    ours = ["prompt_lookup", "draft_model:model=draft,depth=2,top_k=2"]
    methods = ["eager", "stock prompt lookup", "stock assisted", *ours]
    assert all(method in result.stdout for method in methods)
    assert [row["method"] for row in found["rows"]] == methods * 2
    assert [row["temperature"] for row in found["rows"]] == [0.0] * 5 + [1.0] * 5
    for row in found["rows"]:
        assert row["tokens_per_second"]["min"] <= row["tokens_per_second"]["median"] <= row["tokens_per_second"]["max"]
        assert set(row["speedup"]) == {"eager", "stock prompt lookup", "stock assisted", "best_stock_speculative"}
        if row["kind"] == "speculator":
            assert row["identical"]["share"] == 1.0  # fp32
            assert row["speculation"]["calls"] == 4
            # The first token of every call is the prefill's.
            assert row["speculation"]["emitted_tokens"] + row["speculation"]["prefill_tokens"] == 4 * 8
    assert list(found["temperatures"]) == ["0", "1"]
    for headline in found["temperatures"].values():
        assert {"eager", "best_stock_speculative"} <= set(headline["speedup"])
    assert found["speedup"] == found["temperatures"]["0"]["speedup"]
    assert found["environment"]["threads"] == 1
    assert found["environment"]["versions"]["transformers"]


def test_bench_generate_compares_with_compiled_stock_modes(bench_folders, monkeypatch, caplog):
    """With dynamo's own backend: inductor takes minutes. One that stock refuses is left out with the reason."""
    for name in ("transformers", "hf_speculate"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    monkeypatch.setattr(methods, "CompileConfig", partial(CompileConfig, backend="eager", mode=None))
    assisted = GenerationMixin._assisted_decoding

    def refusing(self, *arguments, **kwargs):
        if kwargs[CACHE_NAME].is_compileable:
            raise NotImplementedError("not compiled\nhere")
        return assisted(self, *arguments, **kwargs)

    speculators = ["prompt_lookup", f"draft_model:model={bench_folders / 'draft'},depth=2"]
    settings = {"temperatures": [0.0], "max_new_tokens": 8, "repeats": 1, "limit": 1, "compile_baseline": True}
    target = str(bench_folders / "target")
    found = bench_generate(GenerateSettings(target=target, speculators=speculators, **settings))
    stock = ["eager", "stock compiled", "stock prompt lookup", "stock assisted"]
    compiled = ["stock prompt lookup, compiled", "stock assisted, compiled"]
    assert [row["method"] for row in found["rows"]][:6] == stock + compiled
    assert all(row["identical"]["share"] == 1.0 for row in found["rows"][1:])
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", refusing)
    found = bench_generate(GenerateSettings(target=target, speculators=speculators[:1], **settings))
    assert [row["method"] for row in found["rows"]] == [*stock[:3], "prompt_lookup"]
    assert f"{compiled[0]} is not measured: NotImplementedError: not compiled" in caplog.text


def test_batches_leave_out_what_stock_cannot_do(bench_folders):
    settings = GenerateSettings(
        target=str(bench_folders / "target"), limit=3, batch_sizes=[2], temperatures=[0.0], max_new_tokens=8, repeats=1
    )
    found = bench_generate(settings)
    assert [row["method"] for row in found["rows"]] == ["eager", "prompt_lookup", "suffix"]
    ours = found["rows"][-1]
    assert ours["speedup"]["best_stock_speculative"] is None
    assert ours["identical"]["num_rows"] == 4  # 3 prompts, the last batch filled up
    assert found["temperatures"]["0"]["speedup"]["best_stock_speculative"] is None


def test_bench_generate_reports_categories_and_skips_long_prompts(bench_folders, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"category": "a", "turns": ["def f(x):", "second turn"]},
        {"category": "b", "turns": ["x = 1\n"]},
        {"category": "a", "turns": ["y" * 600]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    settings = GenerateSettings(
        target=str(bench_folders / "target"), prompts=[path], temperatures=[0.0], max_new_tokens=6, repeats=1
    )
    found = bench_generate(settings)
    assert (found["num_prompts"], found["num_skipped_prompts"]) == (2, 1)
    assert set(found["rows"][-1]["categories"]) == {"a", "b"}
    settings.max_new_tokens = 510
    with pytest.raises(SpeculateError, match="no prompt fits"):
        bench_generate(settings)


def test_bench_generate_reports_texts_that_differ_without_a_tie(bench_folders, monkeypatch):
    from hf_speculate.verification import Verifier

    verify = Verifier.verify

    def wrong(self, logits, *args, **kwargs):
        return verify(self, logits.roll(1, dims=-1), *args, **kwargs)

    monkeypatch.setattr(Verifier, "verify", wrong)
    settings = GenerateSettings(
        target=str(bench_folders / "target"), limit=1, temperatures=[0.0], max_new_tokens=6, repeats=1
    )
    identical = bench_generate(settings)["rows"][-1]["identical"]
    assert identical["share"] == 0.0
    assert identical["divergences"][0]["is_tie"] is False
    assert "is not a tie" in identical["divergences"][0]["why"]


def test_options_of_a_speculator_have_types():
    spec = SpeculatorSpec.parse("draft_model:model=/models/small,depth=4,flag=true,rate=0.5")
    assert spec.options == {"model": "/models/small", "depth": 4, "flag": True, "rate": 0.5}


def test_limit_is_spread_over_categories(tmp_path):
    path = tmp_path / "set.jsonl"
    lines = [{"category": category, "question": f"{category}{i}"} for category in "abc" for i in range(5)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert [prompt.content for prompt in read_prompts(path, limit=5)] == ["a0", "a1", "b0", "b1", "c0"]
    assert len(read_prompts(path)) == 15


def test_files_of_spec_bench_are_read(tmp_path):
    """question_id, category, turns, and sometimes a reference; several turns are a conversation."""
    path = tmp_path / "question.jsonl"
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Shorter."]},
        {"question_id": 321, "category": "rag", "turns": ["Who?"], "reference": ["me"]},
        {"question_id": 82, "category": "writing", "turns": ["Draft."]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = read_prompts(path)
    assert found == [Prompt("writing", "Write.", ("Shorter.",)), Prompt("writing", "Draft."), Prompt("rag", "Who?")]
    assert found[0].messages == [{"role": "user", "content": "Write."}]
    assert read_prompts(path, categories=["rag"]) == [found[2]]
    assert read_prompts(path, limit=1, categories=["rag", "writing"]) == [found[0]]
    with pytest.raises(SpeculateError, match="has no category maths; there are writing, rag"):
        read_prompts(path, categories=["maths"])


def test_later_turns_come_after_the_targets_own_answers(bench_folders, tmp_path):
    """Through the chat template; each turn is a prompt, the answers before it are plain greedy ones."""
    folder = tmp_path / "chat"
    shutil.copytree(bench_folders / "target", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    path = tmp_path / "question.jsonl"
    path.write_text(json.dumps({"category": "c", "turns": ["one", "two", "three"]}))
    workload = load_workload(WorkloadSettings(target=str(folder), prompts=[path], max_new_tokens=5))
    texts = [tokenizer.decode(ids) for _, ids in workload.prompts]
    assert texts[0] == "<user>one>"
    plain = workload.model.generate(workload.prompts[0][1][None], max_new_tokens=5, do_sample=False)
    answer = tokenizer.decode(plain[0, len(workload.prompts[0][1]) :])
    assert texts[1] == f"<user>one<assistant>{answer}<user>two>"
    assert texts[2].startswith(texts[1][:-1] + "<assistant>")
    assert texts[2].endswith("<user>three>")
    raw = load_workload(WorkloadSettings(target=str(folder), prompts=[path], max_new_tokens=5, raw=True))
    assert [tokenizer.decode(ids) for _, ids in raw.prompts] == ["one"]


@pytest.mark.parametrize(
    ("line", "content"),
    [
        ({"prompt": "p", "answer": "a"}, "p"),
        ({"text": "t"}, "t"),
        ({"question": "q"}, "q"),
        ({"turns": ["one"]}, "one"),
        ({"messages": [{"role": "user", "content": "u"}]}, ({"role": "user", "content": "u"},)),
    ],
)
def test_prompts_are_read_from_every_known_field(line, content, tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text(json.dumps(line))
    assert read_prompts(path) == [Prompt("file", content)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompts"),
        ("{", "not JSON lines"),
        ("[1]", "not a JSON object"),
        ('{"answer": 1}', "none of the fields"),
    ],
)
def test_broken_prompt_files_are_refused(text, message, tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text(text)
    with pytest.raises(SpeculateError, match=message):
        read_prompts(path)


def test_chat_template_is_applied():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    [(_, ids)] = tokenize([Prompt("x", "hi")], tokenizer, use_chat_template=True)
    assert tokenizer.decode(ids) == "<user>hi>"
    [(_, ids)] = tokenize([Prompt("x", "hi")], tokenizer, use_chat_template=False)
    assert tokenizer.decode(ids) == "hi"
    with pytest.raises(SpeculateError, match="no chat template"):
        tokenize([Prompt("x", ({"role": "user", "content": "hi"},))], character_tokenizer(), use_chat_template=False)
