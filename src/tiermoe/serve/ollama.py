"""Ollama's dialect: `/api/chat` and `/api/generate`, whole and as a stream of JSON lines, and what front ends ask about
the model: `/api/tags`, `/api/show`, `/api/ps`, `/api/version`. Names are those of its Python client's types (0.6.3)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from pydantic import BaseModel, ConfigDict, Field, field_validator

from tiermoe.engine.request import Piece, Request
from tiermoe.model.chat.reader import Chunk, ToolCall
from tiermoe.serve import harmony
from tiermoe.serve.answers import LineStream, Logprobs, failure, submitted, whole
from tiermoe.serve.chats import Chat, PieceReader, Prepared, grammar_of, prepare
from tiermoe.serve.dialects import (
    LATEST,
    OLLAMA,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    OLLAMA_LINES,
    OLLAMA_VERSION,
    Json,
    Refused,
    ollama_error,
    ollama_lines,
    ollama_reply,
)
from tiermoe.serve.fields import (
    SamplerFields,
    Several,
    StopFields,
    Tools,
    check_fields,
    readable_object,
    thinking_variables,
)
from tiermoe.serve.grammar import Constraint, json_constraint
from tiermoe.serve.intake import aside
from tiermoe.serve.openai import CalledFunction, Function
from tiermoe.serve.served import Served

_FOR_EVER = "9999-12-31T23:59:59Z"
_LINES: dict[int | str, Json] = {
    200: {"description": "The answer, whole or as a stream", "content": {OLLAMA_LINES: {}}}
}


class RunOptions(SamplerFields, StopFields):
    """`options` of a request. Unknown ones are kept for `check_fields`."""

    model_config = ConfigDict(extra="allow")

    num_predict: int | None = Field(None, ge=-2)
    num_ctx: int | None = Field(None, ge=1)

    def named(self, most: int) -> Json:
        values = super().named(most)
        if values.get("seed") == -1:  # any
            del values["seed"]
        return values


class Asked(BaseModel):
    """Fields of both endpoints. Unknown fields are kept for `check_fields`."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    stream: bool | None = None  # None: yes
    format: Literal["", "json"] | Json | None = None
    options: RunOptions = Field(default_factory=lambda: RunOptions.model_validate({}))
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @field_validator("options", mode="before")
    @classmethod
    def _no_options(cls, value: Any) -> Any:
        return {} if value is None else value

    @property
    def constraint(self) -> Constraint | None:
        """What the answer must be; None: any text."""
        if self.format == "json":
            return json_constraint({"type": "object"}, "format")
        return json_constraint(self.format if isinstance(self.format, dict) else None, "format")

    @property
    def variables(self) -> Json:
        """Variables of the template."""
        think = self.think
        return {"enable_thinking": think} if isinstance(think, bool) else thinking_variables(think)

    @property
    def likeliest(self) -> int | None:
        """`Request.logprobs`. Refused if its fields contradict each other."""
        if self.top_logprobs and not self.logprobs:
            raise Refused(400, "top_logprobs needs logprobs=true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class GenerateRequest(Asked):
    prompt: str = ""
    system: str = ""
    raw: bool = False

    @property
    def plain(self) -> list[Json]:
        """The conversation as chat templates take it."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]


class CalledTool(BaseModel):
    id: str = ""
    function: CalledFunction


class Message(BaseModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: Several[CalledTool] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    @field_validator("images")
    @classmethod
    def _text_alone(cls, images: list[str] | None) -> None:
        if images:
            raise ValueError("this server reads text alone, no images")

    @property
    def plain(self) -> Json:
        """The message as chat templates take it."""
        plain: Json = {"role": self.role, "content": self.content or ""}
        if self.tool_calls:
            plain["tool_calls"] = [{"type": "function", **call.model_dump()} for call in self.tool_calls]
        more = {"reasoning_content": self.thinking, "name": self.tool_name, "tool_call_id": self.tool_call_id}
        return plain | {name: value for name, value in more.items() if value}


class Tool(BaseModel):
    type: Literal["function"] = "function"
    function: Function


class ChatRequest(Asked):
    messages: Several[Message] = []
    tools: Tools[Tool] | None = None


class ShowRequest(BaseModel):
    model_config = ConfigDict(extra="ignore")  # verbose and the like

    model: str = ""
    name: str = ""  # what `model` was called


class GrowingReply:
    """A reply while it grows: the objects of its stream, and the whole one after the last piece.

    model: the model's name. chat: the text is in a message. prompt: tokens of the prompt."""

    def __init__(self, model: str, chat: bool, reader: PieceReader, logprobs: Logprobs, prompt: int) -> None:
        self._model = model
        self._chat = chat
        self._reader = reader
        self._logprobs = logprobs
        self._prompt = prompt
        self._began = time.perf_counter_ns()
        self._calls = 0
        self._said: list[tuple[Chunk, list[Json]]] = []
        self._end: Json = {}

    def add(self, piece: Piece) -> Iterator[Json]:
        """Objects of a piece."""
        parsed = self._reader.add(piece)
        logprobs = (self._logprobs.of(piece.logprobs) or {"content": []})["content"]
        # Ollama has whole calls alone
        parsed = replace(parsed, calls=[each for each in parsed.calls if each.kind == "end"])
        if parsed.thought or parsed.text or parsed.calls or logprobs:
            self._said.append((parsed, logprobs))
            yield self._object(parsed, logprobs)
        if parsed.finish is None:
            return
        timings = piece.timings
        self._end = {
            "done": True,
            "done_reason": "length" if parsed.finish == "length" else "stop",
            "total_duration": time.perf_counter_ns() - self._began,
            "load_duration": 0,  # the model was there
            "prompt_eval_count": self._prompt,
            "prompt_eval_duration": round(timings.read_s * 1e9),
            "eval_count": timings.tokens,
            "eval_duration": round(timings.answer_s * 1e9),
        }
        yield self._object(Chunk(), []) | self._end

    def whole(self) -> Json:
        self._calls = 0
        read = [parsed for parsed, _ in self._said]
        text, thought = "".join(each.text for each in read), "".join(each.thought for each in read)
        said = Chunk(thought, text, [piece for each in read for piece in each.calls])
        return self._object(said, [each for _, logprobs in self._said for each in logprobs]) | self._end

    def _object(self, said: Chunk, logprobs: list[Json]) -> Json:
        found = ollama_reply(self._model, self._chat, said.text, said.thought)
        if said.calls:
            found["message"]["tool_calls"] = [self._call(each.call) for each in said.calls]
        return found | ({"logprobs": logprobs} if logprobs else {})

    def _call(self, call: ToolCall) -> Json:
        self._calls += 1
        return {
            "id": call.id,
            "function": {"index": self._calls - 1, "name": call.name, "arguments": readable_object(call.arguments)},
        }


def routes(app: FastAPI, served: Served) -> None:
    """Adds the endpoints."""

    @app.post(OLLAMA_CHAT, response_model=None, responses=_LINES)
    async def chat(asked: ChatRequest, http: HttpRequest) -> Response | Json:
        _check(served, asked)
        if not asked.messages:
            return _loaded(served, {"message": {"role": "assistant", "content": ""}})
        tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()]
        messages = [message.plain for message in asked.messages]
        wanted = Chat(messages, tools, constraint=asked.constraint, variables=asked.variables)
        return await _answer(http, served, asked, await aside(prepare, served, wanted))

    @app.post(OLLAMA_GENERATE, response_model=None, responses=_LINES)
    async def generate(asked: GenerateRequest, http: HttpRequest) -> Response | Json:
        _check(served, asked)
        if not asked.prompt:
            return _loaded(served, {"response": ""})
        return await _answer(http, served, asked, await aside(_prepared, served, asked))

    @app.get(f"{OLLAMA}tags")
    async def tags() -> Json:
        return {"models": [_model(served)]}

    @app.get(f"{OLLAMA}ps")
    async def running() -> Json:
        plan = served.engine.plan
        on_gpu = getattr(plan, "gpu_total", 0)
        memory = {"size": plan.total + on_gpu, "size_vram": on_gpu}
        return {"models": [_model(served) | memory | {"expires_at": _FOR_EVER, "context_length": served.context}]}

    @app.post(f"{OLLAMA}show")
    async def show(asked: ShowRequest) -> Json:
        check_model(served, asked.model or asked.name)
        return _shown(served)

    @app.get(f"{OLLAMA}version")
    async def version() -> dict[str, str]:
        return {"version": OLLAMA_VERSION}


def _check(served: Served, asked: Asked) -> None:
    """Refused if a field is unknown, another model is named, or the model cannot do what is asked for."""
    check_fields(asked)
    check_fields(asked.options)
    check_model(served, asked.model)
    if asked.think and not _thinks(served):
        raise Refused(400, f"'{served.name}' does not support thinking; leave think out", "think")
    wanted = asked.options.num_ctx
    if wanted is not None and wanted > served.context:
        raise Refused(
            400,
            f"num_ctx is {wanted:,}, and this server's context has {served.context:,} tokens; ask for no more, or "
            f"start the server with --context {wanted}",
            "num_ctx",
        )


def check_model(served: Served, name: str) -> None:
    """Refused if a client names another model; a tag after a name says nothing."""
    if name != served.name:
        served.check_model(name.removesuffix(LATEST))


def _thinks(served: Served) -> bool:
    return served.chat.form.thought is not None or harmony.speaks(served.chat.text)


def _loaded(served: Served, said: Json) -> Json:
    """The answer to a request without a prompt, by which clients have a model loaded."""
    created = datetime.now(UTC).isoformat()
    return {"model": served.name, "created_at": created, **said, "done": True, "done_reason": "load"}


def _prepared(served: Served, asked: GenerateRequest) -> Prepared:
    if not asked.raw:
        return prepare(served, Chat(asked.plain, constraint=asked.constraint, variables=asked.variables))
    if asked.system:
        raise Refused(400, "a raw prompt has no system message; leave out one", "system")
    return Prepared(served.text_ids(asked.prompt), grammar=grammar_of(served, asked.constraint))


async def _answer(http: HttpRequest, served: Served, asked: Asked, prepared: Prepared) -> Response | Json:
    request = _request(served, asked, prepared)
    chat, count = isinstance(asked, ChatRequest), len(prepared.ids)
    growing = GrowingReply(served.name, chat, prepared.reader(), Logprobs(served.tokenizer, chat=True), count)
    answers = await submitted(served.worker, [request], prepared.grammar)
    if asked.stream is not False:
        return LineStream(answers, _stream(growing, answers), ollama_lines(served.name, chat))
    await whole(http, answers, lambda _, piece: list(growing.add(piece)))
    return growing.whole()


def _request(served: Served, asked: Asked, prepared: Prepared) -> Request:
    room, wanted = max(served.context - len(prepared.ids), 1), asked.options.num_predict
    most = min(wanted, room) if wanted is not None and wanted > 0 else room
    sampling = replace(served.sampling, max_tokens=most, **asked.options.named(most))
    return prepared.request(sampling, asked.options.stops, logprobs=asked.likeliest)


async def _stream(growing: GrowingReply, pieces: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[bytes]:
    async for _, piece in pieces:
        if piece.error is not None:
            yield _line(ollama_error(failure(piece.error)))
            return
        for each in growing.add(piece):
            yield _line(each)


def _line(said: Json) -> bytes:
    return json.dumps(said).encode() + b"\n"


# --- the model ---


def _model(served: Served) -> Json:
    """The model in a list."""
    engine = served.engine
    plan = engine.plan
    facts = f"{engine.store.source.fingerprint} {plan.precision}"
    return {
        "name": served.name,
        "model": served.name,
        "modified_at": _created(served),
        "size": plan.all_slots * plan.slot_bytes + plan.dense,
        "digest": hashlib.sha256(facts.encode()).hexdigest(),
        "details": _details(served),
    }


def _created(served: Served) -> str:
    return datetime.fromtimestamp(served.created, UTC).isoformat()


def _details(served: Served) -> Json:
    """What clients show of a model; what they must not miss and this server does not know is empty."""
    family, plan = served.engine.config.model_type, served.engine.plan
    return {
        "parent_model": "",
        "format": "tiermoe",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": f"{plan.bits} bits",
    }


def _shown(served: Served) -> Json:
    """What `/api/show` says: capabilities, the context, and sampling of a request that names none."""
    config, sampling, template = served.engine.config, served.sampling, served.chat.text
    family = config.model_type
    sizes = {"block_count": "num_hidden_layers", "embedding_length": "hidden_size", "vocab_size": "vocab_size"}
    known = {f"{family}.{name}": getattr(config, field, None) for name, field in sizes.items()}
    tools = harmony.speaks(template) or served.chat.form.calls is not None
    parameters = {"num_ctx": served.context} | {
        name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")
    }
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in parameters.items()),
        "template": template,
        "modified_at": _created(served),
        "details": _details(served),
        "model_info": {
            "general.architecture": family,
            "general.basename": served.name,
            f"{family}.context_length": served.context,
            **{name: value for name, value in known.items() if value is not None},
        },
        "capabilities": ["completion", *(["tools"] if tools else []), *(["thinking"] if _thinks(served) else [])],
    }
