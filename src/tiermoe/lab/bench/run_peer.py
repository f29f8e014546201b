"""One run of transformers or llama.cpp in a process of its own; prints one JSON object.

    PYTHON run_peer.py '{"task": "transformers" | "llama.cpp", …}'

An interpreter that holds llama-cpp-python runs this file by its path. That interpreter needs numpy, and neither tiermoe
nor torch nor transformers, so this file imports nothing of tiermoe.

`Llama` of llama-cpp-python does not expose `use_extra_bufts`, so llama.cpp is driven through its C interface. By
default llama.cpp copies 4-bit weights into another order for its CPU kernels ("repacking"). The copy is anonymous
memory: a repacked model is no longer mapped from its file, and one that is larger than memory is killed rather than
paged.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BEGAN = "TIERMOE_BENCH_BEGAN"
"""Environment variable: the monotonic clock's seconds when the process was started."""
ATTENTION = ("default", "exact")
"""Of `LlamaEngine`: llama.cpp's own choice (float16 KV cache, flash attention), or float32."""

_MICRO_BATCH = 512  # tokens that are computed at once: llama.cpp's own default
_CELLS = 256  # llama.cpp rounds a sequence's context up to a multiple of this


def since_start() -> float:
    """Seconds since this process was started; 0 where nobody noted the start."""
    began = os.environ.get(BEGAN)
    return time.monotonic() - float(began) if began else 0.0


def peak_resident_bytes() -> int:
    """Largest resident set that this process has had, in bytes (VmHWM; 0 on other systems than Linux)."""
    try:
        with open("/proc/self/status", encoding="utf-8") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), 0)
    except OSError:
        return 0


def timed_run(feed: Callable[[int, int], object], clear: Callable[[], object], job: dict[str, Any]) -> dict[str, Any]:
    """Speeds of one run of a peer whose model is loaded.

    feed: runs the tokens [begin, end) of every row behind what ran before; clear: forgets every token. job: `shape`
    (rows, tokens), `prompt` tokens, `warm` tokens of each row that run once before the clock starts.
    """
    (rows, length), prompt, load_s, first_token_s = job["shape"], job["prompt"], since_start(), 0.0

    def decode(until: int) -> None:
        for at in range(prompt, until):
            feed(at, at + 1)

    if job["warm"]:
        feed(0, prompt)
        first_token_s = since_start()
        decode(job["warm"])
        clear()
    began = time.perf_counter()
    feed(0, prompt)
    prefilled = time.perf_counter()
    first_token_s = first_token_s or since_start()
    decode(length)
    decode_s = time.perf_counter() - prefilled
    return {
        "prefill_tok_s": rows * prompt / (prefilled - began),
        "decode_tok_s": rows * (length - prompt) / decode_s if length > prompt else None,
        "first_token_s": first_token_s,
        "load_s": load_s,
        "peak_memory_bytes": peak_resident_bytes(),
    }


def run_transformers(job: dict[str, Any]) -> dict[str, Any]:
    """One case under transformers: the checkpoint's own dtype, its default implementation of experts.

    job: `model`, `ids` (a .npy of (batch, prompt + output) token ids), `prompt`, `warm`, `threads`. With `cpu_bytes`
    and `offload` accelerate puts what goes beyond so many bytes into that folder.
    """
    import numpy as np
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {}
    if job.get("offload"):
        options = {"device_map": "auto", "max_memory": {"cpu": job["cpu_bytes"]}, "offload_folder": job["offload"]}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype="auto", trust_remote_code=False, **options
    )
    model.eval()
    takes = inspect.signature(model.forward).parameters
    cache_name = "cache" if "cache" in takes else "past_key_values"  # before transformers 5.24
    ids, cache = torch.from_numpy(np.load(job["ids"])), None

    def feed(begin: int, end: int) -> None:
        nonlocal cache
        output = model(input_ids=ids[:, begin:end], use_cache=True, logits_to_keep=1, **{cache_name: cache})
        cache = output[cache_name]

    def clear() -> None:
        nonlocal cache
        cache = None

    with torch.inference_mode():
        found = timed_run(feed, clear, {**job, "shape": tuple(ids.shape)})
    dtype = str(model.dtype).removeprefix("torch.")
    return {**found, "version": f"transformers {transformers.__version__}, {dtype}"}


class LlamaEngine:
    """A GGUF file under llama.cpp with `sequences` sequences of up to `context` tokens each. Raises RuntimeError where
    llama.cpp fails.

    mmap: the file is mapped, else read whole; repack: weights are copied into the order of the CPU kernels; attention:
    one of `ATTENTION`.
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
        import llama_cpp

        self._llama = llama_cpp
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
        self._past = 0  # tokens of each sequence so far

    def clear(self) -> None:
        """Forgets every token."""
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        self._past = 0

    def append(self, rows: Sequence[Sequence[int]], *, every: bool = False) -> Any:
        """Appends as many tokens to each sequence, in one batch. Returns float32 logits: after every token (rows * T,
        vocabulary), or after each row's last (rows, vocabulary)."""
        import numpy as np

        batch, length, place = self._batch, len(rows[0]), 0
        for row, ids in enumerate(rows):
            for i, token in enumerate(ids):
                batch.token[place], batch.pos[place] = token, self._past + i
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
                batch.logits[place] = every or i == length - 1
                place += 1
        batch.n_tokens = place
        if code := self._llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code} for {place} tokens after {self._past}")
        self._past += length
        pointer = self._llama.llama_get_logits(self._context)
        shown = place if every else len(rows)
        return np.ctypeslib.as_array(pointer, shape=(shown, self._vocabulary)).copy()


def run_llama(job: dict[str, Any]) -> dict[str, Any]:
    """One case under llama.cpp. job: `gguf`, `ids` (a .npy of (batch, prompt + output) token ids), `prompt`, `warm`,
    `threads`, `mmap`, `repack`. RuntimeError where llama.cpp fails."""
    import llama_cpp
    import numpy as np

    ids = np.load(job["ids"])
    rows, length = ids.shape
    engine = LlamaEngine(
        Path(job["gguf"]), length, job["threads"], mmap=job["mmap"], repack=job["repack"], sequences=rows
    )
    found = timed_run(
        lambda begin, end: engine.append(ids[:, begin:end].tolist()), engine.clear, {**job, "shape": (rows, length)}
    )
    return {**found, "version": f"llama-cpp-python {llama_cpp.__version__}"}


_TASKS = {"transformers": run_transformers, "llama.cpp": run_llama}


def main() -> None:
    job = json.loads(sys.argv[1])
    try:
        print(json.dumps(_TASKS[job["task"]](job)))
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        if job["task"] == "transformers":
            raise  # its messages need the kind of the error beside them
        sys.exit(str(error))


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]  # its modules are no packages
    main()
