"""Embeddings are the mean of transformers' hidden states, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy
import ollama
import openai
import pytest
import torch

from native_experts import checkpoint
from patience import PATIENCE_S
from serving import KEY, Letters, ids, running
from small_engines import engine_of
from tiermoe.engine.request import Piece, Request
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.engine.sampling import Sampling
from tiermoe.serve.app import create_app
from tiermoe.serve.served import Served, served_of
from tiny import oracle, write

PROMPT = "once upon a time"
FAMILIES: dict[str, dict[str, Any]] = {"qwen3_moe": {}, "gpt_oss": {"sliding_window": 12}, "qwen3_next": {}}


def expected(model: Any, tokens: list[int]) -> torch.Tensor:
    """The mean of the states behind the last norm, of length 1, by transformers' eager code."""
    with torch.no_grad():
        states = model.model(torch.tensor([tokens])).last_hidden_state[0]
    return torch.nn.functional.normalize(states.double().mean(0), dim=0)


def embedded(loop: RequestLoop, tokens: list[int]) -> Piece:
    number = loop.add(Request(tokens, Sampling(max_tokens=1), embeds=True))
    found = list[Piece]()
    while not loop.scheduler.idle:
        found += [piece for piece in loop.step() if piece.number == number]
    (piece,) = found
    assert piece.error is None, piece.error
    return piece


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_the_mean_of_transformers_states(family: str, tmp_path: Path) -> None:
    """Of a prompt within a chunk and of one in many, beside answers that run."""
    directory = write(tmp_path, family, torch.float32, **FAMILIES[family])
    plain = oracle(directory, family, torch.float32)
    engine = engine_of(directory, bits=16, dense_bits=16, chunk=16, batch=3, context=96, cache="50%")
    for count in (1, 9, 60):
        loop = RequestLoop(engine, Letters(), 3, set())
        loop.add(Request(ids(20, 7), Sampling(max_tokens=12)))
        loop.step()
        piece = embedded(loop, ids(count, count))
        want = expected(plain, ids(count, count))
        assert torch.nn.functional.cosine_similarity(torch.tensor(piece.embedding).double(), want, dim=0) > 1 - 1e-6
        assert torch.allclose(torch.tensor(piece.embedding, dtype=torch.float64), want, atol=1e-4)
        assert (piece.finish, piece.tokens, piece.timings.read) == ("stop", (), count)
    engine.close()


def test_an_embedding_is_the_same_whatever_ran_before_or_beside_it(tmp_path: Path) -> None:
    """A prompt whose beginning is cached runs whole, and the answers beside it and behind it stay as they are."""
    directory = checkpoint(tmp_path, "qwen3_moe")
    engine = engine_of(directory, bits=4, dense_bits=4, chunk=16, batch=3, context=96)
    alone = embedded(RequestLoop(engine, Letters(), 1, set()), ids(40)).embedding
    plain = RequestLoop(engine, Letters(), 1, set())
    plain.add(Request(ids(40), Sampling(max_tokens=8)))
    answer = [token for _ in range(30) for piece in plain.step() for token in piece.tokens]
    loop, beside = RequestLoop(engine, Letters(), 3, set()), list[int]()
    assert embedded(loop, ids(40)).embedding == alone
    assert embedded(loop, ids(40)).embedding == alone
    number = loop.add(Request(ids(40), Sampling(max_tokens=8)))
    other = loop.add(Request(ids(40), Sampling(max_tokens=1), embeds=True))
    pieces = [piece for _ in range(30) for piece in loop.step()]
    beside = [token for piece in pieces if piece.number == number for token in piece.tokens]
    assert beside == answer
    assert [piece.embedding for piece in pieces if piece.number == other] == [alone]
    engine.close()


def test_openai_s_client_gets_them(client: openai.OpenAI, served: Served, http: httpx.Client) -> None:
    tokens = served.tokenizer(PROMPT).input_ids
    answer = client.embeddings.create(model="tiny", input=[PROMPT, "the king"])  # by base64: the client's default
    plain = client.embeddings.create(model="tiny", input=[tokens], encoding_format="float")
    assert [each.index for each in answer.data] == [0, 1]
    assert plain.data[0].embedding == pytest.approx(answer.data[0].embedding, abs=1e-6)
    assert plain.data[0].embedding != pytest.approx(answer.data[1].embedding, abs=1e-3)
    assert numpy.linalg.norm(plain.data[0].embedding) == pytest.approx(1)
    assert (plain.usage.prompt_tokens, plain.usage.total_tokens) == (len(tokens), len(tokens))
    coded = http.post("/v1/embeddings", json={"input": PROMPT, "encoding_format": "base64"}).json()["data"][0]
    assert numpy.frombuffer(base64.b64decode(coded["embedding"]), "<f4").tolist() == answer.data[0].embedding
    many = client.embeddings.create(model="tiny", input=["a"] * 20)  # more than may wait
    assert len(many.data) == 20


def test_ollama_s_client_gets_them(address: str, client: openai.OpenAI) -> None:
    theirs = client.embeddings.create(model="tiny", input=PROMPT, encoding_format="float")
    with ollama.Client(address, headers={"Authorization": f"Bearer {KEY}"}) as llama:
        answer = llama.embed("tiny:latest", [PROMPT, "a " * 99])
        assert answer.embeddings[0] == theirs.data[0].embedding
        assert answer.prompt_eval_count == theirs.usage.prompt_tokens + 63  # the second is cut to the context
        assert llama.embed("tiny", "").embeddings == []
        with pytest.raises(ollama.ResponseError, match="the prompt is too long"):
            llama.embed("tiny", "a " * 99, truncate=False)


def test_ollama_s_old_endpoint(address: str, client: openai.OpenAI, http: httpx.Client) -> None:
    theirs = client.embeddings.create(model="tiny", input=PROMPT, encoding_format="float")
    with ollama.Client(address, headers={"Authorization": f"Bearer {KEY}"}) as llama:
        assert llama.embeddings("tiny:latest", PROMPT, options={"num_ctx": 64}).embedding == theirs.data[0].embedding
        assert llama.embeddings("tiny", "a " * 99).embedding == llama.embed("tiny", "a " * 99).embeddings[0]
        assert llama.embeddings("tiny").embedding == []
    refused = http.post("/api/embeddings", json={"prompt": "a", "pooling": "last"})
    assert (refused.status_code, refused.json()["error"].partition(" by ")[0]) == (400, "pooling is not supported")


@pytest.mark.parametrize(
    ("path", "asked", "why"),
    [
        ("/v1/embeddings", {"input": "a", "dimensions": 3}, "leave dimensions out"),
        ("/v1/embeddings", {"input": []}, "the prompt is empty"),
        ("/v1/embeddings", {"input": [[]]}, "no tokens"),
        ("/v1/embeddings", {"input": [[1 << 20]]}, "there is no token 1048576"),
        ("/v1/embeddings", {"input": "a " * 99}, "the prompt is too long"),
        ("/v1/embeddings", {"input": "a", "pooling": "last"}, "pooling is not supported"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "does not rerank"),
        ("/rerank", {}, "does not rerank"),
    ],
)
def test_refusals(http: httpx.Client, path: str, asked: dict[str, Any], why: str) -> None:
    answer = http.post(path, json=asked)
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]


@pytest.fixture
def generic(tmp_path: Path) -> Iterator[Served]:
    import tiermoe

    directory = write(tmp_path, "qwen3_moe", torch.float32)
    options: Any = {"memory": "4GiB", "device": "cpu", "decoder": "generic", "context": 64}
    with tiermoe.load(directory, **options) as (model, tokenizer):
        served = served_of(model.tiermoe, tokenizer, "tiny", Sampling(max_tokens=4), 8)
        yield served
        served.worker.close(1)


def test_a_model_that_transformers_runs_gives_none(generic: Served) -> None:
    with running(create_app(generic)) as address:
        answer = httpx.post(f"{address}/v1/embeddings", json={"input": "a"}, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert "gives no embeddings" in answer.json()["error"]["message"]
