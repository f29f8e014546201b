"""What bounds the decoding speed of a run, from the routing that it had and what the machine was measured to do.

A pass reads the weights that it uses from memory and the experts that are missing from the drive, at the same time:
it takes at least max(weight bytes / memory bandwidth, bytes missed / drive bandwidth): docs/architecture.md, "Bounds".
With the misses that Belady's choice has in as many slots this is a bound that no cache without foresight reaches; with
the run's own misses it says what overlap and kernels leave undone. Key/value memory and activations are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiermoe.errors import TraceError
from tiermoe.lab.simulate.evictions import hits_of
from tiermoe.lab.trace import Header, LayerTrace, Pass, Trace


@dataclass(frozen=True, slots=True)
class Routing:
    """The routers' choices of one run."""

    header: Header
    bits: int  # of every expert
    prompt: list[Pass]
    decode: list[Pass]  # one for each decoded token, of all rows of the batch


@dataclass(frozen=True, slots=True)
class Ideal:
    """A decode pass at its best, on average."""

    hit_rate: float  # of Belady's choice
    missed_bytes: float  # by Belady's choice
    experts: float  # used in all layers together


def read_routing(path: Path, decoded: int) -> Routing | None:
    """What `run_tiermoe` wrote of a run of `decoded` tokens; None where it wrote nothing, as there is no one answer
    for the preset. TraceError where layers or tokens are missing: a bound of those that are there would be too high."""
    if not path.exists():
        return None
    with path.open() as file:
        first = json.loads(file.readline())
        passes = list(_passes(map(json.loads, file), len(first["experts"])))
    bits = first["bits"]
    header = Header(
        "", "", first["experts"], first["top_k"], {bits: first["expert_bytes"]}, times=None, holds=frozenset()
    )
    if any(not layer.experts for passed in passes for layer in passed.layers):
        raise TraceError("the routing of some layers was not seen, so the run has no bound: the engine did not tell it")
    kinds = {phase: [passed for passed in passes if passed.phase == phase] for phase in ("prefill", "decode")}
    if len(kinds["decode"]) != decoded:
        raise TraceError(f"the routing of {len(kinds['decode'])} of {decoded} tokens was seen, so the run has no bound")
    return Routing(header, bits, kinds["prefill"], kinds["decode"])


def _passes(events: Iterator[Any], layers: int) -> Iterator[Pass]:
    """Layers run in order, so a pass ends where the next layer is not a later one."""
    current: Pass | None = None
    last = layers
    for layer, phase, experts in events:
        if layer <= last:
            if current is not None:
                yield current
            current = Pass(phase, 0, [], [LayerTrace([], []) for _ in range(layers)])
        assert current is not None
        current.layers[layer] = LayerTrace(experts, [[] for _ in experts])
        last = layer
    if current is not None:
        yield current


def ideal(routing: Routing, slots: int, warm_prompt: bool, warm_output: bool) -> Ideal | None:
    """Belady's decoding in one pool of `slots`, after what ran before the clock started: nothing, the prompt, or the
    prompt and the output. None where nothing is decoded."""
    if not routing.decode:
        return None
    before = [*(routing.prompt if warm_prompt else []), *(routing.decode if warm_output else [])]
    passes = [_as(passed, "prefill", 0) for passed in before]
    passes += [_as(passed, passed.phase, 1) for passed in [*routing.prompt, *routing.decode]]
    slots = min(slots, sum(routing.header.experts))
    best = hits_of(Trace(routing.header, passes), "belady", slots, routing.bits).decode
    count = len(routing.decode)
    used = sum(len({e for row in layer.experts for e in row}) for passed in routing.decode for layer in passed.layers)
    return Ideal(best.counts.hit_rate or 0.0, best.bytes_read / count, used / count)


def _as(passed: Pass, phase: str, sequence: int) -> Pass:
    return Pass(phase, sequence, [], passed.layers)


def with_bounds(result: dict[str, Any], best: Ideal | None, memory_bandwidth: float) -> dict[str, Any]:
    """A run's result with `belady_hit_rate`, `bound_tok_s`, `own_bound_tok_s` and the fractions reached; None where
    there is no bound to give. memory_bandwidth: bytes per second."""
    named: dict[str, Any] = dict.fromkeys(
        ("belady_hit_rate", "bound_tok_s", "own_bound_tok_s", "fraction_of_bound", "fraction_of_own_bound")
    )
    speed = result["decode_tok_s"]
    if best is not None and speed:
        weights = result["dense_bytes"] + best.experts * result["slot_bytes"]
        own = result["bytes_per_token"] * result["batch"]
        for name, missed in (("bound", best.missed_bytes), ("own_bound", own)):
            bound_s = max(weights / memory_bandwidth, missed / result["link_bandwidth"])
            named[f"{name}_tok_s"] = result["batch"] / bound_s
            named[f"fraction_of_{name}"] = speed / named[f"{name}_tok_s"]
        named |= {"belady_hit_rate": best.hit_rate, "weight_bytes_per_pass": weights}
    return {**result, **named}
