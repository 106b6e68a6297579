"""Prompts that the target writes itself, texts without an end, and prompts that are held out."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
import typer
from datasets import Dataset
from typer.testing import CliRunner

from hf_speculate.errors import SpeculateError
from hf_speculate_training.data import Chat, DataOptions, HeldOut, Plain, prepare_data
from hf_speculate_training.regenerate import (
    RegenerateOptions,
    regenerate,
    write_self_prompts,
)
from hf_speculate_training.regenerate.answers import repeats_itself
from hf_speculate_training.regenerate.command import regenerate_command
from hf_speculate_training.regenerate.journal import read_lines


COUNT = 24
OPTIONS = RegenerateOptions(temperature=1.0, top_p=0.95, max_new_tokens=24, batch_size=8)


@pytest.fixture
def target(tiny_model, byte_tokenizer):
    """Ends what it writes now and then, and knows no end of its own: that of the template has to be told to it."""
    model = copy.deepcopy(tiny_model(vocab_size=len(byte_tokenizer)))
    with torch.no_grad():
        model.lm_head.weight[byte_tokenizer.eos_token_id] *= 3.0
    return model


def drawn(target, tokenizer, output, options=OPTIONS, **arguments):
    return write_self_prompts(target, tokenizer, output, COUNT, options, show_progress=False, **arguments)


class TestSelfPrompts:
    def test_self_prompts_are_written_in_the_users_turn(self, target, byte_tokenizer, tmp_path):
        """The target is given the template up to the user's message; what it writes up to the turn's end is kept."""
        records, dropped = drawn(target, byte_tokenizer, tmp_path / "drawn.jsonl")
        lines = list(read_lines(tmp_path / "drawn.jsonl"))
        text = byte_tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
        header, end = text.split("?")
        assert end.startswith(byte_tokenizer.eos_token), "the fixture's template ends turns with it"
        for line in lines:
            assert byte_tokenizer.decode(line["input_ids"]).startswith(header)
            ended = line["input_ids"][-1] == byte_tokenizer.eos_token_id
            assert line["finish"] == ("stop" if ended else "length")
        kept = [line["completion"].strip() for line in lines if line["finish"] == "stop" and line["completion"].strip()]
        assert sorted(records["prompt"]) == sorted(set(kept))
        assert len(lines) == COUNT == len(records) + sum(dropped.values())
        assert len(records) > 4, "the test must see some"
        assert dropped["no end"] > 0

    def test_duplicates_are_dropped(self, target, byte_tokenizer, tmp_path):
        target.generation_config.top_k = 2
        drawn(target, byte_tokenizer, tmp_path / "drawn.jsonl")
        path = tmp_path / "drawn.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line, text in zip(lines, ("One  thing", " one thing ", "another", "  "), strict=False):
            line |= {"completion": text, "finish": "stop"}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        records, dropped = drawn(target, byte_tokenizer, path)
        first = sorted(lines[:2], key=lambda line: int(line["id"]))[0]["completion"].strip()
        assert {first, "another"} <= set(records["prompt"])
        assert (dropped["a duplicate"] >= 1, dropped["empty"] >= 1) == (True, True)

    def test_a_turn_that_ends_in_text(self, target, byte_tokenizer, tmp_path):
        byte_tokenizer.chat_template = "{% for m in messages %}[USER] {{ m['content'] }} [/USER]{% endfor %}"
        with pytest.raises(SpeculateError, match=r"user's message with ' \[/USER\]'.*Possible: prompts from data"):
            drawn(target, byte_tokenizer, tmp_path / "drawn.jsonl")
        assert not (tmp_path / "drawn.jsonl").exists()

    def test_greedy_options_are_refused(self, target, byte_tokenizer, tmp_path):
        with pytest.raises(SpeculateError, match="must be sampled"):
            drawn(target, byte_tokenizer, tmp_path / "drawn.jsonl", RegenerateOptions(temperature=0.0))

    def test_regenerate_command_writes_self_prompts_once(self, target, byte_tokenizer, tmp_path, write_lines):
        """Questions and answers from nothing; told twice, it does nothing more."""
        target.save_pretrained(tmp_path / "model")
        byte_tokenizer.save_pretrained(tmp_path / "model")
        app = typer.Typer()
        app.command()(regenerate_command)
        output = tmp_path / "own.jsonl"
        arguments = ["--target", tmp_path / "model", "--self-prompts", 12, "--output", output, "--max-new-tokens", 12]
        arguments += ["--temperature", 0, "--exclude", write_lines([{"turns": ["kept", "for measuring"]}])]
        written = []
        for _ in range(2):
            result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
            written.append(json.loads(result.stdout.splitlines()[-1])["num_written"])
        lines = list(read_lines(output))
        assert written == [len(lines), 0]
        asked = {line["messages"][0]["content"] for line in lines}
        found = {line["completion"].strip() for line in read_lines(tmp_path / "own.jsonl.prompts")}
        assert asked
        assert asked <= found


class TestEndlessTexts:
    @pytest.mark.parametrize(
        ("tokens", "is_endless"),
        [
            ([7] * 64, True),
            ([1, 2, 3] * 30, True),
            ([*range(100, 140), *[1, 2, 3, 4, 5] * 12], True),
            (list(range(64)), False),
            ([7] * 63, False),  # too short to tell
            ([*[1, 2, 3] * 30, 9], False),  # it went on
            ([*range(20)] * 2 + [*range(30, 70)], False),
        ],
    )
    def test_repeats_itself_finds_long_cycles(self, tokens, is_endless):
        assert repeats_itself(tokens) == is_endless

    def test_endless_answers_are_noted_and_not_trained_on(self, tiny_model, byte_tokenizer, tmp_path):
        """They are noted, so that a run that goes on does not write them again; training leaves them out."""
        target = copy.deepcopy(tiny_model(vocab_size=len(byte_tokenizer)))
        with torch.no_grad():  # the next token depends on the last one alone: sooner or later they are a circle
            for layer in target.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
        target.generation_config.suppress_tokens = [byte_tokenizer.eos_token_id]
        records = Dataset.from_dict({"prompt": ["a", "b c", "d e f", "gh"]})
        output, options = tmp_path / "out.jsonl", RegenerateOptions(max_new_tokens=96, batch_size=2)
        report = regenerate(target, byte_tokenizer, records, output, options, show_progress=False)
        lines = list(read_lines(output))
        assert (report.num_endless, report.num_cut) == (4, 0)
        for line in lines:
            assert line["finish"] == "endless"
            assert len(line["input_ids"]) == line["num_prompt_tokens"] + 96
            assert not any(line["loss_mask"])
        again = regenerate(target, byte_tokenizer, records, output, options, show_progress=False)
        assert (again.num_found, again.num_written) == (4, 0)
        advice = "4 of 4 answers repeated themselves without end and teach nothing: give a temperature (--temp"
        assert report.advice(options).startswith(advice)
        assert "give a temperature above 0.5" in report.advice(replace(options, temperature=0.5))
        assert again.advice(options) == ""
        with pytest.raises(SpeculateError, match=r"none can be used: 4 dropped, endless answers.*--temperature 0\.7"):
            prepare_data(output, byte_tokenizer, DataOptions(max_length=256))


class TestHeldOut:
    HELD_OUT = HeldOut(["What is the name of the largest city of the old world?", "Sort a list."])

    @pytest.mark.parametrize(
        ("text", "is_like"),
        [
            ("Tell me: what is THE name of the largest, city in Spain", True),  # eight words in a row
            ("what is the name of the largest town of all", False),  # seven
            ("please sort, a list", True),  # a short one stands whole
            ("sort the list", False),
            ("", False),
        ],
    )
    def test_is_like_finds_eight_words_in_a_row(self, text, is_like):
        assert self.HELD_OUT.is_like(Plain(text)) == is_like
        chat = Chat(({"role": "user", "content": text}, {"role": "assistant", "content": "Sort a list."}))
        assert self.HELD_OUT.is_like(chat) == is_like, "answers are not looked at"

    def test_regenerate_skips_records_like_held_out_prompts(self, tiny_model, byte_tokenizer, tmp_path):
        target = tiny_model(vocab_size=len(byte_tokenizer))
        records = Dataset.from_dict({"prompt": ["sort a list", "another prompt"]})
        report = regenerate(
            target,
            byte_tokenizer,
            records,
            tmp_path / "out.jsonl",
            RegenerateOptions(max_new_tokens=4),
            held_out=self.HELD_OUT,
            show_progress=False,
        )
        assert report.skipped == {"like a prompt that is held out": 1}
        assert [line["prompt"] for line in read_lines(tmp_path / "out.jsonl")] == ["another prompt"]
