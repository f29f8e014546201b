"""moe-stream, a program that streams experts from a drive (2026, no paper): eviction by use counts, and the next
layer's router on this layer's input names what is read ahead.

As built: counts decay (`policies/eviction/decayed.py`; LRFU, Lee and others, 2001), half of a use is left after 64
tokens; of what is named nobody leaves until its layer has run.

Left out: sampling 24 slots for a victim, which approximates the exact one to save time; the protection of what was
read in the last 24 loads, in whose place prefetched experts are masked. The published program forgets an expert's
count when it leaves the cache and lets none decay: `--set cache=lfu` is close to it.
"""

from tiermoe.offload.composition import Composition

PRESET = Composition(
    "moe-stream",
    "decayed use counts decide who leaves, the next layer's gate who comes",
    "moe-stream (2026); LRFU (2001)",
    prefetch="next-gate", cache="decayed",
)  # fmt: skip
