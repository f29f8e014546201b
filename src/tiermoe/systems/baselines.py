"""What the papers compare themselves with."""

from __future__ import annotations

from tiermoe.offload.composition import Composition

BASELINES = (
    Composition(
        "io-free", "baseline: every expert in memory", "EdgeMoE, section 5", cache="all"
    ),
    Composition(
        "load-on-demand", "baseline: no expert cache, room for one layer's K (LoD, IO-EXP)",
        "Fate, section 5; EdgeMoE, section 5", cache="none",
    ),
    Composition(
        "io-qexp", "baseline: load on demand with channel-wise 4 bits", "EdgeMoE, section 5",
        cache="none", bits=4, quantizer="linear",
    ),
    Composition(
        "sti", "baseline: layer by layer, everything quantised, EdgeMoE's memory", "EdgeMoE, section 5",
        routing="layer", prefetch="layer", bits=4, dense_bits=4, quantizer="linear",
    ),
    Composition(
        "eap", "baseline: prediction from the one previous block's choices, Fate's cache", "Fate, section 5",
        prefetch="path", cache="arc", allotment="shallow", profile="fate", own={"path": 1},
    ),
    Composition(
        "lru", "baseline: a plain LRU cache, no prefetch", ""
    ),
    Composition(
        "mixtral-offload", "baseline: LRU with the next layer's gate", "Eliseev and Mazur (2023)",
        prefetch="next-gate", allotment="even",
    ),
)  # fmt: skip
