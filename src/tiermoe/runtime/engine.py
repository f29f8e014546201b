"""The engine of one loaded model: its store, slots, link, cache and counters. It is `model.tiermoe`."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tiermoe.batch import Batch
from tiermoe.compose import PrecisionSlots, assemble
from tiermoe.controller import Controller
from tiermoe.errors import ConfigError, TiermoeError
from tiermoe.kernels import machine_layout
from tiermoe.kernels.expert import ExpertKernel, Views
from tiermoe.model.architectures import decoder_for
from tiermoe.model.decoder import Decoder
from tiermoe.model.generic import GenericDecoder
from tiermoe.model.routers import Router
from tiermoe.model.weights import ModuleWeights
from tiermoe.policy.prediction.worth import PrefetchTrial, promising
from tiermoe.runtime.blueprint import Blueprint
from tiermoe.runtime.composition import Resolved
from tiermoe.runtime.fallback import ConfidentDecoding
from tiermoe.runtime.footprint import peak_resident_bytes
from tiermoe.runtime.forecasts import Forecaster, PassForecasts, router_beside
from tiermoe.runtime.gpu_plan import GpuMemoryPlan
from tiermoe.runtime.hash_routing import token_tables
from tiermoe.runtime.history import History
from tiermoe.runtime.memory_plan import MemoryPlan
from tiermoe.runtime.observer import Observer, Undo, time_kernels
from tiermoe.runtime.passes import CurrentPass
from tiermoe.runtime.reading import drive_for
from tiermoe.runtime.settled import SettledExperts
from tiermoe.runtime.shells import is_shell
from tiermoe.runtime.slot_pools import shape_of
from tiermoe.runtime.steps import Front, Steps
from tiermoe.runtime.system import processors
from tiermoe.runtime.units import unit_of
from tiermoe.scheduler import Scheduler
from tiermoe.store.layout import ExpertFormat, Layout
from tiermoe.store.store import Store, precision_key
from tiermoe.tiers.assemble import assemble as assemble_tiers
from tiermoe.tiers.cuda import resolve_device
from tiermoe.tiers.held import HeldReader
from tiermoe.tiers.probe import DriveProbe
from tiermoe.tiers.reader import ExtentReader
from tiermoe.types import FEW_TOKENS, ExpertKey, Extent, Ready

_LONG_ENOUGH = 0.25  # seconds of reading that say more than the probe


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters at one moment."""

    hits: int
    misses: int
    bytes_read: int
    wait_s: float


class Engine:
    """Serves a model's experts. Made by `tiermoe.load`, attached as `model.tiermoe`."""

    def __init__(self, model: Any, store: Store, plan: MemoryPlan, resolved: Resolved, blueprint: Blueprint) -> None:
        self.plan = plan
        self.settings = resolved.settings
        self.composition = resolved.composition
        self._tables = resolved.tables
        self.precisions = resolved.precisions
        self.store = store
        self.longest_context = blueprint.max_context()
        self._family = blueprint.family
        self._checkpoint = blueprint.checkpoint
        self._device = resolve_device(self.settings.device)
        self._packed = {bits: PackedExperts(store, self._key_of(bits)) for bits in self.precisions}
        self._layouts = _numbered_layouts(self._packed)
        extents = [extent for packed in self._packed.values() for layer in packed.extents for extent in layer]
        self.drive: DriveProbe = drive_for(plan, extents, resolved, store.root)
        self._views: dict[tuple[int, int], Views] = {}
        host_slots = plan.host_slots if isinstance(plan, GpuMemoryPlan) else 0
        self._unit = unit_of(self.composition, torch.device(self._device).type)
        tiers = assemble_tiers(
            [(pool.slots, pool.slot_bytes) for pool in plan.pools],
            self._unit.filler(self._reader(), self._extent_of, self._format_of),
            self.drive.lanes,
            lambda key: self._format_of(key).slot.nbytes,
            self._device,
            host_slots,
        )
        self._slots, self.link, self._tier_stats = tiers.slots, tiers.link, tiers.stats
        self._unit.over(tiers.link)
        self._hash_tables = token_tables(model, self._family)
        self._history = self._earlier_runs() if self.settings.warm else None
        self.scheduler = self._schedule()
        if self._history is not None:
            self.scheduler.fill(self._history.uses)
            self._leave_record = self._history.keep(self, self.scheduler)
        self._closed = False
        self._unwatch: list[Undo] = []
        self._attach(model)

    @property
    def controller(self) -> Controller:
        return self.scheduler.controller

    @property
    def lossy(self) -> list[str]:
        """The parts of the composition that can change tokens; empty: exact."""
        return self.composition.lossy

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the link: the probe's at loading, or more where reading has been faster since."""
        busy = self.link.busy_s
        return max(self.drive.bandwidth, self.link.bytes_read / busy if busy > _LONG_ENOUGH else 0.0)

    def snapshot(self) -> Snapshot:
        """The counters now; two of them tell what happened between."""
        counts = self.controller.counts
        return Snapshot(counts.hits, counts.misses, self.link.bytes_read, self.wait_s)

    @property
    def wait_s(self) -> float:
        """Seconds in which the computing thread waited for experts, or parts of them."""
        return self.link.wait_s + self._unit.wait_s

    def stats(self) -> dict[str, float | int | str]:
        """Counters since loading: hits and misses of experts, bytes read, seconds waited for the link, memory."""
        counts, discarded = self.controller.counts, self.scheduler.discarded
        return {
            "preset": self.composition.name,
            "lossy": ", ".join(self.lossy),
            "bits": self.settings.bits,
            "dense_bits": self.settings.dense_bits_used,
            "expert_hits": counts.hits,
            "expert_misses": counts.misses,
            "prefetched_hits": counts.prefetched,
            "warmed_experts": counts.warmed,
            "expert_skips": counts.skipped,
            "experts_on_cpu": counts.elsewhere,
            "low_loads": counts.low_loads,
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
            "peak_memory_bytes": peak_resident_bytes(),
            "memory_budget_bytes": self.plan.budget,
            **self._tier_stats(),
            **self._unit.stats(),
        }

    def close(self) -> None:
        """Detaches from the model: ends the reading lanes and gives the slots back. The model cannot run afterwards."""
        if self._closed:
            return
        self._closed = True
        if self._history is not None:
            self._leave_record()
        for shell in self._shells:
            shell.run_experts = _closed
        for hook in self._hooks:
            hook.remove()
        self.forecaster.close()
        self._unit.close()
        self.link.close()
        self._checkpoint.close()
        self._views.clear()
        del self._slots

    def step(self, batch: Batch, cache: Any, every: bool = False) -> torch.Tensor:
        """Runs a batch (`runtime.steps.Steps.step`): logits (rows, vocabulary), or (T, vocabulary) of every token."""
        self._check_open()
        return self.steps.step(batch, cache, every)

    def new_cache(self, sequences: int = 1, context: int | None = None) -> Any:
        """Keys and values for `sequences` of up to `context` tokens; None: as many as memory is set aside for."""
        return self.steps.new_cache(sequences, context)

    def forward(self, model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A call of the transformers model in front of this engine."""
        self._check_open()
        return self._front.forward(model, arguments, named)

    def cache_for_generate(self, generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
        """The cache that transformers' `generate()` begins with; None: one of its own."""
        return self._front.cache_for_generate(generation_config, model_kwargs)

    def new_sequence(self) -> None:
        """Forgets what is recorded per sequence, as a forward pass without a past does by itself."""
        self.scheduler.new_sequence()

    def observe(self, observer: Observer | None) -> None:
        """Tells `observer`, and nobody else, of what runs from now on; None ends it."""
        for undo in self._unwatch:
            undo()
        self._unwatch = []
        if observer is not None and observer.kernels:
            self._unwatch = time_kernels(self.steps.decoder, self._layers, observer)
        self.current.observer = observer if observer is not None and observer.layers else None
        rule, predictor = self.scheduler.precision, self.composition.policy("prefetch")
        self.current.needs_weights = rule.reads_weights or (observer is not None and observer.weights)
        whole = observer is not None and observer.whole_rankings
        self.forecaster.whole = whole or rule.ranks_all or predictor.ranks_all

    def held(self, layer: int, ready: Ready) -> tuple[ExpertKernel, Views]:
        """What computes an expert that is ready, and its views: for an observer, of whole experts."""
        held: tuple[ExpertKernel, Views] = self._layers[layer].held(ready)
        return held

    def _check_open(self) -> None:
        if self._closed:
            _closed()

    def _extent_of(self, key: ExpertKey) -> Extent:
        return self._packed[key.bits].extents[key.layer][key.expert]

    def _format_of(self, key: ExpertKey) -> ExpertFormat:
        return self._packed[key.bits].formats[key.layer]

    def _reader(self) -> ExtentReader | HeldReader:
        reader = ExtentReader(self.drive.direct, self.drive.keep)
        if self.composition.store == "disk":
            return reader
        places = (
            ExpertKey(layer, expert, bits)
            for bits, packed in self._packed.items()
            for layer, extents in enumerate(packed.extents)
            for expert in range(len(extents))
        )
        return HeldReader(reader, ((key, self._extent_of(key)) for key in places))

    def _key_of(self, bits: int) -> str:
        return precision_key(bits, self.settings.quantizer, machine_layout(self._device), self.composition.unit)

    def _schedule(self) -> Scheduler:
        shape = replace(shape_of(self.store.layers), hash_tables=self._hash_tables)
        slots = [PrecisionSlots(pool.bits, pool.slots) for pool in self.plan.pools]
        costs = self._unit.miss_costs
        return assemble(
            self.composition, shape, slots, self.link, self.settings.bits, self._tables,
            miss_costs=costs, trial=self._trial,
        )  # fmt: skip

    def _earlier_runs(self) -> History:
        share, prefetch = round(20 * self.plan.slots / self.plan.all_slots) * 5, self.composition.prefetch
        circumstances = f"prefetch={prefetch}, {share} % of the experts, {torch.get_num_threads()} threads"
        return History(self.store, self._key_of(self.precisions[0]), circumstances)

    def _trial(self) -> PrefetchTrial:
        load_s = self.plan.slot_bytes / self.drive.bandwidth if self.drive.bandwidth else math.inf
        spare = processors() > torch.get_num_threads()

        def promises(layer_s: float) -> bool:
            return promising(layer_s, load_s, spare)

        return self._history.trial(promises) if self._history else PrefetchTrial(None, promises)

    def _attach(self, model: Any) -> None:
        self._shells = [module for module in model.modules() if is_shell(module)]
        self._layers: list[Any] = []
        decoder = self._own_decoder(model)
        self.forecaster = Forecaster(self._routers(model, decoder), False, self._stacked_layers())
        encoder_layers = shape_of(self.store.layers).encoder_layers
        self.current = CurrentPass(self.scheduler, PassForecasts(self.forecaster), encoder_layers)
        self.current.may_skip = self.scheduler.precision.skips or self.composition.on_mispredict == "proceed"
        renormalise = self._family.renormalises(model.config)
        for index, shell in enumerate(self._shells):
            formats = {bits: packed.formats[index] for bits, packed in self._packed.items()}
            layer = self._unit.experts(index, shell, formats, self.current, self._views_of, renormalise)
            self._layers.append(layer)
            shell.run_experts = layer
        if self.scheduler.settles:
            self.controller.tell_warmed(self._has_come)
        self._hooks = self.current.follow_both(model) if self._family.encoder_decoder else []
        self._confident = self._decode_little_first()
        base: Any = type(model).__mro__[1]
        if decoder is not None:
            decoder.attach([ShellExperts(shell) for shell in self._shells])
        self.steps = Steps(
            decoder or GenericDecoder(model, functools.partial(base.forward, model)),
            self.current,
            self._confident,
            self.settings.chunk,
            self.plan.context,
        )
        self._front = Front(self.steps, self.current, base, decoder is not None, bool(model.config.use_cache))
        self.observe(None)
        model.tiermoe = self

    def _own_decoder(self, model: Any) -> Decoder | None:
        """A decoder built from blocks; None where the family has none, where another is asked for, or on a GPU."""
        if self.settings.decoder == "generic" or self._family.encoder_decoder or self._device != "cpu":
            return None
        return decoder_for(model.config, ModuleWeights(model), model.dtype)

    def _routers(self, model: Any, decoder: Decoder | None) -> list[Any]:
        if decoder is not None:
            return list(decoder.routers)
        return [
            None if self._family.adapter or layer in self._hash_tables else router_beside(shell, model)
            for layer, shell in enumerate(self._shells)
        ]

    def _has_come(self, key: ExpertKey, slot: int) -> None:
        self._layers[key.layer].has_come(key.expert, key.bits, slot)

    def _stacked_layers(self) -> int:
        """Layers whose routers are evaluated in one product."""
        alike = len({layer.experts for layer in self.store.layers}) == 1
        stacked = self.composition.policy("prefetch").in_one_product and self._family.plain_router and alike
        return int(self.composition["ahead"]) if stacked else 1

    def _decode_little_first(self) -> ConfidentDecoding | None:
        if self.composition.routing not in ("half", "confident"):
            return None
        if max(layer.top_k for layer in self.store.layers) < 2:
            raise ConfigError(
                f"routing={self.composition.routing} runs half of a token's experts, this model uses one; "
                f"use another preset or --set routing=all"
            )
        gamma = self.composition.gamma if self.composition.routing == "confident" else None
        return ConfidentDecoding(self.current, gamma)

    def _views_of(self, layer: int, bits: int, slot: int) -> Views:
        layout = self._layouts[bits][layer]
        views = self._views.get((layout, slot))
        if views is None:
            views = self._unit.views(self._packed[bits].formats[layer], self._slots.buffer(slot))
            self._views[layout, slot] = views
        return views


class PackedExperts:
    """One precision of a store: `extents[layer][expert]` and `formats[layer]`."""

    def __init__(self, store: Store, key: str) -> None:
        self.extents = [layer.extents for layer in store.precisions[key].layers]
        self.formats = [store.expert_format(key, index) for index in range(len(store.layers))]


def _numbered_layouts(packed: Mapping[int, PackedExperts]) -> dict[int, list[int]]:
    """Precision → a number per layer, the same where slots are laid out alike, so that these share views."""
    known: dict[Layout, int] = {}
    return {
        bits: [known.setdefault(form.slot, len(known)) for form in experts.formats] for bits, experts in packed.items()
    }


class ShellExperts:
    """The experts of a decoder's layer: what runs in place of a transformers experts module."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    @property
    def by_row(self) -> bool:
        return bool(getattr(self._shell.run_experts, "by_row", False))

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._shell.run_experts(hidden, index, weights)
        return result

    def block(self, router: Router, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor | None:
        settled: SettledExperts | None = getattr(self._shell.run_experts, "settled", None)
        if settled is None or hidden.shape[0] > FEW_TOKENS or router.native is None:
            return None
        return settled(router.native, hidden, residual)


def _closed(*_: torch.Tensor) -> torch.Tensor:
    raise TiermoeError("this model's expert engine was closed; load the model again")
