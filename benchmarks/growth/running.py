"""Runs points through the engine of `tiermoe bench`, alternating, each run in a fresh process."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.growth.points import Point, Run
from benchmarks.random_moe import ensure
from tiermoe.bench.cases import OURS, Case, Condition, alternating
from tiermoe.bench.child import Bounds, run_child
from tiermoe.bench.engines import Common
from tiermoe.bench.limit import drop_from_page_cache
from tiermoe.bench.measure import Measured
from tiermoe.bench.ours import Tiermoe
from tiermoe.bench.stretches import check_lengths
from tiermoe.bench.subject import Subject
from tiermoe.bench.summary import summarise
from tiermoe.errors import TiermoeError

Say = Callable[[str], None]

_KEPT = ("error", "decode_tok_s", "prefill_tok_s", "hit_rate", "belady_hit_rate", "bytes_per_token", "bound_tok_s",
         "own_bound_tok_s", "compute_bound_tok_s", "weight_bytes_per_pass", "link_bandwidth", "compute_ms", "wait_ms",
         "framework_ms", "dense_bytes", "slots", "peak_memory_bytes", "lossy")  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """`model`: the one that was named, for points without a shape; `work`: folder of random checkpoints; `options` of
    `tiermoe.load`; `text`: what is fed; `timeout`: seconds of one run."""

    model: str | None
    work: Path
    options: dict[str, Any]
    text: str
    threads: int
    timeout: float
    rounds: int


@dataclass
class Running:
    """A measurement: `rows` of what has been run so far."""

    asked: Asked
    points: Sequence[Point]
    memory_bandwidth: float = 0.0
    measured: dict[Run, Measured] = field(default_factory=dict)
    _subjects: dict[str, Subject] = field(default_factory=dict)

    def run(self, say: Say) -> None:
        """Everything, with a line for each run that ends. A run that fails is a result and is not repeated."""
        self.memory_bandwidth = memory_bandwidth(self.asked.threads, self.asked.timeout)
        runs = list(dict.fromkeys(point.run for point in self.points))
        base = self.asked.work
        base.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".growth-", dir=base) as folder:
            scratch = Path(folder)
            ready = [(run, self._prepared(run, scratch, say)) for run in runs]
            total = self.asked.rounds * len(ready)
            for done, (number, (run, call)) in enumerate(alternating(ready, self.asked.rounds), 1):
                row = self.measured[run]
                if row.error is None:
                    self._once(row, number, call)
                    say(f"[{done}/{total}] {_told(run)}: {_outcome(row, number)}")

    def rows(self) -> list[dict[str, Any]]:
        """One flat object for each point that has been run."""
        return [self._row(point) for point in self.points if self._known(point.run)]

    def _known(self, run: Run) -> bool:
        row = self.measured.get(run)
        return row is not None and bool(row.rounds or row.error)

    def _row(self, point: Point) -> dict[str, Any]:
        measured, model = self.measured[point.run], point.run.model
        (summary,) = summarise([measured])
        one = next(iter(measured.rounds.values()), {})
        return {
            "over": point.over, "series": point.series, "x": point.x, "preset": point.run.preset,
            "layers": model.layers, "experts": model.experts, "top_k": model.top_k, "cache": point.run.slots,
            "prompt": point.run.prompt, "output": point.run.output, "slot_bytes": one.get("slot_bytes"),
            **{name: summary[name] for name in _KEPT},
            "limited_by": limited_by(summary, self.memory_bandwidth),
        }  # fmt: skip

    def _prepared(self, run: Run, scratch: Path, say: Say) -> Callable[[], dict[str, Any]]:
        """What runs it once; its checkpoint and store are made here, where they are not there yet."""
        condition = Condition(None, run.prompt, run.output)
        self.measured[run] = Measured(Case(OURS, run.preset, condition))
        subject = self._subject(run, say)
        check_lengths([condition], len(subject.ids), subject.context)
        folder = scratch / subject.directory.name
        folder.mkdir(exist_ok=True)
        options = {**self.asked.options, "cache": cache_share(run.slots, run.model.every)}
        if run.model.shape is not None:
            options["store"] = str(self.asked.work / "stores" / run.model.shape.name)
        files = subject.ensure(run.preset, options)(_progress(say))
        common = Common(subject.directory, self.asked.threads, self.asked.timeout, folder)
        engine = Tiermoe(run.preset, options, common, lambda _: files, self.memory_bandwidth)
        ids = subject.ids_file(folder)

        def once() -> dict[str, Any]:
            drop_from_page_cache(files)
            return engine.run(condition, ids(condition))

        return once

    def _subject(self, run: Run, say: Say) -> Subject:
        shape = run.model.shape
        name = self.asked.model if shape is None else shape.name
        assert name is not None
        if name not in self._subjects:
            if shape is not None and not (self.asked.work / name).exists():
                say(f"writing {name}")
            directory = name if shape is None else str(ensure(shape, self.asked.work))
            self._subjects[name] = Subject(directory, self.asked.text)
        return self._subjects[name]

    @staticmethod
    def _once(row: Measured, number: int, call: Callable[[], dict[str, Any]]) -> None:
        try:
            row.rounds[number] = call()
        except TiermoeError as error:
            row.error = str(error)


def memory_bandwidth(threads: int, timeout: float) -> float:
    """Bytes per second that memory gives, measured in a process of its own."""
    command = [sys.executable, "-m", "tiermoe.process.bandwidth", str(threads)]
    return float(run_child(command, Bounds(None, timeout))["bandwidth"])


def cache_share(slots: int, every: int) -> str:
    """What `cache` says for `slots` of `every` expert."""
    return f"{min(100 * (slots + 0.5) / every, 100):.9f}%"


def limited_by(summary: dict[str, Any], bandwidth: float) -> str | None:
    """Which of its two times is the bound of a decoded token: reading weights from 'memory', or Belady's misses from
    the 'drive'."""
    if not summary["bound_tok_s"]:
        return None
    memory_s = summary["weight_bytes_per_pass"] / bandwidth
    return "memory" if memory_s * summary["bound_tok_s"] > 0.999 else "drive"


def _progress(say: Say) -> Callable[[str, int, int], None]:
    def progress(what: str, done: int, total: int) -> None:
        if done == total:
            say(f"{what}: {total}")

    return progress


def _told(run: Run) -> str:
    model = run.model
    tokens = f"{run.prompt}+{run.output}" if run.output else f"prompt {run.prompt}"
    return f"{model.layers} x {model.experts} experts, {run.slots} cached, {tokens}, {run.preset}"


def _outcome(row: Measured, number: int) -> str:
    if row.error is not None:
        return row.error
    result = row.rounds[number]
    return f"{result['decode_tok_s'] or result['prefill_tok_s']:.2f} tok/s"
