"""Records what a model's routers choose on a text into a trace file: `tiermoe trace`, and the calibrations.

Of each of a text's sequences the first tokens are a prompt, read in one pass; the others are fed one at a time,
whatever the model would have said. Recording changes nothing: the little pass before a token and the forecasts leave
the model's own passes as they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import xxhash

from tiermoe import __version__
from tiermoe.config import BITS, Settings
from tiermoe.engine.engine import engine_of
from tiermoe.engine.observer import Observer
from tiermoe.errors import ConfigError
from tiermoe.formats.expert_format import expert_format
from tiermoe.formats.neurons import neuron_format, record_place
from tiermoe.formats.store import Store, precision_key
from tiermoe.lab.measure.costs import costs_of, with_link
from tiermoe.lab.measure.neurons import NeuronWatch
from tiermoe.lab.measure.texts import Feed, SequenceShape
from tiermoe.lab.papers import corm
from tiermoe.lab.trace import Header, LayerTrace, Little, Pass, Times, Trace, TraceWriter
from tiermoe.model.families import family_of
from tiermoe.model.prepare_store import Progress
from tiermoe.offload.policies.routing import require_little
from tiermoe.offload.presets import PRESETS
from tiermoe.types import Ready, Routed

DISTANCES = (1, 2, 3)
_DIGITS = 5  # significant ones of a forecast's weight: a trace holds hundreds for each token

MadeFrom = dict[str, str | int | float]


def write_trace(
    path: Path,
    model: Any,
    ids: torch.Tensor,
    shape: SequenceShape,
    made_from: MadeFrom,
    progress: Progress,
    distances: Sequence[int] = DISTANCES,
    little: bool = True,
    theta: float | None = None,
    little_k: int | None = None,
    runs: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Records the sequences `ids` (sequences, length) in a trace file at `path`, which appears whole or not at all.
    Times are measured before, on the first sequence. distances, little, theta, little_k: as for `Recorder`. runs: of
    presets on the same text, as `costs_of` takes them. TraceError where `path` cannot be written."""
    times, costs = measure_times(model, ids[0], shape.prompt), None
    if runs:
        top_k = [layer.top_k for layer in engine_of(model).store.layers]
        compositions = {name: PRESETS[name] for name in runs}
        times, costs = costs_of(runs, compositions, times, top_k, engine_of(model).link.lanes)
    if theta is not None:
        made_from = {**made_from, "theta": theta}
    if little_k is not None:
        made_from = {**made_from, "little": little_k}
    with Recorder(model, distances, little, theta, little_k) as recorder:
        header = replace(header_of(model, times, recorder.holds, recorder.distances, made_from), costs=costs)
        passes: Iterable[Pass] = _counted(recorder, ids, shape, progress)
        if runs:  # a link is fitted on the passes
            recorded = Trace(header, list(passes))
            header, passes = replace(header, costs=with_link(recorded, runs)), recorded.passes
        with TraceWriter(path, header) as writer:
            for passed in passes:
                writer.add(passed)


def _counted(recorder: Recorder, ids: torch.Tensor, shape: SequenceShape, progress: Progress) -> Iterator[Pass]:
    """The passes of all sequences, with progress."""
    done = 0
    for number, sequence in enumerate(ids):
        for passed in recorder.passes(sequence, shape.prompt, number):
            done += 1
            progress("recording", done, shape.passes)
            yield passed


def made_from(text_name: str, text: str, shape: SequenceShape, settings: Settings) -> MadeFrom:
    """What a trace or a profile is made from, beside the checkpoint; without a date, so that the same text and settings
    give the same."""
    return {
        "text": text_name,
        "text_xxh3": xxhash.xxh3_64_hexdigest(text.encode()),
        "tokens": shape.sequences * shape.sequence,
        "prompt": shape.prompt,
        "sequence": shape.sequence,
        "bits": settings.bits_used,
        "dense_bits": settings.dense_bits_used,
        "quantizer": settings.quantizer_used,
        "version": __version__,
    }


class Recorder(Observer):
    """Records the routing of a loaded model that has run before (`Forecaster`). A context.

    distances: layers ahead whose routers forecast on a layer's input. little: run the little pass (MoBiLE) before each
    token, of `little_k` experts (None: K/2). theta: record the neurons above it of each token after a prompt (CORM;
    ModelError where the experts are not gated). The attributes `holds` and `distances` are what can be recorded (an
    adapter family's routers name no experts; with one expert per token there is no half).

    ConfigError for a model whose composition is lossy or decodes with fewer experts: it would choose otherwise than the
    model."""

    weights = whole_rankings = True

    def __init__(
        self,
        model: Any,
        distances: Sequence[int] = DISTANCES,
        little: bool = True,
        theta: float | None = None,
        little_k: int | None = None,
    ) -> None:
        self._model = model
        self._engine = engine = engine_of(model)
        if engine.lossy:
            raise ConfigError(
                f"preset {engine.composition.name} is lossy ({', '.join(engine.lossy)}); record with an exact preset"
            )
        layers = engine.store.layers
        self._experts = [layer.experts for layer in layers]
        self._top_k = [layer.top_k for layer in layers]
        family = family_of(engine.config.model_type)
        self.little = little and not family.encoder_decoder and engine.decoder.can_rollback and max(self._top_k) > 1
        if little_k is not None:
            require_little("confident", little_k, self._top_k)
        engine.context.little = little_k
        self.distances = () if not family.forecasts else tuple(d for d in distances if d < len(layers))
        self._layers: list[LayerTrace] = []
        self._neurons = None if theta is None else NeuronWatch(model, theta)
        engine.observe(self)

    @property
    def holds(self) -> frozenset[str]:
        """The parts that the trace holds, of `tiermoe.lab.trace.HOLDS`."""
        parts = {
            "forecasts": self.distances, "counts": self.distances, "little": self.little, "neurons": self._neurons,
        }  # fmt: skip
        return frozenset(["weights", "tokens", *(name for name, there in parts.items() if there)])

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the model as it was before."""
        self._engine.context.little = None
        self._engine.observe(None)

    @torch.inference_mode()
    def passes(self, ids: torch.Tensor, first: int, sequence: int = 0) -> Iterator[Pass]:
        """The passes over one sequence (n,): the first `first` tokens, then each of the others, as `Feed` runs them."""
        feed = Feed(self._model, ids, first)
        self._begin()
        feed.prompt()
        yield Pass("prefill", sequence, ids[:first].tolist(), self._layers)
        for position in range(first, len(ids)):
            little = self._little(feed, position) if self.little else None
            self._begin()
            feed.token(position)
            if self._neurons is not None:
                for layer, active, named in zip(self._layers, self._neurons.active, self._neurons.named, strict=True):
                    layer.neurons, layer.named = active, named
            yield Pass("decode", sequence, [int(ids[position])], self._layers, little)

    def _begin(self) -> None:
        self._layers = [LayerTrace([], []) for _ in self._experts]
        if self._neurons is not None:
            self._neurons.start_pass()

    def _little(self, feed: Feed, position: int) -> Little:
        """The little pass at a position; it is undone afterwards."""
        current = self._engine.context
        self._begin()
        try:
            with current.halved([]):
                logits = feed.token(position)
        finally:
            feed.take_back(position)
            current.scheduler.discard_pass()
        for layer, ranked in current.forecasts.little.items():
            traced = self._layers[layer]
            traced.experts = [[expert for expert, _ in ranked]]
            traced.weights = [[weight for _, weight in ranked]]
        current.forecasts.little.clear()
        return Little(float(logits.float().softmax(-1).amax()), self._layers)

    def on_route(self, routed: Routed, hidden: torch.Tensor) -> None:
        if self._neurons is not None:
            self._neurons.on_route(routed, hidden)
        traced = self._layers[routed.layer]
        traced.experts = [list(chosen) for chosen in routed.experts]
        # as they are: a score that is a threshold, as calibrated ones are, must fall on the same side in a replay
        traced.weights = [list(gates) for gates in routed.weights]
        for distance in self.distances:
            target = routed.layer + distance
            if target < len(self._experts):
                ranked = self._engine.forecaster.rank(target, hidden)
                kept = self._kept(target) if len(hidden) == 1 else self._experts[target]
                traced.forecasts[distance] = [(expert, _rounded(weight)) for expert, weight in ranked[:kept]]
                if routed.phase == "prefill":
                    traced.counts[distance] = list(self._engine.forecaster.count(target, hidden))

    def on_ready(self, layer: int, ready: Ready) -> None:
        if self._neurons is not None:
            self._neurons.on_ready(layer, ready)

    def _kept(self, target: int) -> int:
        """How much of one token's ranking is recorded: 2 K experts, and those above the 75th percentile. The choices of
        several tokens may be anywhere in a ranking."""
        return max(2 * int(self._top_k[target]), -(-int(self._experts[target]) // 4) + 1)


def _rounded(weight: float) -> float:
    return float(f"{weight:.{_DIGITS}g}")


def header_of(
    model: Any,
    times: Times | None,
    holds: frozenset[str],
    distances: tuple[int, ...],
    made_from: dict[str, str | int | float],
) -> Header:
    """The header of a loaded model's trace. A trace with neurons: ModelError or ConfigError for experts that the neuron
    unit cannot take."""
    engine = engine_of(model)
    store, plan = engine.store, engine.plan
    own = stored_bytes(store, engine.settings.quantizer_used)
    slots = slot_bytes(store, engine.settings.quantizer_used)
    quantizers = {each.quantizer for each in PRESETS.values() if each.quantizer and each.unit == "expert"}
    return Header(
        model=store.source.name,
        fingerprint=store.source.fingerprint,
        experts=[layer.experts for layer in store.layers],
        top_k=[layer.top_k for layer in store.layers],
        expert_bytes=own,
        slot_bytes=slots,
        copied_bytes=slots,  # a copy to a GPU fills the slot
        quantized_bytes={name: sizes for name in sorted(quantizers) if (sizes := stored_bytes(store, name)) != own},
        times=times,
        holds=holds,
        forecast_distances=distances,
        dense_bytes=plan.dense,
        encoder_layers=sum(layer.name.startswith("encoder.") for layer in store.layers),
        made_from=made_from,
        hash_layers=engine.service.hash_layers,
        **(neuron_sizes(store, engine.settings, engine.dtype) if "neurons" in holds else {}),
    )


def neuron_sizes(store: Store, settings: Settings, dtype: torch.dtype) -> dict[str, Any]:
    """`head_bytes`, `neuron_bytes`, `neurons` and `neuron_slot_bytes` of a header, of the first MoE layer (all have one
    shape), as the neuron unit stores it in the settings' bits, or in 4 where the unit does not have those bits, and by
    their quantiser, or CORM's where they name none."""
    quantizer = settings.quantizer or corm.QUANTIZER
    forms = {bits: neuron_format(store.layers[0], bits, dtype, quantizer) for bits in (4, 2)}
    place = record_place(forms.get(settings.bits_used, forms[4]))
    return {
        "head_bytes": place.stored_at,
        "neuron_bytes": place.record_bytes,
        "neurons": place.neurons,
        "neuron_slot_bytes": {bits: form.slot.nbytes for bits, form in forms.items()},
    }


def expert_bytes(store: Store, quantizer: str) -> dict[int, list[int]]:
    """Bits → bytes that a read of one expert of each layer takes, in the precisions that the store holds."""
    found = {}
    for bits in BITS:
        packed = store.precisions.get(precision_key(bits, quantizer))
        if packed is not None:
            found[bits] = [max(extent.nbytes for extent in layer.extents) for layer in packed.layers]
    return found


def stored_bytes(store: Store, quantizer: str) -> dict[int, list[int]]:
    """Bits → stored bytes of one expert of each layer, in every precision; as packing would make one that the store
    lacks."""
    packed = expert_bytes(store, quantizer)
    return {
        bits: packed.get(bits)
        or [expert_format(layer, bits, store.dtype, quantizer).stored.nbytes for layer in store.layers]
        for bits in BITS
    }


def slot_bytes(store: Store, quantizer: str) -> dict[int, list[int]]:
    """Bits → bytes of a slot for an expert of each layer, in every precision: they follow from shapes."""
    return {
        bits: [expert_format(layer, bits, store.dtype, quantizer).slot.nbytes for layer in store.layers]
        for bits in BITS
    }


_DECODED = 32
_PROMPTS = 3  # the first is left out: it may be the first that the model does


@torch.inference_mode()
def measure_times(model: Any, ids: torch.Tensor, prompt: int) -> Times:
    """Times of a loaded model on one sequence (n,): the prompt three times, then up to `_DECODED` tokens after it."""
    prefills, decodes = [], []
    with Stopwatch(model) as watch:
        for _ in range(_PROMPTS):
            feed = Feed(model, ids, prompt)
            watch.lap()
            feed.prompt()
            prefills.append(watch.lap())
        for position in range(prompt, min(prompt + _DECODED, len(ids))):
            feed.token(position)
            decodes.append(watch.lap())
    return times_of(prefills[1:], decodes, prompt, engine_of(model).settings.bits_used)


def times_of(prefills: Sequence[Lap], decodes: Sequence[Lap], prompt: int, bits: int) -> Times:
    """Times of passes over prompts of `prompt` tokens and over single ones, with experts in `bits`: medians."""
    one = median(lap.experts_s / lap.used for lap in decodes)
    dense = median(lap.seconds - lap.experts_s for lap in decodes)
    further = median(lap.further(one) for lap in prefills)
    prefill_token = median(lap.beside(one, further) / prompt for lap in prefills)
    layers = min(median(lap.layers_s for lap in decodes), dense)
    prefill_layers = min(median(lap.layers_s / prompt for lap in prefills), prefill_token)
    return Times(dense, {bits: one}, prefill_token, {bits: further}, layers, prefill_layers)


@dataclass(slots=True)
class Lap:
    """What one pass took."""

    seconds: float = 0.0
    experts_s: float = 0.0  # seconds of its experts
    used: int = 0  # (token, expert) pairs that ran
    active: int = 0  # (layer, expert) pairs that ran
    layers_s: float = 0.0  # seconds from the routers' choices to the layers' first experts

    def further(self, one: float) -> float:
        """Seconds of each token after an expert's first token, which takes `one`."""
        return max(self.experts_s - self.active * one, 0.0) / max(self.used - self.active, 1)

    def beside(self, one: float, further: float) -> float:
        """Seconds of everything but experts that take `one` and `further`."""
        return max(self.seconds - self.active * one - (self.used - self.active) * further, 0.0)


class Stopwatch(Observer):
    """Times a model's passes and their experts, less the waiting for the link. A context."""

    def __init__(self, model: Any) -> None:
        self._engine = engine_of(model)
        self._lap = Lap()
        self._routed = 0.0  # when the running layer's router had spoken
        self._first: float | None = None  # when its first expert could be computed
        self._began = self._now()

    def __enter__(self) -> Stopwatch:
        self._engine.observe(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.observe(None)

    def lap(self) -> Lap:
        """What has passed since the last lap."""
        ended, self._lap = self._lap, Lap()
        ended.seconds = self._now() - self._began
        self._began = self._now()
        return ended

    def on_route(self, routed: Routed, hidden: torch.Tensor) -> None:
        counts = routed.tokens_per_expert()
        self._lap.used += sum(counts.values())
        self._lap.active += len(counts)
        self._first = None
        self._routed = self._now()

    def on_ready(self, layer: int, ready: Ready) -> None:
        if self._first is None:
            self._first = self._now()
            self._lap.layers_s += self._first - self._routed

    def on_computed(self, layer: int) -> None:
        if self._first is not None:
            self._lap.experts_s += self._now() - self._first

    def _now(self) -> float:
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)  # so that each part's work is done within it
        return time.perf_counter() - self._engine.service.wait_s
