"""The tokenizer of a model as the metadata of a GGUF file (`tokenizer.ggml.*`).

Draft heads carry their target's tokenizer. llama.cpp splits texts with the target's own file; of a head's it uses the
number of tokens and the special ones. So a pre-tokenizer without a known name does no harm there.
"""

from __future__ import annotations

import json
from typing import Any

from hf_speculate.errors import CheckpointError
from hf_speculate.messages import get_logger

from .reading import GgufFile
from .tokenizer import PRE_TYPES


logger = get_logger(__name__)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# Split differently by the pre-tokenizers that llama.cpp has names for.
_SAMPLE = (
    "Hello, y'all! I'LL pay $12345.67 (3 times) \n\n\t  for  naïve Ünïcode x = a_b(c) / d; # \u6f22\u5b57 "
    "\u0939\u093f\u0928\u094d\u0926\u0940 \U0001f680\r\n    return None  HTTPServer camelCase //--\n"
)


def vocabulary_of(file: GgufFile) -> dict[str, Any]:
    """The metadata about tokens of a model's file, as they are there."""
    return {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}


def describe_vocabulary(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Metadata for a tokenizer of transformers.

    Args:
        tokenizer: a fast tokenizer with a byte-level vocabulary, or one of pieces with bytes as the last resort.
        vocab_size: rows of the model's embeddings; ids without a token become unused ones.
    Raises:
        CheckpointError: the tokenizer has more tokens, or is of a kind that is not written.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    described = "" if backend is None else backend.to_str()
    model = json.loads(described)["model"] if described else {}
    has_bytes = bool(model.get("byte_fallback"))
    if model.get("type") != "BPE" or not (has_bytes or "ByteLevel" in described):
        raise CheckpointError(
            f"the tokenizer of the target ({type(tokenizer).__name__}) is neither byte-level nor made of pieces with "
            "bytes: give the target as a GGUF file, whose tokenizer is copied."
        )
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    if max(tokens) >= vocab_size:
        raise CheckpointError(f"the tokenizer of the target has token {max(tokens)}, but the model only {vocab_size}.")
    added = tokenizer.added_tokens_decoder
    metadata = {
        "tokenizer.ggml.model": "llama" if has_bytes else "gpt2",
        "tokenizer.ggml.pre": "default" if has_bytes else _pre_name(backend, bool(model.get("ignore_merges"))),
        "tokenizer.ggml.tokens": [tokens.get(index, f"[PAD{index}]") for index in range(vocab_size)],
        "tokenizer.ggml.token_type": [_type(index, tokens, added, has_bytes) for index in range(vocab_size)],
    }
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if has_bytes:
        # Pieces are joined by score: the earlier its merge, the higher.
        ranks = {merge.replace(" ", ""): rank for rank, merge in reversed(list(enumerate(merges)))}
        tokens_in_order = metadata["tokenizer.ggml.tokens"]
        metadata["tokenizer.ggml.scores"] = [-float(ranks.get(token, len(merges))) for token in tokens_in_order]
    else:
        metadata["tokenizer.ggml.merges"] = merges
    for name, ours in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        token = getattr(tokenizer, f"{ours}_token_id")
        if token is not None:
            metadata[f"tokenizer.ggml.{name}_token_id"] = int(token)
    begins = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    return {**metadata, "tokenizer.ggml.add_bos_token": begins}


def _type(index: int, tokens: dict[int, str], added: Any, has_bytes: bool) -> int:
    if index not in tokens:
        return _UNUSED
    token = tokens[index]
    if has_bytes and len(token) == 6 and token.startswith("<0x"):
        return _BYTE
    if index not in added:
        return _NORMAL
    if has_bytes and token == "<unk>":
        return _UNKNOWN
    return _CONTROL if added[index].special else _USER_DEFINED


def _pre_name(backend: Any, ignores_merges: bool) -> str:
    """llama.cpp's name of a pre-tokenizer, found by what it makes of a text; "default" if none is alike."""
    pieces = backend.pre_tokenizer.pre_tokenize_str(_SAMPLE)
    for name, kind in PRE_TYPES.items():
        same = kind.ignores_merges == ignores_merges and kind.pre_tokenizer().pre_tokenize_str(_SAMPLE) == pieces
        if same and name != "default":
            return name
    logger.info("no llama.cpp name is known for the target's pre-tokenizer; the head's file has 'default'.")
    return "default"
