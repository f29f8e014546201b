"""What stands in place of a model's experts: routing in, sum of the chosen experts out.

The sum runs in ascending expert index and in the hidden states' dtype, as transformers' eager experts do, whatever the
order in which the experts became available. The block of few tokens is one native call where all that have come stay
for good, and a few where they come and go (`FusedBlock`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from tiermoe.decide.controller import ELSEWHERE
from tiermoe.engine.cooperative import OnCpu
from tiermoe.engine.expert_sums import Sums, sums_of
from tiermoe.engine.passes import CurrentPass
from tiermoe.kernels.expert import ExpertKernel, InOneCall, Views
from tiermoe.kernels.native.moe_block import MoeBlock
from tiermoe.kernels.native.router import Router
from tiermoe.types import FEW_TOKENS, ExpertKey, Ready, Routed


class LayerExperts:
    """The experts of MoE layer `index`: called in place of the experts module.

    kernels: one per precision. views_of: (expert, slot) → typed views of what the slot holds. renormalise: whether
    the model scales the chosen experts' weights to a fixed sum, so that those of fewer experts are scaled too. on_cpu:
    computes the experts that come without a slot (`controller.ELSEWHERE`), beside this device. by_row: whether a
    token's result does not depend on the others of a call of few tokens.
    """

    def __init__(
        self,
        index: int,
        experts: int,
        kernels: Mapping[int, ExpertKernel],
        current: CurrentPass,
        views_of: Callable[[ExpertKey, int], Views],
        renormalise: bool = False,
        on_cpu: OnCpu | None = None,
    ) -> None:
        self._index = index
        self._experts = experts
        self._kernels = kernels
        self._current = current
        self._views_of = views_of
        self._renormalise = renormalise
        self._on_cpu = on_cpu
        self._fused = fused_block(kernels, experts)
        self.by_row = all(isinstance(kernel, InOneCall) for kernel in kernels.values())

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden (T, H), index (T, K) of the chosen experts (a value of `experts` or more: none), weights (T, K)
        → (T, H)."""
        (total,) = self.apart([(hidden, index, weights)])
        return total

    @torch.no_grad()
    def block(self, router: Router, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor | None:
        """residual, if any, + the block of hidden, few tokens (T, 1, H) each; None where its parts must run one by one:
        no native kernel computes them, somebody observes what is chosen, or decisions need the router's weights."""
        fused, current = self._fused, self._current
        if fused is None or current.observer is not None:
            return None
        if current.scheduler.settles:
            result, experts = fused.resident(router, hidden, residual)
            if result is not None:
                current.scheduler.controller.counts.hits += experts
                return result
        if current.needs_weights or current.proceed or current.unsure is not None:
            return None
        chosen = fused.route(router, hidden)
        routed = Routed(self._index, current.phase, chosen, [[]] * len(chosen))
        self._as_they_come(fused, routed, hidden.view(len(chosen), -1))
        return fused.total(hidden, residual)

    @torch.no_grad()
    def apart(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """What a call with each part's hidden, index and weights gives, bit for bit: each expert comes once, and
        computes the tokens of each part by themselves."""
        current = self._current
        if self._fused is not None and len(parts) == 1 and parts[0][0].shape[0] <= FEW_TOKENS:
            return [self._few(self._fused, *parts[0])]
        works = [self._part(*part) for part in parts]
        hidden = works[0].hidden if len(works) == 1 else torch.cat([each.hidden for each in works])
        for group in current.run_layer(self._routed(works), hidden):
            for each in works:
                for alike in each.alike(group):
                    self._compute(alike, each)
        totals = [self._total(each) for each in works]
        if current.observer is not None:
            current.observer.on_computed(self._index)
        return totals

    def _few(self, fused: FusedBlock, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Few tokens with one part, whose experts are known."""
        current, hidden = self._current, hidden.contiguous()
        index, weights = current.route(self._index, index, weights, self._experts, self._renormalise)
        fused.routed(hidden, index, weights)
        routed = self._routed_of(index.tolist(), weights)
        came = self._as_they_come(fused, routed, hidden)
        total = fused.total(hidden, None)
        if current.observer is not None:
            current.observer.on_computed(self._index)
        return self._rescaled(total, index, weights, came)

    def _as_they_come(self, fused: FusedBlock, routed: Routed, hidden: torch.Tensor) -> set[int]:
        """Computes what a layer's run brings, group by group; returns the experts that came."""
        came = set[int]()
        for group in self._current.run_layer(routed, hidden):
            for ready in group:
                self.has_come(ready.expert, ready.bits, ready.slot)
            experts = [ready.expert for ready in group]
            fused.compute(experts)
            came.update(experts)
        return came

    def held(self, ready: Ready) -> tuple[ExpertKernel, Views]:
        """What computes an expert that is ready, and what it computes with."""
        return self._kernels[ready.bits], self._views_of(ExpertKey(self._index, ready.expert, ready.bits), ready.slot)

    def watch(self, wrap: Callable[[Any], Any]) -> Callable[[], None]:
        """Puts wrap(kernel), which is called as the kernel is, in the place of each; returns what puts them back."""
        kernels = self._kernels
        self._kernels = {bits: wrap(kernel) for bits, kernel in kernels.items()}
        undo_fused = self._fused.watch(wrap) if self._fused is not None else None

        def undo() -> None:
            self._kernels = kernels
            if undo_fused is not None:
                undo_fused()

        return undo

    def has_come(self, expert: int, bits: int, slot: int) -> None:
        """The expert lies in the slot now."""
        if self._fused is not None and self._fused.slots.get(expert) != slot:
            self._fused.place(expert, slot, self._views_of(ExpertKey(self._index, expert, bits), slot))

    def _part(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> _Part:
        index, weights = self._current.route(self._index, index, weights, self._experts, self._renormalise)
        return _Part(hidden, index, weights)

    def _compute(self, group: list[Ready], part: _Part) -> None:
        """Experts that are computed in one call, for the tokens of a part that chose them."""
        experts = [ready.expert for ready in group]
        part.came.update(experts)
        if group[0].slot == ELSEWHERE:
            part.away += self._sent(group, part.sums)
        else:
            part.sums.keep(experts, self._outputs(group, part.hidden, part.sums))

    def _total(self, part: _Part) -> torch.Tensor:
        for future, experts in part.away:
            part.sums.keep(experts, future.result().to(part.hidden.device))
        return self._rescaled(part.sums.total(), part.index, part.weights, part.came)

    def _rescaled(
        self, total: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, came: set[int]
    ) -> torch.Tensor:
        if self._current.proceed and self._renormalise:
            return total * _left_out(index, weights, came).to(total.dtype)
        return total

    def _outputs(self, group: list[Ready], hidden: torch.Tensor, sums: Sums) -> torch.Tensor:
        """What experts of one precision give, (M, H), for the rows that `sums` says."""
        kernel, views, tokens = self._kernels[group[0].bits], [self._views(ready) for ready in group], hidden.shape[0]
        if tokens == 1:
            return kernel.together(hidden, views)
        experts = [ready.expert for ready in group]
        return kernel.apart(sums.rows(experts), sums.counts(experts), views, tokens > FEW_TOKENS)

    def _sent(self, group: list[Ready], sums: Sums) -> list[tuple[Future[torch.Tensor], list[int]]]:
        """Experts that the CPU computes beside this device, and their outputs to come."""
        assert self._on_cpu is not None
        experts = [ready.expert for ready in group]
        parts = torch.split(sums.rows(experts).cpu(), sums.counts(experts))
        return [
            (self._on_cpu(ready.expert, ready.bits, x), [ready.expert]) for ready, x in zip(group, parts, strict=True)
        ]

    def _views(self, ready: Ready) -> Views:
        self.has_come(ready.expert, ready.bits, ready.slot)
        return self._views_of(ExpertKey(self._index, ready.expert, ready.bits), ready.slot)

    def _routed(self, parts: Sequence[_Part]) -> Routed:
        """What all tokens chose."""
        weights = parts[0].weights if len(parts) == 1 else torch.cat([part.weights for part in parts])
        return self._routed_of([row for part in parts for row in part.chosen], weights)

    def _routed_of(self, chosen: list[list[int]], weights: torch.Tensor) -> Routed:
        """Of the choices of tokens, an index beyond the experts left out."""
        gates: list[list[float]] = weights.tolist() if self._current.needs_weights else [[]] * len(chosen)
        if max(map(max, chosen)) >= self._experts:
            there = [[k for k, expert in enumerate(row) if expert < self._experts] for row in chosen]
            gates = [[row[k] for k in keep] if row else [] for row, keep in zip(gates, there, strict=True)]
            chosen = [[row[k] for k in keep] for row, keep in zip(chosen, there, strict=True)]
        return Routed(self._index, self._current.phase, chosen, gates)


class _Part:
    """Tokens that are computed by themselves, and what has come for them: hidden (T, H), index and weights (T, K),
    `chosen`: the index, as lists. away: outputs to come."""

    def __init__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
        self.hidden, self.index, self.weights = hidden, index, weights
        self.chosen: list[list[int]] = index.tolist()
        self.sums: Sums = sums_of(hidden, self.chosen, index, weights)
        self.came = set[int]()
        self.away: list[tuple[Future[torch.Tensor], list[int]]] = []

    def alike(self, group: list[Ready]) -> Iterator[list[Ready]]:
        """Those of a group that its tokens chose, in calls of one precision. A call takes no more rows than there are
        tokens, but for the first expert, so that a prompt's rows are not all there at once; few tokens are one call."""
        tokens = self.hidden.shape[0]
        most = tokens * self.index.shape[1] if tokens <= FEW_TOKENS else tokens
        asked = self.sums.counts([ready.expert for ready in group])
        for bits in dict.fromkeys(ready.bits for ready in group):
            call, rows = list[Ready](), 0
            for ready, its in zip(group, asked, strict=True):
                if not its or ready.bits != bits:
                    continue
                if call and rows + its > most:
                    yield call
                    call, rows = [], 0
                call.append(ready)
                rows += its
            if call:
                yield call


def _left_out(index: torch.Tensor, weights: torch.Tensor, came: set[int]) -> torch.Tensor:
    """(T, 1): what scales the sums of tokens some of whose experts were left out, for a model that scales the chosen
    experts' weights to a fixed sum."""
    there = torch.isin(index, torch.tensor(sorted(came), dtype=index.dtype, device=index.device))
    kept = weights.masked_fill(~there, 0).sum(1, keepdim=True)
    return torch.where(kept > 0, weights.sum(1, keepdim=True) / kept, 1)


class FusedBlock:
    """A layer's router, experts and residual in native calls for few tokens: one where all that fits has come and
    nothing is evicted or predicted (`Scheduler.settles`), else one for the router, one for each group of experts as
    they come, and one for the sum. `slots`: by expert, where it lay last."""

    def __init__(self, kernel: InOneCall, experts: int) -> None:
        self._block = MoeBlock(kernel.native, experts)
        self._kernel = kernel
        self.slots: dict[int, int] = {}
        self.route, self.routed, self.total = self._block.route, self._block.routed, self._block.total
        self.compute: Callable[[list[int]], None] = self._block.compute
        self.resident: Callable[..., tuple[torch.Tensor | None, int]] = self._block

    def place(self, expert: int, slot: int, views: Views) -> None:
        """The expert lies in the slot of these views from now on."""
        self._block.place(expert, self._kernel.packed(views))
        self.slots[expert] = slot  # after it: an interruption may come between

    def watch(self, wrap: Callable[[Any], Any]) -> Callable[[], None]:
        """Puts wrap(kernel), which is called as the kernel is, in the place of each; returns what puts them back."""
        before = self.compute, self.resident
        self.compute, self.resident = wrap(self.compute), wrap(self.resident)

        def undo() -> None:
            self.compute, self.resident = before

        return undo


def fused_block(kernels: Mapping[int, ExpertKernel], experts: int) -> FusedBlock | None:
    """None where experts come in several precisions or where no native kernel computes them."""
    (kernel, *others) = kernels.values()
    return FusedBlock(kernel, experts) if not others and isinstance(kernel, InOneCall) else None
