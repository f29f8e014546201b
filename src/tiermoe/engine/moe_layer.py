"""The MoE layer of an engine: routing in, the weighted sum of the chosen experts out, which come through the expert
cache.

The sum runs in ascending expert index and in the hidden states' dtype, as transformers' eager experts do, whatever the
order in which experts become available. A layer of few tokens is computed by one native call where all of its experts
are resident, and in parts of the same call where some are not yet. Longer prompts, several precisions and GPUs compute
expert by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from tiermoe.engine.cached_routing import Route
from tiermoe.engine.cooperative import OnCpu
from tiermoe.engine.expert_sums import Sums, sums_of
from tiermoe.engine.forward_context import ForwardContext
from tiermoe.engine.neuron_experts import NeuronExpert
from tiermoe.errors import TiermoeError
from tiermoe.kernels.experts import ExpertKernel, FusedExperts, Views
from tiermoe.kernels.moe_block import MoeBlock
from tiermoe.model.routers import Router
from tiermoe.offload.loader import CPU_FALLBACK
from tiermoe.types import FEW_TOKENS, ExpertKey, Ready, Routed

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""hidden (T, H), experts (T, K) and weights (T, K) of tokens that are computed by themselves."""


@dataclass(frozen=True, slots=True)
class ExpertSource:
    """What computes the experts of a layer. kernels: one per precision. views_of: (expert, slot) → typed views of what
    the slot has. on_cpu: computes experts that have no slot (`loader.CPU_FALLBACK`), beside this device. expect: called
    with the layer and its hidden states before its loads begin, by the neuron unit; parts then run one by one."""

    kernels: Mapping[int, ExpertKernel]
    views_of: Callable[[ExpertKey, int], Views]
    on_cpu: OnCpu | None = None
    expect: Callable[[int, torch.Tensor], None] | None = None


class MoELayer:
    """MoE layer `index`, of `experts` experts, as decoders and transformers' modules call it.

    renormalise: whether the model scales the chosen experts' weights to a fixed sum, so that those of fewer experts are
    scaled too. chooses: which experts run, instead of the router alone (routing=cached). `batch_invariant`: whether a
    token's result does not depend on the others of a call of few tokens."""

    def __init__(
        self,
        index: int,
        experts: int,
        source: ExpertSource,
        context: ForwardContext,
        renormalise: bool = False,
        chooses: Route | None = None,
    ) -> None:
        self._index = index
        self._experts = experts
        self._kernels = source.kernels
        self._views_of = source.views_of
        self._on_cpu = source.on_cpu
        self._expect = source.expect
        self._context: Any = context
        self._renormalise = renormalise
        self._chooses = chooses
        self._fused: FusedLayer | None = None
        (kernel, *others) = self._kernels.values()
        if not others and isinstance(kernel, FusedExperts):
            self._fused = FusedLayer(kernel, experts)
        self.batch_invariant = all(isinstance(kernel, FusedExperts) for kernel in self._kernels.values())

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden (T, H), index (T, K) of the chosen experts (a value of `experts` or more: none), weights (T, K)
        → (T, H)."""
        (total,) = self.forward_ragged([(hidden, index, weights)])
        return total

    def route(self, router: Router, *parts: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The weights and the experts, (T, K) each, of each part (T, H)."""
        self._context.forecasts.router_input(parts)
        return [router.route(each) if self._chooses is None else self._chooses(router, each) for each in parts]

    def block(self, router: Router, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor | None:
        """residual, if any, + the layer of hidden, few tokens (T, H) each, valid until the next call; None where its
        parts must run one by one: no native kernel computes them, somebody observes what is chosen, or decisions need
        the router's weights."""
        fused, context, native = self._fused, self._context, router.native
        if fused is None or native is None or self._chooses is not None or hidden.shape[0] > FEW_TOKENS:
            return None
        scheduler = context.scheduler
        if context.observer is not None or (not scheduler.settles and context.decides_by_layer):
            return None
        out = fused.out if hidden.shape[0] == 1 else torch.empty_like(hidden)
        if scheduler.settles or scheduler.hits_need_no_decision:
            hits = fused.whole(native, hidden, residual, out)
            if hits:
                scheduler.all_hit(self._index, hits, () if scheduler.settles else fused.chosen())
                return out
            chosen = fused.chosen()
        else:
            chosen = fused.route(native, hidden)
        context.forecasts.at(hidden)
        self._compute_fused(fused, scheduler.run_layer(self._routed(chosen, None), context.forecasts))
        fused.total(residual, out)
        return out

    @torch.no_grad()
    def forward_ragged(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """What a call with each part gives, bit for bit: each expert is read once and computes the tokens of each part
        by themselves."""
        context, observer = self._context, self._context.observer
        if self._expect is not None and len(parts) > 1:
            return [self(*part) for part in parts]
        routed_parts = [(hidden, *self._little(index, weights)) for hidden, index, weights in parts]
        hidden, index, weights = routed_parts[0]
        if self._expect is not None:
            self._expect(self._index, hidden)
        if self._fused is not None and len(parts) == 1 and hidden.shape[0] <= FEW_TOKENS:
            totals = [self._few(self._fused, hidden.contiguous(), index, weights)]
        else:
            works = [_Work(*part) for part in routed_parts]
            if len(works) > 1:
                hidden = torch.cat([each.hidden for each in works])
                weights = torch.cat([each.weights for each in works])
            chosen = [row for work in works for row in work.chosen]
            for group in context.run_layer(self._routed(chosen, weights), hidden):
                for each in works:
                    for alike in each.alike(group):
                        self._compute(alike, each)
            totals = [self._total(each) for each in works]
        if observer is not None:
            observer.on_computed(self._index)
        return totals

    def place(self, expert: int, bits: int, slot: int) -> None:
        """An expert has come into a slot: the native kernel gets its addresses."""
        if self._fused is not None:
            self._fused.place(expert, slot, self._views_of(ExpertKey(self._index, expert, bits), slot))

    def remove(self, expert: int) -> None:
        """The expert's slot is another's from now on."""
        if self._fused is not None:
            self._fused.remove(expert)

    def computes(self, ready: Ready) -> tuple[ExpertKernel, Views]:
        """What computes an expert that is ready, and what it computes with."""
        return self._kernels[ready.bits], self._views_of(ExpertKey(self._index, ready.expert, ready.bits), ready.slot)

    def watch(self, wrap: Callable[[Any], Any]) -> Callable[[], None]:
        """Puts wrap(kernel), which is called as the kernel is, in the place of each; returns what puts them back."""
        kernels, fused = self._kernels, self._fused
        self._kernels = {
            bits: kernel.watched(wrap) if isinstance(kernel, NeuronExpert) else wrap(kernel)
            for bits, kernel in kernels.items()
        }
        undo_fused = fused.watch(wrap) if fused is not None else None

        def undo() -> None:
            self._kernels = kernels
            if undo_fused is not None:
                undo_fused()

        return undo

    def close(self) -> None:
        """Calls from now on raise TiermoeError."""
        self._context = _Closed()

    def _little(self, index: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts that run: all, or few in a little pass."""
        if self._context.unsure is None:
            return index, weights
        chosen: tuple[torch.Tensor, torch.Tensor] = self._context.route(
            self._index, index, weights, self._experts, self._renormalise
        )
        return chosen

    def _few(self, fused: FusedLayer, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Few tokens of one part, whose experts are known."""
        context = self._context
        scheduler = context.scheduler
        fused.routed(hidden, index, weights)
        routed = self._routed(index.tolist(), weights)
        asks = context.observer is not None or context.decides_by_layer or not scheduler.hits_need_no_decision
        came = None if asks else fused.resident(routed.experts)
        if came is None:
            came = self._compute_fused(fused, context.run_layer(routed, hidden))
        else:
            fused.compute(list(came))
            scheduler.all_hit(self._index, len(came), () if scheduler.settles else routed.experts)
        out = torch.empty_like(hidden)
        fused.total(None, out)
        return self._rescaled(out, index, weights, came)

    def _compute_fused(self, fused: FusedLayer, groups: Iterator[list[Ready]]) -> set[int]:
        """Computes experts as they come; returns which came."""
        came = set[int]()
        for group in groups:
            experts = []
            for expert, slot, bits in group:
                if fused.slots.get(expert) != slot:
                    self.place(expert, bits, slot)
                experts.append(expert)
            fused.compute(experts)
            came.update(experts)
        return came

    def _compute(self, group: list[Ready], work: _Work) -> None:
        """Experts that are computed in one call, for the tokens of a part that chose them."""
        experts = [ready.expert for ready in group]
        work.came.update(experts)
        if group[0].slot == CPU_FALLBACK:
            work.on_cpu += self._sent(group, work.sums)
            return
        kernel, tokens, sums = self._kernels[group[0].bits], work.hidden.shape[0], work.sums
        views = [self._views_of(ExpertKey(self._index, ready.expert, ready.bits), ready.slot) for ready in group]
        if tokens == 1:
            outputs = kernel.forward_one(work.hidden, views)
        else:
            outputs = kernel.forward_ragged(sums.rows(experts), sums.counts(experts), views, tokens > FEW_TOKENS)
        sums.keep(experts, outputs)

    def _total(self, work: _Work) -> torch.Tensor:
        for future, experts in work.on_cpu:
            work.sums.keep(experts, future.result().to(work.hidden.device))
        return self._rescaled(work.sums.total(), work.index, work.weights, work.came)

    def _rescaled(
        self, total: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, came: set[int]
    ) -> torch.Tensor:
        """Sums of tokens some of whose experts were left out, for a model that scales the chosen experts' weights to a
        fixed sum (CORM, on_mispredict=proceed)."""
        if not (self._context.proceed and self._renormalise):
            return total
        there = torch.isin(index, torch.tensor(sorted(came), dtype=index.dtype, device=index.device))
        kept = weights.masked_fill(~there, 0).sum(1, keepdim=True)
        return total * torch.where(kept > 0, weights.sum(1, keepdim=True) / kept, 1).to(total.dtype)

    def _sent(self, group: list[Ready], sums: Sums) -> list[tuple[Future[torch.Tensor], list[int]]]:
        """Experts that the CPU computes beside this device, and their outputs to come."""
        assert self._on_cpu is not None
        experts = [ready.expert for ready in group]
        parts = torch.split(sums.rows(experts).cpu(), sums.counts(experts))
        return [
            (self._on_cpu(ready.expert, ready.bits, x), [ready.expert]) for ready, x in zip(group, parts, strict=True)
        ]

    def _routed(self, chosen: list[list[int]], weights: torch.Tensor | None) -> Routed:
        """What tokens chose, an index beyond the experts left out. weights (T, K): of the same choices in the same
        order, where policies may ask for them."""
        context = self._context
        gates: list[list[float]] = [[]] * len(chosen)
        if weights is not None and context.needs_weights:
            gates = weights.tolist()
        if max(map(max, chosen)) >= self._experts:
            kept = [[k for k, expert in enumerate(row) if expert < self._experts] for row in chosen]
            gates = [[row[k] for k in keep] if row else [] for row, keep in zip(gates, kept, strict=True)]
            chosen = [[row[k] for k in keep] for row, keep in zip(chosen, kept, strict=True)]
        return Routed(self._index, context.phase, chosen, gates)


class _Work:
    """Tokens that are computed by themselves, and what has come for them: hidden (T, H), index and weights (T, K),
    `chosen`: the index, as lists. `on_cpu`: outputs to come."""

    def __init__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
        self.hidden, self.index, self.weights = hidden, index, weights
        self.chosen: list[list[int]] = index.tolist()
        self.sums: Sums = sums_of(hidden, self.chosen, index, weights)
        self.came = set[int]()
        self.on_cpu: list[tuple[Future[torch.Tensor], list[int]]] = []

    def alike(self, group: list[Ready]) -> Iterator[list[Ready]]:
        """Those of a group that its tokens chose, in calls of one precision. A call takes no more rows than there are
        tokens, but for the first expert, so that a prompt's rows are not all there at once; few tokens are one call."""
        tokens = self.hidden.shape[0]
        most = tokens * self.index.shape[1] if tokens <= FEW_TOKENS else tokens
        asked = self.sums.counts([ready.expert for ready in group])
        for bits in dict.fromkeys(ready.bits for ready in group):
            call, rows = list[Ready](), 0
            for ready, count in zip(group, asked, strict=True):
                if not count or ready.bits != bits:
                    continue
                if call and rows + count > most:
                    yield call
                    call, rows = [], 0
                call.append(ready)
                rows += count
            if call:
                yield call


class FusedLayer:
    """A layer's router, experts and residual in native calls for few tokens: one where all that was chosen is resident,
    else one for the router, one for each group of experts as they come, and one for the sum. `slots`: by resident
    expert, where it lies. `out`: a result for one token, (1, H)."""

    def __init__(self, kernel: FusedExperts, experts: int) -> None:
        self._block = MoeBlock(kernel.native, experts)
        self._packed = kernel.packed
        self.slots: dict[int, int] = {}
        self.out = torch.empty((1, kernel.native.hidden), dtype=torch.bfloat16)
        block = self._block
        self.route, self.routed, self.chosen, self.total = block.route, block.routed, block.chosen, block.total
        self.compute: Callable[[list[int]], None] = block.compute
        self.whole: Callable[..., int] = block.__call__

    def place(self, expert: int, slot: int, views: Views) -> None:
        """The expert lies in the slot of these views from now on."""
        self._block.place(expert, self._packed(views))
        self.slots[expert] = slot  # after it: an interruption may come between

    def resident(self, chosen: Sequence[Sequence[int]]) -> set[int] | None:
        """The experts that tokens chose, where all of them are resident."""
        experts = {expert for row in chosen for expert in row}
        return experts if experts <= self.slots.keys() else None

    def remove(self, expert: int) -> None:
        """The expert is resident no longer."""
        self.slots.pop(expert, None)
        self._block.remove(expert)  # even of one without a slot: an interruption may have come between

    def watch(self, wrap: Callable[[Any], Any]) -> Callable[[], None]:
        """Puts wrap(kernel), which is called as the kernel is, in the place of each; returns what puts them back."""
        before = self.compute, self.whole
        self.compute, self.whole = wrap(self.compute), wrap(self.whole)

        def undo() -> None:
            self.compute, self.whole = before

        return undo


class _Closed:
    """The context of a layer whose engine was closed."""

    def __getattr__(self, name: str) -> Any:
        raise closed_error()


def closed_error() -> TiermoeError:
    """The error of a call after closing."""
    return TiermoeError("this model's expert engine was closed; load the model again")
