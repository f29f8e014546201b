"""llama.cpp with `--n-cpu-moe N` (2025, a program): the experts of the first N layers stay in main memory and are
computed on the CPU, those of the other layers lie on the GPU. Nothing moves.

As built: N follows from the cache's size: the experts of the last layers stay as far as they fit
(`policies/eviction/static.py`), a layer of which some fit is split. Missing ones are computed on the CPU in decode
(misses=cpu). For prompts they are copied into 4 slots of their own until their layer has run, as llama.cpp copies them
for long batches.

It needs a GPU, or a replay of one. `--set misses=load` is the placement alone, which runs everywhere.
"""

from tiermoe.offload.composition import Composition

PRESET = Composition(
    "llama-cpu-moe",
    "the experts of the last layers stay on the GPU; those of the first are computed on the CPU",
    "llama.cpp, --n-cpu-moe (2025)",
    cache="last-layers", misses="cpu", room=4,
)  # fmt: skip
