"""One case under tiermoe, in a process of its own.

    python -m tiermoe.lab.bench.run_tiermoe '{"model": …, "options": …, "ids": …, "prompt": …, "warm": …, "routing": …}'

Prints one JSON object. The pass that is measured is followed by one in which the routers' choices are written, where
`routing` names a file, and by one in which kernels are timed: neither disturbs what is measured.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tiermoe.batch import Batch, decode, prompt
from tiermoe.lab.bench.run_peer import since_start

_SPLIT = 32  # decoded tokens at most in which kernels are timed


class Feeding:
    """A text's own tokens fed to an engine, with an empty KV cache: the routing of real text, the same for every
    engine.

    ids: token ids (rows, prompt + output); first: tokens of each row that are the prompt.
    """

    def __init__(self, engine: Any, ids: Any, first: int) -> None:
        self._engine, self._first = engine, first
        self._ids: list[list[int]] = ids.tolist()
        self._cache = engine.new_cache(len(self._ids), len(self._ids[0]))
        self._slabs = [self._cache.open() for _ in self._ids]

    def prompt(self) -> None:
        """Runs the rows' prompts."""
        rows = [prompt(slab, ids[: self._first]) for slab, ids in zip(self._slabs, self._ids, strict=True)]
        self._engine.step(Batch(tuple(rows)), self._cache)

    def decode(self, until: int) -> None:
        """Runs the tokens from the prompt's end to position `until`, one of each row at a time."""
        for at in range(self._first, until):
            rows = [decode(slab, at, ids[at]) for slab, ids in zip(self._slabs, self._ids, strict=True)]
            self._engine.step(Batch(tuple(rows)), self._cache)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Figures of one run.

    job: `model`, `options` of `tiermoe.load`, `ids` (a .npy of (batch, prompt + output) token ids), `prompt`, `warm`
    (tokens of each row that run once before the clock starts), `routing` (a file to write, or None).
    """
    engine = start_engine(job["model"], {"warm": False, **job["options"]})
    load_s = since_start()
    import numpy as np
    import torch

    ids = torch.from_numpy(np.load(job["ids"]))
    with torch.inference_mode():
        found = _timed(engine, ids, job["prompt"], job["warm"])
        if job["routing"]:
            write_routing(engine, ids, job["prompt"], Path(job["routing"]))
        kernel_s = _kernel_seconds(engine, ids, job["prompt"])
    stats = engine.stats()
    return {
        **found,
        "load_s": load_s,
        "kernel_s": kernel_s,
        "slots": engine.plan.slots,
        "slot_bytes": engine.plan.slot_bytes,
        "all_experts": engine.plan.all_slots,
        "dense_bytes": engine.plan.dense - engine.plan.looked_up,  # read whole for each pass
        "planned_bytes": engine.plan.total,
        "lossy": engine.lossy,
        "kernels": engine.kernels,
        "bits": engine.settings.bits_used,
        "lanes": stats["lanes"],
        "direct_io": stats["direct_io"],
        "batch": len(ids),
    }


def start_engine(model: str, options: dict[str, Any]) -> Any:
    """The engine that `tiermoe run` has with these options."""
    from tiermoe.platform import process_memory

    process_memory.import_libraries(own_process=True)
    from tiermoe.config import settings
    from tiermoe.engine.load import start
    from tiermoe.model.hf.blueprint import inspect_model
    from tiermoe.model.hf.hub import resolve_model

    asked = settings(**options)
    return start(inspect_model(resolve_model(model), model, asked.store), asked)


def _timed(engine: Any, ids: Any, prompt: int, warm: int) -> dict[str, Any]:
    """The pass that is measured, after a warm one."""
    from tiermoe.metrics import Metrics

    rows, length = ids.shape
    first_token_s = 0.0
    if warm:
        feeding = Feeding(engine, ids, prompt)
        feeding.prompt()
        first_token_s = since_start()
        feeding.decode(warm)
    feeding, metrics = Feeding(engine, ids, prompt), Metrics()
    with metrics.prefill.measured(engine.snapshot, rows * prompt):
        feeding.prompt()
    first_token_s = first_token_s or since_start()
    before = device_bytes_read(engine.store.root)
    with metrics.decode.measured(engine.snapshot, rows * (length - prompt)):
        feeding.decode(length)
    after = device_bytes_read(engine.store.root)
    decode, bandwidth = engine.complete(metrics).decode, metrics.bandwidth
    counted = before is not None and after is not None and decode.tokens
    phase = decode if length > prompt else metrics.prefill
    return {
        "prefill_tok_s": metrics.prefill_tok_s,
        "decode_tok_s": metrics.decode_tok_s or None,
        "first_token_s": first_token_s,
        "peak_memory_bytes": metrics.peak_memory_bytes,
        "token_s": phase.seconds / phase.tokens,
        "wait_s": phase.wait_s / phase.tokens,
        "hit_rate": phase.hit_rate,
        "bytes_per_token": phase.bytes_per_token,
        "device_bytes_per_token": (after - before) / decode.tokens if counted else None,  # type: ignore[operator]
        "compute_bound_tok_s": phase.bound_tok_s(bandwidth),
        "link_bandwidth": bandwidth,
    }


def device_bytes_read(folder: Path) -> int | None:
    """Bytes that the block device of `folder` has read since the machine started, for all processes
    (/sys/dev/block/…/stat); None where nobody counts them."""
    number = os.stat(folder).st_dev
    try:
        text = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat").read_text()
    except OSError:
        return None
    return int(text.split()[2]) * 512


def write_routing(engine: Any, ids: Any, prompt: int, path: Path) -> None:
    """Runs the rows and writes the routers' choices into a file that `tiermoe.lab.bench.engines` reads: a header of the
    model, then one line of JSON for each layer of each pass, written as it runs, since memory is what is measured.

    Writes nothing where no one cache of equal experts serves the model exactly.
    """
    if engine.lossy or len(engine.precisions) > 1 or engine.composition.unit != "expert":
        return
    from tiermoe.engine.observer import Observer
    from tiermoe.lab.measure.record import expert_bytes

    layers = engine.store.layers
    sizes = expert_bytes(engine.store, engine.settings.quantizer_used)
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
        feeding = Feeding(engine, ids, prompt)
        feeding.prompt()
        feeding.decode(ids.shape[1])
        engine.observe(None)


def _kernel_seconds(engine: Any, ids: Any, prompt: int) -> float:
    """Seconds of kernels for each token of the phase that is measured: of experts, and of all other weights. What is
    left of a token's time, less waiting for the link, is the framework's own. Timing every call costs a little."""
    from tiermoe.engine.observer import Observer

    class Clock(Observer):
        layers, kernels = False, True
        seconds = 0.0

        def on_kernel(self, kind: str, seconds: float) -> None:
            self.seconds += seconds

    rows, length = ids.shape
    until = min(length, prompt + _SPLIT)
    feeding, clock = Feeding(engine, ids, prompt), Clock()
    engine.observe(clock)
    feeding.prompt()
    before = clock.seconds
    feeding.decode(until)
    engine.observe(None)
    per_token = before / prompt if length == prompt else (clock.seconds - before) / (until - prompt)
    return float(per_token / rows)


def main() -> None:
    from tiermoe.errors import TiermoeError
    from tiermoe.offload.plugins import load_named

    try:
        load_named()
        print(json.dumps(measure(json.loads(sys.argv[1]))))
    except TiermoeError as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
