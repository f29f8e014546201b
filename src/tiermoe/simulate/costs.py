"""What a replay charges: bytes of an expert, seconds of computing, and links by name, those of the papers' machines.
Their figures are effective ones, of what a copy of a few MiB reaches, beside the nominal ones; a figure measured on the
machine at hand is better than any of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tiermoe.config import parse_size
from tiermoe.errors import ConfigError
from tiermoe.trace.schema import Header, Times
from tiermoe.types import ExpertKey


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes and seconds of one model on one machine. copies: its link moves copies to a GPU, not stored bytes."""

    header: Header
    times: Times
    copies: bool = False

    def nbytes(self, key: ExpertKey) -> int:
        """Bytes that a load moves. A precision that the trace has no size for is taken in proportion from the
        nearest."""
        return (copied_bytes if self.copies else expert_bytes)(self.header, key.layer, key.bits)

    def dense_s(self, phase: str, tokens: int) -> float:
        """Seconds of everything but experts in a pass over `tokens` tokens."""
        return self.times.dense if phase == "decode" else self.times.prefill_token * tokens

    def expert_s(self, bits: int, tokens: int) -> float:
        """Seconds of one expert on `tokens` tokens, 0 for none; of the nearest precision that was measured."""
        if not tokens:
            return 0.0
        first, further = (_nearest(times, bits) for times in (self.times.expert, self.times.prefill_expert))
        return first + (tokens - 1) * further


def expert_bytes(header: Header, layer: int, bits: int) -> int:
    """Stored bytes of one expert of `layer`, see `Costs.nbytes`."""
    return _sized(header.expert_bytes, layer, bits)


def copied_bytes(header: Header, layer: int, bits: int) -> int:
    """Bytes that a copy of one expert of `layer` to a GPU moves; its stored bytes where the trace has no others."""
    return _sized(header.copied_bytes or header.expert_bytes, layer, bits)


def slot_sizes(header: Header, precisions: Iterable[int], unit: str = "expert") -> dict[int, int]:
    """Bits → bytes of a slot, as the engine's plan has them: of the layer that takes most. Stored bytes where the trace
    has no others. unit: 'expert' or 'neuron'."""
    known = header.slot_bytes or header.expert_bytes
    own = header.neuron_slot_bytes if unit == "neuron" else {}
    layers = range(len(header.experts))
    return {bits: own.get(bits) or max(_sized(known, layer, bits) for layer in layers) for bits in precisions}


def _sized(known: Mapping[int, Sequence[int]], layer: int, bits: int) -> int:
    if bits in known:
        return known[bits][layer]
    nearest = min(known, key=lambda other: (abs(other - bits), other))
    return known[nearest][layer] * bits // nearest


def run_bits(header: Header) -> int:
    """The precision that the traced model ran in: the one that was measured, else the highest with a known size."""
    return max(header.times.expert if header.times else header.expert_bytes)


def spread(header: Header, decode_s: float, prefill_s: float) -> Times:
    """Times where nothing was measured but seconds per token, of decoding and of a prompt: spread over the dense part
    and the K experts of each layer by their bytes (all on the dense part where its bytes are unknown)."""
    bits = run_bits(header)
    active = sum(k * expert_bytes(header, layer, bits) for layer, k in enumerate(header.top_k))
    share = header.dense_bytes / (header.dense_bytes + active) if header.dense_bytes else 1.0
    uses = sum(header.top_k)
    return Times(
        decode_s * share,
        {bits: decode_s * (1 - share) / uses},
        prefill_s * share,
        {bits: prefill_s * (1 - share) / uses},
    )


def _nearest(times: dict[int, float], bits: int) -> float:
    return times[min(times, key=lambda known: (abs(known - bits), known))]


@dataclass(frozen=True, slots=True)
class Machine:
    """A link: `bandwidth` in bytes per second, `latency` in seconds before a transfer's first byte. copies: it moves
    what a slot on a GPU holds, else what a store does."""

    name: str
    bandwidth: float
    latency: float
    source: str
    copies: bool = False


MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        # PCIe: 80 % of the nominal rate, which is about what pinned copies reach; 10 us for a copy's start
        Machine("pcie1", 3.2e9, 1e-5, "PCIe 1.0 x16, 4 GB/s nominal (Fate, low-end PC), taken at 80 %", True),
        Machine("pcie3", 12.8e9, 1e-5, "PCIe 3.0 x16, 16 GB/s nominal (Fate, high-end PC), taken at 80 %", True),
        Machine("pcie4", 25.6e9, 1e-5, "PCIe 4.0 x16, 32 GB/s nominal (HOBBIT, CORM), taken at 80 %", True),
        Machine("nvme", 3.0e9, 1e-4, "Samsung 980 PRO, 7 GB/s nominal, 'around 3,000 MB/s in practice' (HOBBIT)"),
        Machine("sata", 5.2e8, 1e-4, "Samsung 860 EVO, 550 MB/s nominal (EdgeMoE, Jetson TX2), taken at 95 %"),
        Machine("sdcard", 4.0e7, 1e-3, "SanDisk Ultra (EdgeMoE) in a Raspberry Pi 4B: 50 MB/s nominal, at 80 %"),
    )
}
"""Latencies are of the order that such devices have; no paper gives them."""

_RATE = re.compile(r"(.+?)\s*/\s*s(?:ec)?", re.IGNORECASE)


def parse_link(text: str) -> Machine:
    """A name of `MACHINES`, or a bandwidth like 16GB/s (then without latency). ConfigError on anything else."""
    if text.lower() in MACHINES:
        return MACHINES[text.lower()]
    rate = _RATE.fullmatch(text.strip())
    if rate is None:
        raise ConfigError(f"link {text!r} is neither a bandwidth like 16GB/s nor one of {', '.join(MACHINES)}")
    return Machine(text, float(parse_size(rate[1], "link")), 0.0, "as given")
