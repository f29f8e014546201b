"""The peers: what a program must answer to be measured, and transformers under measurement, with everything resident or
with accelerate's disk offload."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tiermoe.bench.cases import ACCELERATE, TRANSFORMERS, Condition
from tiermoe.bench.child import Bounds, CaseFailed, run_child
from tiermoe.config import format_size
from tiermoe.store.gguf.file import is_gguf


class BenchEngine(Protocol):
    """One program, with one preset where it is ours."""

    @property
    def name(self) -> str: ...

    @property
    def preset(self) -> str | None: ...

    def missing(self) -> str | None:
        """Why it cannot run here and what to do; None: it can. Asked once, before anything is measured."""

    def takes(self, condition: Condition) -> bool:
        """Whether the condition says something about it."""

    def prepare(self, progress: Any) -> None:
        """Makes what its runs need and keeps: stores, files. progress: called with (what, done, total). Raises a
        TiermoeError with the reason why it can not."""

    def run(self, condition: Condition, ids: Path) -> dict[str, Any]:
        """One run in a fresh process on the token ids in a .npy file of (batch, prompt + output). Speeds in tokens per
        second: `prefill_tok_s`, `decode_tok_s` (None where nothing is decoded); `first_token_s` since the process was
        started; bytes: `peak_memory_bytes`, `cgroup_peak_bytes`; `limited`: whether the bound on memory was a real one.
        Raises CaseFailed with the reason."""


@dataclass(frozen=True, slots=True)
class Common:
    """What is the same for all engines: the checkpoint's `directory`, compute `threads`, seconds that one run may take,
    a folder for what is made while running, on a drive."""

    directory: Path
    threads: int
    timeout: float
    scratch: Path


def warm_tokens(condition: Condition) -> int:
    """How many tokens of each row run once before the clock starts, all engines alike: none in a cold start; the
    prompt; where memory has no bound, the output too, as everything is then resident."""
    if condition.start == "cold":
        return 0
    return condition.prompt + (condition.output if condition.memory is None else 0)


def files_to_drop(condition: Condition, files: tuple[Path, ...]) -> tuple[Path, ...]:
    """`files` where they must not be in the page cache: in a cold start, and under a bound, to which cached pages do
    not count that another process has read."""
    return files if condition.start == "cold" or condition.memory is not None else ()


class Transformers:
    """transformers alone: the checkpoint's own dtype, its default implementation of experts."""

    name, preset = TRANSFORMERS, None

    def __init__(self, common: Common) -> None:
        self._common = common

    def missing(self) -> str | None:
        if is_gguf(self._common.directory):
            return "it is measured on checkpoints alone, not on a GGUF file"
        return not_installed("transformers")

    def takes(self, condition: Condition) -> bool:
        return True

    def prepare(self, progress: Any) -> None:
        """It reads the checkpoint as it is."""

    def run(self, condition: Condition, ids: Path) -> dict[str, Any]:
        return self._child(condition, ids, condition.memory, {})

    def _child(self, condition: Condition, ids: Path, memory: int | None, more: dict[str, Any]) -> dict[str, Any]:
        job = {
            "model": str(self._common.directory),
            "ids": str(ids),
            "prompt": condition.prompt,
            "warm": warm_tokens(condition),
            "threads": self._common.threads,
            **more,
        }
        files = files_to_drop(condition, tuple(sorted(self._common.directory.glob("*.safetensors"))))
        command = [sys.executable, "-m", "tiermoe.bench.child_transformers", json.dumps(job)]
        return run_child(command, Bounds(memory, self._common.timeout, files))


class Accelerate(Transformers):
    """transformers with accelerate's disk offload: as many weights in memory as the budget, the others in a folder.

    It holds far more than the budget. Where a cgroup of the budget kills it, it runs without one, and its figures say
    so: the page cache then serves it what the budget would have it read."""

    name = ACCELERATE

    def __init__(self, common: Common) -> None:
        super().__init__(common)
        self._killed: set[int] = set()

    def missing(self) -> str | None:
        return super().missing() or not_installed("accelerate")

    def takes(self, condition: Condition) -> bool:
        """Without a bound it is transformers."""
        return condition.memory is not None

    def run(self, condition: Condition, ids: Path) -> dict[str, Any]:
        memory = condition.memory
        assert memory is not None
        if memory not in self._killed:
            try:
                return self._offloaded(condition, ids, memory)
            except CaseFailed as error:
                if not error.killed:
                    raise
                self._killed.add(memory)
        note = f"killed within {format_size(memory)}; its figures are those of a run without the bound"
        return {**self._offloaded(condition, ids, None), "note": note}

    def _offloaded(self, condition: Condition, ids: Path, limit: int | None) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="offload-", dir=self._common.scratch) as folder:
            return self._child(condition, ids, limit, {"cpu_bytes": condition.memory, "offload": folder})


def not_installed(package: str) -> str | None:
    """Says that a package is missing here and how to install it; None where it is there."""
    if importlib.util.find_spec(package) is not None:
        return None
    return f"{package} is not installed; pip install {package}"
