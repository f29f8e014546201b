"""Detokenizer: tokens to text while they come, without splitting a character and up to a stop string. Single tokens to
their bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tiermoe.model.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"  # what a tokenizer gives for the first bytes of a character
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNPRINTABLE = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + at): byte for at, byte in enumerate(_UNPRINTABLE)}
"""Character → byte of byte-level vocabularies (GPT-2's alphabet)."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # a sentencepiece vocabulary's


class Detokenizer:
    """Text of an answer whose tokens come one by one, cut at the first stop string.

    stops: strings that end the answer. special: special tokens that are part of the text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), special: frozenset[int] = frozenset()) -> None:
        self.stopped_by: str | None = None  # the stop string that has come
        self._decode = tokenizer.decode
        self._skips = not special
        added = tokenizer.added_tokens_decoder if special else {}
        self._dropped = {token for token, each in added.items() if each.special} - special
        self._stops = [stop for stop in stops if stop]
        self._tokens: list[int] = []
        self._begin = 0  # tokens from here on are decoded: those before do not change how later ones look
        self._emitted = 0  # tokens whose text has been emitted
        self._withheld = ""  # text that may begin a stop string

    def add(self, token: int) -> str:
        """Text that is certain with one more token; empty within a character."""
        if token in self._dropped:
            return ""
        tokens = self._tokens
        tokens.append(token)
        before = self._decode(tokens[self._begin : self._emitted], skip_special_tokens=self._skips)
        text: str = self._decode(tokens[self._begin :], skip_special_tokens=self._skips)
        if text.endswith(_UNFINISHED) or len(text) <= len(before):
            return ""
        self._begin, self._emitted = self._emitted, len(tokens)
        new = text[len(before) :]
        return self._cut(new) if self._stops else new

    def end(self) -> str:
        """The rest of the text, once no more tokens come."""
        before = self._decode(self._tokens[self._begin : self._emitted], skip_special_tokens=self._skips)
        text: str = self._decode(self._tokens[self._begin :], skip_special_tokens=self._skips)
        rest = self._cut(text[len(before) :])
        withheld, self._withheld = self._withheld, ""
        return rest + ("" if self.stopped_by else withheld)

    def _cut(self, new: str) -> str:
        """New text up to a stop string, without an end that may begin one."""
        if self.stopped_by:
            return ""
        text = self._withheld + new
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            at, self.stopped_by = min(found)
            self._withheld = ""
            return text[:at]
        kept = max((overlap(text, stop) for stop in self._stops), default=0)
        self._withheld = text[len(text) - kept :]
        return text[: len(text) - kept]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Bytes that a token adds to a text, with the blank before a word; a part of a character gives its own bytes."""
    once, twice = (tokenizer.decode([token] * count, clean_up_tokenization_spaces=False) for count in (1, 2))
    text: str = twice[len(once) :]  # a text of sentencepiece tokens begins without its first blank
    if _UNFINISHED in text:
        piece = tokenizer.convert_ids_to_tokens(token) or ""
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(byte[1])
        if piece and all(letter in _BYTES for letter in piece):
            return bytes(_BYTES[letter] for letter in piece)
    return text.encode()


def token_text(token: bytes) -> str:
    r"""A token's bytes as OpenAI names them: `bytes:\xe2\x80` where they are no whole characters."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
