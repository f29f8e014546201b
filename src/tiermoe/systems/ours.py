"""The exact default, and its lossy variants."""

from __future__ import annotations

from tiermoe.offload.composition import Composition
from tiermoe.systems.ladder import Ladder

OURS = (
    Composition(
        "default",
        "exact: estimated next uses decide who leaves a layer, the next two's routers who comes if that is faster",
        "the best exact composition measured, docs/systems.md",
        prefetch="stacked-gates", speculate="measured", cache="next-use", allotment="by-use",
        own={"ahead": 2},
    ),
    Composition(
        "frugal",
        "what ranks behind 80 % of a token's gate weight is used where it is here and not fetched; no prefetch",
        "HOBBIT's skipping (2024, section 3.2) without its low precision",
        precision="gate-score", cache="next-use", allotment="by-use",
        own={"t1": 0.8, "t2": 0.8},
    ),
    Composition(
        "nimble",
        "an expert that is here stands in for one that is not and scores little better; no prefetch",
        "Cache-Prior (Skliar and others, 2024)",
        routing="cached", cache="weighted", allotment="even", profile="nimble", prior=0.25, always=2, untouched=1,
        own={"weights": (0.25, 0.25, 0.25, 0.25)},
    ),
    Composition(
        "nimble-3bit",
        "nimble with a weaker prior, on experts that gptq packs at 3 bits: a miss is fewer bytes, and more are here",
        "Cache-Prior (Skliar and others, 2024); GPTQ (Frantar and others, 2023)",
        routing="cached", cache="weighted", allotment="even", prior=0.1, always=2, untouched=1,
        bits=3, quantizer="gptq",
        own={"weights": (0.25, 0.25, 0.25, 0.25)},
    ),
)  # fmt: skip

DEFAULT_LADDER = Ladder(
    "LRU, one pool",
    (
        ("eviction by next use", {"cache": "lru"}),
        ("slots by use", {"allotment": "pool"}),
        ("prefetch", {"prefetch": "none"}),
    ),
)
"""Of `default`."""
