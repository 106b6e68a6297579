"""Schemas in a session: the tokens that are drafted, and the text that stays the target's."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from transformers import AutoTokenizer

from hf_speculate import AutoSpeculator
from hf_speculate.errors import OptionError, TargetMismatchError
from hf_speculate.testing import check_lossless
from hf_speculate_plugins.suffix import SuffixDrafter, SuffixOptions
from hf_speculate_plugins.suffix.guide import Guide
from hf_speculate_plugins.suffix.schemas import read_schemas

from ...support.text_drafters import start, state


FILM = {
    "name": "rate_film",
    "parameters": {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "opinion": {"enum": ["good", "bad", "größer als 🙂"]},
            "seen": {"type": "boolean"},
        },
        "required": ["title", "opinion", "seen"],
    },
}
CALL = '{"name": "rate_film", "arguments": {"title": "Alien", "opinion": "größer als 🙂", "seen": true}}'


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained("examples/pycoder")


@pytest.fixture(scope="module")
def drafter(tokenizer):
    return SuffixDrafter(len(tokenizer), SuffixOptions(schemas=[FILM], tokenizer=tokenizer, max_nodes=24))


@pytest.fixture
def ids(tokenizer):
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def paths(session, tokenizer, *texts, **options):
    """The texts of all paths of every row's tree."""
    host = session.draft(state(*texts, **options)).host
    rows = []
    for tokens, parents in zip(host.token_ids, host.parents, strict=True):
        found = [[]]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            if parent >= 0:
                found.append([*found[parent], token])
            else:
                found.append([])
        rows.append([tokenizer.decode(path) for path in found])
    return rows


def test_the_expected_keys_are_drafted(drafter, tokenizer, ids):
    text = ids('<call>\n{"name": "')
    [found] = paths(start(drafter, text), tokenizer, text)
    assert 'rate_film", "arguments": {"title": "' in found
    begun = ids('<call>\n{"name": "rate_film", "arguments": {"title": "Alien",')
    [found] = paths(start(drafter, begun), tokenizer, begun)
    assert ' "opinion": "' in found
    assert ' "opinion": "good' in found  # the next forecast
    assert ' "opinion": "bad' in found


def test_guide_drafts_nothing_outside_its_objects(drafter, tokenizer, ids):
    for words in ("call rate_film with", '{"other": 1, "name": '):
        text = ids(words)
        plain = start(SuffixDrafter(len(tokenizer), SuffixOptions(max_nodes=24)), text)
        assert paths(start(drafter, text), tokenizer, text) == paths(plain, tokenizer, text)


def test_rows_are_apart_and_the_written_tokens_count(drafter, tokenizer, ids):
    texts = ids("Now: {"), ids('{"name": "rate_film", "arguments": {"title": "Alien", "opinion":')
    session = start(drafter, *texts)
    first, second = paths(session, tokenizer, *texts)
    assert any(each.startswith('"name": "rate') for each in first)
    assert ' "good", "seen":' in second
    more = ids('"name":"rate_film","arguments":{"')
    session.observe(torch.tensor([more, more]), {}, torch.tensor([len(more), 0]))
    ended = [*texts[0], *more], texts[1]
    first, second = paths(session, tokenizer, *ended, active=(True, False))
    assert 'title":"' in first
    assert set(second) == {""}


def test_every_token_of_a_call_is_foreseen_but_for_the_free_value(drafter, tokenizer, ids):
    """Tokens that are parts of characters included."""
    tokens = ids("\n" + CALL)
    position, missed = drafter._guide.start(tokens[:2]), []
    for token in tokens[2:]:
        guesses = position.guesses
        if not guesses or token not in guesses[0][1].counts:
            missed.append(token)
        position = position.after(token)
    assert tokenizer.decode(missed).strip() == "Alien"


def test_characters_in_several_tokens_are_read(tokenizer, ids):
    schema = {"type": "object", "properties": {"größe 🙂": {"type": "null"}}, "required": ["größe 🙂"]}
    guide = Guide(read_schemas([schema], "arguments"), tokenizer, len(tokenizer))
    whole = ids('{"größe 🙂":')
    assert len({"\ufffd" in tokenizer.decode([token]) for token in whole}) == 2
    position = guide.start(whole[:1])
    for token in whole[1:]:
        position = position.after(token)
    [(_, found)] = position.guesses
    assert [tokenizer.decode([token]).strip()[:1] for token in found.counts] == ["n"]


def test_a_token_that_would_have_been_longer_is_not_followed(drafter, ids):
    """A comma does not come behind `"` alone: both would have been one token."""
    assert not drafter._guide.start([*ids('{"name": "rate_film'), *ids('"')]).guesses
    assert drafter._guide.start([*ids('{"name": "rate_film'), *ids('",')]).guesses


def test_the_chat_template_names_the_key_of_the_arguments(tokenizer, ids):
    llama = deepcopy(tokenizer)
    llama.chat_template = 'Respond in the format {"name": function name, "parameters": dictionary}.'
    owner = SuffixDrafter(len(tokenizer), SuffixOptions(schemas=[FILM], tokenizer=llama))
    text = ids('{"name": "rate_film", "')
    [found] = paths(start(owner, text), tokenizer, text)
    assert 'parameters": {"title": "' in found


def test_special_tokens_end_an_object(drafter, tokenizer, ids):
    begun = ids('{"name": "rate_film", "arguments": {"title": "Alien')
    position = drafter._guide.start(begun)
    assert position.guesses
    assert not position.after(tokenizer.eos_token_id).guesses
    assert not drafter._guide.start([*begun, tokenizer.eos_token_id]).guesses


@pytest.mark.parametrize("do_sample", [False, True])
def test_schema_drafts_give_plain_text(tiny_model, tokenizer, ids, do_sample):
    model = tiny_model(vocab_size=len(tokenizer))
    speculator = AutoSpeculator.from_name("suffix", target=model, schemas=[FILM], tokenizer=tokenizer)
    prompts = [torch.tensor([ids(text)]) for text in ("{", CALL[:10], "<call>\n" + CALL[:40])]
    report = check_lossless(model, speculator, prompts, max_new_tokens=24, do_sample=do_sample, seeds=(7,))
    assert report.num_identical == 3, report.ties


def test_options_are_checked(tokenizer):
    with pytest.raises(OptionError, match="schemas need the target's tokenizer: give tokenizer="):
        SuffixOptions(schemas=[FILM])
    with pytest.raises(OptionError, match="give tokenizer=, got str"):
        SuffixOptions(schemas=[FILM], tokenizer="gpt2")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="schema 0 is a int"):
        SuffixDrafter(100, SuffixOptions(schemas=[3], tokenizer=tokenizer))
    drafter = SuffixDrafter(10, SuffixOptions(schemas=[FILM], tokenizer=tokenizer))
    assert "schemas=<1>" in repr(drafter)
    position = drafter._guide.start(tokenizer('{"name": "')["input_ids"])
    assert all(token < 10 for _, found in position.guesses for token in found.counts)


def test_another_target_is_refused(tiny_model, tokenizer):
    drafter = SuffixDrafter(len(tokenizer), SuffixOptions(schemas=[FILM], tokenizer=tokenizer))
    with pytest.raises(TargetMismatchError, match="corpus or tokenizer is of a vocabulary"):
        drafter.check_target(tiny_model(vocab_size=50))
