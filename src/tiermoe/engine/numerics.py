"""What the bits of keys and values follow from, beside the tokens: who keeps them longer than a process lives compares
it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import xxhash

from tiermoe import native
from tiermoe.formats.store import precision_key
from tiermoe.kernels.linear import machine_layout
from tiermoe.platform.machine import installed_version, processor_identity

if TYPE_CHECKING:
    from tiermoe.engine.engine import Engine


def numerics(engine: Engine) -> dict[str, Any]:
    """Values that JSON can hold, by name: the checkpoint, every precision, how prompts are cut, what computes, and the
    parts that can change tokens. The memory budget, and what is cached, are not among them: they change no bit."""
    settings, composition = engine.settings, engine.composition
    layout = machine_layout(engine.device.type)
    return {
        "version": installed_version("tiermoe") or "",
        "torch": torch.__version__,
        "checkpoint": engine.store.source.fingerprint,
        "dtype": str(engine.dtype),
        "experts": [
            precision_key(bits, settings.quantizer_used, layout, composition.unit) for bits in engine.precisions
        ],
        "dense": engine.plan.dense_bits,
        "kv_bits": settings.kv_bits,
        **({"mtp": True} if engine.mtp is not None else {}),  # whose keys and values a slab has too
        "chunk": settings.chunk,
        "threads": torch.get_num_threads(),
        "decoder": type(engine.decoder).__name__,
        "kernels": native.instruction_set(),
        "build": _build(),
        "processor": [torch.backends.cpu.get_cpu_capability(), processor_identity()],
        "lossy": {name: str(value) for name, value in composition.settings().items()} if engine.lossy else {},
    }


def _build() -> str:
    """A checksum of the native kernels; empty where there are none."""
    file = native.library()
    return xxhash.xxh3_64(file.read_bytes()).hexdigest() if file else ""
