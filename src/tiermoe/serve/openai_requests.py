"""Bodies of `/v1/chat/completions` and `/v1/completions`, OpenAI's dialect, and what follows from their fields."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from tiermoe.serve.constraints import ConstraintFields
from tiermoe.serve.errors import Refused
from tiermoe.serve.fields import (
    CallArguments,
    Options,
    Several,
    StopFields,
    TextPart,
    TokenIds,
    Tools,
    thinking_variables,
)
from tiermoe.serve.samplers import SamplerFields

_BUDGETS = AliasChoices("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget")
"""Names of a budget of thoughts: llama-server's, its older one, vLLM's."""
_MESSAGE_FIELDS = ("tool_call_id", "name", "reasoning_content")
"""Optional fields of a message that chat templates get."""


class StreamOptions(BaseModel):
    include_usage: bool = False


class Common(SamplerFields, ConstraintFields, StopFields):
    """Fields of both endpoints. Unknown fields are kept for `check_fields`."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    timings_per_token: bool = False
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)


class CalledFunction(BaseModel):
    name: str
    arguments: CallArguments = {}


class CalledTool(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


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
        """The message as chat templates take it."""
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            plain["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return plain | {name: value for name in _MESSAGE_FIELDS if (value := getattr(self, name))}


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
    reasoning_budget_tokens: int | None = Field(None, ge=-1, validation_alias=_BUDGETS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_progress: bool | None = None

    @property
    def new_turn(self) -> bool:
        """`Chat.new_turn`. Refused where its fields contradict each other or the messages."""
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
        """`Chat.choice`."""
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
    def variables(self) -> dict[str, Any]:
        """Variables of the template."""
        return thinking_variables(self.reasoning_effort) | (self.chat_template_kwargs or {})

    @property
    def thought_tokens(self) -> int | None:
        """`Chat.thought_tokens`."""
        return None if self.reasoning_budget_tokens == -1 else self.reasoning_budget_tokens


class CompletionRequest(Common):
    prompt: str | Several[str] | TokenIds | Several[TokenIds]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    max_tokens: int | None = Field(None, ge=0)
