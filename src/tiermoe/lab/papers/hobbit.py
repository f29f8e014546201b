"""HOBBIT's figures: *HOBBIT: A Mixed Precision Expert Offloading System for Fast MoE Inference* (2024)."""

from __future__ import annotations

from dataclasses import replace

from tiermoe.lab.papers import statistics as trace
from tiermoe.lab.papers.figure import (
    OF_FIGURE,
    Counted,
    Figure,
    Loss,
    Paper,
    Ratio,
    Replayed,
    Row,
    bytes_a_token,
    hit_rate,
    prompts,
    waiting,
)
from tiermoe.lab.papers.runs import Place, Side

RTX_4090, ORIN = Place("rtx4090"), Place("jetson-orin")
OURS = Side("hobbit", {"low_bits": "4"}, 16)  # float16 with int4, as on the RTX 4090 (table 2)
ON_ORIN = Side("hobbit", {"low_bits": "2"}, 8)  # int8 with int2
OFFLOADING = Side("mixtral-offload", bits=16)
FIDDLER = Side("lru", {"misses": "measured"}, 16)
ALONE = OURS.but(prefetch="none")
EXACT = Side("hobbit", {"precision": "fixed", "low_share": "0"}, 16)


def _evictions(place: Place, policy: Side) -> Ratio:
    """The miss penalty of HOBBIT's cache over another's: the bytes read on demand, as an expert costs its bytes."""
    return Ratio(ALONE, policy.but(prefetch="none"), place, bytes_a_token)


def _ahead(distance: int) -> tuple[Row, Row]:
    papers = {1: "96 %", 2: "90 %", 3: "90 %"}
    return (
        Row(f"the first expert of layer + {distance} is predicted", papers[distance],
            Counted(trace.first_predicted(distance), ".1%")),
        Row(f"all K of layer + {distance}", "", Counted(trace.recall_of("next-gate", distance), ".1%")),
    )  # fmt: skip


OVER = Ratio(OURS, OFFLOADING, RTX_4090)
READ = replace(OVER, figure=prompts)
OTHERS = {
    "t1=.5 t2=.75": replace(OVER, ours=OURS.but(t1=0.5, t2=0.75)),
    "all but the first rank low": replace(OVER, ours=OURS.but(t1=0, t2=0.99, low_share=0.5)),
    "8 + 2 bits beside 16 in the same bytes": replace(OVER, ours=ON_ORIN.but(share_of=16)),
    **OVER.shares("25%", "60%"),
    **OVER.slower(16e-3),
}
DYNAMIC, DYNAMIC_ORIN = (Ratio(side.but(prefetch="none"), EXACT.but(prefetch="none", bits=side.bits), place)
                         for side, place in ((OURS, RTX_4090), (ON_ORIN, ORIN)))  # fmt: skip


PAPER = Paper(
    "hobbit",
    "HOBBIT: A Mixed Precision Expert Offloading System for Fast MoE Inference (2024)",
    [
        Figure("figure 3a", OF_FIGURE.format("share of a token's time that loads take, on demand at 16 bits"), [
            Row("RTX 4090", "85.5 %", Replayed(Side("load-on-demand", bits=16), RTX_4090, waiting, ".1%")),
            Row("Jetson Orin", "94.5 %", Replayed(Side("load-on-demand", bits=16), ORIN, waiting, ".1%")),
        ]),
        Figure("figure 5b", "scores that T1 = .6 and T2 = .9 split", [
            Row("high precision", "67 %", Counted(trace.scores(0.6, 0.9, "high"), ".1%")),
            Row("low precision", "30 %", Counted(trace.scores(0.6, 0.9, "low"), ".1%")),
            Row("skipped", "3 %", Counted(trace.scores(0.6, 0.9, "skipped"), ".1%")),
        ]),
        Figure("figure 7b", "prediction by a later layer's gate", [row for each in (1, 2) for row in _ahead(each)]),
        Figure("figure 10a", "use by the next token", [
            Row("the first expert", "above .25", Counted(trace.first_is_used_again, ".2f")),
            Row("the first expert, were routing even", ".25", Counted(trace.first_at_random, ".2f")),
            Row("at least one", "above .46", Counted(trace.one_is_used_again, ".2f")),
            Row("at least one, were routing even", ".46", Counted(trace.one_at_random, ".2f")),
        ]),
        Figure("figure 10b", "what a layer's most used quarter of the experts serves", [
            Row("within a sequence", "", Counted(trace.most_used(0.25, per_sequence=True), ".1%")),
            Row("in all sequences", "nearly 25 %", Counted(trace.most_used(0.25, per_sequence=False), ".1%")),
        ]),
        Figure("figure 11b", "miss penalty of LHU over LFU", [
            Row("16 and 4 bits", ".85 for three experts", Ratio(ALONE.but(weights="0,0,1,0"),
                ALONE.but(weights="0,1,0,0"), RTX_4090, bytes_a_token)),
        ]),
        Figure("figure 14", "speed beside others; RTX 4090, float16 with int4", [
            Row("decoding over MoE-Offloading", "3.21, 3.29", OVER, OTHERS),
            Row("prompts over MoE-Offloading", "2.0, 2.2", READ, {
                "8 + 2 bits beside 16 in the same bytes": replace(READ, ours=ON_ORIN.but(share_of=16))}),
        ]),
        Figure("table 3", "loss of perplexity, for that of tasks", [
            Row("16 and 4 bits", "at most 1 %", Loss(OURS)),
            Row("8 and 2 bits", "at most 1 %", Loss(ON_ORIN)),
        ]),
        Figure("figure 15", "the CPU computes misses beside the GPU, RTX 4090", [
            Row("decoding over Fiddler (`misses=measured`, no prefetch)", ".99, 1.46",
                Ratio(OURS.but(misses="cpu"), FIDDLER, RTX_4090)),
            Row("decoding over HOBBIT without the CPU", "", Ratio(OURS.but(misses="cpu"), OURS, RTX_4090)),
        ]),
        Figure("figure 16", "dynamic loading alone", [
            Row("RTX 4090, 16 and 4 bits", "1.19 to 1.57 on all", DYNAMIC, {
                "4 and 2 bits": Ratio(ALONE.but(bits=4, low_bits=2), EXACT.but(prefetch="none", bits=4), RTX_4090)}),
            Row("Jetson Orin, 8 and 2 bits", "the highest of all", DYNAMIC_ORIN),
        ]),
        Figure("figure 17b", "layers predicted, RTX 4090", [
            *(Row(f"p = {ahead}, decoding over p = 0, 16 and 4 bits", "1.05" if ahead == 1 else "",
                  Ratio(OURS.but(ahead=ahead), ALONE, RTX_4090)) for ahead in (1, 2, 3)),
            Row("p = 1, decoding, 16 bits alone", "1.01, below 1", Ratio(EXACT.but(ahead=1),
                EXACT.but(prefetch="none"), RTX_4090)),
            Row("p = 1, prompts, 16 and 4 bits", "1.1", Ratio(OURS.but(ahead=1), ALONE, RTX_4090, prompts)),
        ]),
        Figure("figure 18a", "miss penalty over other caches', RTX 4090", [
            Row("over LRU", ".91 to .95", _evictions(RTX_4090, OURS.but(cache="lru"))),
            Row("over LFU of the sequence", ".96 to .98",
                _evictions(RTX_4090, OURS.but(cache="lfu", records="sequence"))),
            Row("over random choice", "", _evictions(RTX_4090, OURS.but(cache="random"))),
        ]),
        Figure("figure 18b", "LFU by sequence and by model", [
            Row("hits, by sequence", "4.5 % more", Replayed(EXACT.but(prefetch="none", cache="lfu",
                records="sequence"), RTX_4090, hit_rate, ".1%")),
            Row("hits, by model", "", Replayed(EXACT.but(prefetch="none", cache="lfu", records="model"), RTX_4090,
                hit_rate, ".1%")),
        ]),
    ],
    {
        "figure 3b": "no command sets the share of experts that are skipped or replaced: t1 and t2 follow scores",
        "figure 5a": "an observer gets the router's weights and not each expert's output",
        "figure 7a": "a trace holds choices and not hidden states",
        "figure 11a": "a drawing of one layer",
        "figure 17a": "needs a GPU: stacked gates are one product here",
    },
)  # fmt: skip
