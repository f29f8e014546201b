"""Decodes given token ids in this process and prints what that took: a child of `benchmarks.full_size`, which runs it
with this tree's tiermoe or an earlier one's."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from tiermoe import native
from tiermoe.batch import Batch, Row, decode, prompt
from tiermoe.cli.session import open_session
from tiermoe.engine.observer import Observer
from tiermoe.formats.store import precision_key
from tiermoe.types import Routed


class Clock(Observer):
    """The seconds of all kernels."""

    layers, kernels = False, True

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_kernel(self, kind: str, seconds: float) -> None:
        self.seconds += seconds


class Choices(Observer):
    """The experts of a token, by MoE layer."""

    def __init__(self) -> None:
        self.chosen: dict[int, list[int]] = {}

    def on_route(self, routed: Routed, hidden: Any) -> None:
        self.chosen[routed.layer] = routed.experts[0]


class Decoding:
    """A sequence of a model that has read a prompt."""

    def __init__(self, engine: Any, ids: Sequence[int]) -> None:
        self.engine, self.cache = engine, engine.new_cache(1)
        self.row = prompt(self.cache.open(), ids)
        self.prompt = self._stepped([self.row], len(ids))

    def feed(self, ids: Sequence[int]) -> dict[str, float]:
        """What decoding these took, a token: milliseconds, in all and waiting; bytes read; hits of the experts."""
        first = self.row.end
        rows = [decode(self.row.slab, first + index, token) for index, token in enumerate(ids)]
        self.row = rows[-1]
        return self._stepped(rows, len(ids))

    def _stepped(self, rows: Sequence[Row], count: int) -> dict[str, float]:
        before = self.engine.snapshot()
        for row in rows:
            self.engine.step(Batch((row,)), self.cache)
        used = self.engine.snapshot().since(before)
        return {
            "ms": 1000 * used.seconds / count,
            "wait_ms": 1000 * used.wait_s / count,
            "bytes": used.bytes_read / count,
            "hits": used.hit_rate,
        }


def run(model: str, options: dict[str, Any], prompt: list[int], before: list[int], measured: list[int], again: int
        ) -> dict[str, Any]:  # fmt: skip
    """Reads the prompt, decodes `before`, and `measured` under the clock. Then the last token `again` times, whose
    experts have come: `resident`, and once more with the kernels timed, `kernels_ms`."""
    length = len(prompt) + len(before) + len(measured) + 2 * again + 2
    session = open_session(
        model, {"context": length, "warm": False, **options}, lambda tokenizer, blueprint, chat: None
    )
    engine = session.engine
    decoding = Decoding(engine, prompt)
    first = decoding.feed(before)
    found = decoding.feed(measured)
    choices, clock = Choices(), Clock()
    engine.observe(choices)
    decoding.feed(measured[-1:])
    engine.observe(None)
    resident = decoding.feed(measured[-1:] * again)
    engine.observe(clock)
    decoding.feed(measured[-1:] * again)
    engine.observe(None)
    stats, bandwidth = engine.stats(), engine.service.bandwidth
    kept = ("peak_memory_bytes", "lanes", "direct_io", "mapped", "prefetching")
    chosen = [choices.chosen[layer] for layer in sorted(choices.chosen)]
    engine.close()
    bits = engine.precisions[0]
    key = precision_key(bits, engine.settings.quantizer_used)
    return {
        **found,
        "prompt": decoding.prompt,
        "first": first,
        "resident": resident,
        "kernels_ms": 1000 * clock.seconds / again,
        "chosen": chosen,
        "lossy": engine.lossy,
        "bits": bits,
        "kernels": native.instruction_set() or "torch",
        "expert_bytes": [layer.extents[0].nbytes for layer in engine.store.precisions[key].layers],
        "slots": stats["cache_slots"],
        "all_slots": stats["all_experts"],
        "load_s": session.load_s,
        "bandwidth": bandwidth,
        **{name: stats[name] for name in kept},
    }


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))))
