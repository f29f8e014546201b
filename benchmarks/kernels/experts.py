"""One token through its experts: all in one call beside one by one."""

from typing import Any

import torch

from benchmarks.kernels.weights import Turns, copy, nbytes, packed, random
from benchmarks.rounds import rates, ratios, timed
from tiermoe.kernels.expert import SlotViews, expert_kernel
from tiermoe.kernels.gates import silu_gate
from tiermoe.store.layout import ExpertFormat
from tiermoe.types import MoeLayer, Part

TOGETHER, ALONE = "together", "one by one"


def measure(hidden: int, inner: int, top_k: int, memory: int, rounds: int) -> dict[str, Any]:
    """GB/s of packed bytes, microseconds a token of one layer, and how many times as fast one call is. memory: bytes of
    the experts that are taken in turn."""
    sizes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    made = {name: packed(*size) for name, size in sizes.items()}
    parts = tuple(Part(name, size) for name, size in sizes.items())
    encodings = {name: encoding for name, (encoding, _) in made.items()}
    form = ExpertFormat(MoeLayer("experts", top_k, top_k, parts), 4, torch.bfloat16, encodings)
    kernel = expert_kernel(form, silu_gate, "cpu")
    each = sum(nbytes(fields) for _, fields in made.values())
    tokens = max(memory // (each * top_k), 1)
    experts = [SlotViews({name: copy(fields) for name, (_, fields) in made.items()}) for _ in range(tokens * top_k)]
    turns, x = Turns(experts), random(1, hidden, 1)

    def together() -> None:
        for _ in range(tokens):
            kernel.together(x, list(turns.take(top_k)))

    def alone() -> None:
        for views in turns.take(tokens * top_k):
            kernel(x, views)

    seconds = timed({TOGETHER: together, ALONE: alone}, rounds)
    return {
        "kernel": type(kernel).__name__,
        "hidden": hidden, "inner": inner, "top_k": top_k, "packed_bytes": each, "all_bytes": each * len(experts),
        "ways": {
            name: {
                "gb_s": rates(took, each * len(experts) / 1e9),
                "us_a_token": rates([1 / one for one in took], 1e6 / tokens),
            }
            for name, took in seconds.items()
        },
        "ratios": {TOGETHER: ratios(seconds, TOGETHER)},
    }  # fmt: skip
