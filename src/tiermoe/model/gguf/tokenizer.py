"""The tokenizer that a GGUF file describes, with the token ids that llama.cpp gives a text.

Byte-level vocabularies ("gpt2") are put together here: transformers' own reader respells control tokens outside of the
byte alphabet (DeepSeek's) and splits by a smaller table. Sentencepiece ones ("llama") are transformers'."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tiermoe.errors import ModelError
from tiermoe.model.gguf.ends import token_id
from tiermoe.model.gguf.pre_tokenizers import BEGIN_ADDED, PRE_TOKENIZERS, WHOLE_WORDS
from tiermoe.store.gguf.file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
"""`tokenizer.ggml.token_type`."""

_PREFIX = "tokenizer.ggml."

_KINDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def load_tokenizer(file: GgufFile) -> Any:
    """transformers' fast tokenizer. ModelError where the file has none, or one of a kind that is not read."""
    from transformers import PreTrainedTokenizerFast

    tokens = _tokens(file)
    if file.entries["tokenizer.ggml.model"] == "gpt2":
        backend = _byte_level(file, tokens)
    else:
        backend = _sentencepiece(file, tokens)
    named = {name: tokens[token] for name, key in _KINDS.items() if (token := token_id(file, key)) is not None}
    _add_ends(file, backend, tokens)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)
    tokenizer.chat_template = file.entries.get("tokenizer.chat_template")
    return tokenizer


def _tokens(file: GgufFile) -> list[str]:
    kind = file.entries.get("tokenizer.ggml.model", "no_vocab")
    tokens = file.strings("tokenizer.ggml.tokens")
    if kind in ("no_vocab", "none") or not tokens:
        raise ModelError(f"{file.path} has no tokenizer; take a file that was converted with its vocabulary")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{file.path} has a '{kind}' tokenizer; byte-level BPE ('gpt2') and sentencepiece ('llama') are read from "
            f"GGUF files"
        )
    return tokens


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    pre = file.entries.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path} splits text as '{pre}' does, which tiermoe does not know from GGUF files; take the model's "
            f"safetensors"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    file.require("tokenizer.ggml.merges")
    merges = [_pair(merge) for merge in file.strings("tokenizer.ggml.merges")]
    bpe = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in WHOLE_WORDS)
    tokenizer = Tokenizer(bpe)
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in PRE_TOKENIZERS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = file.entries.get("tokenizer.ggml.token_type", [])
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [token for token, its in zip(tokens, kinds, strict=False) if its == kind]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in added])
    return tokenizer


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


def _add_ends(file: GgufFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """What is put before and after a text."""
    sentencepiece = file.entries["tokenizer.ggml.model"] == "llama"
    usual = sentencepiece or file.entries.get("tokenizer.ggml.pre") in BEGIN_ADDED
    begin, end = token_id(file, "bos"), token_id(file, "eos")
    before = [begin] if begin is not None and file.entries.get("tokenizer.ggml.add_bos_token", usual) else []
    after = [end] if end is not None and file.entries.get("tokenizer.ggml.add_eos_token", False) else []
    byte_level = [] if sentencepiece else [processors.ByteLevel(trim_offsets=False)]
    names = {tokens[token]: token for token in (*before, *after)}
    template = processors.TemplateProcessing(
        single=[*(tokens[token] for token in before), "$A", *(tokens[token] for token in after)],
        special_tokens=list(names.items()),
    )
    tokenizer.post_processor = processors.Sequence([*byte_level, template])
