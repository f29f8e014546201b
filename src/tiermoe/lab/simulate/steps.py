"""The passes that a composition makes of a trace, with their forecasts and their future; and the refusal where a trace
or a calibration lacks what the composition needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tiermoe.errors import ProfileError, TraceError
from tiermoe.lab.trace import Header, LayerTrace, Pass, Trace
from tiermoe.offload.composition import POLICIES, Composition
from tiermoe.offload.policies.prediction import Ranked
from tiermoe.offload.policies.routing import is_confident, little, require_adaptive, require_little
from tiermoe.offload.profiles import Profile, tables
from tiermoe.types import ExpertKey, Routed

_TABLES = {"bits": "table of bits per expert", "paths": "activation paths", "frequencies": "frequencies of experts"}
HASHED = ("hash", "hash+path")
"""Predictions by the tables of layers that are routed by the token."""
_LITTLE = (("routing", "confident"), ("prefetch", "recalled"), ("prefetch", "recalled+next-gate"))


@dataclass(slots=True)
class Step:
    """One pass to run."""

    phase: str  # 'prefill' or 'decode'
    sequence: int
    size: int  # tokens that run
    tokens: list[int]  # their ids; empty where unknown
    layers: list[LayerTrace]  # one per MoE layer of the model
    recalled: list[LayerTrace] | None = None  # layers of the discarded little pass at the same position
    discarded: bool = False  # this is a little pass whose token is run again

    @property
    def running(self) -> list[int]:
        """The MoE layers that run, in order."""
        return [layer for layer, traced in enumerate(self.layers) if traced.experts]

    def routed(self, layer: int) -> Routed:
        """The router's choice for `layer`."""
        return Routed(layer, self.phase, self.layers[layer].experts, self.layers[layer].weights)


def steps_of(trace: Trace, composition: Composition) -> list[Step]:
    """The passes that run, in order. Recorded choices of passes with all K experts stand for the choices of passes with
    fewer experts, whose hidden states, and so later choices, would differ a little."""
    steps = []
    for passed in trace.passes:
        if passed.phase == "decode" and (gating := composition.adaptive_gating):
            steps.append(_step(passed, _kept(passed.layers, gating.kept)))
        elif passed.phase == "decode" and composition.routing == "half":
            steps.append(_step(passed, _little(passed.layers, composition.little)))
        elif passed.phase == "decode" and composition.routing == "confident" and passed.little is not None:
            sure = is_confident(passed.little.confidence, composition.gamma)
            steps.append(_step(passed, _little(passed.little.layers, composition.little), discarded=not sure))
            if not sure:
                steps.append(_step(passed, passed.layers, recalled=passed.little.layers))
        else:
            steps += _parted(_step(passed, passed.layers), trace.header.encoder_layers)
    return [step for step in steps if step.running]


def _step(
    passed: Pass, layers: list[LayerTrace], recalled: list[LayerTrace] | None = None, discarded: bool = False
) -> Step:
    return Step(passed.phase, passed.sequence, passed.size, passed.tokens, layers, recalled, discarded)


def _parted(step: Step, encoder_layers: int) -> list[Step]:
    """A pass through an encoder and the decoder behind it, as two passes; the decoder's first token is a decoded
    one."""
    if not any(layer < encoder_layers for layer in step.running):
        return [step]
    nothing = LayerTrace([], [])
    decoder = step.layers[encoder_layers:]
    encoded = replace(step, layers=step.layers[:encoder_layers] + [nothing] * len(decoder))
    size = max((len(layer.experts) for layer in decoder), default=0)
    if not size:
        return [encoded]
    phase = "decode" if size == 1 else "prefill"
    layers = [nothing] * encoder_layers + decoder
    return [encoded, replace(step, phase=phase, size=size, tokens=[], layers=layers)]


def _little(layers: Sequence[LayerTrace], count: int | None) -> list[LayerTrace]:
    """The layers as a little pass of `count` experts (None: K/2) runs them."""
    return _kept(layers, lambda _, gates: little(gates, count))


def _kept(layers: Sequence[LayerTrace], places_of: Callable[[int, Sequence[float]], list[int]]) -> list[LayerTrace]:
    """The layers with fewer experts. places_of: (layer, a token's gate weights) → the positions of those that run."""
    passes = []
    for number, layer in enumerate(layers):
        kept = [places_of(number, gates) for gates in layer.weights]
        experts = [[row[place] for place in places] for row, places in zip(layer.experts, kept, strict=True)]
        weights = [[row[place] for place in places] for row, places in zip(layer.weights, kept, strict=True)]
        passes.append(replace(layer, experts=experts, weights=weights))
    return passes


class RecordedTable(dict[int, list[int]]):
    """The table of a layer that is routed by the token alone, as far as the trace's tokens show it: token id → its
    experts; none for another token."""

    def __missing__(self, token_id: int) -> list[int]:
        return []


def hash_tables(trace: Trace) -> dict[int, RecordedTable]:
    """MoE layer → its table, of the trace's `hash_layers`: what such a layer chose for a token is what its table has.
    TraceError where one token got two choices: then the layer is no such layer."""
    tables = {layer: RecordedTable() for layer in trace.header.hash_layers}
    for passed in trace.passes:
        for layer, table in tables.items():
            chosen = passed.layers[layer].experts
            # a layer that runs for the last tokens alone
            for token, experts in zip(passed.tokens[len(passed.tokens) - len(chosen) :], chosen, strict=True):
                if table.setdefault(token, experts) != experts:
                    raise TraceError(
                        f"layer {layer} of the trace of {trace.header.model} is said to be routed by the token, and "
                        f"token {token} got experts {table[token]} and {experts}; make it again with tiermoe trace"
                    )
    return tables


class RecordedForecasts:
    """Implements `Forecasts` from a step's recording. `layer`: the one that runs (-1: none yet)."""

    def __init__(self, step: Step) -> None:
        self.layer = -1
        self._step = step

    def ranked(self, target: int) -> Ranked:
        if self.layer < 0:
            return ()
        return self._step.layers[self.layer].forecasts.get(target - self.layer, ())

    def counted(self, target: int) -> Ranked:
        if self.layer < 0:
            return ()
        return self._step.layers[self.layer].counts.get(target - self.layer, ())

    def token_ids(self) -> Sequence[int]:
        return self._step.tokens

    def recalled(self, target: int) -> Ranked:
        if self._step.recalled is None or target >= len(self._step.recalled):
            return ()
        layer = self._step.recalled[target]
        return [pair for row in zip(layer.experts, layer.weights, strict=True) for pair in zip(*row, strict=True)]


class Future:
    """When each expert is requested next. `start_step` and `start_layer` say where the replay is."""

    def __init__(self, steps: Sequence[Step], layers: int) -> None:
        self._layers = layers
        self._steps = steps
        self._now = 0
        self._step = 0
        self._following: list[dict[int, float]] = []
        self._next: list[dict[int, float]] = [{} for _ in range(layers)]
        for step in reversed(steps):
            for layer in reversed(range(layers)):
                self._following.append(self._record(len(self._following), step, layer))
        self._total = len(self._following)
        self._following.reverse()

    def _record(self, back: int, step: Step, layer: int) -> dict[int, float]:
        """Expert → next use after this layer's run, as a count from the end; later uses are recorded already."""
        upcoming = self._next[layer]
        chosen = {expert for token in step.layers[layer].experts for expert in token}
        after = {expert: upcoming.get(expert, math.inf) for expert in chosen}
        upcoming.update(dict.fromkeys(chosen, -float(back)))
        return after

    def start_step(self, step: int) -> None:
        """Step number `step` begins. Every step must begin, in order."""
        self._step = step

    def start_layer(self, layer: int) -> None:
        """Layer `layer` of the step runs now. Every running layer must be named, in order."""
        self._now = self._step * self._layers + layer
        self._next[layer].update(self._following[self._now])

    def next_use(self, key: ExpertKey) -> float:
        """Implements `NextUse`: layers from now until the key's next request; infinity where there is none."""
        use = self._next[key.layer].get(key.expert, math.inf)
        return use if use == math.inf else use + self._total - 1 - self._now

    def choices(self, layer: int) -> list[int]:
        """What `layer` of the running step chooses, by number of tokens (`prediction.context.Future`)."""
        counts = self._steps[self._step].routed(layer).tokens_per_expert()
        return sorted(counts, key=lambda expert: -counts[expert])


def require(composition: Composition, header: Header) -> None:
    """TraceError, with the preset and what the trace lacks, where a trace is not enough."""
    if composition.routing == "cached":
        raise TraceError(
            f"preset {composition.name} chooses by the scores of all experts, and a trace holds those of the chosen "
            f"ones; use --set routing=all, or measure it with tiermoe eval"
        )
    if composition.prefetch in HASHED and not header.hash_layers:
        raise TraceError(
            f"preset {composition.name} prefetches layers that are routed by a hash of the token "
            f"(prefetch={composition.prefetch}), and the trace of {header.model} names none: the model has none, or an "
            f"older tiermoe made the trace; make it again with tiermoe trace, or use --set prefetch=next-gate"
        )
    if gating := composition.adaptive_gating:
        require_adaptive(gating, header.top_k)
    if composition.routing in ("half", "confident"):
        require_little(composition.routing, composition.little, header.top_k)
    recorded = header.made_from.get("little")
    if composition.routing == "confident" and composition.little != recorded and "little" in header.holds:
        raise TraceError(
            f"preset {composition.name} has a little pass of {composition.little or 'K/2'} experts, and the trace of "
            f"{header.model} tells how sure one of {recorded or 'K/2'} was; make the trace again with tiermoe trace "
            f"--little-k"
        )
    lacking = list(_lacking(composition, header))
    if lacking:
        raise TraceError(
            f"preset {composition.name} cannot be replayed: the trace of {header.model} holds no "
            f"{' and no '.join(lacking)}; make one that does with tiermoe trace, have them simulated (tiermoe simulate "
            f"--recall, --fallback, --neurons), or switch the part off with --set"
        )


def require_calibration(composition: Composition, profile: Profile | None, model: str) -> None:
    """ProfileError, with the preset and what the calibration lacks. composition: filled from the profile."""
    found = tables(profile)
    open_ = composition.missing()
    lacking = list(open_)
    for part, table in composition.tables_read.items():
        if table and not getattr(found, table):
            lacking.append(f"{_TABLES[table]} ({part}={getattr(composition, part)})")
    if lacking:
        made_for = composition.profile or "hobbit,edgemoe,fate,corm"
        given = f", or the values with --set {open_[0]}=…" if open_ else ""
        raise ProfileError(
            f"preset {composition.name} has no {' and no '.join(lacking)}; make them with tiermoe calibrate {model} "
            f"--text FILE --for {made_for} and give the folder of the profiles with --profiles{given}, or have tiermoe "
            f"simulate count them with --profiles from-trace"
        )


def _lacking(composition: Composition, header: Header) -> Iterator[str]:
    holds = header.holds
    gates = composition.policy("prefetch").asks_routers and composition.prefetch != "recalled"
    if gates and "forecasts" not in holds:
        yield f"forecasts (prefetch={composition.prefetch})"
    elif gates and (beyond := set(range(1, composition["ahead"] + 1)) - set(header.forecast_distances)):
        yield f"forecasts {max(beyond)} layers ahead (prefetch={composition.prefetch}, ahead={composition['ahead']})"
    if composition.prefetch == "percentile" and composition["popularity"] == "counts" and "counts" not in holds:
        yield "predicted counts of tokens (popularity=counts)"
    if composition.prefetch in HASHED and "tokens" not in holds:
        yield f"ids of tokens (prefetch={composition.prefetch})"
    for part in POLICIES:
        if getattr(composition.policy(part), "reads_weights", False) and "weights" not in holds:
            yield f"gate weights ({part}={getattr(composition, part)})"
    if composition.routing in ("half", "adaptive") and "weights" not in holds:
        yield f"gate weights (routing={composition.routing})"
    little = [f"{part}={value}" for part, value in _LITTLE if getattr(composition, part) == value]
    if little and "little" not in holds:
        yield f"little passes ({', '.join(little)})"
    if composition.unit == "neuron" and not ("neurons" in holds and header.neuron_bytes and header.neurons):
        yield "active neurons (unit=neuron)"
