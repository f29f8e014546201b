"""One answer as it comes: its thought, its text, its calls of tools. What every dialect tells in its own shape."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiermoe.serve.call_reader import CallReader
from tiermoe.serve.harmony import ChannelReader
from tiermoe.serve.request import Piece
from tiermoe.serve.thoughts import ThoughtReader
from tiermoe.serve.tools import ToolCall


@dataclass(frozen=True, slots=True)
class Said:
    """What a piece adds. finish: 'stop', 'length', 'tool_calls' or None while more comes."""

    thought: str = ""
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    finish: str | None = None


class Reader:
    """Reads the pieces of one answer. thoughts, calls: None where there can be none. channels: reads both.
    `thought_tokens`: of the thought, so far."""

    def __init__(
        self,
        thoughts: ThoughtReader | None = None,
        calls: CallReader | None = None,
        channels: ChannelReader | None = None,
    ) -> None:
        self.thought_tokens = 0
        self._thoughts = thoughts
        self._calls = calls
        self._channels = channels

    def add(self, piece: Piece) -> Said:
        last, cut = piece.finish is not None, piece.finish == "length"
        thought, text, calls = "", piece.text, list[ToolCall]()
        if self._channels is not None:
            thought, text, calls = self._channels.add(text, last, cut)
        elif self._thoughts is not None:
            thought, text = self._thoughts.add(text, last)
        thinking = self._channels or self._thoughts
        if thinking is not None and (thought or thinking.inside):
            self.thought_tokens += len(piece.tokens)
        if self._calls is not None:
            text, calls = self._calls.add(text, last, cut)
        calling, finish = self._channels or self._calls, piece.finish
        if finish == "stop" and calling is not None and calling.calls:
            finish = "tool_calls"
        return Said(thought, text, calls, finish)
