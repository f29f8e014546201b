"""Several servers of a model behind one address: replicas of a Ray Serve deployment.

Each replica is a process with an engine and the routes of its own. Ray Serve starts them, checks on them, starts
another where one ends, and routes requests: by consistent hashing of a request's session, so that the turns of a
conversation reach their prefix."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiermoe.config import settings
from tiermoe.offload.plugins import load_named
from tiermoe.platform.ray import start_ray
from tiermoe.serve.dialects import from_json

if TYPE_CHECKING:
    from fastapi import FastAPI

    from tiermoe.engine.sampling import Sampling

APP = "tiermoe"
_CHECKS_S = 2  # between two looks whether a replica is well
_PATIENCE = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # a proxy that takes thrice as long to start is replaced
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "5",  # a replica silent for so long loses a request to another
}
"""Ray Serve's own seconds, 5 and 0.1, are too few on a busy machine: no proxy ever starts, and sessions lose their
prefix."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """What each replica loads."""

    model: str
    options: Mapping[str, Any]  # of `config.settings`, one replica's share
    name: str  # the model's, for clients
    sampling: Sampling  # of a request that names none
    access: Mapping[str, Any]  # named arguments of `create_app`
    most_waiting: int  # requests in a replica's queue
    guesses: bool  # whether answers' next tokens are guessed
    kv_memory: int | None  # bytes for the keys and values of a replica's requests
    template: str | None = None  # chat template in place of the model's
    guards: bool = True  # of `ChatTemplate`


def start(deployed: Deployed, replicas: int, host: str, port: int, tls: Mapping[str, Path], grace_s: int) -> None:
    """Answers at an address once every replica has loaded the model. Ray runs on this machine alone, unless RAY_ADDRESS
    names a cluster. tls: uvicorn's options for HTTPS, whose files each machine with a proxy has; empty: HTTP. grace_s:
    seconds for answers under way when a replica ends."""
    os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = "tiermoe.serve.replicas.middlewares"
    for name, seconds in _PATIENCE.items():
        os.environ.setdefault(name, seconds)
    from ray import serve
    from ray.serve.config import HTTPOptions, RequestRouterConfig
    from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

    asked = settings(**deployed.options)
    start_ray()
    with suppress(TimeoutError):  # Ray waits for a minute; the proxy's start goes on, and `run` waits again
        files = {option: str(path.resolve()) for option, path in tls.items()}  # a proxy may run in another folder
        serve.start(http_options=HTTPOptions(host=host, port=port, **files))
    deployment = serve.deployment(
        serve.ingress(lambda: app_of(deployed))(),
        name=deployed.name,
        num_replicas=replicas,
        max_ongoing_requests=asked.batch + deployed.most_waiting + 1,  # our own queue refuses what is too much
        ray_actor_options={"num_cpus": asked.threads or 1},
        request_router_config=RequestRouterConfig(request_router_class=ConsistentHashRouter),
        health_check_period_s=_CHECKS_S,
        graceful_shutdown_timeout_s=grace_s,
    )
    serve.run(deployment.bind(), name=APP, route_prefix="/")


def stop() -> None:
    """Ends the replicas once their answers are finished, and Ray where `start` has started it."""
    import ray
    from ray import serve

    serve.delete(APP)
    ray.shutdown()


def app_of(deployed: Deployed) -> FastAPI:
    """The routes over a model that is loaded now, in a replica's process."""
    from tiermoe.platform import process_memory

    process_memory.import_libraries(own_process=True)
    load_named()
    from tiermoe.engine.drafts import Lookup
    from tiermoe.engine.load import start as start_engine
    from tiermoe.engine.speculation import Speculation
    from tiermoe.model.chat.template import chat_template
    from tiermoe.model.hf.blueprint import inspect_model
    from tiermoe.model.hf.hub import resolve_model
    from tiermoe.model.tokenizer import load_tokenizer
    from tiermoe.serve.app import create_app
    from tiermoe.serve.batch_limits import use_of_server
    from tiermoe.serve.served import served_of

    asked = settings(**deployed.options)
    directory = resolve_model(deployed.model)
    blueprint = inspect_model(directory, deployed.model, asked.store)
    use = replace(use_of_server(blueprint, asked), kv_memory=deployed.kv_memory)
    engine = start_engine(blueprint, asked, use=use)
    tokenizer = load_tokenizer(directory)
    if deployed.template is not None:
        tokenizer.chat_template = deployed.template
    served = served_of(
        engine, tokenizer, deployed.name, deployed.sampling, deployed.most_waiting,
        speculation=Speculation(Lookup()) if deployed.guesses else None,
        chat=replace(chat_template(tokenizer), guards=deployed.guards),
    )  # fmt: skip
    return create_app(served, **deployed.access)


# --- sessions ---


HEADER = "x-session-id"
GATHERED = 1 << 20
"""Most bytes of a body that is looked into: every request waits while it is parsed."""
_BEGIN = 256
"""Characters, or token ids, of a continued text that name its session: more come with every call."""


def middlewares() -> list[Middleware]:
    """Middleware of Ray Serve's proxy, which finds this function by its name."""
    return [Middleware(SessionId)]


class SessionId:
    """ASGI middleware that adds the header to a request without it, from the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks = scope["type"] == "http" and scope["method"] == "POST" and HEADER not in Headers(scope=scope)
        if not asks:
            await self._app(scope, receive, send)
            return
        parts = deque(await _body_parts(receive))
        session = session_of(b"".join(part.get("body", b"") for part in parts))
        if session is not None:
            scope = {**scope, "headers": [*scope["headers"], (HEADER.encode(), session.encode())]}

        async def again() -> Message:
            return parts.popleft() if parts else await receive()

        await self._app(scope, again, send)


async def _body_parts(receive: Receive) -> list[Message]:
    """All of a body, or more than `GATHERED` bytes of it."""
    parts, had, more = list[Message](), 0, True
    while more and had <= GATHERED:
        parts.append(await receive())
        had += len(parts[-1].get("body", b""))
        more = parts[-1].get("more_body", False)
    return parts


def session_of(body: bytes) -> str | None:
    """Session of a request in any dialect: a digest of `prompt_cache_key`, else of the conversation up to the user's
    first message. None if it has neither."""
    try:
        asked = from_json(body)
    except ValueError:
        return None
    begun = _beginning(asked) if isinstance(asked, dict) else None
    return hashlib.sha256(begun.encode()).hexdigest()[:32] if begun else None


def _beginning(asked: Mapping[str, Any]) -> str | None:
    if isinstance(key := asked.get("prompt_cache_key"), str):
        return key
    prompt = asked.get("prompt")
    if prompt:
        while isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]  # of several prompts, the first
        return json.dumps(prompt[:_BEGIN]) if isinstance(prompt, str | list) else None
    turns = asked.get("messages", asked.get("input"))
    said = [_text(asked.get("system") or asked.get("instructions"))]
    if isinstance(turns, str):
        return "\n".join([*said, turns])
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict):
            said.append(_text(turn.get("content")))
            if turn.get("role") == "user":
                return "\n".join(said)
    return None


def _text(content: Any) -> str:
    """Text of a content, which is text or parts with text."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
