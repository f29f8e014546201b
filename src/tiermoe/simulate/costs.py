"""What a replay charges: bytes of an expert, seconds of computing."""

from __future__ import annotations

from dataclasses import dataclass

from tiermoe.trace import Header, Times
from tiermoe.types import ExpertKey


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes and seconds of one model on one machine."""

    header: Header
    times: Times

    def nbytes(self, key: ExpertKey) -> int:
        """Bytes of an expert. A precision that the trace has no size for is taken in proportion from the nearest."""
        return expert_bytes(self.header, key.layer, key.bits)

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
    """Bytes of one expert of `layer`, see `Costs.nbytes`."""
    if bits in header.expert_bytes:
        return header.expert_bytes[bits][layer]
    nearest = min(header.expert_bytes, key=lambda known: (abs(known - bits), known))
    return header.expert_bytes[nearest][layer] * bits // nearest


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
