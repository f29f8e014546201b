"""One composition over one trace: the scheduler's own decisions, with time and bytes computed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import chain

from tiermoe.config import CacheSize
from tiermoe.decide.compose import (
    Foresight,
    ModelShape,
    assemble,
    cache_bytes,
    divide,
    filled,
    precisions,
    tables,
    with_low_share,
)
from tiermoe.decide.composition import Composition
from tiermoe.decide.phase_costs import PhaseCosts
from tiermoe.decide.profiles import Profile
from tiermoe.errors import TraceError
from tiermoe.simulate.costs import Costs, run_bits, slot_sizes
from tiermoe.simulate.evictions import hits_of
from tiermoe.simulate.link import VirtualClock, VirtualLink
from tiermoe.simulate.needs import require, require_calibration
from tiermoe.simulate.neuron_loads import NeuronLoads
from tiermoe.simulate.result import Result
from tiermoe.simulate.steps import Future, Recorded, Step, steps_of
from tiermoe.trace.schema import Header, Times, Trace
from tiermoe.types import ExpertKey


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """The machine and what is given beside the trace. `bandwidth` in bytes per second, `latency` in seconds, `lanes`
    transfers at once, `start` seconds until a lane without work begins what is asked for, `wake` until whoever waits
    for a load goes on after its end. `bits`: of the experts, None
    the composition's own, or those that the traced model ran in. `times`: None takes the trace's own. `copies`: the
    link moves copies to a GPU (`Header.copied_bytes`), not what a drive stores."""

    cache: CacheSize
    bandwidth: float
    latency: float = 0.0
    lanes: int = 1
    bits: int | None = None
    times: Times | None = None
    profile: Profile | None = None
    seed: int = 0
    wake: float = 0.0
    start: float = 0.0
    copies: bool = False


def replay(
    trace: Trace, composition: Composition, settings: ReplaySettings, belady: BeladyHits | None = None
) -> Result:
    """Runs `composition` over the passes of `trace`, from an empty cache. belady: of this trace, for who replays it
    several times. Raises TraceError where the trace lacks what the composition needs, ProfileError where a calibration
    is missing, ConfigError for a cache that cannot be divided."""
    header = trace.header
    require(composition, header)
    composition = _with_theta(filled(composition, settings.profile), header)
    require_calibration(composition, settings.profile, header.model)
    composition = with_low_share(composition, len(header.experts))
    times = settings.times or header.times
    if times is None:
        raise TraceError(f"the trace of {header.model} holds no computing times; give them with --compute 20ms")
    run = _Run(trace, composition, settings, Costs(header, times, settings.copies))
    for number, step in enumerate(run.steps):
        run.step(number, step)
    unit = slot_sizes(header, [run.bits], composition.unit)[run.bits]
    best = (belady or BeladyHits(trace)).of(max(run.nbytes // unit, 1), run.bits)
    fraction = run.nbytes / (unit * sum(header.experts))
    return Result.of(composition, fraction, run.slots, run.phases, best, settings.bandwidth, run.prefetching)


class BeladyHits:
    """Belady's hits on one trace, replayed once for each cache size that is asked for."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._known: dict[tuple[int, int], dict[str, PhaseCosts]] = {}

    def of(self, slots: int, bits: int) -> dict[str, PhaseCosts]:
        """Phase → hits in one pool of `slots` slots for experts in `bits`."""
        slots = min(slots, sum(self._trace.header.experts))
        if (slots, bits) not in self._known:
            self._known[slots, bits] = hits_of(self._trace, "belady", slots, bits)
        return self._known[slots, bits]


def _with_theta(composition: Composition, header: Header) -> Composition:
    """Active neurons were told by the theta that the trace was made with."""
    recorded = header.made_from.get("theta")
    if composition.unit != "neuron" or recorded is None:
        return composition
    if composition.theta not in (None, float(recorded)):
        raise TraceError(
            f"the trace of {header.model} holds the neurons active at theta {recorded}, preset {composition.name} asks "
            f"for {composition.theta:g}; make the trace again with that theta"
        )
    return dataclasses.replace(composition, theta=float(recorded))


def shape_of(header: Header) -> ModelShape:
    """The shape of a traced model; a trace holds no hash tables."""
    return ModelShape(header.experts, header.top_k, header.encoder_layers)


class _Run:
    """The state of one replay: a scheduler, its link and clock, and what each phase has cost."""

    def __init__(self, trace: Trace, composition: Composition, settings: ReplaySettings, costs: Costs) -> None:
        header, found = trace.header, tables(settings.profile)
        self.steps = steps_of(trace, composition)
        self.phases = {"prefill": PhaseCosts(), "decode": PhaseCosts()}
        self.bits = settings.bits or composition.bits or run_bits(header)
        sizes = slot_sizes(header, precisions(composition, self.bits, found.bits), composition.unit)
        self.nbytes = cache_bytes(composition, settings.cache, shape_of(header), sizes)
        self.slots = divide(self.nbytes, composition, sizes, found.bits.values(), sum(header.experts))
        self._costs = costs
        self._future = Future(self.steps, len(header.experts))
        self._clock = VirtualClock()
        self._neurons = NeuronLoads(trace, costs, composition) if composition.unit == "neuron" else None
        nbytes_of = self._neurons.load if self._neurons else costs.nbytes
        self._link = VirtualLink(
            self._clock, settings.bandwidth, nbytes_of, settings.latency, settings.lanes, settings.wake, settings.start
        )
        self._scheduler = assemble(
            composition, shape_of(header), self.slots, self._link, self.bits, found,
            Foresight(self._future.next_use, self._future.choices), settings.seed,
        )  # fmt: skip
        self._sequence: int | None = None

    @property
    def prefetching(self) -> str:
        return self._scheduler.prefetching

    def step(self, number: int, step: Step) -> None:
        """One pass, charged to its phase."""
        before = self._meter()
        if step.sequence != self._sequence:
            self._sequence = step.sequence
            self._scheduler.new_sequence()
        if self._neurons:
            self._neurons.begin(step.layers, step.size)
        self._future.begin(number)
        forecasts = Recorded(step)
        running = step.running
        self._scheduler.begin_pass(step.size, forecasts, step.phase, running[0])
        for layer in running:
            self._clock.compute(self._costs.dense_s(step.phase, step.size) / len(running))
            self._future.at(layer)
            if self._neurons:
                self._neurons.at(layer)
            forecasts.layer = layer
            self._layer(step, layer, forecasts)
        used = self._meter().since(before)
        if step.discarded:
            self._scheduler.discard_pass()
        self.phases[step.phase].add(used, 0 if step.discarded else step.size, step.discarded)

    def _layer(self, step: Step, layer: int, forecasts: Recorded) -> None:
        routed = step.routed(layer)
        tokens = routed.tokens_per_expert()
        for ready in chain.from_iterable(self._scheduler.run_layer(routed, forecasts)):
            if self._neurons and (more := self._neurons.complete(ExpertKey(layer, ready.expert, ready.bits))):
                self._link.fetch(more)
            self._clock.compute(self._costs.expert_s(ready.bits, tokens.get(ready.expert, 0)))

    def _meter(self) -> PhaseCosts:
        link, clock = self._link, self._clock
        counts = self._scheduler.controller.counts.copy()
        link.catch_up()
        return PhaseCosts(clock.now, clock.compute_s, link.wait_s, link.bytes_read, 0, counts, read_s=link.busy_s)
