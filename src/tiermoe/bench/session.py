"""One measurement from beginning to end: the engines that can run here, their cases, and the document that comes of
them."""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash

from tiermoe.bench.cases import ACCELERATE, LLAMA, OURS, TRANSFORMERS, Condition, named
from tiermoe.bench.child import Bounds, run_child
from tiermoe.bench.engines import Accelerate, BenchEngine, Common, Transformers
from tiermoe.bench.llama_peer import LlamaCpp
from tiermoe.bench.machine import describe
from tiermoe.bench.measure import Journal, Measured, Step, measure, plan
from tiermoe.bench.ours import Tiermoe
from tiermoe.bench.stretches import RANDOM, check_lengths
from tiermoe.bench.subject import Subject
from tiermoe.bench.summary import summarise
from tiermoe.config import settings as make_settings
from tiermoe.errors import ConfigError, ProfileError, TiermoeError

TITLES = {ACCELERATE: "transformers + accelerate"}
"""Engine → what people are told it is, where that is more than its name."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What `tiermoe bench` was asked for. options: of `tiermoe.load`, but memory, threads and preset; text: what is
    fed, None for token ids drawn at random; out: the file of finished runs."""

    model: str
    text: str | None
    conditions: Sequence[Condition]
    presets: Sequence[str]
    peers: Sequence[str]
    options: dict[str, Any]
    rounds: int
    threads: int
    timeout: float
    gguf: Path | None = None
    peer_python: str = sys.executable
    out: Path | None = None


@dataclass(slots=True)
class Session:
    """A measurement. `rows`: what has been run so far; `skipped`: engines that cannot run here, with the reason."""

    asked: Asked
    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[Measured] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)

    def run(self, progress: Any, skip: Callable[[str], None]) -> Iterator[Step]:
        """Checks, prepares and runs everything; yields each run as it ends. progress: called with (what, done, total)
        while something is made that is kept; skip: with a line about an engine that is left out. Raises a TiermoeError
        where nothing could be measured as asked."""
        asked = self.asked
        subject = Subject(asked.model, asked.text)
        check_lengths(asked.conditions, len(subject.ids), subject.context)
        self.model = {"name": subject.name, "fingerprint": subject.fingerprint}
        journal = Journal(asked.out, self._key(subject))
        self.machine = {**describe(), "threads": asked.threads, "memory_bandwidth": self._memory_bandwidth()}
        base = subject.store_root.parent
        base.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="bench-", dir=base) as folder:
            common = Common(subject.directory, asked.threads, asked.timeout, Path(folder))
            engines = list(self._ready(self._engines(subject, common), progress, skip))
            if not engines:
                raise ConfigError("nothing can be measured: " + "; ".join(one["reason"] for one in self.skipped))
            ids = subject.ids_file(Path(folder))
            yield from measure(plan(engines, asked.conditions), asked.rounds, ids, journal, self.rows)

    def document(self) -> dict[str, Any]:
        """What `--json` prints, of what has been run so far."""
        used = make_settings(**self.asked.options)
        return {
            "model": self.model,
            "machine": self.machine,
            "command": shlex.join(["tiermoe", *sys.argv[1:]]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "rounds": self.asked.rounds,
            "options": {name: str(value) for name, value in self.asked.options.items()}
            | {"bits": str(used.bits_used), "dense_bits": str(used.dense_bits_used), "kv_bits": str(used.kv_bits)},
            "skipped": self.skipped,
            "cases": summarise(self.rows),
        }

    def _key(self, subject: Subject) -> dict[str, Any]:
        """What runs that are kept in a file must have in common."""
        options = {name: str(value) for name, value in self.asked.options.items()}
        text = RANDOM if self.asked.text is None else xxhash.xxh3_64_hexdigest(self.asked.text.encode())
        return {"model": subject.fingerprint, "text": text, "threads": self.asked.threads, **options}

    def _memory_bandwidth(self) -> float:
        command = [sys.executable, "-m", "tiermoe.process.bandwidth", str(self.asked.threads)]
        return float(run_child(command, Bounds(None, self.asked.timeout))["bandwidth"])

    def _engines(self, subject: Subject, common: Common) -> Iterator[BenchEngine]:
        asked = self.asked
        for preset in asked.presets:
            ensure = subject.ensure(preset, asked.options)
            yield Tiermoe(preset, asked.options, common, ensure, self.machine["memory_bandwidth"])
        kept = subject.store_root.parent / "gguf" / subject.store_root.name
        makers: dict[str, Callable[[], BenchEngine]] = {
            LLAMA: lambda: LlamaCpp(common, asked.gguf, kept, asked.peer_python),
            TRANSFORMERS: lambda: Transformers(common),
            ACCELERATE: lambda: Accelerate(common),
        }
        for peer in asked.peers:
            yield makers[peer]()

    def _ready(
        self, engines: Iterator[BenchEngine], progress: Any, skip: Callable[[str], None]
    ) -> Iterator[BenchEngine]:
        """The engines that can run; the others are noted. An option of ours that is wrong is no reason to go on."""
        for engine in engines:
            reason = engine.missing()
            if reason is None:
                try:
                    engine.prepare(progress)
                except TiermoeError as error:
                    if engine.name == OURS and not isinstance(error, ProfileError):
                        raise
                    reason = str(error)
            if reason is None:
                yield engine
                continue
            title = named(TITLES.get(engine.name, engine.name), engine.preset)
            self.skipped.append({"engine": engine.name, "reason": reason})
            skip(f"skipped: {title}: {reason}")


@contextlib.contextmanager
def writable(path: Path | None, option: str) -> Iterator[None]:
    """Refuses a file that cannot be written, before the work that is to go there; leaves none behind that was not
    written. ConfigError names the option."""
    if path is None:
        yield
        return
    there = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file with {option}") from error
    try:
        yield
    finally:
        if not there and path.exists() and not path.stat().st_size:
            path.unlink()
