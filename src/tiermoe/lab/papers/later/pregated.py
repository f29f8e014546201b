"""Pre-gated MoE: *An Algorithm-System Co-Design for Fast and Scalable Mixture-of-Expert Inference* (Hwang and others,
2024).

While a layer runs, the experts of the next are copied. Nothing is cached beyond that: there is room for the experts of
two layers (cache=double).

As built: the next layer's own gate on this layer's input names them, and what it did not name is loaded when the layer
runs, so the preset is exact.

Left out: the training of a pre-gate in each layer that decides which experts the next one uses. Such a model needs no
prediction and misses nothing but in its first layer; `--set prefetch=oracle` is its bound in a replay.
"""

from tiermoe.offload.composition import Composition

PRESET = Composition(
    "pregated",
    "the next layer's experts come while this one runs, into room for two layers; no cache",
    "Pre-gated MoE (2024)",
    prefetch="next-gate", cache="double",
)  # fmt: skip
