"""HTTP app in front of several models: passes each request on to the process of the model that it names.

The router holds no model and imports no torch. It answers for all models itself (`/v1/models`, `/health`, `/metrics`,
`/stats`); `?model=NAME` asks the process of a loaded one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import httpx
import pydantic_core
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tiermoe.errors import reason
from tiermoe.platform.process_memory import peak_resident_bytes, resident_bytes
from tiermoe.serve.dialects import (
    EVENTS,
    KEEP_ALIVE_S,
    OLLAMA,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    OLLAMA_VERSION,
    Json,
    Refused,
    StreamKind,
    error_body,
    from_json,
    listed,
    model_list,
    ollama_lines,
)
from tiermoe.serve.guards import Guard, Hosts, refusal, until_left
from tiermoe.serve.intake import Intake
from tiermoe.serve.loaded_models import LoadedModels, Model, ModelProcess
from tiermoe.serve.page import root

_HEALTH_S = 10  # for a process to say how it is
_STREAM = {"cache-control": "no-store", "x-accel-buffering": "no"}  # headers, without the type
# headers of a connection, of its length, and of the router's own access
_NOT_ASKED = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "authorization", "x-api-key"}
_NOT_ANSWERED = {"connection", "keep-alive", "transfer-encoding", "date", "server"}


def create_router(
    loaded: LoadedModels,
    context: int,
    keys: Sequence[str] = (),
    hosts: Hosts | None = None,
    origins: Sequence[str] = (),
) -> Starlette:
    """The app over models. context: most tokens of a request to any of them. keys, hosts, origins: as of
    `create_app`."""
    router = Router(loaded)
    guard = Middleware(Guard, keys=keys, hosts=hosts, intake=Intake(context, router.count_refusal))
    cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return Starlette(
        routes=[
            Route("/", router.page),
            Route("/health", router.health),
            Route("/metrics", router.metrics),
            Route("/stats", router.stats),
            Route("/v1/models", router.models),
            Route("/v1/models/{name:path}", router.one_model),
            Route(f"{OLLAMA}tags", router.ollama_models),
            Route(f"{OLLAMA}ps", router.ollama_models),
            Route(f"{OLLAMA}version", router.ollama_version),
            Route("/{path:path}", router.other, methods=["GET", "POST"]),
        ],
        middleware=[*([cors] if origins else []), guard],
        exception_handlers={Refused: _refused, HTTPException: _http_error, Exception: _unforeseen},
    )


class Router:
    """The endpoints. refused: requests that found too little memory."""

    def __init__(self, loaded: LoadedModels) -> None:
        self.refused = 0
        self._loaded, self._created = loaded, int(time.time())
        self._registry = CollectorRegistry()
        self._registry.register(_State(loaded, self))

    def count_refusal(self) -> None:
        self.refused += 1

    async def page(self, request: Request) -> Response:
        return root(request.headers)

    async def health(self, request: Request) -> Response:
        """503 where the batch of a model is stalled."""
        there = [model for model in self._loaded.models if model.loaded]
        found = await asyncio.gather(*(_health(model.process) for model in there))
        stalled = {model.name: health for model, health in zip(there, found, strict=True) if "stalled_s" in health}
        models = {model.name: model.status for model in self._loaded.models}
        body = {"status": "stalled" if stalled else "ok", "models": models, "doing": self._loaded.doing or None}
        return JSONResponse(body | ({"stalled": stalled} if stalled else {}), 503 if stalled else 200)

    async def metrics(self, request: Request) -> ASGIApp:
        if (named := self._named(request)) is not None:
            return named
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4")

    async def stats(self, request: Request) -> ASGIApp:
        if (named := self._named(request)) is not None:
            return named
        change = self._loaded.last_change
        return JSONResponse({
            "memory_budget_bytes": self._loaded.nbytes,
            "router_memory_bytes": resident_bytes(),
            "router_peak_memory_bytes": peak_resident_bytes(),
            "waiting": self._loaded.waiting,
            "refused": self.refused,
            "doing": self._loaded.doing or None,
            "last_change": change and asdict(change),
            "models": [
                {
                    "name": model.name, "status": model.status, "memory_budget_bytes": model.nbytes,
                    "running": model.running, "loads": model.loads, "load_s": model.load_s,
                    "error": model.problem or model.error or None,
                }
                for model in self._loaded.models
            ],
        })  # fmt: skip

    async def models(self, request: Request) -> Response:
        return JSONResponse(model_list([self._facts(each) for each in self._loaded.models]))

    async def one_model(self, request: Request) -> Response:
        return JSONResponse(self._facts(self._loaded.find(request.path_params["name"])))

    async def ollama_models(self, request: Request) -> Response:
        """All models, or those that are loaded, with what is known of them without loading."""
        loaded = request.url.path.endswith("ps")
        created = datetime.fromtimestamp(self._created, UTC).isoformat()
        names = [model.name for model in self._loaded.models if model.loaded or not loaded]
        facts = {"modified_at": created, "size": 0, "digest": "", "details": {"format": "", "family": ""}}
        return JSONResponse({"models": [{"name": name, "model": name, **facts} for name in names]})

    async def ollama_version(self, request: Request) -> Response:
        return JSONResponse({"version": OLLAMA_VERSION})

    async def other(self, request: Request) -> ASGIApp:
        """Passes a request on: with a body to the model that it names, once that is loaded."""
        if request.method != "POST":
            if (named := self._named(request)) is not None:
                return named
            raise Refused(404, f"{request.url.path} is not known, or one model's: add ?model=NAME")
        body = await request.body()
        try:
            asked = from_json(body)
        except ValueError as error:
            raise Refused(400, f"body: no JSON: {error}") from error
        if not isinstance(asked, dict) or not isinstance(asked.get("model", ""), str):
            raise Refused(400, "the body must be an object, whose model is a name", "model")
        named = asked.get("model") or asked.get("name")  # `name` is older, in Ollama's dialect
        model = self._loaded.find(named if isinstance(named, str) else "")
        if asked.get("model") != model.name:  # an alias, which its own server does not know
            body = pydantic_core.to_json(asked | {"model": model.name})
        kind = _kind(request.url.path, asked.get("stream"), model.name)
        return _Passed(self._loaded, model, _request(request, body), kind)

    def _named(self, request: Request) -> ASGIApp | None:
        """Passes a request on to the loaded model of `?model=NAME`; None without. Refused if it is not loaded."""
        if (name := request.query_params.get("model")) is None:
            return None
        model = self._loaded.find(name)
        if not model.loaded or model.leaving:
            raise Refused(503, f"{model.name} is not loaded; a request for an answer loads it")
        return _Passed(self._loaded, model, _request(request, b""), None)

    def _facts(self, model: Model) -> Json:
        """A model as `/v1/models` lists it, with llama-server's `status` and `aliases`."""
        error = model.problem or model.error
        status = {"value": model.status} | ({"failed": True, "error": error} if error else {})
        return listed(model.name, self._created, model.context, status=status, aliases=list(model.aliases))


class _Passed:
    """ASGI app that answers with what a model's process answers. asked: arguments of the request to it. kind: of the
    stream that is asked for, which signs of life keep open until the model is loaded; None: the answer is whole."""

    def __init__(self, loaded: LoadedModels, model: Model, asked: Mapping[str, Any], kind: StreamKind | None) -> None:
        self._loaded, self._model, self._asked, self._kind = loaded, model, asked, kind
        self._started = False  # whether status and headers are sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.ensure_future(self._answer(send))
        leaving = asyncio.ensure_future(until_left(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    async def _answer(self, send: Send) -> None:
        begun = False
        waiting = asyncio.ensure_future(self._say_waiting(send))
        try:
            try:
                process = await self._loaded.begin(self._model)
                begun = True
            finally:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            await self._pass_on(process, send)
        except Refused as error:
            if not self._started:
                raise
            if self._kind is None:
                return  # the connection is closed within the body: nothing else says that it is not whole
            body = json.dumps(error_body(self._asked["url"].path, error)).encode()
            await send({"type": "http.response.body", "body": self._kind.error(body)})
        finally:
            if begun:
                self._loaded.end(self._model)

    async def _say_waiting(self, send: Send) -> None:
        """Says in a stream what it waits for."""
        while self._kind is not None:
            await asyncio.sleep(KEEP_ALIVE_S)
            if not self._started:
                self._started = True
                named = {"content-type": self._kind.media_type, **_STREAM}
                headers = [(name.encode(), value.encode()) for name, value in named.items()]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            doing = self._loaded.doing or "waiting"
            if (process := self._model.process) is not None and process.progress:
                doing += f": {process.progress}"
            await send({"type": "http.response.body", "body": self._kind.waiting(doing), "more_body": True})

    async def _pass_on(self, process: ModelProcess, send: Send) -> None:
        """Sends what the process answers. Refused if it has ended before."""
        try:
            async with process.client.stream(**self._asked) as answer:
                if self._started and self._kind and answer.status_code != 200:
                    await send({"type": "http.response.body", "body": self._kind.error(await answer.aread())})
                    return
                if not self._started:
                    headers = [each for each in answer.headers.raw if each[0].decode().lower() not in _NOT_ANSWERED]
                    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
                    self._started = True
                    if self._kind and not answer.headers.get("content-type", "").startswith(self._kind.media_type):
                        self._kind = None  # it is an error, and whole
                async for part in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except httpx.TransportError as error:
            why = f"{self._model.name} has ended, or its process does not answer ({reason(error)}); ask again"
            raise Refused(502, why) from error
        await send({"type": "http.response.body", "body": b""})


def _kind(path: str, stream: Any, model: str) -> StreamKind | None:
    """The stream that a request asks for; None: a whole answer. stream: its field."""
    if path in (OLLAMA_CHAT, OLLAMA_GENERATE):
        return None if stream is False else ollama_lines(model, path == OLLAMA_CHAT)
    return EVENTS if path.startswith("/v1/") and stream is True else None


def _request(request: Request, body: bytes) -> Json:
    """Arguments of httpx for a request to a model's process."""
    headers = [(name, value) for name, value in request.headers.items() if name not in _NOT_ASKED]
    url = httpx.URL(path=request.url.path, query=request.url.query.encode())
    return {"method": request.method, "url": url, "content": body, "headers": headers}


async def _health(process: ModelProcess | None) -> Json:
    """What a model's process says of its health; empty if it says nothing."""
    assert process is not None
    with contextlib.suppress(httpx.TransportError):
        found: Json = (await process.client.get("/health", timeout=_HEALTH_S)).json()
        return found
    return {}


# --- errors ---


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return refusal(request.url.path, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _refused(request, Refused(error.status_code, str(error.detail)))


async def _unforeseen(request: Request, error: Exception) -> Response:
    return await _refused(request, Refused(500, reason(error)))


# --- metrics ---


class _State(Collector):
    """Counters of the router and its models, read at each scrape. Those of a model are its own server's."""

    def __init__(self, loaded: LoadedModels, router: Router) -> None:
        self._loaded, self._router = loaded, router

    def collect(self) -> Iterator[Metric]:
        loaded = self._loaded
        change = loaded.last_change
        for name, text, value in (
            ("models_memory_budget_bytes", "Bound on all models' processes", loaded.nbytes),
            ("resident_memory_bytes", "Memory that the router holds", resident_bytes()),
            ("num_requests_waiting", "Requests that wait for a model to be loaded", loaded.waiting),
            ("last_change_seconds", "Time of the last change of models", change.seconds if change else 0.0),
        ):
            yield GaugeMetricFamily(f"tiermoe:{name}", text, value)
        yield CounterMetricFamily(
            "tiermoe:requests_refused", "Requests that found too little memory", self._router.refused
        )
        families: tuple[GaugeMetricFamily | CounterMetricFamily, ...] = (
            GaugeMetricFamily("tiermoe:model_loaded", "Whether a model is loaded", labels=["model"]),
            GaugeMetricFamily("tiermoe:model_memory_budget_bytes", "Its part of the budget", labels=["model"]),
            GaugeMetricFamily("tiermoe:model_requests_running", "Its requests", labels=["model"]),
            GaugeMetricFamily("tiermoe:model_load_seconds", "How long its last load took", labels=["model"]),
            CounterMetricFamily("tiermoe:model_loads", "How often it was loaded", labels=["model"]),
        )
        for each in loaded.models:
            values = (each.loaded, each.nbytes, each.running, each.load_s, each.loads)
            for family, value in zip(families, values, strict=True):
                family.add_metric([each.name], float(value))
        yield from families
