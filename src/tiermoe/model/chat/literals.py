"""Arguments as models write them, turned to JSON as they come: JSON itself, keywords of a Python call, and objects with
bare keys and quotes of their own (Gemma 4)."""

from __future__ import annotations

import json
import re
from typing import Any

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_OPEN, _CLOSE = "{[(", "}])"


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def from_json(text: str) -> Any:
    """Value of a JSON text. ValueError if it is none, names NaN or infinity, or is nested too deeply."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    try:
        value = json.loads(text, parse_constant=refuse)
        json.dumps(value, allow_nan=False)  # 1e999 is read as infinity
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


class ObjectReader:
    """Incremental reader of one object: what comes is JSON, whatever of the ways above it is written in.

    Control characters in strings are escaped, a comma before the end is left out, a bare word that is no constant is a
    string. The first bracket is of the object, or of the call whose keywords are its entries; a later `(` begins a
    list. quote: quotes of the format, in addition to `"` and `'`; text between them has no escapes."""

    def __init__(self, quote: str = "") -> None:
        self.ended = False
        self._marks = tuple(filter(None, (quote, '"', "'")))
        self._within = ""  # the quotes of the string that is read; empty: none
        self._closers = list[str]()  # of the brackets that are open
        self._held = ""  # that may begin, or be a part of, something longer
        self._word = ""  # bare, and blanks after it
        self._comma = ""  # with blanks after it, until it is known that something follows

    def take(self, text: str) -> tuple[str, str]:
        """JSON of what of more text belongs to the object, and the rest."""
        text, self._held = self._held + text, ""
        made, at = list[str](), 0
        while at < len(text) and not self.ended:
            size = self._string(text, at, made) if self._within else self._outside(text, at, made)
            if not size:
                self._held = text[at:]
                return "".join(made), ""
            at += size
        return "".join(made), text[at:]

    def _string(self, text: str, at: int, made: list[str]) -> int:
        """Reads a part of a string; its size, 0 where more text must come first."""
        quote = self._within
        if text.startswith(quote, at):
            self._within = ""
            made.append('"')
            return len(quote)
        if quote.startswith(text[at:]):
            return 0
        escapes = len(quote) == 1
        if text[at] == "\\" and escapes:
            if at + 1 == len(text):
                return 0
            letter = text[at + 1]
            if letter in '"\\/bfnrtu':
                made.append(text[at : at + 2])
            elif letter == "'" or letter < " ":
                made.append(json_text(letter)[1:-1])
            else:  # no escape of JSON
                made.append("\\\\" + json_text(letter)[1:-1])
            return 2
        made.append(json_text(text[at])[1:-1])
        return 1

    def _outside(self, text: str, at: int, made: list[str]) -> int:
        letter = text[at]
        for mark in self._marks:
            if text.startswith(mark, at):
                self._flush(made)
                self._within = mark
                made.append('"')
                return len(mark)
        if self._marks[0].startswith(text[at:]):
            return 0
        if letter in ":=" and self._word:
            word = self._word.rstrip()
            made.append(self._after_comma() + json_text(word) + self._word[len(word) :])
            self._word = ""
        if letter in _CLOSE:
            self._end_word(made)
            self._comma = ""  # nothing follows it
            made.append(self._closers.pop() if self._closers else letter)
            self.ended = not self._closers
        elif letter in _OPEN:
            self._flush(made)
            entries = letter == "{" or (letter == "(" and not self._closers)
            self._closers.append("}" if entries else "]")
            made.append("{" if entries else "[")
        elif letter == ",":
            self._end_word(made)
            self._comma = letter
        elif letter in ":=":
            made.append(": " if letter == "=" else letter)
        elif letter.isspace():
            if self._word:
                self._word += letter
            elif self._comma:
                self._comma += letter
            else:
                made.append(letter)
        else:
            self._word += letter
        return 1

    def _flush(self, made: list[str]) -> None:
        self._end_word(made)
        made.append(self._after_comma())

    def _after_comma(self) -> str:
        comma, self._comma = self._comma, ""
        return comma

    def _end_word(self, made: list[str]) -> None:
        if self._word:
            word = self._word.rstrip()
            said = _WORDS.get(word) or (word if _NUMBER.fullmatch(word) else json_text(word))
            made.append(self._after_comma() + said + self._word[len(word) :])
            self._word = ""
