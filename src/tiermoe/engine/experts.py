"""What stands in place of a model's experts: routing in, sum of the chosen experts out.

The sum runs in ascending expert index and in the hidden states' dtype, as transformers' eager experts do, whatever the
order in which the experts became available. Where all that have come stay for good nobody decides anything, and the
block of a few tokens is one call (`SettledExperts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from itertools import accumulate, chain
from typing import Any

import torch

from tiermoe.decide.controller import ELSEWHERE
from tiermoe.engine.cooperative import OnCpu
from tiermoe.engine.expert_sums import Choices, compute_few, sums_of
from tiermoe.engine.passes import CurrentPass
from tiermoe.kernels.expert import ExpertKernel, InOneCall, Views, weighted_sum
from tiermoe.kernels.native.moe_block import MoeBlock
from tiermoe.kernels.native.router import Router
from tiermoe.types import FEW_TOKENS, Ready, Routed


class LayerExperts:
    """The experts of MoE layer `index`: called in place of the experts module.

    kernels: one per precision. views_of: (layer, bits, slot) → typed views of what the slot holds. renormalise: whether
    the model scales the chosen experts' weights to a fixed sum, so that those of fewer experts are scaled too. on_cpu:
    computes the experts that come without a slot (`controller.ELSEWHERE`), beside this device. settled: told of every
    expert that comes, where those stay.
    """

    def __init__(
        self,
        index: int,
        experts: int,
        kernels: Mapping[int, ExpertKernel],
        current: CurrentPass,
        views_of: Callable[[int, int, int], Views],
        renormalise: bool = False,
        on_cpu: OnCpu | None = None,
        settled: SettledExperts | None = None,
    ) -> None:
        self._index = index
        self._experts = experts
        self._kernels = kernels
        self._current = current
        self._views_of = views_of
        self._renormalise = renormalise
        self._on_cpu = on_cpu
        self.settled = settled
        in_one_call = {bits: kernel for bits, kernel in kernels.items() if isinstance(kernel, InOneCall)}
        self._few = in_one_call if len(in_one_call) == len(kernels) else None

    @property
    def by_row(self) -> bool:
        """Whether a token's result does not depend on the others of a call of few tokens."""
        return self._few is not None

    @torch.no_grad()
    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden (T, H), index (T, K) of the chosen experts (a value of `experts` or more: none), weights (T, K)
        → (T, H)."""
        index, weights = self._current.route(self._index, index, weights, self._experts, self._renormalise)
        if hidden.shape[0] == 1:
            result = self._one_token(hidden, index, weights)
        elif self._few is not None and hidden.shape[0] <= FEW_TOKENS:
            result = self._few_tokens(self._few, hidden, index, weights)
        else:
            result = self._many_tokens(hidden, index, weights)
        if self._current.observer is not None:
            self._current.observer.on_computed(self._index)
        return result

    def held(self, ready: Ready) -> tuple[ExpertKernel, Views]:
        """What computes an expert that is ready, and what it computes with."""
        return self._kernels[ready.bits], self._views_of(self._index, ready.bits, ready.slot)

    def watch(self, wrap: Callable[[Any], Any]) -> Callable[[], None]:
        """Puts wrap(kernel), which is called as the kernel is, in the place of each; returns what puts them back."""
        kernels, few = self._kernels, self._few
        self._kernels = {bits: wrap(kernel) for bits, kernel in kernels.items()}
        self._few = None if few is None else {bits: wrap(kernel) for bits, kernel in few.items()}
        undo_settled = self.settled.watch(wrap) if self.settled is not None else None

        def undo() -> None:
            self._kernels, self._few = kernels, few
            if undo_settled is not None:
                undo_settled()

        return undo

    def has_come(self, expert: int, bits: int, slot: int) -> None:
        """The expert lies in the slot now, though no token has asked for it."""
        if self.settled is not None:
            self.settled.note(expert, self._views_of(self._index, bits, slot))

    def _one_token(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        position = {expert: k for k, expert in enumerate(index[0].tolist()) if expert < self._experts}
        gates = weights[0].tolist() if self._current.needs_weights else []
        kept = [gates[k] for k in position.values()] if gates else []
        routed = Routed(self._index, self._current.phase, [list(position)], [kept])
        results: dict[int, torch.Tensor] = {}
        away: dict[int, Future[torch.Tensor]] = {}
        for group in self._current.run_layer(routed, hidden):
            if group[0].slot == ELSEWHERE:
                assert self._on_cpu is not None
                if not away:
                    host = hidden.cpu()
                away.update((ready.expert, self._on_cpu(ready.expert, ready.bits, host)) for ready in group)
            else:
                self._compute([ready for ready in group if ready.expert in position], hidden, results)
        for expert, future in away.items():
            results[expert] = future.result()[0].to(hidden.device)
        if self._current.proceed and self._renormalise and 0 < len(results) < len(position):
            loaded = weights[0, [position[expert] for expert in results]]
            weights = weights * (weights.sum() / loaded.sum())
        if not results:
            return torch.zeros_like(hidden)
        order = sorted(results)
        return weighted_sum([results[expert] for expert in order], weights[0], [position[expert] for expert in order])

    def _compute(self, group: list[Ready], hidden: torch.Tensor, results: dict[int, torch.Tensor]) -> None:
        """The outputs (H) of experts that are all here, those of one precision in one call."""
        for bits in {ready.bits for ready in group}:
            alike = [ready for ready in group if ready.bits == bits]
            views = [self._views(ready) for ready in alike]
            outputs = self._kernels[bits].together(hidden, views).unbind()
            results.update(zip((ready.expert for ready in alike), outputs, strict=True))

    def _views(self, ready: Ready) -> Views:
        views = self._views_of(self._index, ready.bits, ready.slot)
        if self.settled is not None:
            self.settled.note(ready.expert, views)
        return views

    def _few_tokens(
        self, kernels: Mapping[int, InOneCall], hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        run = self._current.run_layer(self._routed(index, weights), hidden)
        alone = self._current.phase == "decode"
        return compute_few(hidden, index.tolist(), weights.tolist(), run, kernels, self._views, alone)

    def _many_tokens(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        choices = Choices(index, weights, self._experts)
        counts, ends = choices.counts, list(accumulate(choices.counts))
        sums = sums_of(choices, hidden, ends[-1] == index.numel() and not self._current.may_skip)
        away: list[tuple[Future[torch.Tensor], slice]] = []
        for ready in chain.from_iterable(self._current.run_layer(self._routed(index, weights), hidden)):
            expert = ready.expert
            if not counts[expert]:
                continue
            rows = slice(ends[expert] - counts[expert], ends[expert])
            x = hidden[choices.token[rows]]
            if ready.slot == ELSEWHERE:
                assert self._on_cpu is not None
                away.append((self._on_cpu(expert, ready.bits, x.cpu()), rows))
            else:
                sums.keep(self._kernels[ready.bits](x, self._views(ready)), rows)
        for future, rows in away:
            sums.keep(future.result().to(hidden.device), rows)
        return sums.total()

    def _routed(self, index: torch.Tensor, weights: torch.Tensor) -> Routed:
        chosen = index.tolist()
        gates = weights.tolist() if self._current.needs_weights else [[]] * len(chosen)
        if int(index.max()) >= self._experts:
            there = [[k for k, expert in enumerate(row) if expert < self._experts] for row in chosen]
            gates = [[row[k] for k in keep] if row else [] for row, keep in zip(gates, there, strict=True)]
            chosen = [[row[k] for k in keep] for row, keep in zip(chosen, there, strict=True)]
        return Routed(self._index, self._current.phase, chosen, gates)


class SettledExperts:
    """The experts of a layer that have been computed with before, or brought by the background, under a composition
    that evicts and predicts nothing (`Scheduler.settles`): counted as hits, and told to nobody."""

    def __init__(self, kernel: InOneCall, experts: int, current: CurrentPass) -> None:
        self._kernel: Any = MoeBlock(kernel.native, experts)
        self._in_one_call = kernel
        self._current = current
        self._noted: set[int] = set()

    def note(self, expert: int, views: Views) -> None:
        """The expert lies in the slot of these views from now on."""
        if expert not in self._noted:
            self._noted.add(expert)
            self._kernel.place(expert, self._in_one_call.packed(views))

    def watch(self, wrap: Callable[[Any], Any]) -> Callable[[], None]:
        """Puts wrap(kernel), which is called as the kernel is, in its place; returns what puts it back."""
        kernel, self._kernel = self._kernel, wrap(self._kernel)

        def undo() -> None:
            self._kernel = kernel

        return undo

    def __call__(self, router: Router, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor | None:
        """residual, if any, + the block of hidden, (T, H) each; None where the layer must run as usual: an expert has
        not come yet, or somebody observes what is chosen."""
        if self._current.observer is not None:
            return None
        result: torch.Tensor
        result, experts = self._kernel(router, hidden, residual)
        self._current.scheduler.controller.counts.hits += experts
        return result


def settled_experts(kernels: Mapping[int, ExpertKernel], experts: int, current: CurrentPass) -> SettledExperts | None:
    """None where the composition decides something or where no native kernel computes the experts."""
    (kernel, *others) = kernels.values()
    if others or not current.scheduler.settles or not isinstance(kernel, InOneCall):
        return None
    return SettledExperts(kernel, experts, current)
