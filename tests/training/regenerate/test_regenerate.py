"""Answers by the target itself: right tokens, and a file that survives being killed at any moment."""

from __future__ import annotations

import copy
import json
import os
from collections import Counter

import pytest
import torch
import typer
from datasets import Dataset
from typer.testing import CliRunner

from hf_speculate import AutoSpeculator
from hf_speculate.errors import SpeculateError
from hf_speculate_training.data import DataOptions, load_records, prepare_data
from hf_speculate_training.regenerate import RegenerateOptions, regenerate
from hf_speculate_training.regenerate.command import regenerate_command
from hf_speculate_training.regenerate.journal import Journal, read_lines

from ...support.training import chats


VOCAB_SIZE = 3 + 256
END = 2
OPTIONS = RegenerateOptions(max_new_tokens=12, batch_size=4)
SAMPLED = RegenerateOptions(max_new_tokens=12, batch_size=4, temperature=1.0)


@pytest.fixture
def target(tiny_model):
    """Ends its answers now and then: the end token's logit is raised by its embedding."""
    model = copy.deepcopy(tiny_model(vocab_size=VOCAB_SIZE))
    model.generation_config.eos_token_id = END
    return model


def run(target, tokenizer, records, output, options=OPTIONS, **arguments):
    return regenerate(target, tokenizer, records, output, options, show_progress=False, **arguments)


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def plain_answer(target, prompt: list[int], max_new_tokens: int = 12) -> list[int]:
    """What stock greedy generation writes for one prompt."""
    output = target.generate(torch.tensor([prompt]), max_new_tokens=max_new_tokens, do_sample=False)
    return output[0, len(prompt) :].tolist()


def raise_end_logit(target, factor: float) -> None:
    """Makes END likely, so that some answers come to their end."""
    with torch.no_grad():
        target.lm_head.weight[END] *= factor


def test_regenerate_writes_the_targets_answers(target, byte_tokenizer, tmp_path):
    raise_end_logit(target, 2.5)
    output = tmp_path / "out.jsonl"
    report = run(target, byte_tokenizer, chats(10), output)
    lines = lines_of(output)
    assert sorted(int(line["id"]) for line in lines) == list(range(10))
    finishes = set()
    for line in lines:
        user = chats(10)[int(line["id"])]["messages"][:1]
        prompt = byte_tokenizer.apply_chat_template(user, add_generation_prompt=True)["input_ids"]
        answer = plain_answer(target, prompt)
        assert line["input_ids"] == prompt + answer
        assert line["loss_mask"] == [0] * len(prompt) + [1] * len(answer)
        assert line["finish"] == ("stop" if answer[-1] == END else "length")
        assert line["messages"] == [
            *user,
            {"role": "assistant", "content": byte_tokenizer.decode(answer, skip_special_tokens=True)},
        ]
        finishes.add(line["finish"])
    assert finishes == {"stop", "length"}, "the test must see both"
    assert report.num_cut == sum(line["finish"] == "length" for line in lines)
    assert report.num_new_tokens == sum(sum(line["loss_mask"]) for line in lines)


@pytest.mark.parametrize("options", [OPTIONS, SAMPLED], ids=["greedy", "sampled"])
def test_speculation_changes_nothing(target, byte_tokenizer, tmp_path, options):
    raise_end_logit(target, 2.0)
    speculator = AutoSpeculator.from_name("prompt_lookup", target, min_ngram=1)
    run(target, byte_tokenizer, chats(10), tmp_path / "plain.jsonl", options)
    run(target, byte_tokenizer, chats(10), tmp_path / "fast.jsonl", options, speculator=speculator)
    assert speculator.stats.rounds > 0
    assert lines_of(tmp_path / "fast.jsonl") == lines_of(tmp_path / "plain.jsonl")


@pytest.mark.parametrize("printable", [True, False])
def test_later_turns_see_what_was_written(target, byte_tokenizer, tmp_path, printable):
    """Every answer is what the target says to the conversation as the template shows it.

    Bytes that are no text come back from text as other ones: then a later turn is a document of its own.
    """
    raise_end_logit(target, 4.0)
    if printable:
        target.generation_config.suppress_tokens = [0, 1, *range(97, VOCAB_SIZE)]
    output = tmp_path / "out.jsonl"
    run(target, byte_tokenizer, chats(8, turns=3), output)
    answers, parts = Counter(), Counter()
    for line in lines_of(output):
        ids, mask = line["input_ids"], line["loss_mask"]
        starts = [i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
        for start in starts:
            answer = plain_answer(target, ids[:start])
            assert ids[start : start + len(answer)] == answer
        messages = line["messages"]
        text = byte_tokenizer.apply_chat_template(messages, tokenize=False)
        if line["finish"] == "stop":
            assert [message["role"] for message in messages] == ["user", "assistant"] * 3
            assert not printable or byte_tokenizer.decode(ids) == text.removesuffix("\n")
        assert all(message["content"] != "of the data" for message in messages)
        answers[line["id"]] += len(starts)
        parts[line["id"]] += 1
    assert max(answers.values()) == 3, "the test must see later turns"
    assert (max(parts.values()) == 1) == printable


def test_plain_texts_are_continued(target, byte_tokenizer, tmp_path):
    target.generation_config.eos_token_id = byte_tokenizer.eos_token = None
    texts = Dataset.from_dict({"text": ["abcdefghij" * 5, "klmnopq" * 4, "short"]})
    options = RegenerateOptions(max_new_tokens=12, prompt_tokens=8)
    report = run(target, byte_tokenizer, texts, tmp_path / "out.jsonl", options)
    lines = lines_of(tmp_path / "out.jsonl")
    assert sorted(line["prompt"] for line in lines) == ["abcdefgh", "klmnopqk"]
    for line in lines:
        assert line["input_ids"][8:] == plain_answer(target, line["input_ids"][:8])
        assert sum(line["loss_mask"]) == 12
    assert report.skipped == {"a text of no more than prompt_tokens=8 tokens": 1}

    pieces = RegenerateOptions(max_new_tokens=12, prompt_tokens=8, pieces=True)
    run(target, byte_tokenizer, texts, tmp_path / "pieces.jsonl", pieces)
    assert sorted(line["id"] for line in lines_of(tmp_path / "pieces.jsonl")) == ["0.0", "0.1", "0.2", "1.0"]


def test_regenerate_reads_every_form_of_a_prompt(target, byte_tokenizer, tmp_path, write_lines):
    """Only a prompt; a prompt as a chat; tokens with a mask."""
    forms = [({"prompt": "abc"}, {}, False), ({"question": "abc"}, {"columns": {"prompt": "question"}}, True)]
    for number, (record, named, chat) in enumerate(forms):
        output = tmp_path / f"{number}.jsonl"
        records = load_records(write_lines([record]), **named)
        run(target, byte_tokenizer, records, output, RegenerateOptions(max_new_tokens=4, chat=chat))
        (line,) = lines_of(output)
        assert ("messages" in line) == chat
    tokens = Dataset.from_dict({"input_ids": [[5, 6, 7, 8, 9]], "loss_mask": [[0, 0, 0, 1, 1]]})
    run(target, byte_tokenizer, tokens, tmp_path / "tokens.jsonl")
    assert lines_of(tmp_path / "tokens.jsonl")[0]["input_ids"] == [5, 6, 7, *plain_answer(target, [5, 6, 7])]


def test_what_is_written_can_be_trained_on(target, byte_tokenizer, tmp_path):
    """The loader takes the token ids, not the text: these bytes are no valid text, so re-tokenising would differ."""
    output = tmp_path / "data" / "out.jsonl"
    run(target, byte_tokenizer, chats(5, turns=2), output)
    # The folder: what lies beside the output is no data.
    data = prepare_data(output.parent, byte_tokenizer, DataOptions(max_length=256))
    assert [list(ids) for ids in data.train["input_ids"]] == [line["input_ids"] for line in lines_of(output)]
    assert [sum(mask) for mask in data.train["loss_mask"]] == [sum(line["loss_mask"]) for line in lines_of(output)]


@pytest.mark.parametrize("options", [OPTIONS, SAMPLED], ids=["greedy", "sampled"])
def test_cut_anywhere_and_resumed_it_is_the_same_file(target, byte_tokenizer, tmp_path, options):
    """As after a kill: any number of bytes of the file may have been written."""
    raise_end_logit(target, 3.0)
    whole = tmp_path / "whole.jsonl"
    run(target, byte_tokenizer, chats(6, turns=2), whole, options)
    content = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for number, size in enumerate([0, 1, ends[0], ends[0] + 5, ends[2] - 1, ends[3], ends[-1] - 1, ends[-1]]):
        path = tmp_path / f"cut{number}.jsonl"
        path.write_bytes(content[:size])
        path.with_name(path.name + ".settings").write_bytes(whole.with_name(whole.name + ".settings").read_bytes())
        report = run(target, byte_tokenizer, chats(6, turns=2), path, options)
        assert path.read_bytes() == content, f"cut at byte {size}"
        assert report.num_found + report.num_written == 6


def test_regenerate_command_writes_a_file_once(target, byte_tokenizer, tmp_path, write_lines):
    """From files to a file; told twice, it does nothing more."""
    target.save_pretrained(tmp_path / "model")
    byte_tokenizer.save_pretrained(tmp_path / "model")
    data = write_lines([{"question": "abc"}, {"question": "defg"}])
    app = typer.Typer()
    app.command()(regenerate_command)
    arguments = ["--target", tmp_path / "model", "--data", data, "--output", tmp_path / "out.jsonl", "--chat"]
    arguments += ["--column", "prompt=question", "--max-new-tokens", "12", "--temperature", "0"]
    for written, found in ((2, 0), (0, 2)):
        result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
        figures = json.loads(result.stdout.splitlines()[-1])
        assert (figures["num_written"], figures["num_found"]) == (written, found)
    for line in lines_of(tmp_path / "out.jsonl"):
        prompt = line["input_ids"][: line["loss_mask"].index(1)]
        assert line["input_ids"] == prompt + plain_answer(target, prompt)
    result = CliRunner().invoke(app, [*map(str, arguments), "--column", "prompt"])
    assert "cannot read --column 'prompt'" in str(result.exception)


def test_the_command_takes_one_source_of_prompts(tmp_path):
    app = typer.Typer()
    app.command()(regenerate_command)
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "a"}\n')
    common = ["--target", str(tmp_path), "--output", str(tmp_path / "out.jsonl")]
    for given in ([], ["--data", str(questions), "--self-prompts", "3"]):
        result = CliRunner().invoke(app, [*common, *given])
        assert "either --data or --self-prompts" in str(result.exception)


def test_seed_decides_samples(target, byte_tokenizer, tmp_path):
    outputs = []
    for number, seed in enumerate([0, 0, 1]):
        torch.manual_seed(number)  # what the caller's generator holds does not matter
        before = torch.get_rng_state()
        options = RegenerateOptions(max_new_tokens=12, batch_size=4, temperature=1.0, seed=seed)
        run(target, byte_tokenizer, chats(4), tmp_path / f"{number}.jsonl", options)
        outputs.append(lines_of(tmp_path / f"{number}.jsonl"))
        assert torch.equal(torch.get_rng_state(), before), "and it is left alone"
    assert outputs[0] == outputs[1] != outputs[2]


def test_models_own_sampling_settings(target, byte_tokenizer, tmp_path):
    """Without a temperature the generation config decides; with one, its top-k does not apply."""
    greedy, own, free = (tmp_path / f"{name}.jsonl" for name in ("greedy", "own", "free"))
    run(target, byte_tokenizer, chats(4), greedy)
    target.generation_config.update(do_sample=True, temperature=1.0, top_k=1)
    run(target, byte_tokenizer, chats(4), own)
    assert [line["input_ids"] for line in lines_of(own)] == [line["input_ids"] for line in lines_of(greedy)]
    run(target, byte_tokenizer, chats(4), free, SAMPLED)
    assert [line["input_ids"] for line in lines_of(free)] != [line["input_ids"] for line in lines_of(greedy)]


def test_other_settings_target_or_data_are_refused(target, byte_tokenizer, tmp_path):
    output = tmp_path / "out.jsonl"
    run(target, byte_tokenizer, chats(4), output)
    before = output.read_bytes()
    with pytest.raises(SpeculateError, match="made with other settings \\(max_new_tokens 12, now 13\\)"):
        run(target, byte_tokenizer, chats(4), output, RegenerateOptions(max_new_tokens=13, batch_size=4))
    with pytest.raises(SpeculateError, match="made with other settings \\(num_records 4, now 5\\)"):
        run(target, byte_tokenizer, chats(5), output)
    other = Dataset.from_dict({"messages": [[{"role": "user", "content": f"other {i}"}] for i in range(4)]})
    with pytest.raises(SpeculateError, match="the data have changed since"):
        run(target, byte_tokenizer, other, output)
    raise_end_logit(target, 1.01)
    with pytest.raises(SpeculateError, match="made with other settings \\(target "):
        run(target, byte_tokenizer, chats(4), output)
    assert output.read_bytes() == before


def test_a_file_of_somebody_else_is_left_alone(target, byte_tokenizer, tmp_path, write_lines):
    path = write_lines([{"text": "precious"}])
    with pytest.raises(SpeculateError, match="give another output, or remove the file"):
        run(target, byte_tokenizer, chats(1), path)
    assert lines_of(path) == [{"text": "precious"}]


def test_one_writer_at_a_time(tmp_path):
    with Journal(tmp_path / "out.jsonl", {}), pytest.raises(SpeculateError, match="being written by another process"):
        Journal(tmp_path / "out.jsonl", {})
    Journal(tmp_path / "out.jsonl", {}).close()


def test_full_disk_keeps_what_was_written(tmp_path):
    resource = pytest.importorskip("resource")
    path = tmp_path / "out.jsonl"
    line = {"id": "0", "part": 0, "num_prompt_tokens": 1, "input_ids": [1, 2], "loss_mask": [0, 1]}
    with Journal(path, {}) as journal:
        journal.append([[line]])
        before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
        try:
            with pytest.raises(SpeculateError, match=r"cannot write .*: .* run the same command again"):
                journal.append([[line | {"id": "1"}]])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == before
        journal.append([[line | {"id": "1"}]])
        assert [found["id"] for found in read_lines(path)] == ["0", "1"]


@pytest.mark.parametrize("place", ["folder", "/dev/full", "file/out.jsonl", "loop"])
def test_journal_refuses_outputs_that_cannot_be_written(tmp_path, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SpeculateError, match="cannot write"):
        Journal(tmp_path / place, {})
    left = [path for path in sorted(tmp_path.iterdir()) if path.suffix != ".lock"]
    assert left == before
    assert not os.path.exists(f"{place}.lock"), "nothing lies beside a device"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": "0", "part": 0, "is_last": true, "input_ids": [1], "num_prompt_tokens": 1}', "holds number 0 twice"),
        ('{"id": "5", "part": 0, "is_last": true}', "not written by this command"),
        ("[" * 100_000, "not written by this command"),
    ],
)
def test_a_damaged_file_is_refused_and_left_as_it_is(tmp_path, line, said):
    path = tmp_path / "out.jsonl"
    with Journal(path, {}) as journal:
        journal.append([[{"id": "0", "part": 0, "input_ids": [1], "num_prompt_tokens": 1}]])
    path.write_text(path.read_text() + line + "\n")
    before = path.read_bytes()
    with pytest.raises(SpeculateError, match=said):
        Journal(path, {})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "options", [{"temperature": float("nan")}, {"temperature": 1e-308}, {"temperature": -1.0}, {"top_p": float("nan")}]
)
def test_options_refuse_impossible_temperature_and_top_p(options):
    with pytest.raises(SpeculateError, match=r"temperature .*: possible are 0|top_p must be between 0 and 1"):
        RegenerateOptions(**options)


def test_prompts_too_long_are_skipped(target, byte_tokenizer, tmp_path):
    records = Dataset.from_dict({"prompt": ["short", "long" * 100]})
    report = run(target, byte_tokenizer, records, tmp_path / "out.jsonl")
    assert report.skipped == {"the prompt and max_new_tokens do not fit into the target's context": 1}
    with pytest.raises(SpeculateError, match="nothing can be answered: 1 x the prompt"):
        run(target, byte_tokenizer, records.select([1]), tmp_path / "none.jsonl")
    with pytest.raises(SpeculateError, match="leaves no room for a prompt in the target's context of 256"):
        run(target, byte_tokenizer, records, tmp_path / "x.jsonl", RegenerateOptions(max_new_tokens=256))
