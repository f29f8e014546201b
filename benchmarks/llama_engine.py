"""llama.cpp through llama-cpp-python's C interface: logits of a batch, of all tokens or of the last one.

The package's own `Llama` class does not expose ``use_extra_bufts``. By default llama.cpp copies 4-bit weights
into another order for its CPU kernels ("repacking"); the copy is anonymous memory, so a repacked model is no
longer mapped from its file, and one that is larger than memory is killed rather than paged.
"""

from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt

ATTENTION = ("default", "exact")


class Engine:
    """One model with one sequence of up to ``context`` tokens. Raises RuntimeError where llama.cpp fails.

    ``attention`` "default" is llama.cpp's own choice (float16 KV cache, flash attention), "exact" is float32.
    """

    def __init__(self, path: Path, context: int, threads: int, *, mmap: bool, repack: bool, attention: str) -> None:
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if mmap else llama_cpp.LLAMA_LOAD_MODE_NONE
        model_params.use_extra_bufts = repack
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = context
        params.n_threads = params.n_threads_batch = threads
        if attention == "exact":
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {path}")
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not make a context of {context} tokens")
        self._batch = llama_cpp.llama_batch_init(context, 0, 1)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._past = 0

    def clear(self) -> None:
        """Forget every token."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._past = 0

    def logits(self, ids: Sequence[int], *, every: bool) -> npt.NDArray[np.float32]:
        """Append ``ids``: the logits after every one (T, vocabulary), or after the last (1, vocabulary)."""
        batch = self._batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i] = token, self._past + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = every or i == len(ids) - 1
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code} for {len(ids)} tokens after {self._past}")
        self._past += len(ids)
        rows = len(ids) if every else 1
        pointer = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, shape=(rows, self._vocabulary)).copy()
