"""One composition over one trace: the scheduler's own decisions, with time and bytes computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from tiermoe.config import CacheSize
from tiermoe.errors import ConfigError, TraceError
from tiermoe.lab.simulate.costs import (
    GATHER,
    Costs,
    NeuronLoads,
    computed_times,
    deciding_of,
    expert_times,
    nearest,
    quantized,
    run_bits,
    shape_of,
    slot_sizes,
    spread,
)
from tiermoe.lab.simulate.evictions import hits_of
from tiermoe.lab.simulate.link import HostTier, VirtualClock, VirtualCpu, VirtualLink
from tiermoe.lab.simulate.machines import Machine
from tiermoe.lab.simulate.steps import (
    HASHED,
    Future,
    RecordedForecasts,
    Step,
    hash_tables,
    require,
    require_calibration,
    steps_of,
)
from tiermoe.lab.trace import Header, Times, Trace
from tiermoe.metrics import ExpertCounts, Metrics, PhaseMetrics
from tiermoe.offload.assembly import FutureTrace, assemble, cache_bytes, divide, precisions
from tiermoe.offload.composition import Composition, filled, with_low_share
from tiermoe.offload.computers import NamedLink
from tiermoe.offload.loader import CPU_FALLBACK
from tiermoe.offload.policies.routing import MissCosts, as_predicted
from tiermoe.offload.profiles import Profile, tables
from tiermoe.offload.second_level import SecondLevelCache
from tiermoe.types import ExpertKey, Routed


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """The machine, and what is given beside the trace."""

    cache: CacheSize
    bandwidth: float  # of the link, bytes per second
    latency: float = 0.0  # seconds before a transfer's first byte
    lanes: int = 1  # transfers at once
    bits: int | None = None  # of the experts; None: the composition's own, or those that the traced model ran in
    times: Times | None = None  # of computing; None: the trace's own
    profile: Profile | None = None
    seed: int = 0
    copies: bool = False  # the link moves copies to a GPU (`Header.copied_bytes`), not what a drive stores
    ram: CacheSize | None = None  # of experts in main memory, which a drive fills; None: there is no level in between
    drive: NamedLink | None = None  # that fills it
    memory: float = 0.0  # bytes a second of the link of experts in main memory; 0: as `bandwidth` and `latency`
    gather: float = 0.0  # seconds a byte of single neurons that main memory gathers before they move
    cpu: Mapping[int, float] = field(default_factory=dict)
    """Bits → seconds of one expert on one token, on the processor that computes misses; empty: there is none."""


def settings_on(
    machine: Machine,
    header: Header,
    cache: CacheSize,
    seconds: tuple[float, float] | None = None,
    ram: CacheSize | None = None,
) -> ReplaySettings:
    """The settings of a machine. seconds: of computing, a decoded token's and a prompt's token's; None: the processor's
    own, or what the trace measured. ram: as `ReplaySettings.ram`. ConfigError where there is no main memory in between,
    TraceError where the trace does not say what the processor's times would follow from."""
    times = None
    if seconds is not None:
        times = spread(header, *seconds)
    elif machine.processor is not None:
        times = computed_times(header, machine.processor)
    hop, behind = machine.hops(ram is not None)
    return ReplaySettings(
        cache, hop.bandwidth, hop.latency, machine.lanes, times=times, copies=hop.copies, ram=ram, drive=behind,
        memory=machine.memory, gather=GATHER / hop.bandwidth,
        cpu=expert_times(header, machine.cpu.rate) if machine.cpu else {},
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """One composition's replay: its metrics beside Belady's, under the names that `--json` prints. Rates in tokens per
    second, times in seconds; None where a phase has no passes. Counts are over the whole trace; those of discarded
    passes (MoBiLE) are apart."""

    preset: str
    eviction: str
    cache_fraction: float
    slots: dict[str, int]  # 'bits' of copies → slots
    metrics: Metrics
    optimum: Callable[[], Metrics]  # makes `belady`
    cached_experts: int  # in the end
    deciding_s: float = 0.0  # seconds of deciding and asking, as the engine measured them; 0 if nothing was measured
    second_level: dict[str, int] = field(default_factory=dict)  # a GPU's counters, named as in `stats()`; with `ram`

    @property
    def belady(self) -> Metrics:
        """Of Belady's choice in one pool of equal slots of the same bytes, without prefetch and time."""
        return self.optimum()

    @property
    def hit_rate(self) -> float:
        """Of decoding, of the prompt where nothing is decoded."""
        return self.metrics.headline_hit_rate

    @property
    def counts(self) -> ExpertCounts:
        """Of both phases, but not of discarded passes."""
        return self.metrics.total.counts

    @property
    def bytes_read(self) -> int:
        return self.metrics.total.bytes_read

    @property
    def decode_tok_s(self) -> float | None:
        return self.metrics.decode.tok_s or None

    @property
    def prefill_tok_s(self) -> float | None:
        return self.metrics.prefill.tok_s or None

    @property
    def bound_tok_s(self) -> float | None:
        """`PhaseMetrics.bound_tok_s` of decoding, at the rate of the link that fills slots."""
        return self.metrics.decode.bound_tok_s(self.metrics.bandwidth) or None

    @property
    def belady_bound_tok_s(self) -> float | None:
        """The same with the bytes that Belady's choice would miss, over that link in no known time."""
        missed = self.belady.decode.bytes_read
        best = replace(self.metrics.decode, bytes_read=missed, read_s=0.0, bytes_copied=0, copy_s=0.0)
        return best.bound_tok_s(self.metrics.bandwidth) or None

    @property
    def bound_fraction(self) -> float | None:
        """The share of `bound_tok_s` that was reached."""
        return self.decode_tok_s / self.bound_tok_s if self.decode_tok_s and self.bound_tok_s else None

    @property
    def bytes_per_token(self) -> float | None:
        """Read while decoding, per token kept."""
        return self.metrics.decode.bytes_per_token if self.metrics.decode.tokens else None

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        metrics, total = self.metrics, self.metrics.total
        return {
            "preset": self.preset,
            "eviction": self.eviction,
            "cache_fraction": self.cache_fraction,
            "slots": self.slots,
            "hit_rate": self.hit_rate,
            "prefill_hit_rate": metrics.prefill.counts.hit_rate,
            "belady_hit_rate": self.belady.headline_hit_rate,
            "decode_tok_s": self.decode_tok_s,
            "prefill_tok_s": self.prefill_tok_s,
            "bound_tok_s": self.bound_tok_s,
            "belady_bound_tok_s": self.belady_bound_tok_s,
            "bytes_read": total.bytes_read,
            "bytes_per_token": self.bytes_per_token,
            "wait_s": total.wait_s,
            **total.expert_counts,
            "cached_experts": self.cached_experts,
            **self.second_level,
            "fallback_ratio": metrics.fallback_ratio,
            "prefetching": metrics.prefetching,
            "bound_fraction": self.bound_fraction,
            "deciding_s": self.deciding_s,
        }


def replay(
    trace: Trace, composition: Composition, settings: ReplaySettings, belady: BeladyHits | None = None
) -> Result:
    """Runs `composition` over the passes of `trace`, from an empty cache. belady: of this trace, for a caller that
    replays it several times. TraceError where the trace lacks what the composition needs, ProfileError where a
    calibration is missing, ConfigError for a cache that cannot be divided and a part that the machine lacks."""
    require(composition, trace.header)
    _require_machine(composition, settings)
    composition = replace(composition, bits=settings.bits or composition.bits)
    composition = _with_theta(filled(composition, settings.profile), trace.header)
    header = quantized(trace.header, composition.quantizer)
    trace = Trace(header, trace.passes)
    require_calibration(composition, settings.profile, header.model)
    composition = with_low_share(composition, len(header.experts))
    times = settings.times or header.times
    if times is None:
        raise TraceError(f"the trace of {header.model} holds no computing times; give them with --compute 20ms")
    if composition.store == "memory" and settings.memory:
        settings = replace(settings, bandwidth=settings.memory, latency=0.0)
    run = _Run(trace, composition, settings, Costs(header, times, settings.copies, deciding_of(header, composition)))
    run.all_steps()
    unit = slot_sizes(header, [run.bits], composition.unit)[run.bits]
    return Result(
        preset=composition.name,
        eviction=composition.cache,
        cache_fraction=run.nbytes / (unit * sum(header.experts)),
        slots={",".join(map(str, share.bits)): share.slots for share in run.slots},
        metrics=run.metrics,
        cached_experts=run.cached_experts,
        deciding_s=run.deciding_s,
        optimum=partial((belady or BeladyHits(trace)).of, max(run.nbytes // unit, 1), run.bits),
        second_level=run.second_level,
    )


class BeladyHits:
    """Belady's hits on one trace, replayed once for each cache size."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._known: dict[tuple[int, int], Metrics] = {}

    def of(self, slots: int, bits: int) -> Metrics:
        """Hits in one pool of `slots` slots for experts in `bits`."""
        slots = min(slots, sum(self._trace.header.experts))
        if (slots, bits) not in self._known:
            self._known[slots, bits] = hits_of(self._trace, "belady", slots, bits)
        return self._known[slots, bits]


def _require_machine(composition: Composition, settings: ReplaySettings) -> None:
    """ConfigError for a part that the machine cannot have, and for main memory that nothing fills."""
    if (settings.ram is None) != (settings.drive is None):
        raise ConfigError("main memory of a size needs a drive that fills it, and a drive the size; give both")
    if composition.misses != "load" and not settings.cpu:
        raise ConfigError(
            f"preset {composition.name}: misses={composition.misses} computes on a CPU beside a GPU, and this machine "
            f"has none; take --machine rtx4090, give --cpu-expert 5ms, or use --set misses=load"
        )
    if composition.unit == "neuron" and (settings.ram is not None or composition.misses != "load"):
        raise ConfigError(
            f"preset {composition.name}: main memory has all experts where their neurons are loaded one by one, and "
            f"the CPU computes none; leave --ram out and use --set misses=load"
        )


def _with_theta(composition: Composition, header: Header) -> Composition:
    """The composition with the theta that the trace's active neurons were recorded with. TraceError where it has
    another: in four digits, as `tiermoe calibrate` prints them, for a user gives `tiermoe trace` what he read."""
    recorded = header.made_from.get("theta")
    if composition.unit != "neuron" or recorded is None:
        return composition
    if composition.theta is not None and f"{composition.theta:.4g}" != f"{float(recorded):.4g}":
        raise TraceError(
            f"the trace of {header.model} holds the neurons active at theta {recorded}, preset {composition.name} asks "
            f"for {composition.theta:g}; make the trace again with that theta"
        )
    return replace(composition, theta=float(recorded))


class _Run:
    """State of one replay: a scheduler, a link and its clock, and the metrics."""

    def __init__(self, trace: Trace, composition: Composition, settings: ReplaySettings, costs: Costs) -> None:
        header, found = trace.header, tables(settings.profile)
        shape = shape_of(header)
        if composition.prefetch in HASHED:
            shape = replace(shape, hash_tables=hash_tables(trace))
        self.steps = steps_of(trace, composition)
        self.metrics = Metrics(bandwidth=settings.bandwidth)
        self.bits = composition.bits or run_bits(header)
        sizes = slot_sizes(header, precisions(composition, self.bits, found.bits), composition.unit)
        self.nbytes = cache_bytes(composition, settings.cache, shape, sizes)
        self.slots = divide(self.nbytes, composition, sizes, found.bits.values(), sum(header.experts))
        self._costs = costs
        self._future = Future(self.steps, len(header.experts))
        self._clock = VirtualClock()
        self._neurons = (
            NeuronLoads(trace, costs, composition, settings.gather) if composition.unit == "neuron" else None
        )
        self._host = None
        if settings.ram is not None and (drive := settings.drive) is not None:
            ram = cache_bytes(replace(composition, cache="lru"), settings.ram, shape, sizes)
            whole = divide(ram, composition, sizes, found.bits.values(), sum(header.experts), settings.lanes, True)
            runs = [(each.bits, each.slots) for each in whole]
            stored = Costs(header, costs.times).nbytes
            self._host = HostTier(SecondLevelCache(runs), drive.bandwidth, drive.latency, stored)
        self._link = link = VirtualLink(
            self._clock, settings.bandwidth, self._neurons.load if self._neurons else costs.move, settings.latency,
            settings.lanes, self._host,
        )  # fmt: skip
        self._cpu = cpu = VirtualCpu(link, lambda bits, tokens: tokens * nearest(settings.cpu, bits))
        self._scheduler = assemble(
            composition, shape, self.slots, link, self.bits, found,
            FutureTrace(self._future.next_use, self._future.choices), settings.seed,
            lambda: MissCosts(link.seconds_per_load, cpu.seconds_per_expert),
        )  # fmt: skip
        self._sequence: int | None = None
        self._loads = 0  # whose asking is charged
        if self._scheduler.placed:
            self._place()

    @property
    def cached_experts(self) -> int:
        return len(self._scheduler.loader.cache)

    @property
    def deciding_s(self) -> float:
        return self._clock.deciding_s

    def all_steps(self) -> None:
        """Every pass in order; fills `metrics`."""
        for number, step in enumerate(self.steps):
            self._step(number, step)
        self.metrics.prefetching = self._scheduler.prefetching
        fallbacks, decoded = sum(step.discarded for step in self.steps), self.metrics.decode.tokens
        self.metrics.fallback_ratio = fallbacks / decoded if decoded else 0.0

    @property
    def second_level(self) -> dict[str, int]:
        """`Result.second_level`."""
        if self._host is None:
            return {}
        cache, copied = self._host.cache, self._link.counters().bytes_copied
        return {"host_hits": cache.hits, "host_misses": cache.misses, "bytes_copied": copied}

    def _place(self) -> None:
        """The cache holds what a static placement has there before the first pass, as when a model has been loaded."""
        self._scheduler.fill(())
        loader = self._scheduler.loader
        while loader.cache.in_flight:
            loader.record(self._link.wait())

    def _step(self, number: int, step: Step) -> None:
        """Runs one pass and adds it to its phase's metrics."""
        before = self._meter()
        if step.sequence != self._sequence:
            self._sequence = step.sequence
            self._scheduler.new_sequence()
        if self._neurons:
            self._neurons.start_pass(step.layers, step.size)
        self._future.start_step(number)
        forecasts = RecordedForecasts(step)
        running = step.running
        self._scheduler.begin_pass(step.size, forecasts, step.phase, running[0])
        for layer in running:
            self._clock.compute(self._costs.dense_s(step.phase, step.size) / len(running))
            self._future.start_layer(layer)
            if self._neurons:
                self._neurons.start_layer(layer)
            forecasts.layer = layer
            self._layer(step, layer, forecasts)
        used = self._meter().since(before)
        if step.discarded:
            self._scheduler.discard_pass()
            self._loads = self._asked
        self.metrics.by_phase[step.phase].add(used, 0 if step.discarded else step.size, step.discarded)

    def _layer(self, step: Step, layer: int, forecasts: RecordedForecasts) -> None:
        routed = step.routed(layer)
        if self._scheduler.substitutes and step.phase == "decode" and (named := self._scheduler.predicted(layer)):
            routed = self._substituted(routed, named)
        tokens, decide_s = routed.tokens_per_expert(), self._costs.decide_s(step.phase)
        ahead = not self._scheduler.computes_hits_at_once
        if ahead:  # half of it before what is resident is known: what is read ahead goes on
            self._clock.decide(decide_s / 2)
        groups = self._scheduler.run_layer(routed, forecasts)
        self._clock.compute(self._costs.layers_s(step.phase, step.size) / len(step.running))
        if ahead or self._scheduler.loader.cache.in_flight:
            self._clock.decide(decide_s / 2 if ahead else decide_s)
        for ready in chain.from_iterable(groups):
            key = ExpertKey(layer, ready.expert, ready.bits)
            if ready.slot == CPU_FALLBACK:
                self._cpu.submit(key, tokens[ready.expert])
                continue
            if self._neurons and (more := self._neurons.complete(key)).nbytes:
                self._link.fetch(more)
            self._clock.compute(self._costs.expert_s(ready.bits, tokens.get(ready.expert, 0)))
        self._clock.compute_s += self._cpu.finish()
        self._clock.decide(self._costs.load_s * (self._asked - self._loads))
        self._loads = self._asked

    @property
    def _asked(self) -> int:
        """Loads, urgent and ahead, of the passes that were not discarded."""
        counts = self._scheduler.loader.counts
        return counts.loads + counts.speculative_loads

    def _substituted(self, routed: Routed, predicted: list[int]) -> Routed:
        """The choice of tokens that go on with `predicted` experts, the likeliest first. No trace has the router's
        weights of them: they get those of the token's own, in their order."""
        experts = [as_predicted(own, predicted) for own in routed.experts]
        others = (len({*taken}.difference(own)) for taken, own in zip(experts, routed.experts, strict=True))
        self._scheduler.loader.counts.displaced += sum(others)
        return Routed(routed.layer, routed.phase, experts, routed.weights)

    def _meter(self) -> PhaseMetrics:
        link, clock, counts = self._link.counters(), self._clock, self._scheduler.loader.counts.copy()
        return PhaseMetrics(
            clock.now, clock.compute_s, link.wait_s, link.bytes_read, 0, counts, read_s=link.busy_s,
            bytes_copied=link.bytes_copied, copy_s=link.copy_s,
        )  # fmt: skip
