"""One case under llama.cpp, through llama-cpp-python's C interface: the text's own tokens, several sequences in one
context, and their logits.

The package's own `Llama` class does not expose ``use_extra_bufts``. By default llama.cpp copies 4-bit weights into
another order for its CPU kernels ("repacking"); the copy is anonymous memory, so a repacked model is no longer mapped
from its file, and one that is larger than memory is killed rather than paged.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from tiermoe.bench.started import figures, peak_resident_bytes, since_start

ATTENTION = ("default", "exact")
_MICRO_BATCH = 512  # tokens that are computed at once: llama.cpp's own default
_CELLS = 256  # llama.cpp rounds a sequence's context up to a multiple of this


class LlamaEngine:
    """One model with `sequences` sequences of up to `context` tokens each. Raises RuntimeError where llama.cpp fails.

    `attention` 'default' is llama.cpp's own choice (float16 KV cache, flash attention), 'exact' is float32.
    """

    def __init__(
        self,
        path: Path,
        context: int,
        threads: int,
        *,
        mmap: bool,
        repack: bool,
        attention: str = "default",
        sequences: int = 1,
    ) -> None:
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if mmap else llama_cpp.LLAMA_LOAD_MODE_NONE
        model_params.use_extra_bufts = repack
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {path}")
        tokens = context * sequences
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = -(-context // _CELLS) * _CELLS * sequences
        params.n_seq_max = sequences
        params.n_batch, params.n_ubatch = tokens, min(tokens, _MICRO_BATCH)
        params.n_threads = params.n_threads_batch = threads
        if attention == "exact":
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not make a context of {sequences} times {context} tokens")
        self._batch = llama_cpp.llama_batch_init(tokens, 0, 1)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._past = 0

    def clear(self) -> None:
        """Forget every token."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._past = 0

    def logits(self, ids: Sequence[int], *, every: bool) -> npt.NDArray[np.float32]:
        """Append `ids` to the first sequence: the logits after every one (T, vocabulary), or after the last
        (1, vocabulary)."""
        return self.append([ids], every=every)

    def append(self, rows: Sequence[Sequence[int]], *, every: bool = False) -> npt.NDArray[np.float32]:
        """Append as many tokens to each sequence, in one batch: the logits after every token (rows * T, vocabulary),
        or after each row's last (rows, vocabulary)."""
        batch, length, place = self._batch, len(rows[0]), 0
        for row, ids in enumerate(rows):
            for i, token in enumerate(ids):
                batch.token[place], batch.pos[place] = token, self._past + i
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
                batch.logits[place] = every or i == length - 1
                place += 1
        batch.n_tokens = place
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code} for {place} tokens after {self._past}")
        self._past += length
        pointer = llama_cpp.llama_get_logits(self._context)
        shown = place if every else len(rows)
        return np.ctypeslib.as_array(pointer, shape=(shown, self._vocabulary)).copy()


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
