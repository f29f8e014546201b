"""Fiddler: *CPU-GPU Orchestration for Fast Inference of Mixture-of-Experts Models* (Kamahori and others, 2024).

The experts that a calibration text uses most lie on the GPU and stay there (`policies/eviction/static.py`). Another
expert is computed on the CPU from main memory, or copied and computed on the GPU, whichever is faster.

As built: of a decoding layer's misses so many are computed on the CPU that it ends when the copies of the others do,
by what both have taken so far (misses=measured); the paper decides by a latency that was measured before. What is
copied lies in 4 slots of its own until its layer has run. Prompts copy; the paper may compute an expert of few tokens
on the CPU there too.

It needs a GPU, or a replay of one. `--set misses=load` is the placement alone, which runs everywhere.
"""

from tiermoe.lab.trace import Trace, frequencies
from tiermoe.offload.composition import Composition

PRESET = Composition(
    "fiddler",
    "the most used experts stay on the GPU; others on the CPU or copied, by what is faster",
    "Fiddler (2024)",
    cache="most-frequent", misses="measured", profile="fiddler", room=4,
)  # fmt: skip


def served(trace: Trace, share: float) -> float:
    """The share of all uses that the most used `share` of the experts serve."""
    uses = sorted((count for row in frequencies(trace) for count in row), reverse=True)
    return sum(uses[: int(share * len(uses))]) / max(sum(uses), 1)
