"""MoBiLE: *Efficient Mixture-of-Experts Inference on Consumer GPU with Mixture of Big Little Experts* (2025). Its
preset (half of a token's experts, and all if the next token is unsure) and its figures. Gamma is the paper's until
one has been found for the model (`lab/measure/searches.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from tiermoe.lab.papers import statistics as counted
from tiermoe.lab.papers.figure import Counted, Figure, Ladder, Loss, Paper, Place, Ratio, Row, Runs, Side, decoding
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


RTX_4080 = Place("rtx4080")
OFFLOADING, LITTLE = Side("load-on-demand"), Side("mobile", {"routing": "half", "prefetch": "none"})
FALLBACKS = {0.0: ("0", "1.85"), 0.5: (".10", "1.65"), 0.7: (".21", "1.57"), 0.8: (".27", "1.54")}  # table III
SURE = (0.4, 0.2, 0.1)  # for a model that is seldom sure


def at(gamma: float, **changes: object) -> Side:
    return Side("mobile", {"gamma": str(gamma)}).but(**changes)


@dataclass(frozen=True, slots=True)
class Estimated:
    """The speedup by the paper's equation 1: 1 / (T_little / T + r T_big / T), of times that were replayed."""

    gamma: float

    def value(self, runs: Runs) -> str:
        full, little, both = (1 / decoding(runs.replayed(side, RTX_4080)) for side in (OFFLOADING, LITTLE, at(1.0)))
        ratio = counted.fallback_ratio(self.gamma)(runs.trace)
        return f"{speedup(little, both - little, ratio, full):.2f}"  # at gamma 1 every token runs twice


def _over_offloading() -> Row:
    return Row("over offloading", "1.57 to 1.72", Ratio(at(0.7), OFFLOADING, RTX_4080), {
        **{f"gamma {gamma:g}": Ratio(at(gamma), OFFLOADING, RTX_4080) for gamma in SURE},
        "over `lru`, gamma .1": Ratio(at(0.1), Side("lru"), RTX_4080),
        "gamma .1 without a cache": Ratio(at(0.1, cache="none"), OFFLOADING, RTX_4080)})  # fmt: skip


def _uncached(ours: Side) -> dict[str, Ratio]:
    """Offloading has no cache of experts; nor has ours then."""
    return {"without a cache": Ratio(ours.but(cache="none"), OFFLOADING, RTX_4080)}


PAPER = Paper(
    "mobile",
    "MoBiLE: Efficient Mixture-of-Experts Inference on Consumer GPU with Mixture of Big Little Experts (2025)",
    [
        Figure("figure 3", "a token's time with little and with big experts", [
            Row("little, speed over offloading", "1.82, 1.85", Ratio(LITTLE, OFFLOADING, RTX_4080), _uncached(LITTLE)),
            Row("big after every little pass", "", Ratio(at(1.0), OFFLOADING, RTX_4080), _uncached(at(1.0))),
        ]),
        Figure("table II", "quality and speed", [
            Row("fallbacks at gamma .7", ".11 to .21", Counted(counted.fallback_ratio(0.7), ".2f")),
            _over_offloading(),
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
                {"gamma .1": Ratio(at(0.1), Side("mixtral-offload"), RTX_4080)}),
            Row("with pre-gating, over offloading", "1.92",
                Ratio(at(0.7, prefetch="recalled+next-gate"), OFFLOADING, RTX_4080), {
                    "gamma .1": Ratio(at(0.1, prefetch="recalled+next-gate"), OFFLOADING, RTX_4080),
                    "gamma .1, next gates alone":
                        Ratio(at(0.1, prefetch="next-gate", ahead=1), OFFLOADING, RTX_4080)}),
        ]),
        Figure("table III", "fallbacks and speed by gamma", [
            row for gamma, (ratio, speed) in {**FALLBACKS, **dict.fromkeys(SURE, ("", ""))}.items() for row in (
                Row(f"fallbacks at gamma {gamma:g}", ratio, Counted(counted.fallback_ratio(gamma), ".2f")),
                Row(f"over offloading at gamma {gamma:g}", speed, Ratio(at(gamma), OFFLOADING, RTX_4080),
                    _uncached(at(gamma))))
        ]),
        Figure("table IV", "experts of the little pass", [
            *(Row(f"little = {little}, over offloading, gamma .7", "", Ratio(at(0.7, little=little), OFFLOADING,
                  RTX_4080)) for little in (1, 3)),
            *(Row(f"little = {little}, loss of perplexity, gamma .7", "", Loss(at(0.7, little=little)))
              for little in (1, 3)),
        ]),
    ],
    {"figure 5, AdapMoE": "AdapMoE is not built"},
)  # fmt: skip
