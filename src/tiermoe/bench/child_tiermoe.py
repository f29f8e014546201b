"""One case under tiermoe, in a process of its own.

    python -m tiermoe.bench.child_tiermoe '{"model": …, "options": …, "ids": …, "prompt": …, "warm": …, "routing": …}'

Prints one JSON object. After the pass that is measured come, where `routing` names a file, one in which the routers'
choices go there, and one in which kernels are timed.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiermoe.bench.machine import device_bytes_read
from tiermoe.bench.started import since_start

_SPLIT = 32  # decoded tokens at most in which kernels are timed


@dataclass(slots=True)
class _Measured:
    """The phases of the pass that is measured, and the peak at its end."""

    prefill: Any
    decode: Any
    first_token_s: float
    peak_memory_bytes: int
    device_bytes: int | None


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """job: `model`, `options` of `tiermoe.load`, `ids` (a .npy of (batch, prompt + output) token ids), `prompt`, `warm`
    (tokens of each row that run once before the clock starts), `routing` (a file to write, or None)."""
    engine = _started(job["model"], {"warm": False, **job["options"]})
    load_s = since_start()
    import numpy as np
    import torch

    ids = torch.from_numpy(np.load(job["ids"]))
    rows, length = ids.shape
    with torch.inference_mode():
        measured = _timed(engine, ids, job["prompt"], job["warm"])
        bandwidth = engine.bandwidth
        if job["routing"]:
            _record(engine, ids, job["prompt"], Path(job["routing"]))
        kernel_s = _kernels(engine, ids, job["prompt"])
    phase = measured.decode if length > job["prompt"] else measured.prefill
    stats = engine.stats()
    return {
        "prefill_tok_s": measured.prefill.tok_s,
        "decode_tok_s": measured.decode.tok_s or None,
        "first_token_s": measured.first_token_s,
        "load_s": load_s,
        "peak_memory_bytes": measured.peak_memory_bytes,
        "token_s": phase.seconds / phase.tokens,
        "kernel_s": kernel_s,
        "wait_s": phase.wait_s / phase.tokens,
        "hit_rate": phase.hit_rate,
        "bytes_per_token": phase.bytes_per_token,
        "device_bytes_per_token": _each(measured.device_bytes, measured.decode.tokens),
        "compute_bound_tok_s": phase.bound_tok_s(bandwidth),
        "link_bandwidth": bandwidth,
        "slots": engine.plan.slots,
        "slot_bytes": engine.plan.slot_bytes,
        "all_experts": engine.plan.all_slots,
        "dense_bytes": engine.plan.dense - engine.plan.looked_up,  # read whole for each pass
        "planned_bytes": engine.plan.total,
        "lossy": engine.lossy,
        "lanes": stats["lanes"],
        "direct_io": stats["direct_io"],
        "batch": rows,
    }


@dataclass(slots=True)
class _Device:
    """What a drive has read within a stretch, for all processes; None where nobody counts."""

    nbytes: int | None = None


@contextlib.contextmanager
def _device(folder: Path) -> Iterator[_Device]:
    found, before = _Device(), device_bytes_read(folder)
    yield found
    after = device_bytes_read(folder)
    found.nbytes = None if before is None or after is None else after - before


def _started(model: str, options: dict[str, Any]) -> Any:
    """The engine that `tiermoe run` has with these options."""
    from tiermoe.process import footprint

    footprint.import_libraries(own_process=True)
    from tiermoe.config import settings
    from tiermoe.engine.load import start
    from tiermoe.model.blueprint import inspect_model
    from tiermoe.model.hub import resolve_model

    asked = settings(**options)
    return start(inspect_model(resolve_model(model), model, asked.store), asked)


def _timed(engine: Any, ids: Any, prompt: int, warm: int) -> _Measured:
    from tiermoe.bench.feeding import EngineFeeding
    from tiermoe.decide.phase_costs import PhaseCosts
    from tiermoe.process.footprint import peak_resident_bytes

    rows, length = ids.shape
    first_token_s = 0.0
    if warm:
        feeding = EngineFeeding(engine, ids, prompt)
        feeding.prompt()
        first_token_s = since_start()
        feeding.decode(warm)
    feeding, prefill, decode = EngineFeeding(engine, ids, prompt), PhaseCosts(), PhaseCosts()
    with prefill.measured(engine.snapshot, rows * prompt):
        feeding.prompt()
    first_token_s = first_token_s or since_start()
    with _device(engine.store.root) as decoding, decode.measured(engine.snapshot, rows * (length - prompt)):
        feeding.decode(length)
    return _Measured(prefill, decode, first_token_s, peak_resident_bytes(), decoding.nbytes)


def _record(engine: Any, ids: Any, prompt: int, path: Path) -> None:
    """One line of JSON for each layer of each pass, written as it runs: memory is what is being measured. The first
    line says what the model is; there is none of them where no one cache of equal experts serves it exactly."""
    if engine.lossy or len(engine.precisions) > 1 or engine.composition.unit != "expert":
        return
    from tiermoe.bench.feeding import EngineFeeding
    from tiermoe.engine.observer import Observer
    from tiermoe.kernels import machine_layout
    from tiermoe.measure.write_trace import expert_bytes

    layers = engine.store.layers
    sizes = expert_bytes(engine.store, engine.settings.quantizer_used, machine_layout("cpu"))
    header = {
        "experts": [layer.experts for layer in layers],
        "top_k": [layer.top_k for layer in layers],
        "bits": engine.precisions[0],
        "expert_bytes": sizes[engine.precisions[0]],
    }
    with path.open("w") as file:
        file.write(json.dumps(header) + "\n")

        class Written(Observer):
            def on_route(self, routed: Any, hidden: Any) -> None:
                file.write(json.dumps([routed.layer, routed.phase, list(routed.experts)]) + "\n")

        engine.observe(Written())
        feeding = EngineFeeding(engine, ids, prompt)
        feeding.prompt()
        feeding.decode(ids.shape[1])
        engine.observe(None)


def _kernels(engine: Any, ids: Any, prompt: int) -> float:
    """Seconds of kernels for each token of the phase that is measured."""
    from tiermoe.bench.feeding import EngineFeeding
    from tiermoe.bench.kernel_clock import KernelClock

    rows, length = ids.shape
    until = min(length, prompt + _SPLIT)
    feeding = EngineFeeding(engine, ids, prompt)
    with KernelClock(engine) as clock:
        feeding.prompt()
        before = clock.seconds
        if length == prompt:
            return float(before / (rows * prompt))
        feeding.decode(until)
    return float((clock.seconds - before) / (rows * (until - prompt)))


def _each(nbytes: int | None, tokens: int) -> float | None:
    return nbytes / tokens if nbytes is not None and tokens else None


def main() -> None:
    from tiermoe.errors import TiermoeError

    try:
        print(json.dumps(measure(json.loads(sys.argv[1]))))
    except TiermoeError as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
