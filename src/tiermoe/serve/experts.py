"""Where the experts of a model are, for a page or a monitor to show."""

from __future__ import annotations

from typing import Any

from tiermoe.types import ExpertKey


def experts_of(engine: Any) -> dict[str, Any]:
    """Of each MoE layer, lists by expert: `bits` in memory (0: not there), `arriving` (bits that are being read, or
    wait to be; 0: none), `uses` (tokens served since the start while experts came and went: once all are in memory, one
    call computes a layer and counts none). Callable while the engine runs."""
    cache, precisions = engine.controller.cache, sorted(engine.precisions, reverse=True)

    def highest(layer: int, expert: int, there: Any) -> int:
        return next((bits for bits in precisions if there(ExpertKey(layer, expert, bits))), 0)

    layers = []
    for index, uses in enumerate(engine.scheduler.uses.counts):
        its = range(len(uses))
        layers.append(
            {
                "bits": [highest(index, expert, lambda key: cache.slot(key) is not None) for expert in its],
                "arriving": [highest(index, expert, cache.in_flight) for expert in its],
                "uses": list(uses),
            }
        )
    return {"precisions": precisions, "layers": layers}
