"""MoE-Infinity: *Activation-Aware Expert Offloading for Efficient MoE Serving* (Xue and others, 2024).

A request has an activation matrix: the tokens that each expert has served. While it runs, the most similar matrix of a
collection names what to read ahead (`policies/prediction/matrix.py`), and the cache gives up what the request uses
least (`policies/eviction/activation.py`).

As built:
* The collection grows from the sequences that have ended since the start, as the published program's does that is
  given none; it holds 32, and what was most similar least often makes room.
* Similarity is the mean cosine over all layers, the running one included. A priority falls with the distance d of a
  layer by d / (L + 1), as in the program.
* In a batch all requests share one matrix, which ends when another request begins.

Left out: a collection that is traced offline and reduced by clusters (its text would have to be the user's), and the
queue of all experts of all later layers: the next 4 layers are named, each with as many experts as the pass can ask
for, since a longer queue is replaced before it is served.
"""

from tiermoe.offload.composition import Composition

PRESET = Composition(
    "moe-infinity",
    "what sequences like this one activated is read ahead; what this one activates least leaves",
    "MoE-Infinity (2024)",
    prefetch="activation-matrix", cache="activation-ratio", records="sequence", own={"ahead": 4},
)  # fmt: skip
