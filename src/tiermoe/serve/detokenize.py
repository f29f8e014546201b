"""Tokens to text while they come: no character is split, and nothing that may begin a stop string is told. Single
tokens to their bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # what a tokenizer gives for the first bytes of a character
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNPRINTABLE = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + at): byte for at, byte in enumerate(_UNPRINTABLE)}
"""Character → byte of byte-level vocabularies (GPT-2's alphabet)."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # a sentencepiece vocabulary's


class Detokenizer:
    """The text of an answer whose tokens come one by one. stops: the answer ends before the first of them. special:
    special tokens are part of it. `stopped_by`: which stop that was, once it has happened."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), special: bool = False) -> None:
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._special = special
        self._stops = [stop for stop in stops if stop]
        self._tokens: list[int] = []
        self._begin = self._told = 0  # tokens from `begin` on give what tokens after `told` look like
        self._held = ""

    def add(self, token: int) -> str:
        """The text that is certain with one more token; may be empty."""
        self._tokens.append(token)
        before = self._decoded(self._begin, self._told)
        text = self._decoded(self._begin, len(self._tokens))
        if text.endswith(_UNFINISHED) or len(text) <= len(before):
            return ""
        self._begin, self._told = self._told, len(self._tokens)
        return self._past_stops(text[len(before) :])

    def end(self) -> str:
        """The rest, once no more tokens come."""
        before = self._decoded(self._begin, self._told)
        rest = self._past_stops(self._decoded(self._begin, len(self._tokens))[len(before) :])
        held, self._held = self._held, ""
        return rest + ("" if self.stopped_by else held)

    def _decoded(self, begin: int, end: int) -> str:
        text: str = self._tokenizer.decode(self._tokens[begin:end], skip_special_tokens=not self._special)
        return text

    def _past_stops(self, new: str) -> str:
        if self.stopped_by:
            return ""
        text = self._held + new
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            at, self.stopped_by = min(found)
            self._held = ""
            return text[:at]
        kept = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def overlap(text: str, stop: str) -> int:
    """The longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """What a token adds to a text, a blank before a word among it; of a part of a character the bytes that it is."""
    once, twice = (_decoded(tokenizer, [token] * count) for count in (1, 2))
    text = twice[len(once) :]  # a text of sentencepiece tokens begins without its first blank
    if _UNFINISHED in text:
        piece: str = tokenizer.convert_ids_to_tokens(token)
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(byte[1])
        if all(letter in _BYTES for letter in piece):
            return bytes(_BYTES[letter] for letter in piece)
    return text.encode()


def token_text(its: bytes) -> str:
    r"""A token's bytes as OpenAI names them: `bytes:\xe2\x80` where they are no whole characters."""
    try:
        return its.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in its)


def _decoded(tokenizer: Any, tokens: list[int]) -> str:
    text: str = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    return text
