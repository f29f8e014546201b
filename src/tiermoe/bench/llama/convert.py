"""A checkpoint to GGUF; the quantised types through a bf16 file, removed afterwards."""

from __future__ import annotations

from pathlib import Path

import llama_cpp

from tiermoe.bench.llama.checkpoint import is_mxfp4
from tiermoe.bench.llama.gguf_file import FILE_TYPES, write_gguf

QUANTISED = {
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "mxfp4": llama_cpp.LLAMA_FTYPE_MOSTLY_MXFP4_MOE,
}
"""`mxfp4` keeps experts that are published so and puts the rest in 8 bits, as the files do that people download."""


def convert_to(model: Path, out: Path, kind: str, threads: int) -> None:
    """Writes `out`. ValueError for a checkpoint that llama.cpp would compute otherwise, RuntimeError where it fails."""
    if kind in FILE_TYPES:
        write_gguf(model, out, kind)
        return
    if kind == "mxfp4" and not is_mxfp4(model):
        raise ValueError(f"the experts of {model} are not stored in MXFP4; choose another type")
    whole = out.with_suffix(".bf16.gguf")
    try:
        write_gguf(model, whole, "bf16", keep_mxfp4=kind == "mxfp4")
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = QUANTISED[kind], threads
        if llama_cpp.llama_model_quantize(str(whole).encode(), str(out).encode(), params):
            raise RuntimeError(f"llama.cpp could not quantise {whole} to {kind}")
    finally:
        whole.unlink(missing_ok=True)
