"""What OpenAI's endpoints take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tiermoe.serve.bounds import Bias, Options, Several, StopString, StopStrings, TokenIds, Tools, from_json
from tiermoe.serve.errors import Refused


class StreamOptions(BaseModel):
    include_usage: bool = False


class Common(BaseModel):
    """What both endpoints take. Other fields are kept for `check_fields`."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: StopString | StopStrings | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: Bias | None = None
    response_format: ResponseFormat | None = None
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """Of JSON that the answer must be. Refused where none is named and one is needed."""
        return None if self.response_format is None else self.response_format.asked

    @property
    def stops(self) -> tuple[str, ...]:
        stop = self.stop or ()
        return (stop,) if isinstance(stop, str) else tuple(stop)


_TextKind = Literal["text", "input_text", "output_text"]


def text_alone(part: Any, kinds: Sequence[str] = get_args(_TextKind)) -> Any:
    """ValueError for a part of a content that is of none of these kinds: an image, a file."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in kinds:
        raise ValueError(f"this server reads text alone, no {kind}")
    return part


class _TextPart(BaseModel):
    type: _TextKind
    text: str


TextPart = Annotated[_TextPart, BeforeValidator(text_alone)]


class CalledFunction(BaseModel):
    name: str
    arguments: str = "{}"


class CalledTool(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def plain(self) -> dict[str, Any]:
        """As chat templates take it. Refused where the arguments are no JSON."""
        try:
            arguments = from_json(self.function.arguments or "{}")
        except ValueError as error:
            raise Refused(400, f"the arguments of a tool call are no JSON: {error}", "messages") from error
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Function(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    name: str


class NamedTool(BaseModel):
    type: Literal["function"]
    function: FunctionName


class AllowedFunctions(BaseModel):
    mode: Literal["auto", "required"]
    tools: Tools[NamedTool]


class AllowedTools(BaseModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Several[TextPart] | None = None
    tool_calls: Several[CalledTool] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @property
    def plain(self) -> dict[str, Any]:
        """As chat templates take it. The arguments of calls are objects there."""
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            plain["tool_calls"] = [call.plain for call in self.tool_calls]
        return plain | {name: value for name in _KEPT if (value := getattr(self, name))}


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="ignore")

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def asked(self) -> Mapping[str, Any] | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}
        if self.json_schema is None:
            raise Refused(400, "a response_format of type json_schema needs json_schema", "response_format")
        return self.json_schema.schema_


class ChatRequest(Common):
    messages: Several[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Tools[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Options[Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def new_turn(self) -> bool:
        """As `Chat` has it. Refused where the fields that say so contradict each other or the messages."""
        begins, goes_on = self.add_generation_prompt, self.continue_final_message
        last = self.messages[-1].role == "assistant"
        if goes_on and begins:
            raise Refused(400, "continue_final_message excludes add_generation_prompt", "continue_final_message")
        if goes_on and not last:
            needed = "continue_final_message needs an assistant's message at the end"
            raise Refused(400, needed, "continue_final_message")
        if begins is False and not (last and goes_on is not False):
            raise Refused(400, "add_generation_prompt of false needs a message to continue", "add_generation_prompt")
        return bool(begins) or goes_on is False

    @property
    def choice(self) -> str:
        """As `Chat` has it."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return choice.function.name
        return choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice or "auto"

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools that may be called."""
        tools = self.tools or []
        if isinstance(self.tool_choice, AllowedTools):
            allowed = {each.function.name for each in self.tool_choice.allowed_tools.tools}
            tools = [tool for tool in tools if tool.function.name in allowed]
        return [tool.model_dump(exclude_none=True) for tool in tools]

    @property
    def told(self) -> dict[str, Any]:
        """What the template is told."""
        return told_of(self.reasoning_effort) | (self.chat_template_kwargs or {})


def told_of(effort: str | None) -> dict[str, Any]:
    """What a template is told of how much to think."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


class CompletionRequest(Common):
    prompt: str | Several[str] | TokenIds | Several[TokenIds]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    max_tokens: int | None = Field(None, ge=0)


_KEPT = ("tool_call_id", "name", "reasoning_content")
