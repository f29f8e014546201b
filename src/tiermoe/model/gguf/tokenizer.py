"""Tokenizer that a GGUF file describes, with the token ids that llama.cpp gives a text.

Byte-level vocabularies ("gpt2") are put together here: transformers' own reader respells control tokens outside of the
byte alphabet (DeepSeek's) and splits by a smaller table. So are those of letters ("gemma4"). Sentencepiece ones
("llama") are transformers'."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
"""`tokenizer.ggml.token_type`."""

_PREFIX = "tokenizer.ggml."

_KINDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def load_tokenizer(file: GgufFile) -> Any:
    """transformers' fast tokenizer. ModelError if the file has none, or one of a kind that is not read."""
    from transformers import PreTrainedTokenizerFast

    tokens = _tokens(file)
    backend = _BACKENDS[file.entries["tokenizer.ggml.model"]](file, tokens)
    named = {name: tokens[token] for name, key in _KINDS.items() if (token := file.token_id(key)) is not None}
    _add_ends(file, backend, tokens)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)
    tokenizer.chat_template = file.entries.get("tokenizer.chat_template")
    return tokenizer


def _tokens(file: GgufFile) -> list[str]:
    kind = file.entries.get("tokenizer.ggml.model", "no_vocab")
    tokens = file.strings("tokenizer.ggml.tokens")
    if kind in ("no_vocab", "none") or not tokens:
        raise ModelError(f"{file.path} has no tokenizer; take a file that was converted with its vocabulary")
    if kind not in _BACKENDS:
        raise ModelError(
            f"{file.path} has a '{kind}' tokenizer; byte-level BPE ('gpt2'), sentencepiece ('llama') and Gemma 4's are "
            f"read from GGUF files"
        )
    return tokens


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    pre = file.entries.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path} splits text as '{pre}' does, which tiermoe does not know from GGUF files; take the model's "
            f"safetensors"
        )
    tokenizer = Tokenizer(models.BPE(*_merged(file, tokens), ignore_merges=pre in WHOLE_WORDS))
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in PRE_TOKENIZERS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(file, tokenizer, tokens)
    return tokenizer


def _by_letters(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """Gemma 4's: merges of letters across words; a letter that is no token is its bytes."""
    tokenizer = Tokenizer(models.BPE(*_merged(file, tokens), byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_tokens(file, tokenizer, tokens)
    return tokenizer


def _merged(file: GgufFile, tokens: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The ids of all tokens, and the merges."""
    file.require("tokenizer.ggml.merges")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return vocabulary, [_pair(merge) for merge in file.strings("tokenizer.ggml.merges")]


def _add_tokens(file: GgufFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Those that a text has whole."""
    kinds = file.entries.get("tokenizer.ggml.token_type", [])
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [token for token, its in zip(tokens, kinds, strict=False) if its == kind]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in added])


def _pair(merge: str) -> tuple[str, str]:
    """The two sides of a merge; a side begins with a space where the vocabulary has one."""
    at = merge.index(" ", 1)
    return merge[:at], merge[at + 1 :]


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    from transformers.integrations.gguf import convert_gguf_tokenizer

    facts: dict[str, Any] = {"tokenizer_type": "llama", "tokens": tokens}
    facts |= {name: file.entries[key] for name in ("scores", "token_type") if (key := _PREFIX + name) in file.entries}
    if _PREFIX + "merges" in file.entries:
        facts["merges"] = file.strings(_PREFIX + "merges")
    backend: Tokenizer
    backend, _ = convert_gguf_tokenizer(file.architecture, facts)
    # transformers prepends no space to a text that begins with one
    prefix = [normalizers.Prepend("▁")] if file.entries.get("tokenizer.ggml.add_space_prefix", True) else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    return backend


_BACKENDS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _by_letters}
"""`tokenizer.ggml.model` → what reads it."""


def _add_ends(file: GgufFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """What is put before and after a text."""
    model = file.entries["tokenizer.ggml.model"]
    usual = model == "llama" or file.entries.get("tokenizer.ggml.pre") in BEGIN_ADDED
    begin, end = file.token_id("bos"), file.token_id("eos")
    begun = model == "gemma4" or file.entries.get("tokenizer.ggml.add_bos_token", usual)  # whatever its file says
    before = [begin] if begin is not None and begun else []
    after = [end] if end is not None and file.entries.get("tokenizer.ggml.add_eos_token", False) else []
    byte_level = [processors.ByteLevel(trim_offsets=False)] if model == "gpt2" else []
    names = {tokens[token]: token for token in (*before, *after)}
    template = processors.TemplateProcessing(
        single=[*(tokens[token] for token in before), "$A", *(tokens[token] for token in after)],
        special_tokens=list(names.items()),
    )
    tokenizer.post_processor = processors.Sequence([*byte_level, template])


# splits of a text before its merges, by `tokenizer.ggml.pre`: llama.cpp's expressions (`src/llama-vocab.cpp`), each of
# which splits what the ones before left in one piece

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_LATIN_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Of alphabets with two cases, as DeepSeek's first tokenizer lists them."""

_GPT2 = (_WORDS,)
_LLAMA3 = (rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}{_REST}",)
_QWEN2 = (rf"{_SHORT}|{_LETTERS}|\p{{N}}{_REST}",)
_QWEN35 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_GPT4O = (rf"{_CASED[0]}{_SHORT}?|{_CASED[1]}{_SHORT}?|\p{{N}}{{1,3}}{_CASED_REST}",)
_NOT_HAN = r"(?!\p{Han})"
_KIMI_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_NOT_HAN}{_UPPER})*(?:{_NOT_HAN}{_LOWER})+",
    rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_NOT_HAN}{_UPPER})+(?:{_NOT_HAN}{_LOWER})*",
)
_KIMI = (rf"\p{{Han}}+|{_KIMI_CASED[0]}{_SHORT}?|{_KIMI_CASED[1]}{_SHORT}?|\p{{N}}{{1,3}}{_REST}",)
_TEKKEN = (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}{_CASED_REST}",)
_STARCODER = (r"\p{N}", _WORDS)
_DEEPSEEK = (
    r"[\r\n]",
    f"\\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_3 = (r"\p{N}{1,3}", _CJK, _LATIN_WORDS)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
)

PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2", "exaone4", "trillion"), _GPT2),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("chatglm-bpe", "glm4"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "kimi-k2": _KIMI,
    "tekken": _TEKKEN,
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), _STARCODER),
    "mellum2": _STARCODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "hy_v4"), _DEEPSEEK_3),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
}

WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "glm4", "tekken")
"""A piece that is a token is taken as it is, whatever its merges."""

BEGIN_ADDED = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken")
"""A text begins with the begin token, where the file does not say."""
