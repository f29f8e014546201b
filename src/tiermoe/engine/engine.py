"""The engine of one loaded model: its experts' service, its decoder, and its counters. It is `model.tiermoe`."""

from __future__ import annotations

import _thread
import atexit
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiermoe.batch import Batch
from tiermoe.config import Settings
from tiermoe.decide.composition import Composition
from tiermoe.decide.controller import Controller
from tiermoe.decide.phase_costs import PhaseCosts
from tiermoe.decide.routing import require_little
from tiermoe.decide.scheduler import Scheduler
from tiermoe.engine.cached_routing import Route, routes
from tiermoe.engine.fallback import ConfidentDecoding
from tiermoe.engine.forecasts import Forecaster, PassForecasts
from tiermoe.engine.observer import Observer, Undo, time_kernels
from tiermoe.engine.passes import CurrentPass
from tiermoe.engine.service import ExpertService
from tiermoe.engine.steps import AnyDecoder, Steps
from tiermoe.engine.units import RunExperts
from tiermoe.errors import ConfigError, TiermoeError
from tiermoe.kernels.expert import ExpertKernel, Views
from tiermoe.memory.memory_plan import MemoryPlan
from tiermoe.memory.other_budgets import OtherBudget, other_budgets
from tiermoe.memory.plan import shape_of
from tiermoe.model.blueprint import Blueprint
from tiermoe.model.decoder import Decoder
from tiermoe.model.expert_gates import ExpertGate
from tiermoe.model.routers import Router
from tiermoe.process.footprint import peak_resident_bytes, resident_bytes
from tiermoe.store.store import Store
from tiermoe.tiers.assemble import MeteredLink
from tiermoe.tiers.probe import DriveProbe
from tiermoe.types import FEW_TOKENS, ExpertKey, Ready


@dataclass(frozen=True, slots=True)
class Model:
    """What an engine is given of its model. `decoder` computes batches. Of each MoE layer in order: `gates`, what its
    experts compute, and `routers`, None where it names no experts by index."""

    blueprint: Blueprint
    decoder: AnyDecoder
    gates: Sequence[ExpertGate]
    routers: Sequence[Any]
    generation_config: Any


class ServedExperts:
    """The experts of a MoE layer as decoders and transformers' modules call them. `run` computes them. asked: told what
    a router of our own is given, part by part. chooses: which run, instead of the router alone."""

    def __init__(
        self, run: RunExperts, asked: Callable[[Sequence[torch.Tensor]], None], chooses: Route | None = None
    ) -> None:
        self.run = run
        self._asked = asked
        self._chooses = chooses

    @property
    def by_row(self) -> bool:
        return bool(getattr(self.run, "by_row", False))

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.run(hidden, index, weights)

    def apart(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        return self.run.apart(parts)

    def route(self, router: Router, *parts: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self._asked(parts)
        return [router.route(each) if self._chooses is None else self._chooses(router, each) for each in parts]

    def block(self, router: Router, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor | None:
        block = getattr(self.run, "block", None)
        if block is None or self._chooses is not None or hidden.shape[0] > FEW_TOKENS or router.native is None:
            return None
        self._asked((hidden,))
        result: torch.Tensor | None = block(router.native, hidden, residual)
        return result


class Engine:
    """Runs batches of a model whose experts a service brings. Made by `tiermoe.load` and the commands. One that is
    collected as garbage is closed."""

    def __init__(self, service: ExpertService, model: Model) -> None:
        self.service = service
        self.gates = list(model.gates)
        self.generation_config = model.generation_config
        self._blueprint = model.blueprint
        experts = [gate.experts for gate in self.gates]
        self.forecaster = Forecaster(model.routers, experts, False, self._stacked_layers())
        self.current = self._passes()
        renormalise = self._blueprint.family.renormalises(self.config)
        chooses = routes(self.current, model.decoder, len(self.gates))
        self.layers = [
            ServedExperts(
                service.experts(index, gate, self.current, renormalise), self.forecaster.asked, chooses[index]
            )
            for index, gate in enumerate(self.gates)
        ]
        if self.scheduler.settles:
            self.controller.tell_warmed(_told([layer.run for layer in self.layers]))
        if isinstance(model.decoder, Decoder):
            model.decoder.attach(self.layers)
        self._confident = self._decode_little_first(model.decoder.rewinds)
        self.steps = Steps(model.decoder, self.current, self._confident, self.settings.chunk, self.plan.context)
        self._undo: list[Callable[[], None]] = []
        self._unwatch: list[Undo] = []
        self._closed = False
        self._collected = weakref.finalize(self, _end_beside, service, self._blueprint)
        self._collected.atexit = False
        self._decoded = PhaseCosts()
        self.observe(None)

    @property
    def store(self) -> Store:
        return self.service.store

    @property
    def plan(self) -> MemoryPlan:
        return self.service.plan

    @property
    def settings(self) -> Settings:
        return self.service.resolved.settings

    @property
    def composition(self) -> Composition:
        return self.service.resolved.composition

    @property
    def precisions(self) -> tuple[int, ...]:
        return self.service.resolved.precisions

    @property
    def config(self) -> Any:
        """transformers' config of the model."""
        return self._blueprint.config

    @property
    def dtype(self) -> torch.dtype:
        return self._blueprint.dtype

    @property
    def device(self) -> torch.device:
        return torch.device(self.service.device)

    @property
    def longest_context(self) -> int | None:
        """Tokens the model was made for; None: unbounded."""
        return self._blueprint.max_context()

    @property
    def rewinds(self) -> bool:
        """Whether a sequence's last tokens can be taken back."""
        return self.steps.decoder.rewinds

    @property
    def drive(self) -> DriveProbe:
        return self.service.drive

    @property
    def link(self) -> MeteredLink:
        return self.service.link

    @property
    def scheduler(self) -> Scheduler:
        return self.service.scheduler

    @property
    def controller(self) -> Controller:
        return self.scheduler.controller

    @property
    def lossy(self) -> list[str]:
        """What can change tokens: parts of the composition, keys and values at 8 bits; empty: exact."""
        return self.composition.lossy + (["kv_bits=8"] if self.settings.kv_bits == 8 else [])

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the link: the probe's at loading, or more where reading has been faster since."""
        return self.service.bandwidth

    @property
    def wait_s(self) -> float:
        """Seconds in which the computing thread waited for experts, or parts of them."""
        return self.service.wait_s

    def snapshot(self) -> PhaseCosts:
        """The clock and the counters now; two of them tell what happened between. Tokens are the caller's to count."""
        seconds, wait_s = time.perf_counter(), self.wait_s
        counts, discarded = self.controller.counts.copy(), self.scheduler.discarded.copy()
        return PhaseCosts(
            seconds, seconds - wait_s, wait_s, self.link.bytes_read, 0, counts, discarded, self.link.busy_s
        )

    def other_budgets(self, decode: PhaseCosts) -> list[OtherBudget]:
        """What other memory budgets would bring, by all decoding that this was told of (`decode`: the latest), and the
        record that later plans read; empty where it says nothing."""
        self._decoded.add(decode, decode.tokens)
        curve = self.scheduler.size_curve(self.plan.slots, self._decoded)
        if curve is None:
            return []
        if self.service.history is not None:
            self.service.history.note(curve)
        return other_budgets(self.plan, curve)

    def stats(self) -> dict[str, float | int | str]:
        """Counters since loading: hits and misses of experts, bytes read, seconds waited for the link, memory."""
        counts, discarded = self.controller.counts, self.scheduler.discarded
        return {
            "preset": self.composition.name,
            "lossy": ", ".join(self.lossy),
            "bits": self.settings.bits_used,
            "dense_bits": self.settings.dense_bits_used,
            "kv_bits": self.settings.kv_bits,
            "expert_hits": counts.hits,
            "expert_misses": counts.misses,
            "expert_evictions": self.controller.cache.evictions,
            "prefetched_hits": counts.prefetched,
            "warmed_experts": counts.warmed,
            "expert_skips": counts.skipped,
            "experts_on_cpu": counts.elsewhere,
            "low_loads": counts.low_loads,
            "displaced_choices": counts.displaced,
            "moved_weight": counts.moved_weight,
            "speculative_loads": counts.speculative_loads,
            "prefetching": self.scheduler.prefetching,
            "discarded_hits": discarded.hits,
            "discarded_misses": discarded.misses,
            "fallback_ratio": self._confident.fallback_ratio if self._confident else 0.0,
            "hit_rate": counts.hit_rate or 0.0,
            "bytes_read": self.link.bytes_read,
            "wait_s": self.wait_s,
            "cache_slots": self.plan.slots,
            "slot_bytes": self.plan.slot_bytes,
            "all_experts": self.plan.all_slots,
            "link_bandwidth": self.drive.bandwidth,
            "lanes": self.drive.lanes,
            "direct_io": self.drive.direct,
            "mapped": self.service.mapped,
            "memory_bytes": resident_bytes(),
            "peak_memory_bytes": peak_resident_bytes(),
            "memory_budget_bytes": self.plan.budget,
            **self.service.tier_stats(),
            **self.service.unit.stats(),
        }

    def before_closing(self, undo: Callable[[], None]) -> None:
        """Calls `undo` when the engine is closed; the last one that was told comes first."""
        self._undo.append(undo)

    def close(self) -> None:
        """Ends the reading lanes and gives the slots back, when the step that runs has ended. The model cannot run
        afterwards."""
        with self.current.lock:
            if self._closed:
                return
            self._closed = True
            for layer in self.layers:
                layer.run = _Closed()
            while self._undo:
                self._undo.pop()()
            self.forecaster.close()
            _end(self.service, self._blueprint)
            self._collected.detach()

    def step(self, batch: Batch, cache: Any, every: bool = False) -> torch.Tensor:
        """Runs a batch (`engine.steps.Steps.step`): logits (rows, vocabulary), or (T, vocabulary) of every token."""
        self.check_open()
        return self.steps.step(batch, cache, every)

    def new_cache(self, sequences: int = 1, context: int | None = None) -> Any:
        """Keys and values for `sequences` of up to `context` tokens; None: as many as memory is set aside for."""
        return self.steps.new_cache(sequences, context)

    def new_sequence(self) -> None:
        """Forgets what is recorded per sequence, as a forward pass without a past does by itself."""
        self.scheduler.new_sequence()

    def observe(self, observer: Observer | None) -> None:
        """Tells `observer`, and nobody else, of what runs from now on; None ends it."""
        for undo in self._unwatch:
            undo()
        self._unwatch = []
        if observer is not None and observer.kernels:
            runs: list[Any] = [layer.run for layer in self.layers]
            self._unwatch = time_kernels(self.steps.decoder, runs, observer)
        self.current.observer = observer if observer is not None and observer.layers else None
        rule, predictor = self.scheduler.precision, self.composition.policy("prefetch")
        self.current.needs_weights = rule.reads_weights or (observer is not None and observer.weights)
        whole = observer is not None and observer.whole_rankings
        self.forecaster.whole = whole or rule.ranks_all or predictor.ranks_all

    def held(self, layer: int, ready: Ready) -> tuple[ExpertKernel, Views]:
        """What computes an expert that is ready, and its views: for an observer, of whole experts."""
        run: Any = self.layers[layer].run
        held: tuple[ExpertKernel, Views] = run.held(ready)
        return held

    def check_open(self) -> None:
        """TiermoeError where the engine was closed."""
        if self._closed:
            raise _closed()

    def _passes(self) -> CurrentPass:
        encoder_layers = shape_of(self.store.layers).encoder_layers
        return CurrentPass(self.scheduler, PassForecasts(self.forecaster), encoder_layers, self.service.before_step)

    def _stacked_layers(self) -> int:
        """Layers whose routers are evaluated in one product."""
        alike = len({layer.experts for layer in self.store.layers}) == 1
        stacked = self.composition.policy("prefetch").in_one_product and self._blueprint.family.plain_router and alike
        return int(self.composition["ahead"]) if stacked else 1

    def _decode_little_first(self, rewinds: bool) -> ConfidentDecoding | None:
        if self.composition.routing not in ("half", "confident"):
            return None
        little = self.composition.little
        require_little(self.composition.routing, little, [layer.top_k for layer in self.store.layers])
        self.current.little = little
        gamma = self.composition.gamma if self.composition.routing == "confident" else None
        if gamma is not None and not rewinds:
            raise ConfigError(
                f"routing=confident runs a token again where it is unsure, and {self._blueprint.family.name} keeps a "
                f"recurrent state that cannot be wound back; use --set routing=half or routing=all"
            )
        return ConfidentDecoding(self.current, gamma)


def _end(service: ExpertService, blueprint: Blueprint) -> None:
    service.close()
    blueprint.checkpoint.close()


_ending: set[_thread.LockType] | None = set()
"""One lock for each engine that ends beside the program, held until it has ended. None once the program ends."""


def _end_beside(service: ExpertService, blueprint: Blueprint) -> None:
    """`_end` in a thread of its own: a lane itself may be what collects."""
    if _ending is None:
        return
    running = _thread.allocate_lock()
    running.acquire()
    _ending.add(running)

    def end() -> None:
        try:
            _end(service, blueprint)
        finally:
            if _ending is not None:
                _ending.discard(running)
            running.release()

    _thread.start_new_thread(end, ())


@atexit.register
def _wait_until_ended() -> None:
    """A thread that is at work when the interpreter goes would be stopped within C++, which ends the process."""
    global _ending
    ending, _ending = _ending or set(), None
    for running in list(ending):
        running.acquire()


def _told(layers: Sequence[Any]) -> Callable[[ExpertKey, int], None]:
    """What tells a layer that an expert has come into a slot by itself."""

    def has_come(key: ExpertKey, slot: int) -> None:
        layers[key.layer].has_come(key.expert, key.bits, slot)

    return has_come


def engine_of(loaded: Any) -> Engine:
    """The engine of a loaded transformers model, or the engine itself."""
    engine: Engine = loaded if isinstance(loaded, Engine) else loaded.tiermoe
    return engine


def transformers_model(loaded: Any) -> Any:
    """The transformers model of a family that has no decoder of ours: `loaded` itself, or the one behind an engine."""
    decoder: Any = loaded.steps.decoder if isinstance(loaded, Engine) else None
    return loaded if decoder is None else decoder.model


class _Closed:
    """Stands in the place of a layer's experts once the engine is closed."""

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        raise _closed()

    def apart(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        raise _closed()


def _closed() -> TiermoeError:
    return TiermoeError("this model's expert engine was closed; load the model again")
