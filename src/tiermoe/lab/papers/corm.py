"""CORM: *Coarse-to-fine-grained Offloading for SMoE LLM Inference on Consumer-grade GPU* (2025). Its preset, its
calibration (mixed quantisation by usage, and theta), its figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tiermoe.lab.papers import statistics as counted
from tiermoe.lab.papers.figure import (
    Counted,
    Figure,
    Ladder,
    Loss,
    Paper,
    Place,
    Ratio,
    Replayed,
    Row,
    Side,
    bytes_a_token,
    decoding,
    rungs,
)
from tiermoe.lab.papers.statistics import decode_passes
from tiermoe.lab.sizes import DEEPSEEK_MOE, MIXTRAL
from tiermoe.lab.trace import Trace, frequencies
from tiermoe.offload.composition import Composition

if TYPE_CHECKING:
    from tiermoe.lab.simulate import Result

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


RTX_3090 = Place("rtx3090ti", sizes=MIXTRAL)
OURS, ON_DEMAND, OFFLOADING = Side("corm"), Side("load-on-demand"), Side("mixtral-offload")
PROCEEDS = OURS.but(on_mispredict="reload")


def _share(part: str) -> Replayed:
    def figure(result: Result) -> float:
        decode = result.metrics.decode
        if part == "overlap":
            return (decode.compute_s + decode.read_s - decode.seconds) / decode.compute_s
        return (decode.compute_s if part == "computing" else decode.read_s) / decode.seconds

    return Replayed(OURS, RTX_3090, figure, ".1%")


def _over(theirs: Side) -> Ratio:
    return Ratio(OURS, theirs, RTX_3090)


def _as_deepseek(ratio: Ratio) -> dict[str, Ratio]:
    return {"with DeepSeekMoE's sizes": replace(ratio, place=replace(RTX_3090, sizes=DEEPSEEK_MOE))}


PAPER = Paper(
    "corm",
    "CORM: Coarse-to-fine-grained Offloading for SMoE LLM Inference on Consumer-grade GPU (2025)",
    [
        Figure("figure 2", "inactive neurons at the trace's theta", [
            Row("by layer", "55 % at .25", Counted(counted.inactive_neurons, ".2f")),
        ]),
        Figure("figure 5a", "experts predicted", [
            Row("by layer", "75 % in lower layers, up to 90 %", Counted(counted.recall_by_layer("next-gate"), ".2f")),
        ]),
        Figure("figure 5b", "active neurons predicted, of experts that were", [
            Row("by layer", "80 to 90 %", Counted(neuron_recall, ".2f")),
        ]),
        Figure("figure 7", "speed", [
            Row("over int4 on demand", "1.92 to 2.09", _over(ON_DEMAND), {
                "on_mispredict=reload": replace(_over(ON_DEMAND), ours=PROCEEDS),
                "without prefetch": replace(_over(ON_DEMAND), ours=OURS.but(prefetch="none")),
                **_over(ON_DEMAND).shares("25%"), **_as_deepseek(_over(ON_DEMAND))}),
            Row("over Mixtral-Offload", "1.23 to 1.27", _over(OFFLOADING),
                {**_over(OFFLOADING).shares("25%", "60%"), **_as_deepseek(_over(OFFLOADING))}),
        ]),
        Figure("table 2", "loss of perplexity, for that of tasks", [
            Row("corm", ".2 points gained to 1.3 lost", Loss(OURS),
                {"on_mispredict=reload": Loss(PROCEEDS)}),
        ]),
        Figure("table 3", "shares of a token's time", [
            Row("weight loading", "94.5 %, 91.6 %", _share("loading")),
            Row("computing", "31.1 %, 35.6 %", _share("computing")),
            Row("overlap, of the computing", "82.4 %, 76.4 %", _share("overlap")),
        ]),
        Figure("figure 8", "speed over int4 on demand, part by part",
               rungs(PRESET, LADDER, RTX_3090, ("1.25, 1.40", "1.59, 1.84", "2.07, 2.14"))),
        Figure("figure 9", "bytes a token with active neurons over those of whole experts", [
            Row("without prefetch, on demand", "in proportion to the active neurons",
                Ratio(OURS.but(prefetch="none", on_mispredict="reload"),
                      OURS.but(unit="expert", prefetch="none", on_mispredict="reload"), RTX_3090, bytes_a_token)),
        ]),
        Figure("figure 10", "theta", [
            *(Row(f"theta = {theta:g}: loss of perplexity", paper, Loss(PROCEEDS.but(theta=theta)))
              for theta, paper in ((0.1, ""), (0.2, "below 1 % of accuracy"), (0.25, "below 1 % of accuracy"),
                                   (0.3, "a sudden drop from .275 on"))),
            Row("tokens a second at the trace's theta", "", Replayed(OURS, RTX_3090, decoding, ".1f")),
        ]),
    ],
    {
        "table 1": "seconds of Mixtral on an RTX 3090 Ti",
        "table 4": "the predictor's time is measured on a GPU; here two layers' routers are one product",
    },
)  # fmt: skip
