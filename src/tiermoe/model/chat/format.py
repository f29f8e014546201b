"""Chat format: how a model writes thoughts, texts and calls of tools, and what its chat template is to be given. It is
learned from the template (`learn`), and kept beside the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

NAME, ID, ARGUMENTS, INDEX, KEY, VALUE = "\ue001", "\ue002", "\ue003", "\ue004", "\ue005", "\ue006"
"""Slots in the texts of a format: the function, the call's id, its arguments, its number; a parameter, its value."""
SLOTS = NAME + ID + ARGUMENTS + INDEX + KEY + VALUE
FUNCTIONS = f"functions.{NAME}:{INDEX}"
"""The id that holds the function, where a template writes no more than the id of a call (Kimi-K2)."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are written. The texts are a template's own, blanks included.

    call: one call, with slots. parameter: how a parameter is written, by the JSON type of its value; the second of a
    kind is of values that the first cannot hold. style: of arguments: `json`, one object; `tags`, each parameter
    between two delimiters; `literals`, keyword arguments with values of JSON or Python, whose strings have quotes."""

    call: str
    begin: str = ""  # before the first call
    between: str = ""  # between two
    end: str = ""  # after the last
    style: Literal["json", "tags", "literals"] = "json"
    parameter: Mapping[str, list[str]] = field(default_factory=dict)
    python: bool = False  # whether constants are written as Python does
    quote: str = ""  # of strings in literals, where they have quotes of their own
    single: bool = False  # whether the template takes no second call

    @property
    def head(self) -> str:
        """What is written before the arguments."""
        return self.call.partition(ARGUMENTS)[0]

    @property
    def tail(self) -> str:
        """What is written after them."""
        return self.call.partition(ARGUMENTS)[2]


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model's answers are written, and what its template takes."""

    calls: CallFormat | None = None  # None: no known way
    no_calls: str = ""  # why not, or why they are as stated for the family
    refused: str = ""  # why the template is never rendered; empty: it is
    thought: tuple[str, str] | None = None  # what begins and ends a thought; None: there are none
    text: tuple[str, str] = ("", "")  # what begins and ends the text of an answer
    turn_end: str = ""  # written after all of it
    ends: tuple[str, ...] = ()  # tokens that end a turn
    arguments: Literal["object", "text"] = "object"  # of calls in messages
    thought_field: str = "reasoning_content"  # of messages
    blank: bool = True  # whether a message of calls alone has an empty text, and not none
    parts: bool = False  # whether contents must be lists of parts
    roles: frozenset[str] = frozenset({"system", "user", "assistant", "tool"})  # that the template renders
    alternates: bool = False  # whether users and the assistant must take turns
    first_system: bool = False  # whether a system message must be the first one
    id_form: Literal["any", "nine", "functions"] = "any"  # of calls in messages: nine letters, or `FUNCTIONS`
    switch: str = ""  # the variable that turns thinking on and off; empty: none

    def opened(self, prompt: str) -> bool:
        """Whether a prompt ends with the beginning of a thought."""
        return self.thought is not None and prompt.rstrip().endswith(self.thought[0])

    def unfinished(self, prompt: str) -> bool:
        """Whether a prompt that ends within an answer ends within its thought."""
        return self.thought is not None and prompt.rfind(self.thought[0]) > prompt.rfind(self.thought[1])

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "roles": sorted(self.roles)}

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> ChatFormat:
        """From `as_dict`, be it through JSON. TypeError or ValueError if it is none."""
        calls = kept["calls"]
        thought = kept["thought"]
        return cls(**{
            **kept, "calls": None if calls is None else CallFormat(**calls),
            "thought": None if thought is None else (thought[0], thought[1]), "text": tuple(kept["text"]),
            "ends": tuple(kept["ends"]), "roles": frozenset(kept["roles"]),
        })  # fmt: skip


PLAIN = ChatFormat()
"""Of a model without a chat template."""
