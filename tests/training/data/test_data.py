"""Records of every form, their loss masks, refused ones, the split; packing, rows, the collator."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import datasets
import pytest
from transformers import LlamaConfig

from hf_speculate.errors import SpeculateError
from hf_speculate_training.data import (
    NO_DOCUMENT,
    Collator,
    DataOptions,
    Encoder,
    RecordError,
    RowDataset,
    load_records,
    prepare_data,
    read_record,
)
from hf_speculate_training.data.packing import best_fit_decreasing


END = 2
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "no\n"},
]
# The template rewrites earlier answers, as those of reasoning models do.
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] | upper if m['role'] == 'assistant' and not loop.last else m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def emitted(tokenizer, document) -> str:
    """The text of the tokens that count, others as dots."""
    pairs = zip(document.input_ids, document.loss_mask, strict=True)
    return "".join(tokenizer.decode([token]) if counts else "." for token, counts in pairs)


def encode(tokenizer, record, as_chat: bool = False, **options):
    return Encoder(tokenizer=tokenizer, end_ids={END}, **options)(read_record(record, as_chat))


def documents_of(records: Sequence[dict], tokenizer, write_lines, **options):
    return prepare_data(write_lines(records), tokenizer, DataOptions(**options))


@pytest.mark.parametrize("template", [None, MARKED], ids=["plain", "marked"])
def test_loss_mask_of_a_chat_counts_answers_and_their_end_only(byte_tokenizer, template):
    byte_tokenizer.chat_template = template or byte_tokenizer.chat_template
    (document,) = encode(byte_tokenizer, {"messages": CHAT})
    assert byte_tokenizer.decode(document.input_ids) == byte_tokenizer.apply_chat_template(CHAT, tokenize=False)
    parts = [part for part in emitted(byte_tokenizer, document).split(".") if part]
    assert parts == ["yes<|im_end|>", "no\n<|im_end|>"], "the newline behind an end-of-turn token is not emitted"


def test_prompt_of_a_document_equals_the_templates_prompt(byte_tokenizer):
    """Up to the first token that counts, a document is the prompt of that answer, token by token."""
    (document,) = encode(byte_tokenizer, {"messages": CHAT})
    prompt = byte_tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True)["input_ids"]
    assert document.input_ids[: document.loss_mask.index(True)] == prompt


@pytest.mark.parametrize(
    "record",
    [
        {"messages": CHAT},
        {
            "conversations": [
                {"from": f, "value": m["content"]} for f, m in zip(["human", "gpt"] * 2, CHAT, strict=True)
            ]
        },
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"messages": [{**m, "tool_calls": None} for m in CHAT], "text": None},
        {"messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in CHAT]},
        {"messages": [*CHAT, {"role": "user", "content": "never answered"}]},
    ],
    ids=["messages", "sharegpt", "prompt-completion", "arrow-nulls", "text-parts", "open-end"],
)
def test_encode_reads_every_form_of_a_conversation(byte_tokenizer, record):
    assert encode(byte_tokenizer, record) == encode(byte_tokenizer, {"messages": CHAT})


def test_encode_reads_texts_and_completions(byte_tokenizer):
    (plain,) = encode(byte_tokenizer, {"text": "abc"})
    assert emitted(byte_tokenizer, plain) == "abc<|im_end|>"
    (completion,) = encode(byte_tokenizer, {"prompt": "ab", "completion": "cd"})
    assert emitted(byte_tokenizer, completion) == "..cd<|im_end|>"
    (bare,) = encode(byte_tokenizer, {"text": "abc"}, append_eos=False)
    assert emitted(byte_tokenizer, bare) == "abc"
    (chat,) = encode(byte_tokenizer, {"prompt": "hi", "completion": "yes"}, as_chat=True)
    assert chat == encode(byte_tokenizer, {"messages": CHAT[:2]})[0]


def test_encode_keeps_given_tokens_and_masks(byte_tokenizer):
    for mask in (
        {"loss_mask": [0, 1, 1]},
        {"assistant_masks": [0, 1, 1]},
        {"labels": [-100, 8, 9]},
        {"completion_mask": [False, True, True]},
    ):
        (document,) = encode(byte_tokenizer, {"input_ids": [7, 8, 9], **mask, "messages": CHAT})
        assert (document.input_ids, document.loss_mask) == ([7, 8, 9], [False, True, True])
    assert encode(byte_tokenizer, {"input_ids": [7, 8]})[0].loss_mask == [True, True]
    with pytest.raises(RecordError, match=r"2 input_ids but 1 entries of labels"):
        read_record({"input_ids": [7, 8], "labels": [1]})


def test_encode_refuses_templates_that_rewrite_history(byte_tokenizer):
    byte_tokenizer.chat_template = REWRITING
    with pytest.raises(SpeculateError, match="turns='separate'"):
        encode(byte_tokenizer, {"messages": CHAT})
    first, second = encode(byte_tokenizer, {"messages": CHAT}, turns="separate")
    assert emitted(byte_tokenizer, first).strip(".") == "yes<|im_end|>"
    assert "YES" in byte_tokenizer.decode(second.input_ids)
    assert emitted(byte_tokenizer, second).strip(".") == "no\n<|im_end|>"


def test_encode_refuses_templates_that_hide_where_an_answer_begins(byte_tokenizer):
    byte_tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ 'X' if add_generation_prompt }}"
    )
    with pytest.raises(SpeculateError, match="what the target is to emit cannot be found"):
        encode(byte_tokenizer, {"messages": CHAT})


def test_prepare_data_refuses_chats_without_a_template(byte_tokenizer, write_lines):
    byte_tokenizer.chat_template = None
    with pytest.raises(SpeculateError, match=r"no chat template.*set tokenizer.chat_template"):
        documents_of([{"messages": CHAT}], byte_tokenizer, write_lines)


def test_prepare_data_refuses_data_without_assistant_tokens(byte_tokenizer, write_lines):
    with pytest.raises(SpeculateError, match=r"of the 3 documents .* none can be used: 3 dropped, no assistant tokens"):
        documents_of([{"messages": CHAT[:1]}] * 3, byte_tokenizer, write_lines)


def test_endless_answers_are_named_apart(byte_tokenizer, write_lines):
    """`regenerate` marks them, and leaves their loss masks empty."""
    line = {"input_ids": [3, 4, 5], "num_prompt_tokens": 1, "prompt": "a", "completion": "b b"}
    good, endless = (
        line | {"finish": "stop", "loss_mask": [0, 1, 1]},
        line | {"finish": "endless", "loss_mask": [0, 0, 0]},
    )
    data = documents_of([good, endless, endless], byte_tokenizer, write_lines)
    assert data.report.notes == {"dropped: endless answers, which repeat themselves": 2}


def test_unusable_records_are_counted_not_fatal(byte_tokenizer, write_lines):
    byte_tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}"
        + byte_tokenizer.chat_template
    )
    records = [{"messages": CHAT}, {"messages": CHAT[1:]}, {"messages": CHAT[:1]}, {"messages": [{"role": "user"}]}]
    data = documents_of(records, byte_tokenizer, write_lines)
    assert data.report.num_documents == 1
    assert data.report.notes == {
        "dropped: the chat template refuses it: user first": 1,
        "dropped: no assistant tokens": 2,
    }


def test_prepare_data_refuses_empty_and_unknown_files(byte_tokenizer, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(SpeculateError, match="no records"):
        prepare_data(empty, byte_tokenizer)
    with pytest.raises(SpeculateError, match="no records"):
        prepare_data(datasets.Dataset.from_dict({"text": []}), byte_tokenizer)
    with pytest.raises(SpeculateError, match="no such file"):
        prepare_data(tmp_path / "absent.jsonl", byte_tokenizer)
    (tmp_path / "image.png").write_bytes(b"x")
    with pytest.raises(SpeculateError, match=r"\.png.*give one of .json"):
        prepare_data(tmp_path / "image.png", byte_tokenizer)


@pytest.mark.parametrize(
    ("long", "texts", "notes"),
    [
        ("truncate", ["abcdef", "x"], {"truncated": 1}),
        ("drop", ["x"], {"dropped: longer than max_length": 1}),
        ("split", ["abcdef", "ghij<|im_end|>", "x"], {}),
    ],
)
def test_prepare_data_truncates_drops_or_splits_long_documents(byte_tokenizer, write_lines, long, texts, notes):
    records = [{"text": "abcdefghij"}, {"text": "x"}]
    data = documents_of(records, byte_tokenizer, write_lines, max_length=6, long=long)
    found = [byte_tokenizer.decode(ids) for ids in data.train["input_ids"]]
    assert found == [text if len(text) >= 6 else f"{text}<|im_end|>" for text in texts]
    assert data.report.notes == notes


def test_prepare_data_refuses_a_max_length_above_the_context(byte_tokenizer, write_lines):
    config = LlamaConfig(vocab_size=300, max_position_embeddings=32)
    path = write_lines([{"text": "x" * 100}])
    with pytest.raises(SpeculateError, match="max_length=64 was asked for, but the target's context is 32 tokens"):
        prepare_data(path, byte_tokenizer, DataOptions(max_length=64), target_config=config)
    assert prepare_data(path, byte_tokenizer, target_config=config).train["length"][0] == 32


def test_prepare_data_refuses_tokens_outside_the_vocabulary(byte_tokenizer, write_lines):
    with pytest.raises(SpeculateError, match="record 1 holds token 400, but the target's vocabulary has 300"):
        prepare_data(
            write_lines([{"input_ids": [5, 6]}, {"input_ids": [5, 400]}]),
            byte_tokenizer,
            target_config=LlamaConfig(vocab_size=300),
        )


def test_prepare_data_reads_every_kind_of_file(byte_tokenizer, tmp_path, write_lines):
    """json, jsonl, parquet, text, folders, patterns and saved datasets hold the same documents."""
    texts = ["one", "two three", "four"]
    table = datasets.Dataset.from_dict({"text": texts})
    (tmp_path / "list.json").write_text(json.dumps([{"text": text} for text in texts]))
    table.to_parquet(str(tmp_path / "data.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "folder").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "folder" / f"{number}.txt").write_text(text)
    lines = write_lines([{"text": text} for text in texts])
    expected = [[*byte_tokenizer(text)["input_ids"], END] for text in texts]
    sources = [lines, tmp_path / "list.json", tmp_path / "data.parquet", tmp_path / "saved", tmp_path / "folder", table]
    fingerprints = set()
    for source in [*sources, str(tmp_path / "folder" / "*.txt")]:
        data = prepare_data(source, byte_tokenizer)
        assert list(data.train["input_ids"]) == expected, source
        fingerprints.add(data.report.fingerprint)
    assert len(fingerprints) == 1, "the fingerprint is of the content"
    with pytest.raises(SpeculateError, match="are a stream"):
        prepare_data(datasets.Dataset.from_list([{"text": "a"}]).to_iterable_dataset(), byte_tokenizer)


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_load_records_turns_tensors_into_lists(tmp_path, form):
    """`speculators` saves its data this way; for us records are lists."""
    records = datasets.Dataset.from_dict({"input_ids": [[5, 6]], "loss_mask": [[0, 1]]}).with_format(form)
    records.save_to_disk(tmp_path / "saved")
    found = load_records(str(tmp_path / "saved"))
    assert next(iter(found)) == {"input_ids": [5, 6], "loss_mask": [0, 1]}


def test_a_transform_of_the_users_stays():
    records = datasets.Dataset.from_dict({"input_ids": [[5, 6]]})
    records.set_transform(lambda batch: {"input_ids": [ids[::-1] for ids in batch["input_ids"]]})
    assert next(iter(load_records(records)))["input_ids"] == [6, 5]


def test_fingerprint_follows_the_content(byte_tokenizer, write_lines):
    def fingerprint(records, **options):
        return documents_of(records, byte_tokenizer, write_lines, **options).report.fingerprint

    records = [{"text": "abc"}, {"text": "de"}]
    prints = [
        fingerprint(records),
        fingerprint(records[::-1]),
        fingerprint([{"text": "abcde"}]),
        fingerprint([{"prompt": "a", "completion": "bc"}, {"prompt": "d", "completion": "e"}]),
        fingerprint([{"prompt": "ab", "completion": "c"}, {"prompt": "d", "completion": "e"}]),
    ]
    assert len(set(prints)) == 5
    assert fingerprint(records) == prints[0]
    joined = [{"text": "abcde"}, {"text": "fg"}]
    assert fingerprint(joined, append_eos=False) != fingerprint([{"text": "abc"}, {"text": "defg"}], append_eos=False)


def test_split_goes_with_the_content(byte_tokenizer, write_lines):
    """A record is on the same side whatever else is there and however it is cut; pieces of one are never on both."""
    texts = [f"text number {i} which is of some length" for i in range(200)]

    def sides(texts, **options):
        data = documents_of(
            [{"text": text} for text in texts], byte_tokenizer, write_lines, **{"eval_fraction": 0.3, **options}
        )
        return [{texts[i] for i in side["record"]} for side in (data.train, data.evaluation)], data

    (train, held_out), data = sides(texts)
    assert train | held_out == set(texts)
    assert not train & held_out
    assert data.report.num_eval_documents == len(held_out)
    # 200 draws of 0.3: outside of this in about one of 1e7 seeds, and this is one seed for good.
    assert 30 <= len(held_out) <= 95
    (fewer, _), _ = sides(texts[50:][::-1])
    assert fewer == train & set(texts[50:])
    (pieces, held_pieces), _ = sides(texts, max_length=8, long="split")
    assert (pieces, held_pieces) == (train, held_out)
    assert sides(texts, seed=1)[0] != [train, held_out]
    with pytest.raises(SpeculateError, match="leaves 2 for training and 0 for evaluation"):
        sides(texts[:2], eval_fraction=0.01)


def best_fit_reference(lengths, capacity):
    """Every row looked at for every item."""
    rows = []
    for item in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = [row for row in rows if sum(lengths[i] for i in row) + lengths[item] <= capacity]
        if not fitting:
            rows.append([item])
            continue
        fullest = max(sum(lengths[i] for i in row) for row in fitting)
        next(row for row in reversed(fitting) if sum(lengths[i] for i in row) == fullest).append(item)
    return rows


def documents(lengths):
    ids = [[100 * number + i for i in range(length)] for number, length in enumerate(lengths)]
    masks = [[i % 2 == 1 for i in range(length)] for length in lengths]
    return datasets.Dataset.from_dict({"input_ids": ids, "loss_mask": masks, "length": list(lengths)})


@pytest.mark.parametrize("seed", range(4))
def test_best_fit_decreasing(seed):
    choose = random.Random(seed)
    capacity = choose.choice([8, 64, 100])
    lengths = [choose.randint(1, capacity) for _ in range(choose.randint(1, 200))]
    rows = best_fit_decreasing(lengths, capacity)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths))), "each item once"
    assert all(sum(lengths[i] for i in row) <= capacity for row in rows)
    fill = [
        sorted(sum(lengths[i] for i in row) for row in packed)
        for packed in (rows, best_fit_reference(lengths, capacity))
    ]
    assert fill[0] == fill[1], "the same rows as the plain search, up to ties"
    with pytest.raises(SpeculateError, match=f"{capacity + 1} tokens does not fit into rows of {capacity}"):
        best_fit_decreasing([*lengths, capacity + 1], capacity)


def test_rows_hold_every_document_once():
    data = documents([5, 3, 8, 2, 6])
    rows = RowDataset(data, max_length=8)

    found = []
    for i in range(len(rows)):
        row = rows[i]
        for number in row["document_ids"].unique().tolist():
            part = row["document_ids"] == number
            assert row["position_ids"][part].tolist() == list(range(int(part.sum())))
            found.append((row["input_ids"][part].tolist(), row["loss_mask"][part].tolist()))
    assert sorted(found) == sorted(zip(data["input_ids"], data["loss_mask"], strict=True))


@pytest.mark.parametrize("length", [None, 12])
def test_collator_pads_with_a_document_of_its_own(length):
    rows = RowDataset(documents([5, 3, 6]), max_length=8)
    batch = Collator(pad_token_id=9, length=length)([rows[0], rows[1]])
    width = length or 8
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(batch, (2, width))
    padding = batch["document_ids"] == NO_DOCUMENT
    assert padding.sum() == 2 * width - 14
    assert (batch["input_ids"][padding] == 9).all()
    assert not batch["loss_mask"][padding].any()
    for row, is_padding in zip(batch["position_ids"], padding, strict=True):
        assert row[is_padding].tolist() == list(range(int(is_padding.sum())))
    with pytest.raises(SpeculateError, match="6 tokens does not fit into the collator's length 4"):
        Collator(length=4)([rows[0], rows[1]])
