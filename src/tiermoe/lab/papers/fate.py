"""Fate: *Fast Edge Inference of Mixture-of-Experts Models via Cross-Layer Gate* (2025). Its preset, its calibration
(the boundary, from how often the next gate is right in each layer; `statistics.windows` has its windows), its
figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from tiermoe.errors import TraceError
from tiermoe.lab.papers import statistics as counted
from tiermoe.lab.papers.figure import (
    BITS,
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
    hit_rate,
    prompts,
    rungs,
)
from tiermoe.lab.sizes import QWEN_MOE
from tiermoe.lab.trace import Trace
from tiermoe.offload.composition import Composition

PRESET = Composition(
    "fate",
    "next gate above a percentile, shallow layers first, ARC per layer, 2 bits for unpopular ones in prefill",
    "Fate (2025)",
    precision="popularity", prefetch="percentile", cache="arc", allotment="shallow", profile="fate",
    low_share=None,
)  # fmt: skip

LADDER = Ladder(
    "LoD, 16 bits",
    (
        ("prefetch", {"prefetch": "none"}),
        ("cache", {"cache": "none"}),
        ("quantisation", {"precision": "fixed", "low_share": 0, "bits": 16}),
    ),
)
"""Section 5.4, figure 14."""


def accuracies(trace: Trace) -> list[float]:
    """How right the next layer's gate is (figure 7): the share of the router's K experts of a decoded token that it
    names, a mean for each layer; 0 for those that nothing predicts. TraceError without forecasts of the next layer."""
    if 1 not in trace.header.forecast_distances:
        raise TraceError(
            f"the trace of {trace.header.model} holds no forecasts of the next layer; make it again with tiermoe trace"
        )
    found = counted.recalls(trace, trace, "next-gate")
    return [found.get((layer, 1), 0.0) for layer in range(len(trace.header.experts))]


def boundary(accuracy: Sequence[float]) -> int:
    """Number of shallow layers: those before the first layer that is predicted at least as well as the mean, at least
    the first layer, which is never predicted. The paper takes the boundary from the same figures (section 4.4, figure
    7) and gives no rule; this rule is ours."""
    if len(accuracy) < 2:
        return len(accuracy)
    mean = fmean(accuracy[1:])
    return next(layer for layer in range(1, len(accuracy)) if accuracy[layer] >= mean - 1e-12)


def largest_share(losses: Sequence[tuple[float, float]], tolerated: float = 0.01) -> float:
    """The largest share before the first that loses `tolerated` or more, of (share, loss) pairs by rising share; 0
    where the first pair does."""
    found = 0.0
    for share, loss in losses:
        if loss >= tolerated:
            break
        found = share
    return found


HIGH_END, LOW_END = Place("rtx3090", sizes=QWEN_MOE), Place("low-end-pc", sizes=QWEN_MOE)
IN_TIME = Place("rtx3090", sizes=QWEN_MOE, seconds=(60.0, 6.0))
"""So slow that whatever is predicted comes in time: the paper's hits include it."""
BLOCK = {"a block computes for 13 ms where an expert takes 6 (section 3)": 13 / 6}
"""That of Qwen1.5-MoE on an RTX 3090, which 14 tokens a second (section 5) are too fast for."""
LOW_PROMPT = (256, 32)
"""Windows for what low precision in a prompt costs the tokens after it."""
OURS, LOD, EAP = Side("fate"), Side("load-on-demand", bits=16), Side("eap")
DENSE = {"dense_bits": "16"}
SHARES = ("10%", "25%", "45%", "60%", "80%")


def _over(theirs: Side, place: Place) -> Ratio:
    return Ratio(OURS, theirs, place)


def _precisions(ratio: Ratio) -> dict[str, Ratio]:
    others = (bits for bits in (16, 8, 4) if bits != (ratio.theirs.bits or BITS))
    return {f"theirs at {bits} bits": replace(ratio, theirs=ratio.theirs.but(bits=bits)) for bits in others}


def _at(ours: Side, share: str) -> Ratio:
    return Ratio(ours, LOD, replace(LOW_END, share=share))


def _decoding() -> list[Row]:
    lod, eap = _over(LOD, HIGH_END), _over(EAP, HIGH_END)
    return [
        Row("over LoD, high-end PC", "4.1, 3.7", lod, {**_precisions(lod), **lod.shares("60%", "80%")}),
        Row("over EAP, high-end PC", "2.2", eap, {**_precisions(eap), **eap.shares("60%", "80%"),
            **{f"{most} read ahead at most": replace(eap, ours=OURS.but(window=most)) for most in (1, 4)}}),
        Row("over LoD, low-end PC", "2.3", _over(LOD, LOW_END), _precisions(_over(LOD, LOW_END))),
        Row("over EAP, low-end PC", "1.6", _over(EAP, LOW_END), _precisions(_over(EAP, LOW_END))),
    ]  # fmt: skip


def _prefill(theirs: Side, place: Place) -> Ratio:
    return replace(_over(theirs, place), figure=prompts)


PAPER = Paper(
    "fate",
    "Fate: Fast Edge Inference of Mixture-of-Experts Models via Cross-Layer Gate (2025)",
    [
        Figure("table 1", "prediction by the next layer's gate", [
            Row("all K, decoding", "78.8 %", Counted(counted.recall_of("next-gate"), ".1%")),
        ]),
        Figure("section 4.2", "experts above the 75th percentile", [
            Row("all K, decoding", "97.15 %", Counted(counted.recall_of("percentile"), ".1%")),
            Row("by layer", "lower in shallow layers", Counted(counted.recall_by_layer("percentile"), ".2f")),
        ]),
        Figure("figure 7", "prediction by layer", [
            Row("all K, by layer", "lower in layers 0 to 3 of 24",
                Counted(counted.recall_by_layer("next-gate"), ".2f")),
        ]),
        Figure("figure 8", "how clearly a layer prefers experts", [
            Row("share of the first expert's weight in K, by layer", "less in shallow layers",
                Counted(counted.first_weight, ".2f")),
        ]),
        Figure("section 4.4", "hits with the shallow layers cached first", [
            *(Row(name, paper, Replayed(side, IN_TIME, hit_rate, ".1%"),
                  {"computing at the machine's rate": Replayed(side, HIGH_END, hit_rate, ".1%")})
              for name, paper, side in (("evenly", "97.2 %", OURS.but(allotment="even")),
                                        ("shallow first", "99.1 %", OURS))),
        ]),
        Figure("table 2", "loss of perplexity, for that of MMLU", [
            Row(f"every expert at {bits} bits", paper, Loss(Side("lru", DENSE, bits)))
            for bits, paper in ((8, "0 of 59.6 points"), (4, ".2 points"), (2, "4.5 points"))
        ]),
        Figure("figure 9", "tokens of a prompt by popularity", [
            Row(f"served by the least popular {share:.0%} of the active experts", "15 %" if share == 0.3 else "",
                Counted(counted.popular_tokens(share), ".1%")) for share in (0.1, 0.3, 0.5)
        ]),
        Figure("figure 10", "loss of perplexity by the share at 2 bits", [
            Row(f"{share:g} of the experts", "", Loss(OURS.but(low_popularity=share), LOW_PROMPT))
            for share in (0.1, 0.3, 0.6)
        ]),
        Figure("figure 11", "prompts", [
            Row("over LoD, high-end PC", "4.5 at most", _prefill(LOD, HIGH_END),
                {**_precisions(_prefill(LOD, HIGH_END)), **_prefill(LOD, HIGH_END).shares("80%")}),
            Row("over EAP, high-end PC", "1.9 at most", _prefill(EAP, HIGH_END), _precisions(_prefill(EAP, HIGH_END))),
            Row("over LoD, low-end PC", "1.8 at most", _prefill(LOD, LOW_END), _precisions(_prefill(LOD, LOW_END))),
            Row("over EAP, low-end PC", "1.5 at most", _prefill(EAP, LOW_END), _precisions(_prefill(EAP, LOW_END))),
        ]),
        Figure("figure 12", "decoding", _decoding()),
        Figure("figure 13", "decoding by budget, low-end PC", [
            Row(f"{name} over LoD, {share} cached", "1.8 at most with little memory" if (name, share) == ("Fate", "10%")
                else "", _at(side, share), _precisions(_at(side, share)) if share == "10%" else {})
            for share in SHARES for name, side in (("Fate", OURS), ("EAP", EAP))
        ]),
        Figure("figure 14", "decoding over LoD, part by part, high-end PC",
               rungs(PRESET, LADDER, HIGH_END, ("1.3", "2 at most", "3.7 at most"), BLOCK)),
        Figure("table 3", "loss of perplexity, for that of tasks", [
            Row("high-end PC", ".55 points at most", Loss(OURS, LOW_PROMPT)),
            Row("low-end PC: mispredicted experts at 2 bits", "1.8 points at most",
                Loss(OURS.but(mispredicted="low"))),
        ]),
    ],
    {
        "table 1, similarity": "a trace holds choices and not hidden states; positions 1 and 3 have no gate here",
        "figure 4": "a drawing of one prediction",
    },
)  # fmt: skip
