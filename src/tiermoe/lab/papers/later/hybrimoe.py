"""HybriMoE: *Hybrid CPU-GPU Scheduling and Cache Management for Efficient MoE Inference* (Zhong and others, 2025).

The cache keeps the experts of the highest recent gate weights (`policies/eviction/recent_score.py`), whether they were
cached or not. The gates of the next three layers name what to read ahead.

As built: the average is over the weights of the K experts that a token uses; the paper takes the 2 K largest, which a
router here does not hand out, nor a trace. alpha is ours.

Left out: the simulated schedule by which a prefetch is chosen that shortens the next layers most. Where misses are
loaded each that is spared saves the same, so the nearest layer comes first. The schedule of CPU and GPU is
`--set misses=measured`, in replays of GPUs: as many misses on the CPU as end when the others' loads do.
"""

from tiermoe.offload.composition import Composition

PRESET = Composition(
    "hybrimoe",
    "an average of recent gate weights decides who leaves, the gates of the next three layers who comes",
    "HybriMoE (2025)",
    prefetch="next-gate", cache="recent-score", own={"ahead": 3},
)  # fmt: skip
