"""Metadata of a GGUF file by key and type, and the vocabulary that they describe."""

from __future__ import annotations

from typing import Any

from hf_speculate.errors import CheckpointError

from .reading import GgufFile


# Lists with one entry for each token, and the type of the entries.
_BY_TOKEN = {"tokens": str, "scores": float, "token_type": int}

# Tokens that end a turn even if the metadata name only one of them, as in llama.cpp.
_END_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>")
_CONTROL_TOKEN = 3

# Special tokens by the tokenizer's model; files need not name them.
_SPECIAL_IDS = {"llama": {"unknown": 0, "bos": 1, "eos": 2}}

# Bound of sizes that no tensor bounds.
_MAX_SIZE = 1 << 40


class Metadata:
    """Typed access to the metadata of a file."""

    def __init__(self, file: GgufFile):
        self.file = file

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of `key`; raises `CheckpointError` if it has another type, or is missing without a default."""
        value = self.file.metadata.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.file.path!r}: the metadata have no {key!r}.")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise CheckpointError(f"{self.file.path!r}: {key!r} is {_short(value)}, not of type {kind.__name__}.")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, int, default)
        if not 1 <= value <= _MAX_SIZE:
            raise CheckpointError(f"{self.file.path!r}: {key!r} is {value}, expected 1 to {_MAX_SIZE}.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; integers are numbers."""
        value = self.get(key, float, default)
        if not 0 < value < 1e30:
            raise CheckpointError(f"{self.file.path!r}: {key!r} is {value}, expected a number above 0.")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        """A list of values of one type; empty if the key is missing."""
        values = self.get(key, list, [])
        if not all(type(value) is kind for value in values):
            raise CheckpointError(f"{self.file.path!r}: {key!r} is not a list of {kind.__name__} only.")
        return values


def _short(value: Any) -> str:
    shown = repr(value[:8] if isinstance(value, list) else value)
    return shown if len(shown) <= 80 else f"{shown[:60]} ..."


def check_vocabulary(reader: Metadata) -> None:
    """Raises `CheckpointError` if a value about tokens has the wrong type, or a list the wrong length."""
    for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template"):
        if key in reader.file.metadata:
            reader.get(key, str)
    for key in reader.file.metadata:
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            reader.get(key, int)
    for name in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        reader.get(f"tokenizer.ggml.{name}", bool, False)
    reader.items("tokenizer.ggml.merges", str)
    sizes = {name: len(reader.items(f"tokenizer.ggml.{name}", kind)) for name, kind in _BY_TOKEN.items()}
    for name, size in sizes.items():
        if size not in (0, sizes["tokens"]):
            raise CheckpointError(
                f"{reader.file.path!r}: 'tokenizer.ggml.{name}' has {size} entries, 'tokenizer.ggml.tokens' "
                f"{sizes['tokens']}."
            )


def token_id(reader: Metadata, name: str, vocab_size: int) -> int | None:
    """A special token; None if the file names none, or one that the model does not have."""
    default = _SPECIAL_IDS.get(reader.get("tokenizer.ggml.model", str, ""), {}).get(name, -1)
    token = reader.get(f"tokenizer.ggml.{name}_token_id", int, default)
    return token if 0 <= token < vocab_size else None


def end_tokens(reader: Metadata, vocab_size: int) -> tuple[int, ...]:
    """Tokens that end a turn: those named in the metadata, and known control tokens."""
    ends = [token_id(reader, name, vocab_size) for name in ("eos", "eot", "eom")]
    tokens = reader.items("tokenizer.ggml.tokens", str)
    types = reader.items("tokenizer.ggml.token_type", int)
    for text in _END_TEXTS:
        if text in tokens and types[tokens.index(text) :][:1] == [_CONTROL_TOKEN]:
            ends.append(tokens.index(text))
    return tuple(dict.fromkeys(token for token in ends if token is not None and token < vocab_size))
