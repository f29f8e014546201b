"""What a model thinks before it answers, told apart from the answer: text between <think> and </think>.

Qwen3, GLM-4.5, MiniMax-M2 and DeepSeek write it so. Some chat templates open the thought at the end of the prompt.
"""

from __future__ import annotations

from tiermoe.serve.detokenize import overlap

BEGIN, END = "<think>", "</think>"


def thinks(template: str | None) -> bool:
    """Whether a chat template knows of thoughts."""
    return END in (template or "")


def opened(prompt: str) -> bool:
    """Whether a prompt ends within a thought."""
    return prompt.rstrip().endswith(BEGIN)


def unfinished(text: str) -> bool:
    """Whether a text that is continued ends within a thought."""
    return text.rfind(BEGIN) > text.rfind(END)


class ThoughtReader:
    """Reads one answer: text in, (thought, answer) out. Line breaks around the thought belong to neither. inside:
    whether the answer begins within a thought."""

    def __init__(self, inside: bool) -> None:
        self.inside = inside
        self._before = not inside
        self._first = True  # nothing of this part has been told
        self._held = ""

    def add(self, text: str, last: bool = False) -> tuple[str, str]:
        """What is certain with more text. last: no more comes."""
        self._held += text
        if self._before and not self._begun(last):
            return "", ""
        thought = self._thought(last) if self.inside else ""
        return thought, "" if self.inside else self._told(self._take(len(self._held)))

    def _begun(self, last: bool) -> bool:
        """Whether it is known if the answer begins with a thought."""
        start = self._held.lstrip()
        if not last and BEGIN.startswith(start[: len(BEGIN)]) and len(start) < len(BEGIN):
            return False
        self._before = False
        if start.startswith(BEGIN):
            self.inside = True
            self._held = start[len(BEGIN) :]
        else:
            self._first = False  # an answer without a thought is told as it is
        return True

    def _thought(self, last: bool) -> str:
        at = self._held.find(END)
        if at >= 0:
            thought = self._told(self._take(at).rstrip("\n"))
            self._take(len(END))
            self.inside, self._first = False, True
            return thought
        certain = self._held if last else self._held[: len(self._held) - overlap(self._held, END)].rstrip("\n")
        return self._told(self._take(len(certain)))

    def _told(self, text: str) -> str:
        """Text without the line breaks that its part begins with."""
        if self._first:
            text = text.lstrip("\n")
            self._first = not text
        return text

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken
