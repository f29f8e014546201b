"""The MoE layer of an engine: routing in, the weighted sum of the chosen experts out, which come through the expert
cache.

The sum runs in ascending expert index and in the hidden states' dtype, as transformers' eager experts do, whatever the
order in which experts become available. A layer of few tokens is computed by one native call if all of its experts are
resident, and in parts of the same call if some are not yet. Longer prompts, several precisions and GPUs compute expert
by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from functools import cached_property
from typing import Any, cast

import torch

from tiermoe.engine.expert_sums import Sums, sums_of
from tiermoe.engine.forward_context import ForwardContext
from tiermoe.engine.rerouting import Route, route
from tiermoe.engine.units import GpuNeuronExperts, LayerKernels, NeuronExpert
from tiermoe.errors import TiermoeError
from tiermoe.formats.encoding import scratch
from tiermoe.kernels.experts import ExpertKernel, FusedExperts, Grouped, SlotViews, Views
from tiermoe.kernels.router import Router as NativeRouter
from tiermoe.kernels.router import router_of
from tiermoe.model.routers import Router
from tiermoe.native import _native
from tiermoe.offload.loader import CPU_FALLBACK
from tiermoe.types import FEW_TOKENS, ExpertKey, Ready, Routed

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""hidden (T, H), experts (T, K) and weights (T, K) of tokens that are computed by themselves, on one device."""


class MoELayer:
    """MoE layer `index`, of `experts` experts, as decoders and transformers' modules call it.

    renormalise: whether the model scales the chosen experts' weights to a fixed sum, so that those of fewer experts are
    scaled too. chooses: which experts run, instead of the router alone (routing=cached). `batch_invariant`: whether a
    token's result does not depend on the others of a call."""

    def __init__(
        self,
        index: int,
        experts: int,
        computed: LayerKernels,
        context: ForwardContext,
        renormalise: bool = False,
        chooses: Route | None = None,
    ) -> None:
        self._index = index
        self._experts = experts
        self._kernels = computed.kernels
        self._views_of = computed.views_of
        self._on_cpu = computed.on_cpu
        self._expect = computed.expect
        self._context = context
        self._renormalise = renormalise
        self._chooses = chooses
        self.batch_invariant = all(isinstance(kernel, FusedExperts) for kernel in self._kernels.values())
        self.native: _native.MoeBlock | None = None  # computes few tokens, from the addresses of experts
        self._fused = {bits: kernel for bits, kernel in self._kernels.items() if isinstance(kernel, FusedExperts)}
        if self.batch_invariant:
            fused = [kernel.native for kernel in self._fused.values()]
            self.native = _native.MoeBlock(b"".join(each.absent() for each in fused), experts)
            self._run, self._compute = self.native.run, self.native.compute
            self._out = torch.empty((1, fused[0].hidden), dtype=torch.bfloat16)
        # of experts that are computed in one precision on a GPU: several in one launch
        (only,) = self._kernels.values() if len(self._kernels) == 1 else (None,)
        self._grouped = only if isinstance(only, Grouped) else None
        # expert → the slot and the bits of the resident copy that the native block, or a GPU's last call, computed
        self.placed: dict[int, tuple[int, int]] = {}
        self._router: tuple[NativeRouter | int | None, bytes] = None, b""  # or experts of a token; as C takes it

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden (T, H), index (T, K) of the chosen experts (a value of `experts` or more: none), weights (T, K)
        → (T, H)."""
        (total,) = self.forward_ragged([(hidden, index, weights)])
        return total

    def route(self, router: Router, *parts: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The weights and the experts, (T, K) each, of each part (T, H)."""
        forecasts = self._context.forecasts
        forecasts.router_input(parts)
        if self._chooses is None:
            return route(router, parts)
        forecasts.at(parts[0], self._index)  # of all parts: forecasts come in the copy that choices are made by
        if len(parts) == 1:
            self._context.helped = self._helped(parts[0])
        return self._chooses(router, parts)

    def block(self, router: Router, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor | None:
        """residual, if any, + the layer of hidden, few tokens (T, H) each, valid until the next call; None if its parts
        must run one by one: no native kernel computes them, somebody observes what is chosen, or decisions need the
        router's weights."""
        native, context, tokens = self.native, self._context, hidden.shape[0]
        if native is None or router.native is None or self._chooses is not None or tokens > FEW_TOKENS:
            return None
        scheduler = context.scheduler
        if context.observer is not None:
            return None
        if not scheduler.settles and (context.needs_weights or context.proceed or context.unsure is not None):
            return None
        room = self._begin(native, router.native, hidden)
        out = self._out if tokens == 1 else torch.empty_like(hidden)
        added = 0 if residual is None else residual.data_ptr()
        if scheduler.settles or (scheduler.computes_hits_at_once and not scheduler.loader.uncommitted):
            hits = self._run(room, added, out.data_ptr())
            if hits:
                scheduler.all_hit(self._index, hits, () if scheduler.settles else native.chosen())
                return out
            chosen = native.chosen()
        else:
            chosen = native.route(room)
        context.forecasts.at(hidden)
        self._compute_few(scheduler.run_layer(self._routed(chosen, None), context.forecasts))
        native.total(added, out.data_ptr())
        return out

    @torch.no_grad()
    def forward_ragged(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """What a call with each part gives, bit for bit: each expert is read once and computes the tokens of each part
        by themselves."""
        context, observer = self._context, self._context.observer
        if self._expect is not None and len(parts) > 1:
            return [self(*part) for part in parts]
        hidden = parts[0][0] if len(parts) == 1 else torch.cat([each for each, _, _ in parts])
        if self._chooses is None:
            context.forecasts.at(hidden, self._index)
        parts, on_host = self._read_back(parts, hidden)
        routed_parts = self._little(parts)
        _, index, weights = routed_parts[0]
        if self._expect is not None:
            self._expect(self._index, hidden)
        if (total := self._sum_hits(hidden, index, weights)) is not None:
            totals = [total]
        elif self.native is not None and len(parts) == 1 and hidden.shape[0] <= FEW_TOKENS:
            totals = [self._few(self.native, hidden.contiguous(), index, weights)]
        else:
            # of a GPU's sequences that decode, rows of one call: a product of its own for each
            alone = hidden.device.type != "cpu" and self._on_cpu is None and len(parts) == len(hidden) > 1
            if alone:
                index, weights = (torch.cat([part[which] for part in routed_parts]) for which in (1, 2))
                routed_parts = [(hidden, index, weights)]
            works = [_Work(*part, on_host, alone) for part in routed_parts]
            if len(works) > 1:
                weights = torch.cat([each.weights for each in works])
            chosen = [row for work in works for row in work.chosen]
            for group in context.run_layer(self._routed(chosen, weights), hidden):
                for each in works:
                    for alike in each.alike(group, self._kernels):
                        self._compute_group(alike, each)
            totals = [self._total(each) for each in works]
            if alone:
                totals = [*torch.split(totals[0], 1)]
        if observer is not None:
            observer.on_computed(self._index)
        return totals

    def place(self, expert: int, bits: int, slot: int) -> None:
        """An expert has come into a slot: the native block gets its addresses."""
        if self.native is not None:
            views = self._views_of(ExpertKey(self._index, expert, bits), slot)
            packed = views.packed if isinstance(views, SlotViews) else None
            self.native.place(expert, packed or self._fused[bits].packed(views))
            self.placed[expert] = slot, bits  # after it: an interruption may come between

    def computes(self, ready: Ready) -> tuple[ExpertKernel, Views]:
        """What computes an expert that is ready, and what it computes with."""
        return self._kernels[ready.bits], self._views_of(ExpertKey(self._index, ready.expert, ready.bits), ready.slot)

    def watch(self, wrap: Callable[[Any], Any]) -> Callable[[], None]:
        """Puts wrap(kernel), which is called as the kernel is, in the place of each; returns what puts them back."""
        kernels, native, grouped = self._kernels, self.native, self._grouped
        self._grouped = None  # whose sums are no kernel's call
        self._kernels = {
            bits: kernel.watched(wrap) if isinstance(kernel, NeuronExpert | GpuNeuronExperts) else wrap(kernel)
            for bits, kernel in kernels.items()
        }
        if native is not None:
            self._run, self._compute = wrap(native.run), wrap(native.compute)

        def undo() -> None:
            self._kernels, self._grouped = kernels, grouped
            if native is not None:
                self._run, self._compute = native.run, native.compute

        return undo

    def close(self) -> None:
        """Calls from now on raise TiermoeError."""
        self._context = cast(ForwardContext, _Closed())

    def _read_back(self, parts: Sequence[Part], hidden: torch.Tensor) -> tuple[Sequence[Part], torch.Tensor | None]:
        """The parts with what was chosen in main memory; and `hidden`, of all parts, there, if it is of one token some
        of whose experts the CPU may compute. On a GPU one copy has all of it that is not there yet (`_chooses`)."""
        if hidden.device.type == "cpu":
            return parts, None
        context = self._context
        chosen = [each for _, index, weights in parts for each in (index, weights)]
        if context.on_host is None:
            context.helped = self._helped(hidden)
        found = context.read_back(self._index, chosen)
        on_host, context.on_host = context.on_host, None
        return [(part[0], found[2 * at], found[2 * at + 1]) for at, part in enumerate(parts)], on_host

    def _helped(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """hidden (T, H), if it is of one token on a GPU whose experts the CPU may compute."""
        helps = self._on_cpu is not None and self._context.phase == "decode" and len(hidden) == 1
        return hidden if helps and hidden.device.type != "cpu" else None

    def _begin(self, native: _native.MoeBlock, router: NativeRouter | int, hidden: torch.Tensor) -> int:
        """Begins a native call for few tokens, and gives the address of its workspace. router: or the number of experts
        of a token, whose choices are known."""
        if self._router[0] is not router:
            sizes = self._experts, self._out.shape[1]
            self._router = router, router_of(*sizes, router) if isinstance(router, int) else router.pack()
        needed = native.begin(self._router[1], hidden.data_ptr(), hidden.shape[0], torch.get_num_threads())
        return scratch.address("block", needed)

    def _little(self, parts: Sequence[Part]) -> Sequence[Part]:
        """The experts that run: all, or few in a little pass, which is of all parts' tokens, or by adaptive gating."""
        if self._context.unsure is None and self._context.adaptive is None:
            return parts
        index, weights = (torch.cat([part[which] for part in parts]) for which in (1, 2))
        found = self._context.route(self._index, index, weights, self._experts, self._renormalise)
        sizes = [len(hidden) for hidden, _, _ in parts]
        split = zip(*(torch.split(each, sizes) for each in found), strict=True)
        return [(hidden, *of_part) for (hidden, _, _), of_part in zip(parts, split, strict=True)]

    def _few(
        self, native: _native.MoeBlock, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Few tokens of one part, whose experts are known."""
        context = self._context
        room = self._begin(native, index.shape[1], hidden)
        wide, gates = index.long().contiguous(), weights.float().contiguous()
        native.routed(room, wide.data_ptr(), gates.data_ptr())
        routed = self._routed(index.tolist(), weights)
        came = {expert for row in routed.experts for expert in row}
        scheduler = context.scheduler
        if self._hits_at_once(came):
            self._compute(list(came))
            scheduler.all_hit(self._index, len(came), () if scheduler.settles else routed.experts)
        else:
            came = self._compute_few(context.run_layer(routed, hidden))
        out = torch.empty_like(hidden)
        native.total(0, out.data_ptr())
        return self._rescaled(out, index, weights, came)

    def _hits_at_once(self, experts: AbstractSet[int]) -> bool:
        """Whether these experts are resident, and computed without asking anybody."""
        context, scheduler = self._context, self._context.scheduler
        asked = context.observer is not None or context.needs_weights or context.proceed or context.unsure is not None
        at_once = not asked and scheduler.computes_hits_at_once and not scheduler.loader.uncommitted
        return at_once and experts <= self.placed.keys()

    def _sum_hits(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        """The sum of one token's experts on a GPU; None if some of them must come, or somebody asks."""
        if self._grouped is None or len(hidden) > 1 or not self._context.scheduler.computes_hits_at_once:
            return None
        gates = dict(zip(index[0].tolist(), weights[0].tolist(), strict=True))
        if len(gates) < index.shape[1] or not self._hits_at_once(gates.keys()):
            return None
        total, scheduler = self._sum_one(self._grouped, hidden, gates, self.placed), self._context.scheduler
        scheduler.all_hit(self._index, len(gates), () if scheduler.settles else index.tolist())
        return total

    def _sum_one(
        self,
        kernel: Grouped,
        hidden: torch.Tensor,
        gates: Mapping[int, float],
        placed: Mapping[int, tuple[int, int]],
    ) -> torch.Tensor:
        """The sum of one token's experts, in ascending order. gates: expert → weight; placed: expert → (slot, bits)."""
        places = [(expert, *placed[expert]) for expert in sorted(gates)]
        views = [self._views_of(ExpertKey(self._index, expert, bits), slot) for expert, slot, bits in places]
        return kernel.sum_one(hidden, views, [gates[expert] for expert, *_ in places])

    def _compute_few(self, groups: Iterator[list[Ready]]) -> set[int]:
        """Computes experts of the native call that has begun as they come; returns which came."""
        came = set[int]()
        for group in groups:
            experts = []
            for expert, slot, bits in group:
                if self.placed.get(expert) != (slot, bits):
                    self.place(expert, bits, slot)
                experts.append(expert)
            self._compute(experts)
            came.update(experts)
        return came

    def _compute_group(self, group: list[Ready], work: _Work) -> None:
        """Experts that are computed in one call, for the tokens of a part that chose them."""
        experts = [ready.expert for ready in group]
        work.came.update(experts)
        if group[0].slot == CPU_FALLBACK:
            work.on_cpu += self._sent(group, work)
            return
        kernel, tokens = self._kernels[group[0].bits], work.hidden.shape[0]
        if isinstance(kernel, Grouped):
            placed = {ready.expert: (ready.slot, ready.bits) for ready in group}
            if self._grouped is not None:
                self.placed.update(placed)
            if tokens == 1 and len(group) == work.index.shape[1]:
                gates = dict(zip(work.chosen[0], work.weights[0].tolist(), strict=True))
                work.summed = self._sum_one(kernel, work.hidden, gates, placed)
                return
        views = [self._views_of(ExpertKey(self._index, ready.expert, ready.bits), ready.slot) for ready in group]
        sums = work.sums
        if tokens == 1:
            outputs = kernel.forward_one(work.hidden, views)
        else:
            counts = sums.counts(experts)
            if work.alone:
                views = [each for each, count in zip(views, counts, strict=True) for _ in range(count)]
                counts = [1] * len(views)
            outputs = kernel.forward_ragged(sums.rows(experts), counts, views, tokens > FEW_TOKENS)
        sums.keep(experts, outputs)

    def _total(self, work: _Work) -> torch.Tensor:
        for future, experts in work.on_cpu:
            work.sums.keep(experts, future.result().to(work.hidden.device, non_blocking=True))
        total = work.sums.total() if work.summed is None else work.summed
        return self._rescaled(total, work.index, work.weights, work.came)

    def _rescaled(
        self, total: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, came: set[int]
    ) -> torch.Tensor:
        """Sums of tokens some of whose experts were left out, for a model that scales the chosen experts' weights to a
        fixed sum (CORM, on_mispredict=proceed)."""
        if not (self._context.proceed and self._renormalise):
            return total
        there = torch.isin(index, torch.tensor(sorted(came), dtype=index.dtype))
        kept = weights.masked_fill(~there, 0).sum(1, keepdim=True)
        factors = torch.where(kept > 0, weights.sum(1, keepdim=True) / kept, 1)
        return total * factors.to(total.device, total.dtype, non_blocking=True)

    def _sent(self, group: list[Ready], work: _Work) -> list[tuple[Future[torch.Tensor], list[int]]]:
        """Experts that the CPU computes beside this device, and their outputs to come."""
        assert self._on_cpu is not None
        experts = [ready.expert for ready in group]
        rows = work.sums.rows(experts).cpu() if work.on_host is None else work.on_host.expand(len(experts), -1)
        parts = torch.split(rows, work.sums.counts(experts))
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
    """Tokens that are computed by themselves, and what has come for them: hidden (T, H), on any device; index and
    weights (T, K), in main memory. `chosen`: the index, as lists. `on_host`: hidden in main memory, if it is there
    (T = 1). `alone`: each of its tokens is computed by itself. `on_cpu`: outputs to come. `summed`: the sum of a token
    all of whose experts came together, on a GPU."""

    def __init__(
        self,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        on_host: torch.Tensor | None = None,
        alone: bool = False,
    ) -> None:
        self.hidden, self.index, self.weights, self.on_host, self.alone = hidden, index, weights, on_host, alone
        self.chosen: list[list[int]] = index.tolist()
        self.came = set[int]()
        self.on_cpu: list[tuple[Future[torch.Tensor], list[int]]] = []
        self.summed: torch.Tensor | None = None

    @cached_property
    def sums(self) -> Sums:
        """What comes, unless it is `summed`."""
        return sums_of(self.hidden, self.chosen, self.index, self.weights)

    def alike(self, group: list[Ready], kernels: Mapping[int, ExpertKernel]) -> Iterator[list[Ready]]:
        """Those of a group that its tokens chose, in calls of one kernel. A call takes no more rows than there are
        tokens, but for the first expert, so that a prompt's rows are not all there at once; few tokens are one call.
        kernels: by precision."""
        tokens = self.hidden.shape[0]
        most = tokens * self.index.shape[1] if tokens <= FEW_TOKENS else tokens
        if tokens == 1:
            asked = [int(ready.expert in self.chosen[0]) for ready in group]
        else:
            asked = self.sums.counts([ready.expert for ready in group])
        for kernel in dict.fromkeys(kernels[ready.bits] for ready in group):
            call, rows = list[Ready](), 0
            for ready, count in zip(group, asked, strict=True):
                if not count or kernels[ready.bits] is not kernel:
                    continue
                if call and rows + count > most:
                    yield call
                    call, rows = [], 0
                call.append(ready)
                rows += count
            if call:
                yield call


def forget(layers: Sequence[MoELayer]) -> Callable[[ExpertKey], None]:
    """What makes layers forget an expert whose slot is another's from now on (`ExpertCache.on_leave`)."""

    def left(key: ExpertKey) -> None:
        layer = layers[key.layer]
        layer.placed.pop(key.expert, None)
        if layer.native is not None:
            layer.native.remove(key.expert)  # even of one that was not placed: an interruption may come between

    return left


class _Closed:
    """The context of a layer whose engine was closed."""

    def __getattr__(self, name: str) -> Any:
        raise closed_error()


def closed_error() -> TiermoeError:
    """The error of a call after closing."""
    return TiermoeError("this model's expert engine was closed; load the model again")
