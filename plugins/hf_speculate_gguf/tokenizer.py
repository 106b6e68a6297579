"""The tokenizer in a GGUF file, by llama.cpp's rules.

A byte-level vocabulary names its pre-tokenizer in `tokenizer.ggml.pre`. Its merges were learned within pieces of text;
text that is cut elsewhere becomes tokens that the model has never seen. Names, patterns and flags are llama.cpp's
(`src/llama-vocab.cpp`) for the architectures that load here. Upper and lower case are distinguished as in the models'
own tokenizers, which llama.cpp's expressions approximate. Neither normalises text for these vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from hf_speculate.compatibility import check_feature
from hf_speculate.errors import CheckpointError, IncompatibleTransformersError
from hf_speculate.messages import get_logger

from .metadata import Metadata, check_vocabulary, token_id
from .reading import GgufFile


logger = get_logger(__name__)

# Types of tokens that are found in the text before all others.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_BLANK = "\u2581"  # a space in pieces of SentencePiece

_DIGIT = r"\p{N}"
_IN_THREES = "[0-9][0-9][0-9]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Branches of patterns newer than GPT-2's.
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SYMBOLS_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWERCASE_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPERCASE_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"

_LLAMA3 = rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_SUFFIX}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_QWEN35 = rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_TEKKEN = rf"{_LOWERCASE_WORD}|{_UPPERCASE_WORD}|\p{{N}}|{_SYMBOLS_WITH_SLASH}|{_SPACES}"
_GPT4O = rf"{_LOWERCASE_WORD}{_SUFFIX}?|{_UPPERCASE_WORD}{_SUFFIX}?|\p{{N}}{{1,3}}|{_SYMBOLS_WITH_SLASH}|{_SPACES}"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_SYMBOLS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


@dataclass(frozen=True)
class PreType:
    """The treatment of text before a byte-level vocabulary's merges.

    Attributes:
        patterns: regular expressions in order; each one isolates its matches within the pieces left by those before.
        ignores_merges: whether a piece that is a token stays one, before any merge.
        adds_bos: whether a BOS token is added if the file lacks `tokenizer.ggml.add_bos_token`.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [_split(pattern) for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    if pattern == _DIGIT:  # as in models' own tokenizers, which have their own Unicode tables
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


DEFAULT = PreType((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", _IN_THREES))  # for files without a name

PRE_TYPES: dict[str, PreType] = {
    name: kind
    for names, kind in (
        ("default", DEFAULT),
        (
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
            PreType((_LLAMA3,), ignores_merges=True, adds_bos=True),
        ),
        ("glm4 glm5", PreType((_LLAMA3,), ignores_merges=True)),
        ("dbrx smaug-bpe chatglm-bpe", PreType((_LLAMA3,))),
        (
            "minicpm5",
            PreType((r"\p{N}{1,3}", rf"{_SUFFIX}|{_WORD}|\p{{N}}+|{_SYMBOLS}|{_SPACES}"), ignores_merges=True),
        ),
        ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", PreType((_QWEN2,))),
        ("qwen35", PreType((_QWEN35,))),
        ("ufakzeka", PreType((rf"{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}",))),
        ("seed-coder", PreType((rf"{_SUFFIX}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}",))),
        ("tekken", PreType((_TEKKEN,), ignores_merges=True, adds_bos=True)),
        ("gpt-4o llama4 kanana2 talkie minimax-m2", PreType((_GPT4O,))),
        (
            "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling",
            PreType((_GPT2,)),
        ),
        ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", PreType((_DIGIT, _GPT2))),
        ("falcon", PreType((r"[\p{P}$+<=>^~|`]+", _GPT2, _IN_THREES))),
        ("deepseek-coder", PreType((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_HANGUL, _DIGIT))),
        (
            "deepseek-llm",
            PreType((r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", _DEEPSEEK_SYMBOLS, r"\s+$", _CJK_AND_HANGUL, r"\p{N}+")),
        ),
        ("deepseek-v3 hunyuan-dense hy_v4 joyai-llm", PreType((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))),
        ("bloom gpt3-finnish poro-chat", PreType((_BLOOM,))),
        ("viking", PreType((_BLOOM, _DIGIT))),
    )
    for name in names.split()
}


def read_tokenizer(file: GgufFile, vocab_size: int | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in a file with its chat template. It gives the same ids as llama.cpp.

    Byte-level vocabularies and those of SentencePiece are built here, others by transformers' conversion.

    Args:
        vocab_size: rows of the embeddings; a tokenizer may have fewer tokens. None: unknown.

    Raises:
        CheckpointError: there is no tokenizer, it has more tokens, or transformers does not know its kind.
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
    except IncompatibleTransformersError:
        raise
    # Its parts are checked. If they do not fit together, transformers and tokenizers raise many kinds of errors. One of
    # them, a panic in Rust, is not an Exception.
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
    tokenizer.padding_side = "left"  # as `generate` wants the prompts of a batch
    return tokenizer


def _build(reader: Metadata) -> PreTrainedTokenizerBase:
    kind = reader.get("tokenizer.ggml.model", str)
    if kind == "gpt2":
        pre_type = _pre_type(reader)
        backend, adds_bos = _byte_level(reader, pre_type), pre_type.adds_bos
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(reader), True
    else:
        check_feature(f"the tokenizer {kind!r} of a GGUF file", "5.18")
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

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
        problem = (
            f"tokenizer.ggml.pre is {name!r}, which is not known here" if name else "tokenizer.ggml.pre is missing"
        )
        logger.warning(
            f"{reader.file.path}: {problem}. Text is split as for 'default', so some of it may become other tokens "
            "than the model knows; `tokenizer=` takes the model's own."
        )
    return PRE_TYPES.get(name, DEFAULT)


def _byte_level(reader: Metadata, pre_type: PreType) -> Tokenizer:
    merges = dict.fromkeys(_halves(merge) for merge in reader.items("tokenizer.ggml.merges", str))  # the first counts
    backend = Tokenizer(models.BPE(_vocabulary(reader), list(merges), ignore_merges=pre_type.ignores_merges))
    backend.pre_tokenizer = pre_type.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(reader: Metadata) -> Tokenizer:
    """A vocabulary of pieces with scores. A blank goes before every text between whole tokens."""
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
    """The two sides of a merge; the first space after the first character separates them."""
    at = merge.index(" ", 1)
    return merge[:at], merge[at + 1 :]


def _add_whole_tokens(backend: Tokenizer, reader: Metadata) -> None:
    """Makes the tokenizer find marked tokens whole in the raw text; all of them are in the vocabulary."""
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
    """Special tokens by transformers' names."""
    tokens = reader.items("tokenizer.ggml.tokens", str)
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {ours: token_id(reader, name, len(tokens)) for ours, name in named.items()}
    return {ours: tokens[index] for ours, index in ids.items() if index is not None}
