"""Embeddings in OpenAI's dialect (`/v1/embeddings`) and Ollama's (`/api/embed`, the older `/api/embeddings`): the mean
of the hidden states of a text's tokens, behind the last norm, of length 1. Reranking is refused by name."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from pydantic import BaseModel, ConfigDict, Field

from tiermoe.engine.request import Piece, Request
from tiermoe.engine.sampling import Sampling
from tiermoe.serve import ollama_api
from tiermoe.serve.answers import submitted, whole
from tiermoe.serve.errors import Refused
from tiermoe.serve.fields import Options, Several, TokenIds, check_fields
from tiermoe.serve.intake import aside
from tiermoe.serve.ollama import check_model
from tiermoe.serve.openai import prompts_of
from tiermoe.serve.served import Served


class EmbeddingsRequest(BaseModel):
    """Unknown fields are kept for `check_fields`."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    input: str | Several[str] | TokenIds | Several[TokenIds]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)


class OllamaRequest(BaseModel):
    """Fields of Ollama's endpoints. Unknown fields are kept for `check_fields`."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    truncate: bool | None = None  # None: yes
    options: Options[Any] | None = None  # there is nothing to sample


class EmbedRequest(OllamaRequest):
    input: str | Several[str]
    dimensions: int | None = Field(None, ge=1)


class OldEmbedRequest(OllamaRequest):
    prompt: str = ""


def routes(app: FastAPI, served: Served) -> None:
    """Adds the endpoints."""

    @app.post("/v1/embeddings")
    async def embeddings(asked: EmbeddingsRequest, http: HttpRequest) -> dict[str, Any]:
        check_fields(asked)
        served.check_model(asked.model)
        _check_dimensions(served, asked.dimensions)
        prompts = await aside(prompts_of, served, asked.input)
        found = await _embedded(http, served, prompts)
        coded = _in_base64 if asked.encoding_format == "base64" else list[float]
        data = [{"object": "embedding", "index": at, "embedding": coded(each)} for at, each in enumerate(found)]
        count = sum(map(len, prompts))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": served.name, "usage": usage}

    @app.post(f"{ollama_api.PATHS}embed")
    async def embed(asked: EmbedRequest, http: HttpRequest) -> dict[str, Any]:
        began = time.perf_counter_ns()
        _check_dimensions(served, asked.dimensions)
        prompts = await _ollama_prompts(served, asked, asked.input)
        return {
            "model": served.name,
            "embeddings": await _embedded(http, served, prompts),
            "total_duration": time.perf_counter_ns() - began,
            "load_duration": 0,
            "prompt_eval_count": sum(map(len, prompts)),
        }

    @app.post(f"{ollama_api.PATHS}embeddings")
    async def old_embed(asked: OldEmbedRequest, http: HttpRequest) -> dict[str, Any]:
        found = await _embedded(http, served, await _ollama_prompts(served, asked, asked.prompt))
        return {"embedding": found[0] if found else []}

    async def rerank() -> None:
        raise Refused(400, "this server does not rerank; compare embeddings of /v1/embeddings instead")

    for path in ("/rerank", "/v1/rerank"):
        app.add_api_route(path, rerank, methods=["POST"], include_in_schema=False)


def _check_dimensions(served: Served, wanted: int | None) -> None:
    there = served.engine.config.hidden_size
    if wanted not in (None, there):
        raise Refused(400, f"embeddings of this model have {there:,} dimensions; leave dimensions out", "dimensions")


async def _ollama_prompts(served: Served, asked: OllamaRequest, texts: str | list[str]) -> list[list[int]]:
    """Token ids of the texts of a request, cut to the context unless that is not to be; none of no text."""
    check_fields(asked)
    check_model(served, asked.model)
    prompts = await aside(prompts_of, served, texts) if texts else []
    return prompts if asked.truncate is False else [ids[: served.context - 1] for ids in prompts]


async def _embedded(http: HttpRequest, served: Served, prompts: Sequence[list[int]]) -> list[tuple[float, ...]]:
    """Embeddings of prompts, which run one after the other: however many they are, one waits in the queue. Refused
    where a prompt has no tokens or too many, or where transformers' code runs the model."""
    if not served.engine.gives_hidden_states:
        raise Refused(400, f"'{served.name}' gives no embeddings: its hidden states are transformers' own", "model")
    found = list[tuple[float, ...]]()

    def add(_: int, piece: Piece) -> None:
        found.append(piece.embedding)

    for ids in prompts:
        served.check_ids(ids, "input")
        request = Request(ids, Sampling(max_tokens=1), embeds=True)
        await whole(http, await submitted(served.worker, [request], None), add)
    return found


def _in_base64(values: Sequence[float]) -> str:
    return base64.b64encode(numpy.asarray(values, "<f4").tobytes()).decode()
