"""What a replay charges: bytes of an expert, whole or as W1 with its active neurons, and seconds of computing."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from tiermoe.errors import TraceError
from tiermoe.lab.simulate.link import Move
from tiermoe.lab.simulate.machines import Processor
from tiermoe.lab.trace import DECIDING, Deciding, Header, LayerTrace, Times, Trace
from tiermoe.offload.assembly import ModelShape
from tiermoe.offload.composition import Composition
from tiermoe.offload.policies.neurons import NeuronCache, Records, to_load, whole
from tiermoe.types import ExpertKey

RECALL = 0.85
"""Share of the active neurons that a prediction names, where a trace does not say which: CORM, section 4, has 80 to
90 %."""

GATHER = 1 / 3
"""Seconds of gathering a byte of single neurons, in those that the link takes for one: what makes three quarters of an
expert's neurons cost as much as the whole, as CORM's figure 9 measures it. Here it is .48 (docs/systems.md, CORM's
gathering kernel)."""

_PAGE = 4096  # bytes that a drive reads at least


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes and seconds of one model on one machine."""

    header: Header
    times: Times
    copies: bool = False  # the link moves copies to a GPU, not stored bytes
    deciding: Deciding | None = None  # of the composition; None: nothing is charged for deciding

    def decide_s(self, phase: str) -> float:
        """Seconds of deciding a layer."""
        if self.deciding is None:
            return 0.0
        return self.deciding.decode if phase == "decode" else self.deciding.prefill

    @property
    def load_s(self) -> float:
        """Seconds of asking for a load, beside its transfer."""
        return self.header.costs.load if self.deciding is not None and self.header.costs else 0.0

    def nbytes(self, key: ExpertKey) -> int:
        """Bytes that a load moves. A precision without a size in the trace is taken in proportion from the nearest."""
        return (copied_bytes if self.copies else expert_bytes)(self.header, key.layer, key.bits)

    def move(self, key: ExpertKey) -> Move:
        """What a load of a whole expert moves."""
        return Move(self.nbytes(key))

    def dense_s(self, phase: str, tokens: int) -> float:
        """Seconds of everything but experts in a pass over `tokens` tokens, without `layers_s`."""
        times = self.times
        dense = times.dense if phase == "decode" else times.prefill_pass + times.prefill_token * tokens
        return dense - self.layers_s(phase, tokens)

    def layers_s(self, phase: str, tokens: int) -> float:
        """Seconds of a pass from the routers' choices to their layers' first experts."""
        return self.times.layers if phase == "decode" else self.times.prefill_layers * tokens

    def expert_s(self, bits: int, tokens: int) -> float:
        """Seconds of one expert on `tokens` tokens, 0 for none; of the nearest precision that was measured."""
        if not tokens:
            return 0.0
        first, further = (nearest(times, bits) for times in (self.times.expert, self.times.prefill_expert))
        return first + (tokens - 1) * further


def expert_bytes(header: Header, layer: int, bits: int) -> int:
    """Stored bytes of one expert of `layer`, see `Costs.nbytes`."""
    return _sized(header.expert_bytes, layer, bits)


def copied_bytes(header: Header, layer: int, bits: int) -> int:
    """Bytes that a copy of one expert of `layer` to a GPU moves; its stored bytes where the trace has no others."""
    return _sized(header.copied_bytes or header.expert_bytes, layer, bits)


def slot_sizes(header: Header, precisions: Iterable[int], unit: str = "expert") -> dict[int, int]:
    """Bits → bytes of a slot, as the engine's plan has them: of the layer that takes most; stored bytes where the trace
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


def quantized(header: Header, quantizer: str | None) -> Header:
    """The header with the sizes under a quantiser, if it has them."""
    sizes = header.quantized_bytes.get(quantizer or "")
    return replace(header, expert_bytes=sizes, slot_bytes=sizes, copied_bytes=sizes) if sizes else header


def resized(header: Header, expert: float, dense: float) -> Header:
    """The header of a model of the same routing whose experts have `expert` weights, and each layer `dense` others in
    16 bits."""
    precise = max(header.expert_bytes)
    factor = expert * precise / 8 / fmean(header.expert_bytes[precise])

    def times(sizes: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        return {bits: [round(factor * nbytes) for nbytes in row] for bits, row in sizes.items()}

    return replace(
        header, expert_bytes=times(header.expert_bytes), slot_bytes=times(header.slot_bytes),
        copied_bytes=times(header.copied_bytes),
        quantized_bytes={name: times(sizes) for name, sizes in header.quantized_bytes.items()},
        dense_bytes=round(2 * dense * len(header.experts)),
        head_bytes=round(factor * header.head_bytes), neuron_bytes=round(factor * header.neuron_bytes),
        neuron_slot_bytes={bits: round(factor * nbytes) for bits, nbytes in header.neuron_slot_bytes.items()},
        made_from={**header.made_from, "dense_bits": 16},
    )  # fmt: skip


def shape_of(header: Header) -> ModelShape:
    """The shape of a traced model, without hash tables."""
    return ModelShape(header.experts, header.top_k, header.encoder_layers)


def run_bits(header: Header) -> int:
    """The precision that the traced model ran in: the measured one, else the highest with a known size."""
    return max(header.times.expert if header.times else header.expert_bytes)


def spread(header: Header, decode_s: float, prefill_s: float) -> Times:
    """Times from seconds per token of decoding and of a prompt, where nothing else was measured: spread by bytes over
    the dense part and the K experts of each layer; all on the dense part where its bytes are unknown."""
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


def computed_times(header: Header, processor: Processor) -> Times:
    """Times of a processor that decodes at the rate at which it reads weights, and computes prompts as fast as its
    arithmetic allows: two operations a weight and token. A pass of either kind takes `layer_s` for each layer, too.
    TraceError where the trace does not say how many bytes its dense layers have."""
    if not header.dense_bytes:
        raise TraceError(
            f"the trace of {header.model} does not say how many bytes its dense layers have, from which their time "
            f"would follow; give times with --compute 20ms"
        )
    precise = max(header.expert_bytes)
    weights = fmean(header.expert_bytes[precise]) * 8 / precise
    dense_weights = header.dense_bytes * 8 / int(header.made_from.get("dense_bits", precise))
    expert = expert_times(header, processor.rate)
    further = dict.fromkeys(expert, 2 * weights / processor.arithmetic)
    layers = len(header.experts) * processor.layer_s
    return Times(
        header.dense_bytes / processor.rate + layers, expert, 2 * dense_weights / processor.arithmetic, further,
        prefill_pass=layers,
    )  # fmt: skip


def expert_times(header: Header, rate: float) -> dict[int, float]:
    """Bits → seconds of one expert on one token, of a processor that reads so many bytes a second of slots."""
    return {bits: fmean(sizes) / rate for bits, sizes in (header.slot_bytes or header.expert_bytes).items()}


def deciding_of(header: Header, composition: Composition) -> Deciding | None:
    """What deciding takes under a composition, whatever the device computes, as the engine measured it where the trace
    was made: for the one with most parts in common, the dearest parts first. One that reads ahead stands for another
    that does before one that does not. None if nothing was measured."""
    if header.costs is None:
        return None

    def alike(measured: Deciding) -> list[tuple[bool, bool]]:
        pairs = [(measured.parts.get(part), str(composition[part])) for part in DECIDING]
        return [(theirs == ours, (theirs == "none") == (ours == "none")) for theirs, ours in pairs]

    return max(header.costs.presets.values(), key=alike)


def nearest(times: Mapping[int, float], bits: int) -> float:
    """The time of the precision that is nearest among those that are known, the lower of two."""
    return times[min(times, key=lambda known: (abs(known - bits), known))]


class NeuronLoads:
    """Bytes of loads where an expert comes as W1 and its active neurons (CORM), and of the fetches when a cached expert
    lacks active neurons.

    A load of the running layer brings the active neurons. A prefetch brings those that the layer before named; in a
    trace without names as many as are active, of which `RECALL` are right. Missing neurons are fetched when the expert
    runs, or left out where it goes on with what was predicted. An expert that was predicted and not chosen has no
    recorded neurons: it brings the trace's mean number. Above the share `upper_limit` of active neurons, and in a pass
    over several tokens, a whole expert comes. A drive reads whole pages, and through gaps (`Composition.gap_bytes`);
    from main memory single neurons are copied, after they were gathered in `gather` seconds a byte."""

    def __init__(self, trace: Trace, costs: Costs, composition: Composition, gather: float = 0.0) -> None:
        header = trace.header
        self._costs = costs
        self._limit = composition.upper_limit
        self._proceeds = composition.proceeds
        self._layer = -1
        self._pass = 0
        self._predicted: set[ExpertKey] = set()
        self._neurons = header.neurons
        self._head_share = header.head_bytes / (header.head_bytes + header.neurons * header.neuron_bytes)
        self._mean = whole(round(_mean_active(trace)))
        self._active: list[dict[int, int]] | None = None
        self._named: list[dict[int, int]] = []
        self._cache = NeuronCache()
        end = header.head_bytes + header.neurons * header.neuron_bytes
        self._records = Records(header.head_bytes, header.neuron_bytes, header.neurons, end)
        copied = costs.copies or composition.store == "memory"
        self._page, self._gap = (1, 0) if copied else (_PAGE, composition.gap_bytes)
        self._gather = gather if copied else 0.0

    def start_pass(self, layers: Sequence[LayerTrace], tokens: int) -> None:
        """A pass over `tokens` tokens begins; active neurons are known of a single token."""
        self._active = [layer.neurons for layer in layers] if tokens == 1 else None
        self._named = [layer.named for layer in layers]
        self._layer = -1
        self._pass += 1

    def start_layer(self, layer: int) -> None:
        """Layer `layer` runs: a load for another layer is a prefetch."""
        self._layer = layer

    def load(self, key: ExpertKey) -> Move:
        """What moves when `key` is loaded: W1 and the neurons wanted now."""
        wanted = self._wanted(key, self._mean)
        self._predicted.discard(key)
        if self._active is not None and key.layer != self._layer:
            self._predicted.add(key)
            named = self._named[key.layer].get(key.expert)
            wanted = as_predicted(wanted, self._neurons, f"{self._pass} {key}") if named is None else named
        loaded = to_load(wanted, self._neurons, self._limit)
        brought, share = self._read(loaded)
        self._cache.put(key, brought)
        return self._move(key, self._head_share + share, share if loaded != whole(self._neurons) else 0.0)

    def complete(self, key: ExpertKey) -> Move:
        """What to fetch before a cached `key` can be computed: active neurons that are not in the cache, where they
        then stay. Nothing where a prediction brought the expert and the layer goes on with its neurons."""
        predicted = key in self._predicted
        self._predicted.discard(key)
        if predicted and self._proceeds and self._active is not None:
            return Move(0)
        missing = self._cache.missing(key, self._wanted(key, 0))
        loaded = to_load(missing, self._neurons, self._limit)
        brought, share = self._read(loaded)
        self._cache.add(key, brought)
        return self._move(key, share, share if loaded != whole(self._neurons) else 0.0)

    def _move(self, key: ExpertKey, share: float, gathered: float) -> Move:
        """The share `share` of an expert's bytes, of which the share `gathered` is gathered first."""
        nbytes = self._costs.nbytes(key)
        return Move(round(nbytes * share), nbytes * gathered * self._gather)

    def _wanted(self, key: ExpertKey, unknown: int) -> int:
        if self._active is None:
            return whole(self._neurons)
        return self._active[key.layer].get(key.expert, unknown)

    def _read(self, wanted: int) -> tuple[int, float]:
        """The neurons that reading `wanted` brings, and the share of the expert that is read for them."""
        brought = nbytes = 0
        for start, stop in self._records.spans(wanted, self._page, self._gap):
            brought |= self._records.within(start, stop)
            nbytes += stop - start
        return brought, nbytes / self._records.end


def as_predicted(active: int, neurons: int, seed: str) -> int:
    """As many of an expert's `neurons` as are active, of which `RECALL` are right; the same for the same seed."""
    chance = random.Random(seed)
    there = [neuron for neuron in range(neurons) if active >> neuron & 1]
    others = [neuron for neuron in range(neurons) if not active >> neuron & 1]
    wrong = len(there) - round(RECALL * len(there))
    kept = chance.sample(there, len(there) - wrong)
    return sum(1 << neuron for neuron in (*kept, *chance.sample(others, min(wrong, len(others)))))


def _mean_active(trace: Trace) -> float:
    layers = (layer for passed in trace.passes for layer in passed.layers)
    counts = [neurons.bit_count() for layer in layers for neurons in layer.neurons.values()]
    return sum(counts) / len(counts) if counts else 0.0
