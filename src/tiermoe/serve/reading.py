"""One answer as it comes: its thought, its text, its calls of tools. What every dialect tells in its own shape."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiermoe.serve.request import Piece
from tiermoe.serve.thoughts import ThoughtReader
from tiermoe.serve.tools import CallReader, ToolCall


@dataclass(frozen=True, slots=True)
class Said:
    """What a piece adds. finish: 'stop', 'length', 'tool_calls' or None while more comes."""

    thought: str = ""
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    finish: str | None = None


class Reader:
    """Reads the pieces of one answer. thoughts, calls: None where there can be none. `thought_tokens`: of the thought,
    so far."""

    def __init__(self, thoughts: ThoughtReader | None = None, calls: CallReader | None = None) -> None:
        self.thought_tokens = 0
        self._thoughts = thoughts
        self._calls = calls

    def add(self, piece: Piece) -> Said:
        last, thought, text, calls = piece.finish is not None, "", piece.text, list[ToolCall]()
        if self._thoughts is not None:
            thought, text = self._thoughts.add(text, last)
            if thought or self._thoughts.inside:
                self.thought_tokens += len(piece.tokens)
        finish = piece.finish
        if self._calls is not None:
            text, calls = self._calls.add(text, last)
            if finish == "stop" and self._calls.calls:
                finish = "tool_calls"
        return Said(thought, text, calls, finish)
