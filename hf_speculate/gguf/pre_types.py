"""Pre-tokenizers of byte-level vocabularies by their names in `tokenizer.ggml.pre`.

A vocabulary's merges were learned within pieces of text. Text that is cut elsewhere becomes tokens that the model has
never seen. Names, patterns and flags are those of llama.cpp (`src/llama-vocab.cpp`) for architectures that are loaded
here. Cases of letters are told apart as in the models' own tokenizers, which llama.cpp's expressions approximate. It
normalises no text for these vocabularies, so nothing is normalised here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers


_DIGIT = r"\p{N}"
_IN_THREES = "[0-9][0-9][0-9]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Branches of the patterns that came after GPT-2's.
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
        ignores_merges: whether a piece that is a token is taken as it is, before any merge.
        adds_bos: whether a file without `tokenizer.ggml.add_bos_token` means true.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [_split(pattern) for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    if pattern == _DIGIT:  # as tokenizers of models say it, by Unicode tables of their own
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


DEFAULT = PreType((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", _IN_THREES))  # for files that name none

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
