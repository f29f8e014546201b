"""The CPU beside a GPU: a helper thread computes the experts that the GPU lacks, from their copies in main memory
(HOBBIT, section 4, CPU-GPU cooperative computing)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.kernels.experts import expert_kernel
from tiermoe.kernels.gates import Gate
from tiermoe.offload.policies.cpu_fallback import averaged
from tiermoe.types import ExpertKey

OnCpu = Callable[[int, int, torch.Tensor], "Future[torch.Tensor]"]
"""(expert, bits, x (M, H) in main memory) → its output (M, H) there, once it is computed; of one layer."""


class Lender(Protocol):
    """Holds experts in main memory (`tiers.host_cache.HostCache`)."""

    def borrow(self, key: ExpertKey) -> torch.Tensor: ...

    def give_back(self, key: ExpertKey) -> None: ...


class CpuHelper:
    """One thread that computes with what `lender` holds in main memory, one expert after the other.
    `seconds_per_expert`: what the last ones took on average, with reading them where main memory had to; None before
    the first."""

    def __init__(self, lender: Lender) -> None:
        self.seconds_per_expert: float | None = None
        self._lender = lender
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tiermoe-cpu")

    def layer(self, index: int, formats: Mapping[int, ExpertFormat], gate: Gate) -> OnCpu:
        """What computes experts of MoE layer `index`; `formats` by precision. The Future raises LoadError where the
        expert cannot be read."""
        kernels = {bits: expert_kernel(form, gate, "cpu") for bits, form in formats.items()}

        def compute(expert: int, bits: int, x: torch.Tensor) -> torch.Tensor:
            started = time.perf_counter()
            key = ExpertKey(index, expert, bits)
            slot = self._lender.borrow(key)
            try:
                output = kernels[bits](x, formats[bits].slot.views(slot))
            finally:
                self._lender.give_back(key)
            self.seconds_per_expert = averaged(self.seconds_per_expert, time.perf_counter() - started)
            return output

        return lambda expert, bits, x: self._thread.submit(compute, expert, bits, x)

    def finish(self) -> None:
        """Waits until all that was asked for is computed."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Ends the thread once it is done with the expert that it computes; the others are dropped."""
        self._thread.shutdown(cancel_futures=True)
