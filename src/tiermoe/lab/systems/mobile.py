"""MoBiLE: half of a token's experts, and all where the next token is unsure. Gamma is the paper's until one has been
found for the model (`lab/measure/gamma.py`)."""

from __future__ import annotations

from tiermoe.lab.systems.ladder import Ladder
from tiermoe.offload.composition import Composition

PRESET = Composition(
    "mobile",
    "K/2 experts, and all K again where the next token is unsure, prefetched from the discarded pass",
    "MoBiLE (2025)",
    routing="confident", prefetch="recalled", profile="mobile", own={"ahead": 2},
)  # fmt: skip

LADDER = Ladder(
    "all K experts",
    (
        ("K/2 and fallback", {"routing": "all"}),
        ("prefetch in fallback", {"prefetch": "none"}),
        ("pre-gating", {"prefetch": "recalled"}),
    ),
    beyond={"prefetch": "recalled+next-gate"},
)
"""Section IV-B: offloading, MoBiLE, and MoBiLE with pre-gating beside it."""
