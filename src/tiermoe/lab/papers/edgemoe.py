"""EdgeMoE's figures: *EdgeMoE: Fast On-Device Inference of MoE-based Large Language Models* (2023)."""

from __future__ import annotations

from dataclasses import replace

from tiermoe.lab.papers import statistics as trace
from tiermoe.lab.papers.figure import OF_FIGURE, Counted, Figure, Loss, Paper, Ratio, Replayed, Row, decoding, rungs
from tiermoe.lab.papers.runs import Place, Side

TX2, CARD = Place("jetson-tx2", "20%"), Place("raspberry-pi-4b", "20%")
HDD = Place("jetson-tx2-hdd", "20%")
OURS, IO_EXP, IO_QEXP = Side("edgemoe"), Side("load-on-demand", bits=16), Side("io-qexp")
STI, KEPT = Side("sti"), Side("sti", {"cache": "belady"})
POLICIES = {"EdgeMoE's": "distance", "LFU": "lfu", "LRU": "lru", "FIFO": "fifo", "random": "random"}
SHARES = (0.1, 0.2, 0.4)


def _latencies() -> list[Row]:
    on_demand = Ratio(OURS, IO_EXP, TX2)
    shards = Ratio(OURS, STI, TX2)
    kept = {f"{share} of the shards kept": replace(shards, theirs=KEPT.but(share=share)) for share in
            ("20%", "45%", "60%", "80%", "85%", "90%", "100%")}  # fmt: skip
    return [
        Row("over IO-EXP, TX2 with an SSD", "2.63 to 3.01", on_demand, on_demand.slower(0.1, 0.3)),
        Row("over IO-EXP, Raspberry Pi with a card", "4.49 to 5.43", replace(on_demand, place=CARD),
            replace(on_demand, place=CARD).shares("25%")),
        Row("over IO-EXP, TX2 with an HDD", "4.49 to 4.76", replace(on_demand, place=HDD)),
        Row("over IO-QEXP, TX2", "1.35 to 1.5", Ratio(OURS, IO_QEXP, TX2), Ratio(OURS, IO_QEXP, TX2).shares("25%")),
        Row("over STI, TX2", "1.11 to 2.78", shards, kept | {
            "shards at 2 bits": replace(shards, theirs=KEPT.but(bits=2)),
            "routed experts alone": replace(shards, theirs=STI.but(routing="all", prefetch="none")),
            **shards.slower(0.2)}),
    ]  # fmt: skip


PAPER = Paper(
    "edgemoe",
    "EdgeMoE: Fast On-Device Inference of MoE-based Large Language Models (2023)",
    [
        Figure("figure 3", OF_FIGURE.format("a token's time over that with every expert in memory"), [
            Row("TX2 with an SSD", "3.2 to 3.9", Ratio(Side("io-free", bits=16), IO_EXP, TX2),
                Ratio(Side("io-free", bits=16), IO_EXP, TX2).slower(0.1, 0.3)),
            Row("Raspberry Pi with a card", "3.3 to 3.8", Ratio(Side("io-free", bits=16), IO_EXP, CARD),
                Ratio(Side("io-free", bits=16), IO_EXP, CARD).slower(0.3, 3.0)),
        ]),
        Figure("figure 4", "activation paths", [
            Row("tokens on the most frequent 20 % of the paths", "99 %", Counted(trace.paths_covered(0.2), ".1%")),
        ]),
        Figure("figure 6", "loss of perplexity, for that of ROUGE-2", [
            Row("experts at 4 bits", "1.30 to 1.44 %",
                Loss(Side("lru", {"quantizer": "linear", "dense_bits": "16"}))),
            Row("experts at 2 bits", "5.8 % and more",
                Loss(Side("lru", {"quantizer": "linear", "dense_bits": "16"}, 2))),
            Row("all weights at 4 bits", "unusable",
                Loss(Side("lru", {"quantizer": "linear", "dense_bits": "4"}))),
        ]),
        Figure("figure 8", "K likeliest experts of the next layer, which it then uses", [
            Row("nothing known", "nearly even", Counted(trace.recall_of("frequent"), ".1%")),
            Row("one layer known", "", Counted(trace.recall_of("path 1"), ".1%")),
            Row("two layers known", "87 % of one expert", Counted(trace.recall_of("path 2"), ".1%")),
        ]),
        Figure("figure 10", "memory of all experts at 16 bits over EdgeMoE's", [
            Row("a fifth of the experts at 4 bits", "2.6 to 3.2", Counted(trace.memory_saved(0.2, 4), ".2f")),
        ]),
        Figure("figure 11", "speed over the baselines'", _latencies()),
        Figure("table 2", "bytes and loss", [
            Row("bytes of an expert at 16 bits over 4", "2.9 to 4", Counted(trace.bytes_moved(4), ".2f")),
            Row("loss of EdgeMoE", "4.9 %", Loss(OURS)),
            Row("loss of STI", "20 to 25 %", Loss(STI)),
        ]),
        Figure("figure 13", "hits of eviction policies without preloading", [
            Row(f"{name}, {share:.0%} of the experts", "the most" if key == "distance" else "",
                Counted(trace.hits(key, share), ".1%")) for share in SHARES for name, key in POLICIES.items()
        ]),
        Figure("figure 14", "speed over IO-QEXP by budget, TX2", [
            Row(f"{share:.0%} of the experts, over {bits} bits", "above 1",
                Ratio(OURS, IO_QEXP.but(bits=bits), replace(TX2, share=f"{share:.0%}")))
            for share in SHARES for bits in (4, 2)
        ]),
        Figure("figure 15", "tokens a second by precision, TX2", [
            Row(f"every expert at {bits} bits", "rises with the loss",
                Replayed(OURS.but(precision="fixed", bits=bits), TX2, decoding, ".2f")) for bits in (8, 4, 2)
        ]),
        Figure("figure 16", "speed over IO-EXP, part by part, TX2", rungs("edgemoe", TX2, ("2.01", "2.59", "3.22"))),
    ],
    {
        "figure 2": "is of other papers",
        "figure 7": "tiermoe calibrate --for edgemoe measures each expert's importance; another quantiser is not built",
        "figure 12": "a distribution over requests: tiermoe simulate prints means",
    },
)  # fmt: skip
