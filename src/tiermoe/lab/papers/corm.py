"""CORM's figures: *CORM: Coarse-to-fine-grained Offloading for SMoE LLM Inference on Consumer-grade GPU* (2025)."""

from __future__ import annotations

from dataclasses import replace

from tiermoe.lab.papers import statistics as trace
from tiermoe.lab.papers.figure import (
    Counted,
    Figure,
    Loss,
    Paper,
    Ratio,
    Replayed,
    Row,
    bytes_a_token,
    decoding,
    rungs,
)
from tiermoe.lab.papers.runs import Place, Side
from tiermoe.lab.simulate import Result
from tiermoe.lab.systems.corm import neuron_recall

RTX_3090 = Place("rtx3090ti")
OURS, ON_DEMAND, OFFLOADING = Side("corm"), Side("load-on-demand"), Side("mixtral-offload")
PROCEEDS = OURS.but(on_mispredict="reload")


def _milliseconds(part: str) -> Replayed:
    def figure(result: Result) -> float:
        decode = result.metrics.decode
        seconds = {"all": decode.seconds, "computing": decode.compute_s, "loading": decode.read_s,
                   "overlap": decode.compute_s + decode.read_s - decode.seconds}  # fmt: skip
        return 1000 * seconds[part] / decode.tokens

    return Replayed(OURS, RTX_3090, figure, ".2f")


def _over(theirs: Side) -> Ratio:
    return Ratio(OURS, theirs, RTX_3090)


PAPER = Paper(
    "corm",
    "CORM: Coarse-to-fine-grained Offloading for SMoE LLM Inference on Consumer-grade GPU (2025)",
    [
        Figure("figure 2", "inactive neurons at the trace's theta", [
            Row("by layer", "55 % at .25", Counted(trace.inactive_neurons, ".2f")),
        ]),
        Figure("figure 5a", "experts predicted", [
            Row("by layer", "75 % in lower layers, up to 90 %", Counted(trace.recall_by_layer("next-gate"), ".2f")),
        ]),
        Figure("figure 5b", "active neurons predicted, of experts that were", [
            Row("by layer", "80 to 90 %", Counted(neuron_recall, ".2f")),
        ]),
        Figure("figure 7", "speed", [
            Row("over int4 on demand", "1.92 to 2.09", _over(ON_DEMAND), {
                "on_mispredict=reload": replace(_over(ON_DEMAND), ours=PROCEEDS),
                "without prefetch": replace(_over(ON_DEMAND), ours=OURS.but(prefetch="none")),
                **_over(ON_DEMAND).shares("25%")}),
            Row("over Mixtral-Offload", "1.23 to 1.27", _over(OFFLOADING), _over(OFFLOADING).shares("25%", "60%")),
        ]),
        Figure("table 2", "loss of perplexity, for that of tasks", [
            Row("corm", ".2 points gained to 1.3 lost", Loss(OURS),
                {"on_mispredict=reload": Loss(PROCEEDS)}),
        ]),
        Figure("table 3", "milliseconds of a token, of a model of this trace's size", [
            Row("in all", "1280, 404", _milliseconds("all")),
            Row("weight loading", "1210, 370", _milliseconds("loading")),
            Row("computing", "398, 144", _milliseconds("computing")),
            Row("overlap", "328, 110", _milliseconds("overlap")),
        ]),
        Figure("figure 8", "speed over int4 on demand, part by part",
               rungs("corm", RTX_3090, ("1.25, 1.40", "1.59, 1.84", "2.07, 2.14"))),
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
