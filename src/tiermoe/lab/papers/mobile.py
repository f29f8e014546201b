"""MoBiLE: *Efficient Mixture-of-Experts Inference on Consumer GPU with Mixture of Big Little Experts* (2025). Its
preset (half of a token's experts, and all if the next token is unsure) and its figures. Gamma is the paper's until
one has been found for the model (`lab/measure/searches.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from tiermoe.errors import TraceError
from tiermoe.lab.papers import statistics as counted
from tiermoe.lab.papers.figure import (
    Counted,
    Figure,
    Ladder,
    Loss,
    Measure,
    Paper,
    Place,
    Ratio,
    Row,
    Runs,
    Side,
    decoding,
)  # fmt: skip
from tiermoe.lab.papers.statistics import decode_passes
from tiermoe.lab.sizes import QWEN_MOE
from tiermoe.offload.composition import Composition
from tiermoe.offload.policies.routing import speedup

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


RTX_4080 = Place("rtx4080", sizes=QWEN_MOE)
OFFLOADING, LRU = Side("load-on-demand"), Side("lru")
LITTLE = Side("mobile", {"routing": "half", "prefetch": "none"})
FALLBACKS = {0.0: ("0", "1.85"), 0.5: (".10", "1.65"), 0.7: (".21", "1.57"), 0.8: (".27", "1.54")}  # table III
SURE = (0.4, 0.2, 0.1)  # for a model that is seldom sure


def at(gamma: float, **changes: object) -> Side:
    return Side("mobile", {"gamma": str(gamma)}).but(**changes)


@dataclass(frozen=True, slots=True)
class Estimated:
    """The speedup by the paper's equation 1: 1 / (T_little / T + r T_big / T), of times that were replayed."""

    kind: ClassVar[str] = "replayed"
    gamma: float

    def value(self, runs: Runs) -> str:
        full, little, both = (1 / decoding(runs.replayed(side, RTX_4080)) for side in (OFFLOADING, LITTLE, at(1.0)))
        ratio = counted.fallback_ratio(self.gamma)(runs.trace)
        return f"{speedup(little, both - little, ratio, full):.2f}"  # at gamma 1 every token runs twice


@dataclass(frozen=True, slots=True)
class AsOften:
    """Decoding over `theirs` at the gamma at which the share `fallbacks` of the tokens falls back: another one than the
    paper's for a model that is seldom sure."""

    kind: ClassVar[str] = "replayed"
    fallbacks: float
    theirs: Side
    changes: Mapping[str, object] = field(default_factory=dict)  # as `Side.but` takes them

    def value(self, runs: Runs) -> str:
        confidences = sorted(passed.little.confidence for passed in decode_passes(runs.trace) if passed.little)
        if not confidences:
            raise TraceError(f"the trace of {runs.trace.header.model} holds no little pass; see tiermoe trace --help")
        gamma = round(confidences[int(self.fallbacks * (len(confidences) - 1))], 3)
        return Ratio(at(gamma, **self.changes), self.theirs, RTX_4080).value(runs)


LARGE = "the same, experts at 16 bits"
"""Loads then outweigh what a layer takes whatever its size."""
NO_CACHE = {"cache": "none"}
"""Offloading has no cache of experts; nor has ours beside it."""


def _over_offloading(gamma: float, paper: str, fallbacks: str) -> Row:
    """At a gamma, without a cache; at as many fallbacks as the paper has; with a cache, over one of as many bytes."""
    cached: dict[str, Measure] = {"both with a cache": Ratio(at(gamma), LRU, RTX_4080)}
    often: dict[str, Measure] = {}
    if fallbacks:
        often[f"gamma for {fallbacks} fallbacks"] = AsOften(float(fallbacks), OFFLOADING, NO_CACHE)
        often[LARGE] = AsOften(float(fallbacks), OFFLOADING.but(bits=16), {**NO_CACHE, "bits": 16})
    return Row(f"over offloading at gamma {gamma:g}", paper, Ratio(at(gamma, **NO_CACHE), OFFLOADING, RTX_4080),
               cached | often)  # fmt: skip


PAPER = Paper(
    "mobile",
    "MoBiLE: Efficient Mixture-of-Experts Inference on Consumer GPU with Mixture of Big Little Experts (2025)",
    [
        Figure("figure 3", "a token's time with little and with big experts", [
            Row("little, speed over offloading", "1.82, 1.85",
                Ratio(LITTLE.but(**NO_CACHE), OFFLOADING, RTX_4080)),
            Row("big after every little pass", "", Ratio(at(1.0, **NO_CACHE), OFFLOADING, RTX_4080)),
        ]),
        Figure("table II", "quality and speed", [
            Row("fallbacks at gamma .7", ".11 to .21", Counted(counted.fallback_ratio(0.7), ".2f")),
            _over_offloading(0.7, "1.57 to 1.72", ".16"),
            Row("loss of perplexity, K/2 alone", "8.5 to 14.4 points of GSM8K",
                Loss(Side("mobile", {"routing": "half", "prefetch": "none"}))),
            Row("loss of perplexity, gamma .7", "3.3 to 6.7 points of GSM8K", Loss(at(0.7))),
        ]),
        Figure("section III-B", "prefetch in fallback, and equation 1", [
            Row("experts that the little pass names", "above 80 %", Counted(counted.recall_of("recalled"), ".1%")),
            *(Row(f"speedup by the equation, gamma {gamma:g}", "", Estimated(gamma),
                  {"replayed": Ratio(at(gamma), OFFLOADING, RTX_4080)}) for gamma in (0.7, 0.2)),
        ]),
        Figure("figure 5", "beside others", [
            Row("over Pre-gated MoE (`mixtral-offload`)", "1.28", Ratio(at(0.7), Side("mixtral-offload"), RTX_4080),
                {"gamma for .16 fallbacks": AsOften(0.16, Side("mixtral-offload")),
                 LARGE: AsOften(0.16, Side("mixtral-offload", bits=16), {"bits": 16})}),
            Row("with pre-gating, over offloading", "1.92",
                Ratio(at(0.7, prefetch="recalled+next-gate", **NO_CACHE), OFFLOADING, RTX_4080), {
                    "gamma for .16 fallbacks":
                        AsOften(0.16, OFFLOADING, {"prefetch": "recalled+next-gate", **NO_CACHE}),
                    "the same, next gates alone":
                        AsOften(0.16, OFFLOADING, {"prefetch": "next-gate", "ahead": "1", **NO_CACHE})}),
        ]),
        Figure("table III", "fallbacks and speed by gamma", [
            row for gamma, (ratio, speed) in {**FALLBACKS, **dict.fromkeys(SURE, ("", ""))}.items() for row in (
                Row(f"fallbacks at gamma {gamma:g}", ratio, Counted(counted.fallback_ratio(gamma), ".2f")),
                _over_offloading(gamma, speed, ratio if gamma else ""))
        ]),
        Figure("table IV", "experts of the little pass", [
            *(Row(f"little = {little}, over offloading, gamma .7", "", Ratio(at(0.7, little=little), OFFLOADING,
                  RTX_4080)) for little in (1, 3)),
            *(Row(f"little = {little}, loss of perplexity, gamma .7", "", Loss(at(0.7, little=little)))
              for little in (1, 3)),
        ]),
    ],
    {"figure 5, AdapMoE": "its sensitivities and trained gate are not built: preset adapmoe has its rule without them"},
)  # fmt: skip
