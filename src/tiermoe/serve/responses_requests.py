"""Bodies of `/v1/responses`, OpenAI's newer dialect: items in, and what follows from their fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag

from tiermoe.serve.errors import Refused
from tiermoe.serve.fields import CallArguments, Options, Several, TextPart, Tools, thinking_variables


class MessageItem(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Several[TextPart]


class CallItem(BaseModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: CallArguments


class OutputItem(BaseModel):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Several[TextPart]


class ReasoningText(BaseModel):
    text: str


class ReasoningItem(BaseModel):
    type: Literal["reasoning"]
    content: Several[ReasoningText] | None = None


class Format(BaseModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextOptions(BaseModel):
    format: Format | None = None


class Reasoning(BaseModel):
    effort: str | None = None


class NamedFunction(BaseModel):
    type: Literal["function"]
    name: str


class AllowedTools(BaseModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Tools[NamedFunction]


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OtherTool(BaseModel):
    """A tool of a kind that only its maker can run; the model does not get it."""

    model_config = ConfigDict(extra="allow")

    type: str


def _kind(value: Any, default: str | None = None) -> str | None:
    """The type of an item or a tool, before it is checked and after."""
    kind: str | None = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
    return kind


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        lambda value: _kind(value, "message"),
        custom_error_type="item_kind",
        custom_error_message="this server reads items of type message, function_call, function_call_output and "
        "reasoning; it keeps none, so that a client that sends an item_reference must be set to store: false",
    ),
]
Tool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")],
    Discriminator(lambda value: "function" if _kind(value) == "function" else "other"),
]


class ResponsesRequest(BaseModel):
    """Fields of the endpoint. Unknown fields are kept for `check_fields`."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    input: str | Several[Item] = Field(min_length=1)
    instructions: str | None = None
    stream: bool = False
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: Several[str] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Tools[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools = "auto"
    parallel_tool_calls: bool | None = None
    metadata: Options[JsonValue] | None = None

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools that can be called, as chat templates take them."""
        tools = [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]
        if isinstance(self.tool_choice, AllowedTools):
            allowed = {each.name for each in self.tool_choice.tools}
            tools = [tool for tool in tools if tool.name in allowed]
        return [
            {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})} for tool in tools
        ]

    @property
    def choice(self) -> str:
        """`Chat.choice`."""
        choice = self.tool_choice
        if isinstance(choice, str):
            return choice
        return choice.name if isinstance(choice, NamedFunction) else choice.mode

    @property
    def parallel(self) -> bool:
        """`Chat.parallel`."""
        return self.parallel_tool_calls is not False

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """Schema of JSON that the answer must be; None: any text. Refused where none is named and one is needed."""
        form = self.text.format if self.text else None
        if form is None or form.type == "text":
            return None
        if form.type == "json_schema" and form.schema_ is None:
            raise Refused(400, "a text.format of type json_schema needs schema", "text")
        return form.schema_ or {"type": "object"}

    @property
    def logprobs(self) -> int | None:
        """`Request.logprobs`."""
        wanted = self.top_logprobs or "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if wanted else None

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the template."""
        return thinking_variables(self.reasoning.effort if self.reasoning else None)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """As chat templates take them."""
        said = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*said, {"role": "user", "content": self.input}]
        return [*said, *_messages(self.input)]


def _messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """A turn of the assistant is several items: thoughts, text and calls."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for item in items:
        if isinstance(item, OutputItem):
            turn = None
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            turn = None
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _text(item.content)})
        else:
            if turn is None or (isinstance(item, ReasoningItem) and turn.keys() - {"role", "reasoning_content"}):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add(turn, item)
    return messages


def _add(turn: dict[str, Any], item: MessageItem | CallItem | ReasoningItem) -> None:
    if isinstance(item, ReasoningItem):
        turn["reasoning_content"] = "".join(part.text for part in item.content or ())
    elif isinstance(item, MessageItem):
        turn["content"] += _text(item.content)
    else:
        function = {"name": item.name, "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


def _text(content: str | Several[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
