"""llama.cpp through llama-cpp-python's C interface: several sequences in one context, and their logits.

The package's own `Llama` class does not expose ``use_extra_bufts``. By default llama.cpp copies 4-bit weights into
another order for its CPU kernels ("repacking"); the copy is anonymous memory, so a repacked model is no longer mapped
from its file, and one that is larger than memory is killed rather than paged.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt

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
