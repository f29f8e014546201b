"""This program under measurement."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiermoe.bench.bounds import Ideal, ideal, read_routing, with_bounds
from tiermoe.bench.cases import OURS, Condition
from tiermoe.bench.child import Bounds, run_child
from tiermoe.bench.engines import Common, files_to_drop, warm_tokens


class Tiermoe:
    """A preset with `options` of `tiermoe.load`. ensure: packs what the store lacks, given a progress callback, and
    returns the files that a run reads. memory_bandwidth: bytes per second, for the bounds."""

    name = OURS

    def __init__(
        self,
        preset: str,
        options: dict[str, Any],
        common: Common,
        ensure: Callable[[Any], tuple[Path, ...]],
        memory_bandwidth: float,
    ) -> None:
        self.preset: str | None = preset
        self._options = options
        self._common = common
        self._ensure = ensure
        self._memory_bandwidth = memory_bandwidth
        self._files: tuple[Path, ...] = ()
        self._ideals: dict[tuple[Condition, int], Ideal | None] = {}

    def missing(self) -> str | None:
        return None

    def takes(self, condition: Condition) -> bool:
        return True

    def prepare(self, progress: Any) -> None:
        self._files = self._ensure(progress)

    def run(self, condition: Condition, ids: Path) -> dict[str, Any]:
        known = any(asked == condition for asked, _ in self._ideals)
        routing = self._common.scratch / f"routing-{self.preset}.jsonl"
        routing.unlink(missing_ok=True)
        job = {
            "model": str(self._common.directory),
            "options": self._asked(condition),
            "ids": str(ids),
            "prompt": condition.prompt,
            "warm": warm_tokens(condition),
            "routing": None if known else str(routing),
        }
        bounds = Bounds(condition.memory, self._common.timeout, files_to_drop(condition, self._files))
        result = run_child([sys.executable, "-m", "tiermoe.bench.child_tiermoe", json.dumps(job)], bounds)
        return self._explained(with_bounds(result, self._ideal(condition, result, routing), self._memory_bandwidth))

    def _asked(self, condition: Condition) -> dict[str, Any]:
        """The device is the CPU, as the peers' is."""
        asked = {
            "preset": self.preset,
            "threads": self._common.threads,
            "batch": condition.batch,
            "context": condition.prompt + condition.output,
            "device": "cpu",
            **self._options,
        }
        return asked if condition.memory is None else {**asked, "memory": condition.memory}

    def _ideal(self, condition: Condition, result: dict[str, Any], path: Path) -> Ideal | None:
        key = condition, result["slots"]
        if key not in self._ideals:
            routing = read_routing(path, condition.output)
            warm = warm_tokens(condition)
            found = routing and ideal(routing, result["slots"], warm > 0, warm > condition.prompt)
            self._ideals[key] = found or None
            path.unlink(missing_ok=True)
        return self._ideals[key]

    @staticmethod
    def _explained(result: dict[str, Any]) -> dict[str, Any]:
        """Milliseconds of a token: kernels, waiting, and what is left of it, the framework's own."""
        token, kernels, wait = (result.pop(name) * 1e3 for name in ("token_s", "kernel_s", "wait_s"))
        rest = max(token - kernels - wait, 0.0)
        return {**result, "token_ms": token, "compute_ms": kernels, "wait_ms": wait, "framework_ms": rest}
