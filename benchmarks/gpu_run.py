"""What the steps of `benchmarks.gpu` share: where they run, seconds by a GPU's clock, engines, and tokens to feed."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.random_model import SMALL, config_of, write
from tiermoe.batch import Batch, decode, prompt
from tiermoe.config import Settings
from tiermoe.engine.load import start
from tiermoe.model.hf.blueprint import Blueprint

Row = dict[str, Any]
"""{what: text, figure: number or text}."""


@dataclass(frozen=True)
class Run:
    """Where a step runs, and what it has found before."""

    device: str
    quick: bool  # on tiny shapes, to see that it does
    folder: Path  # for checkpoints and their stores
    routing: Path | None = None  # a recorded trace, for models of its shape
    llama_bench: str | None = None  # the program
    done: Sequence[Row] = ()  # of an earlier run of the step

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def kind(self) -> str:
        """The device's type."""
        return self.device.partition(":")[0]

    def found(self, what: str) -> Row | None:
        """The row that an earlier run of the step has found."""
        return next((row for row in self.done if row["what"] == what and "error" not in row), None)

    def seconds(self, call: Callable[[], object], rounds: int = 5) -> float:
        """Of one call, the median of the rounds after one that does not count; on a GPU by its own clock. A round calls
        as often as 5 ms need."""
        call()
        first = self._seconds(call, 1)
        often = 1 if self.quick else max(1, min(1000, int(5e-3 / max(first, 1e-9))))
        return median(self._seconds(call, often) / often for _ in range(1 if self.quick else rounds))

    def _seconds(self, call: Callable[[], object], often: int) -> float:
        if not self.on_gpu:
            began = time.perf_counter()
            for _ in range(often):
                call()
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(often):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def checkpoint(self, kind: str, layers: int, small: bool) -> Path:
        """A checkpoint of random weights, written once."""
        out = self.folder / f"{kind}-{layers}{'-small' * small}"
        if not out.exists():
            write(kind, out, config_of(kind, layers, **(SMALL[kind] if small else {})))
        return out

    def store(self, model: Path) -> Path:
        """Where a checkpoint is packed."""
        return self.folder / f"store-{model.name}"


@contextlib.contextmanager
def engine_of(blueprint: Blueprint, asked: Settings) -> Iterator[Any]:
    """An engine without a record of earlier runs, whose main memory is filled by now. Its memory is free afterwards."""
    assert asked.store is not None
    for record in asked.store.glob("runs-*.json"):
        record.unlink()
    on_gpu = asked.device != "cpu"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(asked.device)
    engine = start(blueprint, asked)
    try:
        if on_gpu:
            _wait_for_main_memory(engine)
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


def _wait_for_main_memory(engine: Any) -> None:
    """Until its slots are full, or nothing has come for a second; a minute at most."""
    held, began = 0, time.monotonic()
    grown = began
    while held < engine.plan.host_slots and time.monotonic() < min(grown + 1, began + 60):
        time.sleep(0.05)
        if (now := engine.stats()["host_experts"]) > held:
            held, grown = now, time.monotonic()


@dataclass
class Fed:
    """A sequence of given tokens over an engine: a prompt, which is read at once, then one after the other."""

    engine: Any
    prompt: Sequence[int]
    decoded: Sequence[int]
    _at: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._cache = self.engine.new_cache(1)
        self._row = prompt(self._cache.open(), self.prompt)
        self.logits = self.engine.step(Batch((self._row,)), self._cache)

    def feed(self, token: int) -> None:
        self._row = decode(self._row.slab, self._row.end, token)
        self.logits = self.engine.step(Batch((self._row,)), self._cache)

    def decode(self, tokens: int) -> Any:
        """The metrics of so many tokens."""
        before = self.engine.snapshot()
        for token in self.decoded[self._at : self._at + tokens]:
            self.feed(token)
        self._at += tokens
        used = self.engine.snapshot().since(before)
        used.tokens = tokens
        return used

    def answer(self, tokens: int) -> list[int]:
        """So many likeliest tokens, each fed in turn."""
        found = list[int]()
        for _ in range(tokens):
            found.append(int(self.logits[-1].cpu().argmax()))
            self.feed(found[-1])
        return found


def random_tokens(count: int) -> list[int]:
    found: list[int] = torch.randint(0, 4096, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return found
