"""Log probabilities of an answer's tokens, as chats and completions of OpenAI's dialect have them; Ollama's are a
chat's."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from tiermoe.engine.detokenize import token_bytes, token_text
from tiermoe.engine.request import TokenLogprob


class Logprobs:
    """Log probabilities in the shape of an endpoint, with tokens as text."""

    def __init__(self, tokenizer: Any, chat: bool) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._bytes: dict[int, bytes] = {}
        self._text = getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters of the text so far

    def of(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """None where the request has none."""
        if not tokens:
            return None
        return {"content": [self._chat_entry(each) for each in tokens]} if self._chat else self._completion(tokens)

    def _chat_entry(self, each: TokenLogprob) -> dict[str, Any]:
        return self._named(each.token, each.logprob) | {"top_logprobs": [self._named(*pair) for pair in each.top]}

    def _completion(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for each in tokens:
            offsets.append(self._offset)
            self._offset += len(self._text.decode(self._bytes_of(each.token)))
        return {
            "tokens": [token_text(self._bytes_of(each.token)) for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [self._top(each) for each in tokens],
            "text_offset": offsets,
        }

    def _top(self, each: TokenLogprob) -> dict[str, float] | None:
        if each.logprob is None:
            return None
        found: dict[str, float] = {}
        for token, value in each.top:
            found.setdefault(token_text(self._bytes_of(token)), value)  # of tokens that read alike, the likeliest
        return found

    def _named(self, token: int, value: float | None) -> dict[str, Any]:
        data = self._bytes_of(token)
        return {"token": token_text(data), "logprob": value, "bytes": list(data)}

    def _bytes_of(self, token: int) -> bytes:
        if token not in self._bytes:
            self._bytes[token] = token_bytes(self._tokenizer, token)
        return self._bytes[token]
