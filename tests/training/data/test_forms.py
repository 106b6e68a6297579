"""Data as people have them: columns of well-known data sets, long texts, and how much of them was used."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from hf_speculate.errors import SpeculateError
from hf_speculate_training import extras
from hf_speculate_training.data import (
    Chat,
    Completion,
    DataOptions,
    RecordError,
    load_records,
    prepare_data,
    read_record,
)


@pytest.mark.parametrize(
    ("record", "prompt", "completion"),
    [
        ({"question": "1+1?", "answer": "2", "id": "7"}, "1+1?", "2"),
        ({"instruction": "Add.", "input": "1, 1", "output": "2"}, "Add.\n\n1, 1", "2"),
        ({"instruction": "Why?", "context": None, "response": "So."}, "Why?", "So."),
    ],
)
def test_columns_of_others_are_prompt_and_completion(record, prompt, completion):
    assert read_record(record) == Completion(prompt, completion)
    chat = read_record(record, as_chat=True)
    assert isinstance(chat, Chat)
    assert [message["content"] for message in chat.messages] == [prompt, completion]


def test_a_text_file_is_cut_into_pieces_that_can_be_held_out(byte_tokenizer, tmp_path):
    """One long document, of which truncation would keep 16 of 400 tokens; its pieces are on both sides."""
    text = "".join(f"{i:04}" for i in range(100))
    (tmp_path / "book.txt").write_text(text)
    options = DataOptions(max_length=16, append_eos=False, eval_fraction=0.3)
    data = prepare_data(tmp_path / "book.txt", byte_tokenizer, options)
    assert len(data.train) + len(data.evaluation) == 25
    assert len(data.evaluation) > 0
    assert data.report.num_given_tokens == data.report.num_tokens == 400
    assert "25 documents, 400 of 400 tokens used (100%)" in data.report.summary()


def test_conversations_are_truncated_and_the_share_is_said(byte_tokenizer, write_lines):
    path = write_lines([{"prompt": "a" * 10, "completion": "b" * 30}])
    data = prepare_data(path, byte_tokenizer, DataOptions(max_length=20, append_eos=False))
    assert "1 documents, 20 of 40 tokens used (50%), 10 of them learnt from" in data.report.summary()


def test_a_prompt_without_an_answer_is_not_learnt_from(byte_tokenizer, write_lines):
    """Prompts alone, or preferences, would teach nothing but the end of text."""
    byte_tokenizer.chat_template = None
    asked = [{"prompt": "ab", "chosen": "c", "rejected": "d"}] * 2
    with pytest.raises(SpeculateError, match="without an answer"):
        prepare_data(write_lines(asked), byte_tokenizer)
    assert read_record(asked[0]) == Completion("ab", ""), "for regenerate, which answers it"


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"x": {"type": "integer"}}}}]
TOOL_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def shown(tokenizer, path) -> list[tuple[str, str]]:
    """Each document, and the part of it that is learnt."""
    rows = prepare_data(path, tokenizer).train
    return [
        (tokenizer.decode(ids), tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]))
        for ids, mask in zip(rows["input_ids"], rows["loss_mask"], strict=True)
    ]


@pytest.mark.parametrize("as_text", [False, True], ids=["objects", "texts"])
def test_tools_reach_the_template(byte_tokenizer, write_lines, as_text):
    """Descriptions and arguments may be JSON or, as OpenAI and LLaMA-Factory have them, texts."""
    byte_tokenizer.chat_template = TOOL_TEMPLATE
    arguments = {"x": 1, "y": {"z": [2]}}
    call = {"name": "add", "arguments": json.dumps(arguments) if as_text else arguments}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": call}]}
    record = {
        "messages": [{"role": "user", "content": "add"}, answer],
        "tools": json.dumps(TOOLS) if as_text else TOOLS,
    }
    other = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": None}
    (text, learnt), (plain, _) = shown(byte_tokenizer, write_lines([record, other]))
    assert text.startswith(f"<tools>{json.dumps(TOOLS)}</tools>")
    assert learnt == f"<call>{json.dumps({'name': 'add', 'arguments': arguments})}</call><|im_end|>"
    assert "tools" not in plain


def test_llama_factory_records_are_read(byte_tokenizer, write_lines):
    """ShareGPT with `system`, calls as texts, and what tools answer."""
    byte_tokenizer.chat_template = TOOL_TEMPLATE
    turns = [
        ("human", "hi"),
        ("function_call", '{"name": "add", "arguments": {}}'),
        ("observation", "3"),
        ("gpt", "so"),
    ]
    record = {"conversations": [{"from": who, "value": what} for who, what in turns], "system": "Be brief."}
    ((text, learnt),) = shown(byte_tokenizer, write_lines([record]))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
    assert "<|im_start|>tool\n3<|im_end|>" in text
    assert learnt == '<call>{"name": "add", "arguments": {}}</call><|im_end|>so<|im_end|>'
    chat = read_record({"messages": [{"role": "system", "content": "own"}], "system": "other"})
    assert [message["content"] for message in chat.messages] == ["own"]


@pytest.mark.parametrize(
    "change",
    [
        {"tools": "calculator"},
        {"tools": {"a": 1}},
        {"messages": [{"role": "assistant", "content": 5}]},
        {"messages": [{"role": "assistant", "tool_calls": [None]}]},
        {"messages": [{"role": "function_call", "content": "add(1)"}]},
    ],
    ids=range(5),
)
def test_read_record_refuses_broken_tools(change):
    with pytest.raises(RecordError):
        read_record({"messages": [{"role": "assistant", "content": "a"}]} | change)


# Mistral's: the system message stands before the last message of the user.
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set rest = messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}{% for m in rest %}{% if m.role == 'user' %}"
    "[INST]{{ s + '\n\n' if loop.last and s is defined else '' }}{{ m.content }}[/INST]"
    "{% else %}{{ ' ' + m.content }}<|im_end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("turns", ["together", "separate"])
def test_system_message_moved_by_the_template_skips_the_record(byte_tokenizer, write_lines, turns):
    """The run goes on: the record is skipped, or, turn by turn, is the prompt of `generate` with its answer."""
    byte_tokenizer.chat_template = MISTRAL
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    records = [{"messages": chat}, {"messages": [{"role": "system", "content": "Be kind."}, *chat]}]
    data = prepare_data(write_lines(records), byte_tokenizer, DataOptions(turns=turns))
    texts = [byte_tokenizer.decode(ids) for ids in data.train["input_ids"]]
    if turns == "together":
        assert texts == ["[INST]hi[/INST] hello<|im_end|>"]
        assert [note for note in data.report.notes if "what the target is to emit cannot be found" in note]
    else:
        assert texts == ["[INST]hi[/INST] hello<|im_end|>", "[INST]Be kind.\n\nhi[/INST] hello<|im_end|>"]
        mask = data.train["loss_mask"][1]
        assert mask.index(True) == len(byte_tokenizer("[INST]Be kind.\n\nhi[/INST]")["input_ids"])
        assert all(mask[mask.index(True) :])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.jsonl": '{"text":"caf\xe9"}\n'.encode("latin-1")}, "UTF-8: `iconv"),
        ({"a.jsonl": b'{"text": "a"}\n{"text": [\n'}, "cannot read the data"),
        ({"a.jsonl": b'{"text": "a"}\n', "b.jsonl": b'{"prompt": "a", "id": [1]}\n'}, "must be the same"),
        ({"a.parquet": b"PAR1 and no more"}, "cannot read the data"),
    ],
    ids=["latin-1", "broken line", "other columns", "no parquet"],
)
def test_prepare_data_reports_broken_files(byte_tokenizer, tmp_path, files, message):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(SpeculateError, match=message):
        list(prepare_data(folder, byte_tokenizer).train)


def test_a_folder_as_it_is_downloaded(byte_tokenizer, tmp_path):
    """Cards, licences and hidden files are no data, and test files are for measuring."""
    for name in ("train", "test", "data/dev-00000", ".cache/huggingface/x"):
        path = tmp_path / "data" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) + "\n")
    for name in ("README.md", "LICENSE.md", ".gitattributes"):
        (tmp_path / "data" / name).write_text("about the data")
    found = {
        split: [record["text"] for record in load_records(tmp_path / "data", split=split)]
        for split in ("train", "test", "validation")
    }
    assert found == {"train": ["train"], "test": ["test"], "validation": ["data/dev-00000"]}
    with pytest.raises(SpeculateError, match=r"cannot read the data .*Unknown split .other.\. Should be one of"):
        load_records(tmp_path / "data", split="other")


def test_names_of_sources_say_no_split(tmp_path):
    for name in ("test_a.py", "b.py"):
        (tmp_path / name).write_text("pass")
    assert len(load_records(tmp_path)) == 2


def test_names_are_no_patterns(tmp_path):
    path = tmp_path / "chats [v2]*?.jsonl"
    path.write_text('{"text": "a"}\n')
    (tmp_path / "chats v__.jsonl").write_text('{"text": "b"}\n')
    assert [record["text"] for record in load_records(path)] == ["a"]


def test_cells_of_csv_are_texts(byte_tokenizer, tmp_path):
    (tmp_path / "a.csv").write_text("question,answer,context\n1+1,2,\n11/10,1.10,\nwho,None,\nwhat,,\n")
    records = [read_record(record) for record in load_records(tmp_path / "a.csv").take(3)]
    assert records == [Completion("1+1", "2"), Completion("11/10", "1.10"), Completion("who", "None")]
    assert read_record({"question": "1+1", "answer": 2}) == Completion("1+1", "2")


def test_columns_can_be_named(byte_tokenizer, write_lines):
    path = write_lines([{"frage": "1+1?", "antwort": "2"}])
    with pytest.raises(SpeculateError, match=r"question \+ answer.*found: frage, antwort.*data\.columns"):
        prepare_data(path, byte_tokenizer)
    with pytest.raises(SpeculateError, match="no column 'nope'; there are: frage, antwort"):
        prepare_data(path, byte_tokenizer, DataOptions(columns={"prompt": "nope"}))
    named = load_records(path, columns={"prompt": "frage", "completion": "antwort"})
    assert list(named) == [{"prompt": "1+1?", "completion": "2"}]


def test_missing_packages_are_one_line_with_the_command(monkeypatch):
    """Said on import, before anything imports them."""
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "yaml" else importlib.util.find_spec(name))
    with pytest.raises(extras.MissingExtraError, match=r"training needs yaml: pip install 'hf-speculate\[train\]'"):
        extras.check_extra()
    code = (
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'datasets' else find(name, *rest)\n"
        "from hf_speculate_tools.cli import app; app(['train'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "training needs datasets: pip install 'hf-speculate[train]'" in result.stderr
    assert "Traceback" not in result.stderr
