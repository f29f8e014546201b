"""The engine of one loaded model: its store, slots, link, cache and counters. It is `model.tiermoe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tiermoe.config import Settings
from tiermoe.controller import Controller
from tiermoe.errors import ConfigError, TiermoeError
from tiermoe.kernels import machine_layout
from tiermoe.kernels.expert import ExpertKernel, Views
from tiermoe.policy.cache import ExpertCache
from tiermoe.policy.eviction import EVICTIONS
from tiermoe.runtime.experts import LayerExperts
from tiermoe.runtime.footprint import peak_resident_bytes
from tiermoe.runtime.gpu_plan import GpuMemoryPlan
from tiermoe.runtime.memory_plan import MemoryPlan
from tiermoe.runtime.prefetch import NextGate
from tiermoe.runtime.shells import activation_of, is_shell
from tiermoe.store.layout import ExpertFormat, Layout
from tiermoe.store.store import Store, precision_key
from tiermoe.tiers.assemble import assemble
from tiermoe.tiers.cuda import resolve_device
from tiermoe.tiers.probe import DriveProbe, probe_drive
from tiermoe.types import ExpertKey, Extent

PRESET = "default"
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

    def __init__(
        self, model: Any, store: Store, plan: MemoryPlan, settings: Settings, longest_context: int | None
    ) -> None:
        self.plan = plan
        self.settings = settings
        self.store = store
        self.longest_context = longest_context
        self._device = resolve_device(settings.device)
        self._key = precision_key(settings.bits, settings.quantizer, machine_layout(self._device))
        self._extents = [layer.extents for layer in store.precisions[self._key].layers]
        self._formats = [store.expert_format(self._key, index) for index in range(len(store.layers))]
        self.drive: DriveProbe = probe_drive([extent for layer in self._extents for extent in layer], settings.lanes)
        self._views: dict[tuple[int, int], Views] = {}
        self._layouts = _shared_layouts(self._formats)
        host_slots = plan.host_slots if isinstance(plan, GpuMemoryPlan) else 0
        tiers = assemble(
            plan.slots,
            plan.slot_bytes,
            self.drive,
            self._extent_of,
            self._format_of,
            self._device,
            host_slots,
        )
        self._slots, self.link, self._tier_stats = tiers.slots, tiers.link, tiers.stats
        self.controller = Controller(ExpertCache(plan.slots, EVICTIONS["lru"]()), self.link)
        self._closed = False
        self._attach(model)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the link: the probe's at loading, or more where reading has been faster since."""
        busy = self.link.busy_s
        return max(self.drive.bandwidth, self.link.bytes_read / busy if busy > _LONG_ENOUGH else 0.0)

    def snapshot(self) -> Snapshot:
        """The counters now; two of them tell what happened between."""
        counts = self.controller.counts
        return Snapshot(counts.hits, counts.misses, self.link.bytes_read, self.link.wait_s)

    def stats(self) -> dict[str, float | int | str]:
        """Counters since loading: hits and misses of experts, bytes read, seconds waited for the link, memory."""
        counts = self.controller.counts
        asked = counts.hits + counts.misses
        return {
            "preset": PRESET,
            "bits": self.settings.bits,
            "dense_bits": self.settings.dense_bits,
            "expert_hits": counts.hits,
            "expert_misses": counts.misses,
            "prefetched_hits": counts.prefetched,
            "speculative_loads": counts.speculative_loads,
            "hit_rate": counts.hits / asked if asked else 0.0,
            "bytes_read": self.link.bytes_read,
            "wait_s": self.link.wait_s,
            "cache_slots": self.plan.slots,
            "slot_bytes": self.plan.slot_bytes,
            "all_experts": self.plan.all_slots,
            "link_bandwidth": self.drive.bandwidth,
            "lanes": self.drive.lanes,
            "direct_io": self.drive.direct,
            "peak_memory_bytes": peak_resident_bytes(),
            "memory_budget_bytes": self.plan.budget,
            **self._tier_stats(),
        }

    def close(self) -> None:
        """Detaches from the model: ends the reading lanes and gives the slots back. The model cannot run afterwards."""
        if self._closed:
            return
        self._closed = True
        for shell in self._shells:
            shell.run_experts = _closed
        if self._predictor is not None:
            self._predictor.close()
        self.link.close()
        self._views.clear()
        del self._slots

    def _attach(self, model: Any) -> None:
        self._shells = [module for module in model.modules() if is_shell(module)]
        self._predictor = (
            NextGate(self._shells, model, self.controller, self.settings.bits) if self.settings.prefetch else None
        )
        for index, (shell, form) in enumerate(zip(self._shells, self._formats, strict=True)):
            kernel = ExpertKernel(form, activation_of(shell), torch.device(self._device).type)
            after = self._predictor.after(index) if self._predictor is not None else None
            shell.run_experts = LayerExperts(
                index, form.layer.experts, self.settings.bits, kernel, self.controller, self._views_of, after
            )
        model.tiermoe = self
        model.save_pretrained = _no_saving

    def _extent_of(self, key: ExpertKey) -> Extent:
        return self._extents[key.layer][key.expert]

    def _format_of(self, key: ExpertKey) -> ExpertFormat:
        return self._formats[key.layer]

    def _views_of(self, layer: int, slot: int) -> Views:
        layout = self._layouts[layer]
        views = self._views.get((layout, slot))
        if views is None:
            views = self._formats[layer].slot.views(self._slots.buffer(slot))
            self._views[layout, slot] = views
        return views


def _shared_layouts(formats: list[ExpertFormat]) -> list[int]:
    """A number per layer, the same for layers whose slots are laid out alike, so that they share views."""
    known: dict[Layout, int] = {}
    return [known.setdefault(form.slot, len(known)) for form in formats]


def _closed(*_: torch.Tensor) -> torch.Tensor:
    raise TiermoeError("this model's expert engine was closed; load the model again")


def _no_saving(*_: Any, **__: Any) -> None:
    raise ConfigError(
        "this model holds no experts, so it cannot be saved; its checkpoint and its expert store lie on disk"
    )
