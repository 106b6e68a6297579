"""Tokenizers of several kinds, made on the spot, and models in another vocabulary."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from .paths import REPOSITORY


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_PARTS = (
    "def add(a, b):\n    return a + b\n",
    "for i in range(10):\n\tprint(f'{i:>3}')\n\n",
    "It's the 21st of May, isn't it? ",
    "   \n\n  ",
    "<|im_start|>user\n",
    "今天天气很好 我们去公园散步吧。",
    "日本語のテキスト",
    "Привет, как дела? ",
    "😀👩\u200d👩\u200d👧\u200d👦🇩🇪",
    "naïve café e\u0301 ",
    "\x00\ufffd\u2028",
    "x" * 70,
)


def random_bytes(seed: int) -> bytes:
    """A text of code, prose, CJK and emoji in any order, often cut within a character, sometimes with noise in it."""
    choose = random.Random(seed)
    text = b"".join(choose.choice(_PARTS).encode() for _ in range(choose.randint(0, 6)))
    if choose.random() < 0.2:
        at = choose.randint(0, len(text))
        text = text[:at] + choose.randbytes(choose.randint(1, 5)) + text[at:]
    return text[choose.randint(0, 3) : len(text) - choose.randint(0, 3)]


@cache
def byte_level_tokenizer(size: int, special: tuple[str, ...] = CHATML, digits: int = 3) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `size` tokens, trained on this repository's prose. The last special token ends a text."""
    raw = Tokenizer(models.BPE())
    numbers = rf"\p{{N}}{{1,{digits}}}"
    words = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(words), "isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    raw.decoder = decoders.ByteLevel()
    raw.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(_prose(), trainer)
    begin = {"bos_token": special[0]} if special is LLAMA else {}
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=special[-1], pad_token=special[0], **begin)


@cache
def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Pieces with "\u2581" for spaces, and a token for each byte, as Llama 2 has them."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = {"\u2581" + word for text in _prose() for word in text.split() if word.isascii()}
    letters = sorted({char for word in words for char in word})
    merges, known = [], {*letters}
    for word in sorted(words)[:400]:
        for end in range(2, len(word) + 1):
            if word[:end] not in known:
                merges.append((word[: end - 1], word[end - 1]))
                known.add(word[:end])
    vocabulary = {piece: index for index, piece in enumerate([*pieces, *letters, *sorted(known - {*letters})])}
    raw = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    raw.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in pieces[:3]])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True
    )


def write_permuted(folder: Path, out: Path, seed: int = 0) -> None:
    """Writes a model and its tokenizer with other ids for the same tokens: the same model in another vocabulary."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    new = list(range(model.config.vocab_size))
    random.Random(seed).shuffle(new)
    matrices = {
        matrix.weight.data_ptr(): matrix for matrix in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    with torch.no_grad():
        for matrix in matrices.values():
            matrix.weight[torch.tensor(new)] = matrix.weight.clone()
    for config in (model.config, model.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if isinstance(old := getattr(config, name, None), int):
                setattr(config, name, new[old])
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    description = json.loads((out / "tokenizer.json").read_text())
    vocabulary = description["model"]["vocab"]
    description["model"]["vocab"] = {token: new[index] for token, index in vocabulary.items()}
    for token in description["added_tokens"]:
        token["id"] = new[token["id"]]
    (out / "tokenizer.json").write_text(json.dumps(description))
    options = json.loads((out / "tokenizer_config.json").read_text())
    options.pop("added_tokens_decoder", None)
    (out / "tokenizer_config.json").write_text(json.dumps(options))


def recite(model, tokens: list[int]):
    """Makes a model say `tokens`, whatever it reads: at position p it predicts token p + 1. Returns the hook."""

    def answer(_module, _args, kwargs, output):
        count = output.logits.shape[1]
        positions = kwargs.get("position_ids")
        if positions is None:
            cache = kwargs.get("cache", kwargs.get("past_key_values"))
            end = cache.get_seq_length()
            positions = torch.arange(end - count, end)[None]
        following = [
            [tokens[p + 1] if p + 1 < len(tokens) else 0 for p in row] for row in positions[:, -count:].tolist()
        ]
        output.logits = torch.full_like(output.logits, -20.0).scatter(2, torch.tensor(following)[..., None], 20.0)
        return output

    return model.register_forward_hook(answer, with_kwargs=True)


def _prose() -> list[str]:
    return [(REPOSITORY / name).read_text() for name in ("README.md", "CONTRIBUTING.md")]
