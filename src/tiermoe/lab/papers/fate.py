"""Fate's figures: *Fate: Fast Edge Inference of Mixture-of-Experts Models via Cross-Layer Gate* (2025)."""

from __future__ import annotations

from dataclasses import replace

from tiermoe.lab.papers import statistics as trace
from tiermoe.lab.papers.figure import Counted, Figure, Loss, Paper, Ratio, Replayed, Row, hit_rate, prompts, rungs
from tiermoe.lab.papers.runs import Place, Side

HIGH_END, LOW_END = Place("rtx3090"), Place("low-end-pc")
OURS, LOD, EAP = Side("fate"), Side("load-on-demand", bits=16), Side("eap", bits=16)
WIDER = Side("eap", bits=8, share_of=4)
DENSE = {"dense_bits": "16"}
SHARES = ("10%", "25%", "45%", "60%", "80%")


def _over(theirs: Side, place: Place) -> Ratio:
    return Ratio(OURS, theirs, place)


def _precisions(ratio: Ratio) -> dict[str, Ratio]:
    return {f"theirs at {bits} bits": replace(ratio, theirs=ratio.theirs.but(bits=bits)) for bits in (8, 4)}


def _at(ours: Side, share: str) -> Ratio:
    return Ratio(ours, LOD, replace(LOW_END, share=share))


def _decoding() -> list[Row]:
    lod, eap = _over(LOD, HIGH_END), _over(EAP, HIGH_END)
    return [
        Row("over LoD, high-end PC", "4.1, 3.7", lod, {**_precisions(lod), **lod.shares("60%", "80%")}),
        Row("over EAP, high-end PC", "2.2", eap, {**_precisions(eap), "EAP at 8 bits in the same bytes":
            replace(eap, theirs=WIDER), **eap.shares("60%", "80%"), **eap.slower(4e-3, 16e-3, 70e-3),
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
            Row("all K, decoding", "78.8 %", Counted(trace.recall_of("next-gate"), ".1%")),
        ]),
        Figure("section 4.2", "experts above the 75th percentile", [
            Row("all K, decoding", "97.15 %", Counted(trace.recall_of("percentile"), ".1%")),
            Row("by layer", "lower in shallow layers", Counted(trace.recall_by_layer("percentile"), ".2f")),
        ]),
        Figure("figure 7", "prediction by layer", [
            Row("all K, by layer", "lower in layers 0 to 3 of 24",
                Counted(trace.recall_by_layer("next-gate"), ".2f")),
        ]),
        Figure("figure 8", "how clearly a layer prefers experts", [
            Row("share of the first expert's weight in K, by layer", "less in shallow layers",
                Counted(trace.first_weight, ".2f")),
        ]),
        Figure("section 4.4", "hits with the shallow layers cached first", [
            Row("evenly", "97.2 %", Replayed(OURS.but(allotment="even"), HIGH_END, hit_rate, ".1%")),
            Row("shallow first", "99.1 %", Replayed(OURS, HIGH_END, hit_rate, ".1%")),
        ]),
        Figure("table 2", "loss of perplexity, for that of MMLU", [
            Row(f"every expert at {bits} bits", paper, Loss(Side("lru", DENSE, bits)))
            for bits, paper in ((8, "0 of 59.6 points"), (4, ".2 points"), (2, "4.5 points"))
        ]),
        Figure("figure 9", "tokens of a prompt by popularity", [
            Row(f"served by the least popular {share:.0%} of the active experts", "15 %" if share == 0.3 else "",
                Counted(trace.popular_tokens(share), ".1%")) for share in (0.1, 0.3, 0.5)
        ]),
        Figure("figure 10", "loss of perplexity by the share at 2 bits", [
            Row(f"{share:g} of the experts", "", Loss(OURS.but(low_popularity=share)))
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
               rungs("fate", HIGH_END, ("1.3", "2 at most", "3.7 at most"))),
        Figure("table 3", "loss of perplexity, for that of tasks", [
            Row("high-end PC", ".55 points at most", Loss(OURS)),
            Row("low-end PC: mispredicted experts at 2 bits", "1.8 points at most",
                Loss(OURS.but(mispredicted="low"))),
        ]),
    ],
    {
        "table 1, similarity": "a trace holds choices and not hidden states; positions 1 and 3 have no gate here",
        "figure 4": "a drawing of one prediction",
    },
)  # fmt: skip
