"""OpenAI's dialect: `/v1/chat/completions` and `/v1/completions`, whole and as streams."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tiermoe.runtime.sampling import Sampling
from tiermoe.serve.batcher import Piece, Request, TokenLogprob


class Refused(Exception):
    """A request that cannot be answered as it is: status, the parameter that is the cause, and why."""

    def __init__(
        self, status: int, message: str, param: str | None = None, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.kind = status, param, kind

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": None}}


class StreamOptions(BaseModel):
    include_usage: bool = False


class Common(BaseModel):
    """What both endpoints take. Fields that change nothing here are ignored; those of `REFUSED` are refused where they
    ask for something."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[int, float] | None = None
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)

    @property
    def stops(self) -> tuple[str, ...]:
        stop = self.stop or ()
        return (stop,) if isinstance(stop, str) else tuple(stop)


class TextPart(BaseModel):
    type: Literal["text", "input_text", "output_text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(Common):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class CompletionRequest(Common):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)


_HARMLESS = {"response_format": ({"type": "text"},), "tool_choice": ("none", "auto"), "best_of": (1,), "echo": (False,)}
"""Field → values that ask for nothing."""
REFUSED = ("tools", "functions", "response_format", "suffix", "best_of", "echo", "audio", "modalities", "prediction")


def check_fields(asked: Common) -> None:
    """Refused where a field asks for what this server does not do."""
    for name in REFUSED:
        value = (asked.model_extra or {}).get(name)
        if not value or value in _HARMLESS.get(name, ()) or (name == "modalities" and value == ["text"]):
            continue
        raise Refused(400, f"{name} is not supported by this server; leave it out", name)


def sampling_of(asked: Common, default: Sampling, most: int) -> Sampling:
    """How the tokens of an answer are chosen: as asked, else as `default`. most: tokens that there is room for."""
    named = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias")
    values = {name: getattr(asked, name) for name in named if getattr(asked, name) is not None}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    kept = {name: getattr(default, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    wanted = getattr(asked, "max_completion_tokens", None) or asked.max_tokens
    return Sampling(max_tokens=min(wanted or most, most), **{**kept, **values})


@dataclass(slots=True)
class Shape:
    """What differs between the two endpoints' answers."""

    id: str
    model: str
    chat: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return self._object(choices, "chat.completion" if self.chat else "text_completion") | {"usage": usage}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return json.dumps(self._object(choices, "chat.completion.chunk" if self.chat else "text_completion") | more)

    def _object(self, choices: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def shape(model: str, chat: bool) -> Shape:
    return Shape(("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex, model, chat)


def usage_of(prompt: int, pieces: Sequence[Piece]) -> dict[str, Any]:
    """prompt: tokens of it. pieces: of all choices."""
    made = sum(len(piece.tokens) for piece in pieces)
    cached = max((piece.cached for piece in pieces), default=0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Logprobs:
    """Log probabilities in the shape of an endpoint. tokenizer: names the tokens."""

    def __init__(self, tokenizer: Any, chat: bool) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._offset = 0

    def of(self, told: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """None where none were asked for."""
        if not told:
            return None
        return {"content": [self._chat_entry(each) for each in told]} if self._chat else self._completion(told)

    def _chat_entry(self, each: TokenLogprob) -> dict[str, Any]:
        return self._named(each.token, each.logprob) | {"top_logprobs": [self._named(*pair) for pair in each.top]}

    def _completion(self, told: Sequence[TokenLogprob]) -> dict[str, Any]:
        names = [self._name(each.token) for each in told]
        offsets = []
        for name in names:
            offsets.append(self._offset)
            self._offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [each.logprob for each in told],
            "top_logprobs": [{self._name(token): value for token, value in each.top} for each in told],
            "text_offset": offsets,
        }

    def _named(self, token: int, value: float) -> dict[str, Any]:
        name = self._name(token)
        return {"token": name, "logprob": value, "bytes": list(name.encode())}

    def _name(self, token: int) -> str:
        name: str = self._tokenizer.decode([token])
        return name


def choice(index: int, chat: bool, pieces: Sequence[Piece], logprobs: Logprobs) -> dict[str, Any]:
    """A whole choice."""
    text = "".join(piece.text for piece in pieces)
    told = logprobs.of([each for piece in pieces for each in piece.logprobs])
    said = {"message": {"role": "assistant", "content": text, "refusal": None}} if chat else {"text": text}
    return {"index": index, **said, "logprobs": told, "finish_reason": pieces[-1].finish}


async def stream(
    shape: Shape,
    answers: AsyncIterator[tuple[int, Piece]],
    prompt: int,
    logprobs: Mapping[int, Logprobs],
    include_usage: bool,
) -> AsyncIterator[str]:
    """The data of a stream's events: the role, text as it comes, the reason of each end, usage, `[DONE]`."""
    pieces: list[Piece] = []
    more: dict[str, Any] = {"usage": None} if include_usage else {}
    if shape.chat:
        for index in logprobs:
            delta = {"role": "assistant", "content": ""}
            yield shape.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], **more)
    async for index, piece in answers:
        pieces.append(piece)
        if piece.error is not None:
            yield json.dumps(Refused(500, str(piece.error), kind="server_error").body())
            return
        told = logprobs[index].of(piece.logprobs)
        if piece.text or told:
            said: dict[str, Any] = {"delta": {"content": piece.text}} if shape.chat else {"text": piece.text}
            yield shape.chunk([{"index": index, **said, "logprobs": told, "finish_reason": None}], **more)
        if piece.finish is not None:
            said = {"delta": {}} if shape.chat else {"text": ""}
            yield shape.chunk([{"index": index, **said, "logprobs": None, "finish_reason": piece.finish}], **more)
    if include_usage:
        yield shape.chunk([], usage=usage_of(prompt, pieces))
    yield "[DONE]"


def requests_of(ids: list[int], asked: Common, sampling: Sampling, logprobs: int | None) -> list[Request]:
    """One for each choice; a seed gives each its own."""
    seeds = [None if sampling.seed is None else sampling.seed + index for index in range(asked.n or 1)]
    return [Request(ids, replace(sampling, seed=seed), asked.stops, logprobs) for seed in seeds]
