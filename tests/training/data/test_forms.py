"""Data as people have them: columns of well-known data sets, long texts, and how much of them was used."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from hf_speculate.errors import SpeculateError
from hf_speculate_training import extras
from hf_speculate_training.data import Chat, Completion, DataOptions, prepare_data, read_record


@pytest.mark.parametrize(
    ("record", "prompt", "completion"),
    [
        ({"question": "1+1?", "answer": "2", "id": "7"}, "1+1?", "2"),
        ({"instruction": "Add.", "input": "1, 1", "output": "2"}, "Add.\n\n1, 1", "2"),
        ({"instruction": "Greet.", "input": "", "output": "Hi"}, "Greet.", "Hi"),
        ({"instruction": "Why?", "context": None, "response": "So."}, "Why?", "So."),
        ({"prompt": "1+1?", "response": "2"}, "1+1?", "2"),
        ({"query": "1+1?", "response": "2"}, "1+1?", "2"),
    ],
)
def test_columns_of_others_are_prompt_and_completion(record, prompt, completion):
    assert read_record(record) == Completion(prompt, completion)
    chat = read_record(record, as_chat=True)
    assert isinstance(chat, Chat)
    assert [message["content"] for message in chat.messages] == [prompt, completion]


@pytest.mark.parametrize("streaming", [False, True])
def test_unknown_columns_are_named(byte_tokenizer, write_lines, streaming):
    path = write_lines([{"frage": "1+1?", "antwort": "2"}])
    with pytest.raises(SpeculateError, match=r"question \+ answer.*found: frage, antwort.*data\.columns"):
        prepare_data(path, byte_tokenizer, DataOptions(streaming=streaming))


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


def test_missing_packages_are_one_line_with_the_command(monkeypatch):
    """Said on import, before anything imports them."""
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "yaml" else importlib.util.find_spec(name))
    with pytest.raises(extras.MissingExtraError, match=r"training needs yaml: pip install 'hf-speculate\[train\]'"):
        extras.check_extra()
    code = (
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'datasets' else find(name, *rest)\n"
        "from hf_speculate.cli import app; app(['train'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "training needs datasets: pip install 'hf-speculate[train]'" in result.stderr
    assert "Traceback" not in result.stderr
