"""AdapMoE: *Adaptive Sensitivity-based Expert Gating and Management for Efficient MoE Inference* (Zhong and others,
2024).

Tokens that hardly need their last experts run without them (`policies.routing.AdaptiveGating`, lossy), the next layer's
gate is asked for what to read ahead, and each layer has as many slots as make the fewest loads expected
(`policies.allotment.by_expected_loads`).

As built:
* The paper has K = 2 and leaves the second expert out if its weight is small beside a threshold by layer. For a larger
  K, ours: as many of the last experts as together stay within it. Prompts run with all K.
* The sensitivity of a layer is 1 unless it is given (`--set sensitivity=1,0.8,…`): the paper's comes from second
  derivatives of the loss, which need training code.
* Expected loads are those of the published program, written for any K: its formula for K = 2 counts a token with one
  expert, and with two, by the share of tokens that have one.
* `calibrate --for adapmoe` counts how often the next gate is right and how many experts run, layer by layer, at the
  preset's threshold.

Left out: asking the gates of further layers while the next one is complete (`--set prefetch=stacked-gates --set
ahead=3`), and a trained gate for the first layer, which nothing predicts here.
"""

from statistics import fmean

from tiermoe.lab.papers.statistics import decode_passes
from tiermoe.lab.trace import Trace
from tiermoe.offload.composition import Composition
from tiermoe.offload.policies.routing import AdaptiveGating

PRESET = Composition(
    "adapmoe",
    "fewer experts for tokens that hardly need the last ones; the next gate, slots for the fewest expected loads",
    "AdapMoE (2024)",
    routing="adaptive", prefetch="next-gate", cache="lru", allotment="expected-loads", profile="adapmoe",
)  # fmt: skip


def uses(trace: Trace, gating: AdaptiveGating) -> list[float]:
    """Experts of a decoded token that run in each layer, a mean; K for a layer that decodes nothing."""
    counts: list[list[int]] = [[] for _ in trace.header.experts]
    for passed in decode_passes(trace):
        for layer, traced in enumerate(passed.layers):
            counts[layer] += [len(gating.kept(layer, gates)) for gates in traced.weights]
    return [fmean(found) if found else float(k) for found, k in zip(counts, trace.header.top_k, strict=True)]
