"""What Anthropic's endpoints take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tiermoe.serve.bounds import Several, StopStrings, Tools
from tiermoe.serve.errors import Refused
from tiermoe.serve.openai_fields import text_alone


class TextBlock(BaseModel):
    model_config = ConfigDict(extra="ignore")  # cache_control and the like change nothing here

    type: Literal["text"]
    text: str


class ThinkingBlock(BaseModel):
    type: Literal["thinking"]
    thinking: str


class RedactedBlock(BaseModel):
    """A thought that only its maker can read: nothing of it is told to the model."""

    type: Literal["redacted_thinking"]


class CallBlock(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = {}


class ResultBlock(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Several[Annotated[TextBlock, BeforeValidator(text_alone)]] | None = None


_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
Block = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | CallBlock | ResultBlock,
    Field(discriminator="type"),
    BeforeValidator(lambda block: text_alone(block, _BLOCKS)),
]


class Message(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | Several[Block]

    @property
    def plain(self) -> list[dict[str, Any]]:
        """As chat templates take it: results of tools are messages of their own, before what is said beside them."""
        blocks = [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        results = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)}
            for block in blocks
            if isinstance(block, ResultBlock)
        ]
        said: dict[str, Any] = {
            "role": self.role,
            "content": "".join(block.text for block in blocks if isinstance(block, TextBlock)),
        }
        thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            for block in blocks
            if isinstance(block, CallBlock)
        ]
        if thought:
            said["reasoning_content"] = thought
        if calls:
            said["tool_calls"] = calls
        return [*results, *([said] if said["content"] or calls or thought or not results else [])]


class Tool(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(BaseModel):
    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(BaseModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    format: OutputFormat | None = None


class CountRequest(BaseModel):
    """Other fields are kept for `check_fields`."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    messages: Several[Message] = Field(min_length=1)
    system: str | Several[TextBlock] | None = None
    tools: Tools[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    @property
    def plain(self) -> list[dict[str, Any]]:
        """The conversation as chat templates take it."""
        system = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        return [*system, *(each for message in self.messages for each in message.plain)]

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [
            {"type": "function", "function": {**_described(tool), "parameters": tool.input_schema}}
            for tool in self.tools or ()
        ]

    @property
    def choice(self) -> str:
        """As `Chat` has it. Refused where a tool is to be called and none is named."""
        choice = self.tool_choice
        if choice is None or choice.type in ("auto", "none"):
            return "auto" if choice is None else choice.type
        if choice.type == "any":
            return "required"
        if choice.name is None:
            raise Refused(400, "a tool_choice of type tool needs name", "tool_choice")
        return choice.name

    @property
    def parallel(self) -> bool:
        """As `Chat` has it."""
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """Of JSON that the answer must be."""
        form = (self.output_config.format if self.output_config else None) or self.output_format
        return form.schema_ if form else None

    @property
    def told(self) -> dict[str, Any]:
        """What the template is told: the model's own way where nothing is asked for."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop_sequences: StopStrings | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)


def _described(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name} | ({"description": tool.description} if tool.description else {})


def text_of(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content or ())
