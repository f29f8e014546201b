"""One case under llama.cpp: the text's own tokens, fed as every engine is fed them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from tiermoe.bench.llama.llama_engine import LlamaEngine
from tiermoe.bench.started import figures, peak_resident_bytes, since_start


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """job: `gguf`, `ids` (a .npy of (batch, prompt + output) token ids), `prompt`, `threads`, `warm` (tokens of each
    row that run once before the clock starts), `mmap`, `repack`. RuntimeError where llama.cpp fails."""
    ids = np.load(job["ids"])
    prompt, (rows, length) = job["prompt"], ids.shape
    engine = LlamaEngine(
        Path(job["gguf"]), length, job["threads"], mmap=job["mmap"], repack=job["repack"], sequences=rows
    )
    load_s = since_start()
    first_token_s = 0.0
    if job["warm"]:
        engine.append(ids[:, :prompt].tolist())
        first_token_s = since_start()
        for at in range(prompt, job["warm"]):
            engine.append(ids[:, at : at + 1].tolist())
        engine.clear()
    began = time.perf_counter()
    engine.append(ids[:, :prompt].tolist())
    prefilled = time.perf_counter()
    first_token_s = first_token_s or since_start()
    for at in range(prompt, length):
        engine.append(ids[:, at : at + 1].tolist())
    decode_s = time.perf_counter() - prefilled
    return {
        **figures(rows, prompt, length, prefilled - began, decode_s, first_token_s, load_s),
        "version": f"llama-cpp-python {llama_cpp.__version__}",
    }


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Answers a prompt greedily as llama.cpp does by default: its file mapped, its weights repacked.

    job: `gguf`, `ids` (a .npy of (1, prompt) token ids), `tokens` of the answer, `threads`. Seconds: `imports_s` since
    the process was started, `seconds` from there to the last token, `load_s` and `ttft_s` of them. RuntimeError where
    llama.cpp fails."""
    imports_s = since_start()
    began = time.perf_counter()
    ids, tokens = np.load(job["ids"])[0].tolist(), job["tokens"]
    engine = LlamaEngine(Path(job["gguf"]), len(ids) + tokens, job["threads"], mmap=True, repack=True)
    loaded = time.perf_counter()
    token = int(engine.logits(ids, every=False)[-1].argmax())
    first = time.perf_counter()
    for _ in range(tokens - 1):
        token = int(engine.logits([token], every=False)[-1].argmax())
    ended = time.perf_counter()
    return {
        "imports_s": imports_s,
        "load_s": loaded - began,
        "ttft_s": first - loaded,
        "decode_tok_s": (tokens - 1) / (ended - first),
        "seconds": ended - began,
        "process_s": since_start(),
        "peak_memory_bytes": peak_resident_bytes(),
    }
