"""Thoughts of a model before its answer: text between <think> and </think>.

Qwen3, GLM-4.5, MiniMax-M2 and DeepSeek write them so. Some chat templates open the thought at the end of the prompt.
"""

from __future__ import annotations

from tiermoe.engine.detokenize import overlap

BEGIN, END = "<think>", "</think>"


def thinks(template: str | None) -> bool:
    """Whether a chat template has thoughts."""
    return END in (template or "")


def opened(prompt: str) -> bool:
    """Whether a prompt ends within a thought."""
    return prompt.rstrip().endswith(BEGIN)


def unfinished(text: str) -> str | None:
    """The thought within which a text ends, or None."""
    _, begun, thought = text.rpartition(BEGIN)
    return thought if begun and END not in thought else None


class ThoughtReader:
    """Reads one answer as it comes: text in, (thought, answer) out. Line breaks around the thought belong to neither.

    inside: whether the answer begins within a thought. begun: whether it continues that thought's text."""

    def __init__(self, inside: bool, begun: bool = False) -> None:
        self.inside = inside
        self._before = not inside  # whether a thought may still begin
        self._first = not begun  # whether nothing of the current part has come
        self._withheld = ""

    def add(self, text: str, last: bool = False) -> tuple[str, str]:
        """Thought and answer that are certain with more text. last: no more text comes."""
        self._withheld += text
        if self._before and not self._begun(last):
            return "", ""
        thought = self._thought(last) if self.inside else ""
        return thought, "" if self.inside else self._trimmed(self._take(len(self._withheld)))

    def _begun(self, last: bool) -> bool:
        """Whether it is certain if the answer begins with a thought."""
        start = self._withheld.lstrip()
        if not last and BEGIN.startswith(start[: len(BEGIN)]) and len(start) < len(BEGIN):
            return False
        self._before = False
        if start.startswith(BEGIN):
            self.inside = True
            self._withheld = start[len(BEGIN) :]
        else:
            self._first = False  # an answer without a thought stays as it is
        return True

    def _thought(self, last: bool) -> str:
        at = self._withheld.find(END)
        if at >= 0:
            thought = self._trimmed(self._take(at).rstrip("\n"))
            self._take(len(END))
            self.inside, self._first = False, True
            return thought
        certain = (
            self._withheld
            if last
            else self._withheld[: len(self._withheld) - overlap(self._withheld, END)].rstrip("\n")
        )
        return self._trimmed(self._take(len(certain)))

    def _trimmed(self, text: str) -> str:
        """Text without the line breaks at the beginning of its part."""
        if self._first:
            text = text.lstrip("\n")
            self._first = not text
        return text

    def _take(self, count: int) -> str:
        taken, self._withheld = self._withheld[:count], self._withheld[count:]
        return taken
