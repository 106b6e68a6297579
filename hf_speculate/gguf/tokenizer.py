"""The tokenizer in a GGUF file, by llama.cpp's rules."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.tokenization_utils_base import generate_merges

from ..errors import CheckpointError
from ..messages import get_logger
from .metadata import Metadata, check_vocabulary, token_id
from .pre_types import DEFAULT, PRE_TYPES, PreType
from .reading import GgufFile


logger = get_logger(__name__)

# Types of tokens that are found in the text before anything else.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_BLANK = "\u2581"  # a space in pieces of SentencePiece


def read_tokenizer(file: GgufFile, vocab_size: int | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in a file with its chat template. It gives the ids that llama.cpp gives.

    Byte-level vocabularies and those of SentencePiece are built here, others by transformers' conversion.

    Args:
        vocab_size: rows of the embeddings; a tokenizer may have fewer tokens. None: unknown.
    Raises:
        CheckpointError: there is none, of a kind that transformers does not know, or with more tokens.
    """
    if "tokenizer.ggml.model" not in file.metadata or "tokenizer.ggml.tokens" not in file.metadata:
        raise CheckpointError(f"{file.path!r} holds no tokenizer (tokenizer.ggml.*): pass `tokenizer=`.")
    reader = Metadata(file)
    check_vocabulary(reader)
    num_tokens = len(file.metadata["tokenizer.ggml.tokens"])
    if vocab_size is not None and num_tokens > vocab_size:
        raise CheckpointError(f"{file.path!r} has a tokenizer of {num_tokens} tokens, but embeddings of {vocab_size}.")
    try:
        tokenizer = _build(reader)
    # Its parts are checked; how they belong together, transformers and tokenizers say in several ways, one of which
    # (a panic in Rust) is no Exception.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"the tokenizer in {file.path!r} cannot be read ({type(error).__name__}: {error}): pass `tokenizer=`."
        ) from error
    if len(tokenizer) > num_tokens:
        raise CheckpointError(
            f"transformers makes a tokenizer of {len(tokenizer)} tokens from the {num_tokens} in {file.path!r}: pass "
            "`tokenizer=`."
        )
    return tokenizer


def _build(reader: Metadata) -> PreTrainedTokenizerBase:
    kind = reader.get("tokenizer.ggml.model", str)
    if kind == "gpt2":
        pre_type = _pre_type(reader)
        backend, adds_bos = _byte_level(reader, pre_type), pre_type.adds_bos
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(reader), True
    else:
        architecture, description, options = get_gguf_tokenizer(reader.file.path)
        backend, _ = convert_gguf_tokenizer(architecture, description)
        return PreTrainedTokenizerFast(tokenizer_object=backend, **options)
    _add_whole_tokens(backend, reader)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=reader.get("tokenizer.ggml.add_bos_token", bool, adds_bos),
        add_eos_token=reader.get("tokenizer.ggml.add_eos_token", bool, False),
        chat_template=reader.file.metadata.get("tokenizer.chat_template"),
        **_named_tokens(reader),
    )


def _pre_type(reader: Metadata) -> PreType:
    name = reader.get("tokenizer.ggml.pre", str, "")
    if name not in PRE_TYPES:
        found = f"tokenizer.ggml.pre is {name!r}, which is not known here" if name else "tokenizer.ggml.pre is missing"
        logger.warning(
            f"{reader.file.path}: {found}. Text is split as for 'default', so some of it may become other tokens than "
            "the model knows; `tokenizer=` takes the model's own."
        )
    return PRE_TYPES.get(name, DEFAULT)


def _byte_level(reader: Metadata, pre_type: PreType) -> Tokenizer:
    merges = dict.fromkeys(_halves(merge) for merge in reader.items("tokenizer.ggml.merges", str))  # the first counts
    backend = Tokenizer(models.BPE(_vocabulary(reader), list(merges), ignore_merges=pre_type.ignores_merges))
    backend.pre_tokenizer = pre_type.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(reader: Metadata) -> Tokenizer:
    """Pieces by their scores. A blank goes before every text between whole tokens, also before one that begins so."""
    vocabulary = _vocabulary(reader)
    scores = dict(zip(vocabulary, reader.items("tokenizer.ggml.scores", float), strict=True))
    model = models.BPE(
        vocabulary,
        generate_merges(vocabulary, scores),
        unk_token=_named_tokens(reader).get("unk_token"),
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    normalizer: list[normalizers.Normalizer] = [normalizers.Replace(" ", _BLANK)]
    decoder: list[decoders.Decoder] = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if reader.get("tokenizer.ggml.add_space_prefix", bool, True):
        normalizer.insert(0, normalizers.Prepend(_BLANK))
        decoder.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(normalizer)
    backend.decoder = decoders.Sequence(decoder)
    return backend


def _vocabulary(reader: Metadata) -> dict[str, int]:
    return {token: index for index, token in enumerate(reader.items("tokenizer.ggml.tokens", str))}


def _halves(merge: str) -> tuple[str, str]:
    """The two sides of a merge, parted by the first space behind the first character."""
    at = merge.index(" ", 1)
    return merge[:at], merge[at + 1 :]


def _add_whole_tokens(backend: Tokenizer, reader: Metadata) -> None:
    """Has tokens that the file marks found whole in the raw text; all of them are in the vocabulary."""
    tokens = reader.items("tokenizer.ggml.tokens", str)
    types = reader.items("tokenizer.ggml.token_type", int)
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
            for token, kind in zip(tokens, types, strict=False)  # a file may have no types
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )


def _named_tokens(reader: Metadata) -> dict[str, Any]:
    """Special tokens by the names that transformers has for them."""
    tokens = reader.items("tokenizer.ggml.tokens", str)
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {ours: token_id(reader, name, len(tokens)) for ours, name in named.items()}
    return {ours: tokens[index] for ours, index in ids.items() if index is not None}
