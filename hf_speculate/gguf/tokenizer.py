"""The tokenizer in a GGUF file."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

from ..errors import CheckpointError
from .metadata import Metadata, check_vocabulary
from .reading import GgufFile


def read_tokenizer(file: GgufFile, vocab_size: int | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in a file with its chat template, as transformers understands it.

    Args:
        vocab_size: rows of the embeddings; a tokenizer may have fewer tokens. None: unknown.
    Raises:
        CheckpointError: there is none, of a kind that transformers does not know, or with more tokens.
    """
    if "tokenizer.ggml.model" not in file.metadata or "tokenizer.ggml.tokens" not in file.metadata:
        raise CheckpointError(f"{file.path!r} holds no tokenizer (tokenizer.ggml.*): pass `tokenizer=`.")
    check_vocabulary(Metadata(file))
    num_tokens = len(file.metadata["tokenizer.ggml.tokens"])
    if vocab_size is not None and num_tokens > vocab_size:
        raise CheckpointError(f"{file.path!r} has a tokenizer of {num_tokens} tokens, but embeddings of {vocab_size}.")
    try:
        architecture, description, options = get_gguf_tokenizer(file.path)
        backend, _ = convert_gguf_tokenizer(architecture, description)
        return PreTrainedTokenizerFast(tokenizer_object=backend, **options)
    # Its parts are checked; how they belong together, transformers and tokenizers say in several ways, one of which
    # (a panic in Rust) is no Exception.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"the tokenizer in {file.path!r} cannot be read ({type(error).__name__}: {error}): pass `tokenizer=`."
        ) from error
