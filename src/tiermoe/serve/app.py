"""The server: routes, keys, errors. What the dialects say is in their own modules."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from tiermoe.errors import ConfigError, PromptError
from tiermoe.runtime.sampling import Sampling
from tiermoe.serve import openai
from tiermoe.serve.batcher import Piece, Request
from tiermoe.serve.metrics import Metrics
from tiermoe.serve.openai import Refused
from tiermoe.serve.worker import ClosingError, QueueFullError, Worker

KEEP_ALIVE_S = 15  # between comments in a stream that has nothing to tell
LARGEST_BODY = 16 << 20  # bytes
_OPEN = ("/health", "/metrics")  # asked without a key
_RETRY_S = 5


@dataclass(slots=True)
class Served:
    """What a server answers with. name: the model's, for clients. sampling: where a request says nothing."""

    name: str
    tokenizer: Any
    worker: Worker
    metrics: Metrics
    engine: Any
    sampling: Sampling
    created: int


class TokenizeRequest(BaseModel):
    prompt: str | None = None
    messages: list[openai.Message] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(BaseModel):
    tokens: list[int]


def create_app(served: Served, key: str | None = None) -> FastAPI:
    """The routes over a model. key: what clients must name, by Bearer or X-Api-Key; None: nothing."""
    app = FastAPI(title="tiermoe", version="1", docs_url=None, redoc_url=None)
    app.add_middleware(
        CORSMiddleware,
        allow_origin_regex=r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?",
        allow_methods=["*"],
        allow_headers=["*"],
    )
    _errors(app)
    _guards(app, key)
    _state(app, served)
    _answers(app, served)
    return app


def _errors(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(_: HttpRequest, error: Refused) -> JSONResponse:
        headers = {"Retry-After": str(_RETRY_S)} if error.status == 503 else None
        return JSONResponse(error.body(), error.status, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: HttpRequest, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"][1:]]
        param = ".".join(place) or None
        return await refused(request, Refused(400, f"{param or 'body'}: {first['msg']}", place[0] if place else None))

    @app.exception_handler(StarletteHTTPException)
    async def http(request: HttpRequest, error: HTTPException) -> JSONResponse:
        return await refused(request, Refused(error.status_code, str(error.detail)))


def _guards(app: FastAPI, key: str | None) -> None:
    @app.middleware("http")
    async def guard(request: HttpRequest, call_next: Any) -> Any:
        if key is not None and request.url.path not in _OPEN and request.method != "OPTIONS":
            given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), key.encode()):
                error = Refused(401, "the API key is missing or wrong", kind="authentication_error")
                return JSONResponse(error.body(), 401)
        length = request.headers.get("content-length", "0")
        if length.isdigit() and int(length) > LARGEST_BODY:
            return JSONResponse(
                Refused(413, f"the body has {int(length):,} bytes, {LARGEST_BODY:,} at most").body(), 413
            )
        return await call_next(request)


def _state(app: FastAPI, served: Served) -> None:
    model = {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "tiermoe",
        "max_model_len": served.worker.batcher.context,
    }

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(served.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        found: dict[str, Any] = served.engine.stats()
        return found

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        _check_model(served, name)
        return model

    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        if (asked.prompt is None) == (asked.messages is None):
            raise Refused(400, "name either prompt or messages", "prompt")
        if asked.messages is not None:
            ids = _chat_ids(served, asked.messages)
        else:
            ids = served.tokenizer(asked.prompt, add_special_tokens=asked.add_special_tokens).input_ids
        return {"tokens": ids, "count": len(ids), "max_model_len": served.worker.batcher.context}

    @app.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> dict[str, str]:
        _check_ids(served, asked.tokens, "tokens")
        return {"prompt": served.tokenizer.decode(asked.tokens)}


def _answers(app: FastAPI, served: Served) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat(asked: openai.ChatRequest) -> Response | dict[str, Any]:
        openai.check_fields(asked)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise Refused(400, "top_logprobs needs logprobs=true", "top_logprobs")
        ids = _chat_ids(served, asked.messages)
        return await _answer(served, asked, [ids], (asked.top_logprobs or 0) if asked.logprobs else None, chat=True)

    @app.post("/v1/completions", response_model=None)
    async def complete(asked: openai.CompletionRequest) -> Response | dict[str, Any]:
        openai.check_fields(asked)
        return await _answer(served, asked, _prompts(served, asked.prompt), asked.logprobs, chat=False)


async def _answer(
    served: Served, asked: openai.Common, prompts: Sequence[list[int]], logprobs: int | None, chat: bool
) -> Response | dict[str, Any]:
    _check_model(served, asked.model)
    requests: list[Request] = []
    for ids in prompts:
        _check_ids(served, ids, "prompt")
        room = served.worker.batcher.context - len(ids)
        try:
            sampling = openai.sampling_of(asked, served.sampling, max(room, 1))
        except ConfigError as error:
            raise Refused(400, str(error)) from error
        requests += openai.requests_of(ids, asked, sampling, logprobs)
    if asked.logit_bias is not None:
        _check_ids(served, list(asked.logit_bias), "logit_bias")
    answers = _together(served.worker, requests)
    first = await _begun(answers)  # what is refused is refused before a stream begins
    shape, count = openai.shape(served.name, chat), sum(len(ids) for ids in prompts)
    told = {index: openai.Logprobs(served.tokenizer, chat) for index in range(len(requests))}
    if asked.stream:
        usage = asked.stream_options is not None and asked.stream_options.include_usage
        events = openai.stream(shape, _with_first(first, answers), count, told, usage)
        return EventSourceResponse(events, ping=KEEP_ALIVE_S, sep="\n")
    pieces: list[list[Piece]] = [[] for _ in requests]
    async for index, piece in _with_first(first, answers):
        if piece.error is not None:
            raise Refused(500, str(piece.error), kind="server_error")
        pieces[index].append(piece)
    choices = [openai.choice(index, chat, its, told[index]) for index, its in enumerate(pieces)]
    return shape.whole(choices, openai.usage_of(count, [piece for its in pieces for piece in its]))


async def _begun(answers: AsyncIterator[tuple[int, Piece]]) -> tuple[int, Piece]:
    try:
        return await anext(answers)
    except PromptError as error:
        raise Refused(400, str(error), "prompt", "invalid_request_error") from error
    except (QueueFullError, ClosingError) as error:
        raise Refused(503, str(error), kind="server_error") from error


async def _with_first(
    first: tuple[int, Piece], rest: AsyncIterator[tuple[int, Piece]]
) -> AsyncIterator[tuple[int, Piece]]:
    yield first
    async for each in rest:
        yield each


async def _together(worker: Worker, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Piece]]:
    """The pieces of several answers as they come, each with its request's index."""
    answers = [worker.answer(request) for request in requests]
    tasks = {asyncio.ensure_future(anext(answer)): index for index, answer in enumerate(answers)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: tasks[task]):
                index = tasks.pop(task)
                piece = task.result()
                if piece.finish is None:
                    tasks[asyncio.ensure_future(anext(answers[index]))] = index
                yield index, piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for answer in answers:
            await answer.aclose()


def _check_model(served: Served, name: str) -> None:
    if name and name != served.name:
        raise Refused(404, f"the model '{name}' does not exist; this server has '{served.name}'", "model")


def _check_ids(served: Served, ids: Sequence[int], param: str) -> None:
    most = len(served.tokenizer)
    wrong = next((token for token in ids if not 0 <= token < most), None)
    if wrong is not None:
        raise Refused(400, f"there is no token {wrong}; the vocabulary has {most:,}", param)


def _chat_ids(served: Served, messages: Sequence[openai.Message]) -> list[int]:
    plain = [{"role": "system" if m.role == "developer" else m.role, "content": m.text} for m in messages]
    if not getattr(served.tokenizer, "chat_template", None):
        # a model of texts: what was said, one after the other
        ids: list[int] = served.tokenizer("\n".join(message["content"] for message in plain)).input_ids
        return ids
    try:
        encoded = served.tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=True)
    except Exception as error:  # a template refuses what it does not know with errors of its own
        raise Refused(400, f"the model's chat template does not take these messages: {error}", "messages") from error
    found: list[int] = encoded["input_ids"]
    return found


def _prompts(served: Served, prompt: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
    if isinstance(prompt, str):
        return [served.tokenizer(prompt).input_ids]
    if not prompt:
        raise Refused(400, "the prompt is empty", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return [served.tokenizer(each).input_ids if isinstance(each, str) else each for each in prompt]
