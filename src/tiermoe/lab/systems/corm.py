"""CORM: its preset; mixed quantisation by usage, and theta."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tiermoe.lab.systems.ladder import Ladder
from tiermoe.lab.systems.routings import decode_passes, frequencies
from tiermoe.offload.composition import Composition

if TYPE_CHECKING:
    from tiermoe.lab.trace.file import Trace

QUANTIZER = "hqq-double"
"""HQQ in groups of 64 with scales that are quantised again (section 7)."""

PRESET = Composition(
    "corm",
    "active neurons alone, two-level prediction and cache, rarely used experts in low precision",
    "CORM (2025)",
    precision="table", prefetch="neurons", cache="lru", allotment="even", unit="neuron", store="memory",
    on_mispredict="proceed", profile="corm", quantizer=QUANTIZER,
)  # fmt: skip

LADDER = Ladder(
    "on demand, whole experts",
    (
        ("neurons and mixed bits", {"unit": "expert", "precision": "fixed"}),
        ("prefetch", {"prefetch": "none", "on_mispredict": "reload"}),
        ("cache", {"cache": "none"}),
    ),
)
"""Section 5.3, figure 8."""


BITS = 4
"""Bits of experts that are not low (section 5)."""

LOW_SHARE = 0.3
"""Share of a layer's experts in low precision, where none is given. The paper has the rule (rarely used experts in
lower precision, section 4.1) and no share."""

INACTIVE_SHARE = 0.55
"""Share of the neurons that theta makes inactive, as theta = 0.25 does in Mixtral (section 2, figure 2)."""


def bits_by_usage(trace: Trace, bits: int, low_bits: int, low_share: float = LOW_SHARE) -> list[list[int]]:
    """Bits per expert, a row per layer: `low_bits` for the share `low_share` that served the fewest tokens, rounded
    down, in a tie the higher index first; `bits` for the others."""
    table = []
    for row in frequencies(trace):
        ascending = sorted(range(len(row)), key=lambda expert: (row[expert], -expert))
        # 1e-9: 0.29 of 100 experts are 29 of them, whatever their product is rounded to
        low = set(ascending[: math.floor(low_share * len(row) + 1e-9)])
        table.append([low_bits if expert in low else bits for expert in range(len(row))])
    return table


def low_usage(trace: Trace, table: Sequence[Sequence[int]]) -> float:
    """The share of the tokens' choices that fall on experts below the highest bits of their layer."""
    usage = frequencies(trace)
    low = sum(
        count
        for row, counts in zip(table, usage, strict=True)
        for bits, count in zip(row, counts, strict=True)
        if bits < max(row)
    )
    return low / max(sum(map(sum, usage)), 1)


def neuron_recall(trace: Trace) -> list[float | None]:
    """Recall of the second level of prediction, layer by layer: the share of the active neurons of decoded tokens'
    experts that the input of the layer before names. None where nothing was recorded."""
    active, named = [0] * len(trace.header.experts), [0] * len(trace.header.experts)
    for passed in decode_passes(trace):
        for index, layer in enumerate(passed.layers):
            for expert, neurons in layer.named.items():
                active[index] += layer.neurons[expert].bit_count()
                named[index] += (layer.neurons[expert] & neurons).bit_count()
    return [right / there if there else None for right, there in zip(named, active, strict=True)]
