"""The two ways in which lm-eval asks a model: in this process, and over HTTP.

Both are told to see the same tokens. lm-eval's API class leaves room for a token that the server generates, and so
counts two more than its transformers class does for the same windows.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

import tiermoe
from benchmarks.serving import answers, free_port
from tiermoe.errors import ConfigError
from tiermoe.model.hub import load_tokenizer, resolve_model

MORE = 2
"""Tokens of context beside a window's: the one that stands before it, and the one that a server generates."""


@contextmanager
def in_process(model: str, length: int, options: Mapping[str, Any]) -> Iterator[Any]:
    """lm-eval's transformers class on the model that `tiermoe.load` returns. length: of windows, in tokens."""
    from lm_eval.models.huggingface import HFLM

    loaded, tokenizer = tiermoe.load(model, context=length + MORE, **options)
    try:
        yield HFLM(
            pretrained=loaded,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=1,  # several are padded: other shapes, other roundings
            max_length=length,
            add_bos_token=begins(tokenizer),
            softmax_dtype="float64",  # of sums too; else that of the logits, which may have 8 bits of mantissa
        )
    finally:
        loaded.tiermoe.close()


@contextmanager
def over_http(model: str, address: str, length: int, together: int) -> Iterator[Any]:
    """lm-eval's class for a completions endpoint. together: prompts a request."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    directory = resolve_model(model)
    yield LocalCompletionsAPI(
        model=name_at(address),
        base_url=f"{address}/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=str(directory),
        add_bos_token=begins(load_tokenizer(directory)),
        batch_size=together,
        max_length=length + MORE,
        timeout=3600,
    )


def begins(tokenizer: Any) -> bool:
    """Whether a model's texts begin with a token of their own: lm-eval's API class adds it only where it is told to."""
    return bool(tokenizer("").input_ids)


@contextmanager
def server(model: str, length: int, options: Mapping[str, Any]) -> Iterator[str]:
    """The address of `tiermoe serve` in a process of its own, once it answers. ConfigError where it ends before."""
    port = free_port()
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = ["serve", model, "--port", str(port), "--context", str(length + MORE), "--max-batch", "1", *words]
    process = subprocess.Popen([sys.executable, "-m", "tiermoe", *command])
    address = f"http://127.0.0.1:{port}"
    try:
        while not answers(address):
            if process.poll() is not None:
                raise ConfigError(f"tiermoe serve ended with {process.returncode} before it answered; see above")
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait()


def name_at(address: str) -> str:
    """What a server's model is called."""
    name: str = httpx.get(f"{address}/v1/models").raise_for_status().json()["data"][0]["id"]
    return name
