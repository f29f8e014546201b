"""HTTP app of the server: errors, and routes that belong to no dialect."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, HTTPException, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from tiermoe.engine.engine import Engine
from tiermoe.serve import anthropic, llama_server, ollama, openai, responses
from tiermoe.serve.dialects import OLLAMA, Json, Refused, error_body, from_json, listed, model_list
from tiermoe.serve.fields import Several, TokenIds
from tiermoe.serve.guards import Guard, Hosts, refusal
from tiermoe.serve.intake import Intake, aside
from tiermoe.serve.openai import Message
from tiermoe.serve.page import root
from tiermoe.serve.served import Served
from tiermoe.serve.worker import STALLED_S
from tiermoe.types import ExpertKey

_REFUSALS: dict[int | str, str] = {
    400: "What was asked for cannot be done; the message says why",
    401: "The API key is missing or wrong",
    403: "The server is not called what the request names as its host",
    404: "There is no such model",
    408: "The body has not come in time",
    413: "The body is too large",
    500: "Computing failed",
    503: "The model is being loaded, the queue or the memory for requests is full, or the server is about to end",
}


class TokenizeRequest(BaseModel):
    """vLLM's fields, or llama-server's: content, add_special and with_pieces."""

    prompt: str | None = None
    messages: Several[Message] | None = None
    add_special_tokens: bool = True
    content: str | None = None
    add_special: bool = False
    with_pieces: bool = False


class DetokenizeRequest(BaseModel):
    tokens: TokenIds


def create_app(
    served: Served, keys: Sequence[str] = (), hosts: Hosts | None = None, origins: Sequence[str] = ()
) -> FastAPI:
    """The routes over a model.

    keys: one of which a client sends, by Bearer or X-Api-Key; empty: none is needed. hosts: names that clients may call
    the server by; None: any. origins: of web pages of others that a browser lets ask; '*': of all."""
    app = FastAPI(
        title="tiermoe",
        version="1",
        docs_url=None,
        redoc_url=None,
        responses={status: {"description": text} for status, text in _REFUSALS.items()},
    )
    counts = served.worker.loop.counts

    def refused() -> None:
        counts.refused += 1

    app.router.route_class = _Route
    app.add_middleware(Guard, keys=keys, hosts=hosts, intake=Intake(served.context, refused))
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    _add_error_handlers(app)
    _add_routes(app, served)
    openai.routes(app, served)
    responses.routes(app, served)
    anthropic.routes(app, served)
    ollama.routes(app, served)
    llama_server.routes(app, served)
    return app


class _Route(APIRoute):
    """Route that parses bodies by `from_json`, whatever their Content-Type: curl and clients of Ollama send others, or
    none. A request of a web page, which a browser marks with Origin, must say JSON, for which it has to be allowed.
    Where GET is, HEAD is: the server sends no body then."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(_as_get(scope))

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().handle(_as_get(scope), receive, send)

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(request: HttpRequest) -> Response:
            scope = request.scope
            if "origin" not in request.headers:
                others = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
                scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
            return await handle(_Bounded(scope, request.receive))

        return bounded


def _as_get(scope: Scope) -> Scope:
    return {**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope


class _Bounded(HttpRequest):
    async def json(self) -> Any:
        try:
            return from_json(await self.body())
        except ValueError as error:
            raise HTTPException(400, f"body: no JSON: {error}") from error


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(request: HttpRequest, error: Refused) -> JSONResponse:
        return refusal(request.url.path, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: HttpRequest, error: RequestValidationError) -> JSONResponse:
        # of a choice of shapes, the one that came closest
        first = max(error.errors(), key=lambda each: len(each["loc"]))
        # which shape of a choice was tried is no field
        place = [str(part) for part in first["loc"][1:] if "[" not in str(part)]
        said = f"{'.'.join(place) or 'body'}: {first['msg'].removeprefix('Value error, ')}"
        if not place and "json" not in request.headers.get("Content-Type", ""):
            said = "body: it is not sent as JSON; send the header Content-Type: application/json"
        return await refused(request, Refused(400, said, place[0] if place else None))

    @app.exception_handler(Exception)
    async def unforeseen(request: HttpRequest, error: Exception) -> JSONResponse:
        return await refused(request, Refused(500, f"{type(error).__name__}: {error}"))

    @app.exception_handler(StarletteHTTPException)
    async def http(request: HttpRequest, error: HTTPException) -> JSONResponse:
        body = error_body(request.url.path, Refused(error.status_code, str(error.detail)))
        return JSONResponse(body, error.status_code, error.headers)


def _add_routes(app: FastAPI, served: Served) -> None:
    model = listed(served.name, served.created, served.context)

    @app.get("/", include_in_schema=False)
    async def shown(http: HttpRequest) -> Response:
        return root(http.headers)

    @app.get("/health")
    async def health() -> Response:
        stalled = served.worker.stalled_s()
        if stalled > STALLED_S:
            return JSONResponse({"status": "stalled", "stalled_s": round(stalled, 1)}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(served.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/stats")
    async def stats() -> Json:
        loop = served.worker.loop
        rows = {"rows": loop.rows, "running": loop.scheduler.running, "waiting": len(loop.scheduler.waiting)}
        disk = {"prefix_disk": asdict(loop.disk.counts)} if loop.disk is not None else {}
        budgets = {"other_budgets": [asdict(each) for each in served.other_budgets]}
        return {**served.engine.stats(), **rows, **asdict(loop.counts), **disk, **budgets}

    @app.get("/experts")
    def experts() -> Json:
        return experts_of(served.engine)

    @app.get("/v1/models")
    async def models() -> Json:
        return model_list([model])

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Json:
        served.check_model(name)
        return model

    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> Json:
        if sum(each is not None for each in (asked.prompt, asked.messages, asked.content)) != 1:
            raise Refused(400, "name either prompt, messages or content", "prompt")
        if asked.content is not None:
            found = await aside(served.text_ids, asked.content, asked.add_special)
            if not asked.with_pieces:
                return {"tokens": found}
            pieces = await aside(lambda: [served.tokenizer.decode([token]) for token in found])
            return {"tokens": [{"id": token, "piece": piece} for token, piece in zip(found, pieces, strict=True)]}
        if asked.messages is not None:
            ids, _ = await aside(served.chat_ids, [message.plain for message in asked.messages])
        else:
            ids = await aside(served.text_ids, asked.prompt or "", asked.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": served.context}

    @app.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> dict[str, str]:
        if len(asked.tokens) > served.context:
            raise Refused(400, f"{len(asked.tokens):,} tokens, {served.context:,} at most", "tokens")
        served.check_ids(asked.tokens, "tokens")
        text = await aside(served.tokenizer.decode, asked.tokens)
        return {"prompt": text, "content": text}  # vLLM's name and llama-server's

    async def lacking() -> None:
        raise Refused(400, "this server has no embeddings and no reranking: its models write text")

    for path in ("/v1/embeddings", f"{OLLAMA}embed", f"{OLLAMA}embeddings", "/v1/rerank", "/rerank"):
        app.add_api_route(path, lacking, methods=["POST"], include_in_schema=False)


def experts_of(engine: Engine) -> Json:
    """Where the experts of each MoE layer are, as lists by expert. Callable while the engine runs.

    `bits`: in memory (0: none). `arriving`: bits that are being read or wait for it (0: none). `uses`: tokens served
    since the start while experts came and went, the running or last pass aside; once all are in memory, one call
    computes a layer and counts none."""
    cache, precisions = engine.loader.cache, sorted(engine.precisions, reverse=True)

    def highest(layer: int, expert: int, there: Callable[[ExpertKey], object]) -> int:
        return next((bits for bits in precisions if there(ExpertKey(layer, expert, bits))), 0)

    layers = []
    for index, uses in enumerate(engine.scheduler.uses.counts):
        experts = range(len(uses))
        layers.append(
            {
                "bits": [highest(index, expert, lambda key: cache.slot(key) is not None) for expert in experts],
                "arriving": [highest(index, expert, lambda key: key in cache.in_flight) for expert in experts],
                "uses": list(uses),
            }
        )
    return {"precisions": precisions, "layers": layers}
