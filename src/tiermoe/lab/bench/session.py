"""One measurement from beginning to end: the model, the engines that can run here, their cases round after round, and
the document that comes of them."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tiermoe.config import settings as make_settings
from tiermoe.engine.load import resolve_for
from tiermoe.engine.sampling import end_tokens
from tiermoe.errors import ConfigError, ModelError, ProfileError, TiermoeError
from tiermoe.formats.store import precision_key
from tiermoe.kernels.linear import cpu_kernels
from tiermoe.lab.bench.cases import (
    ACCELERATE,
    LLAMA,
    OURS,
    RANDOM,
    TRANSFORMERS,
    BenchConfig,
    Case,
    Condition,
    Measured,
    alternating,
    check_lengths,
    named,
    random_ids,
    rows,
    token_ids,
)
from tiermoe.lab.bench.child import Bounds, run_child
from tiermoe.lab.bench.engines import Accelerate, BenchEngine, Common, LlamaCpp, Tiermoe, Transformers
from tiermoe.lab.bench.summary import describe_machine, summarise
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.hf.hub import resolve_model
from tiermoe.model.prepare_store import ensure_packed, open_or_create, store_root
from tiermoe.model.tokenizer import load_tokenizer

_TITLES = {ACCELERATE: "transformers + accelerate"}  # of engines whose name says too little


class Subject:
    """The model that every engine runs, and the token ids that it is fed.

    model: a directory or a hub id; text: what is fed, None for random token ids. ModelError for a model that cannot be
    measured.
    """

    def __init__(self, model: str, text: str | None) -> None:
        self.directory = resolve_model(model)
        self._blueprint = inspect_model(self.directory, model)
        self._blueprint.require_text()
        if self._blueprint.family.encoder_decoder:
            raise ModelError(
                f"{self._blueprint.family.name} models read a prompt through an encoder, which the peers' runs do not; "
                f"bench measures decoder-only models"
            )
        if text is None:
            self.ids = random_ids(self._blueprint.config.vocab_size)
        else:
            self.ids = token_ids(load_tokenizer(self.directory), text)
        self.context = self._blueprint.max_context()
        self.ends = end_tokens(self._blueprint.generation_settings())
        self.name = self._blueprint.name
        self.fingerprint = self._blueprint.checkpoint.fingerprint()
        self.store_root = store_root(self._blueprint, None)

    def ids_file(self, condition: Condition, folder: Path) -> Path:
        """A .npy file in `folder` of the token ids (batch, prompt + output) of a condition, made where it is not
        there."""
        path = folder / f"ids-{condition.batch}-{condition.prompt}-{condition.output}.npy"
        if not path.exists():
            np.save(path, np.asarray(rows(self.ids, condition), dtype=np.int64))
        return path

    def ensure_packed(self, preset: str, options: dict[str, Any], progress: Any) -> tuple[Path, ...]:
        """Packs the precisions of a preset where the store lacks them. Returns the files that a run reads."""
        settings = make_settings(preset=preset, **options)
        resolved = resolve_for(self._blueprint, settings)
        settings, unit = resolved.settings, resolved.composition.unit
        store = open_or_create(self._blueprint, store_root(self._blueprint, settings.store))
        quantizer, dense_bits = settings.quantizer_used, settings.dense_bits_used
        for bits in resolved.precisions:
            ensure_packed(store, self._blueprint, bits, quantizer, dense_bits, progress, unit)
        keys = [precision_key(bits, quantizer, unit) for bits in resolved.precisions]
        extents = (extent for key in keys for layer in store.precisions[key].layers for extent in layer.extents)
        experts = {Path(segment.file) for extent in extents for segment in extent.segments}
        dense = {store.root / entry["file"] for entry in store.dense.values()}
        return tuple(sorted(experts | dense | set(self.directory.glob("*.safetensors"))))


class Journal:
    """A file of JSON lines to which runs are appended as they end, and from which a later call goes on.

    path: None keeps nothing; key: what the runs hold for (model, text, threads, precisions). ConfigError for a file of
    other runs, or one that cannot be read or written.
    """

    def __init__(self, path: Path | None, key: dict[str, Any]) -> None:
        self._path = path
        self._known: dict[tuple[str, int], dict[str, Any]] = {}  # by case and round
        if path is None:
            return
        try:
            self._read(path, key)
        except OSError as error:
            raise ConfigError(f"the file {path} cannot be used: {error.strerror}; name another with --out") from error

    def _read(self, path: Path, key: dict[str, Any]) -> None:
        lines = path.read_text().splitlines() if path.exists() else []
        if not lines:
            path.write_text(json.dumps({"measured": key}) + "\n")
            return
        whole = list(_objects(lines))
        if not whole or "measured" not in whole[0]:
            raise ConfigError(f"{path} is no file of tiermoe bench; name another with --out")
        if whole[0]["measured"] != key:
            other = [name for name in key if whole[0]["measured"].get(name) != key[name]]
            raise ConfigError(f"{path} holds runs with another {', '.join(other)}; name another file with --out")
        for line in whole[1:]:
            self._known[json.dumps(line["case"], sort_keys=True), line["round"]] = line["result"]
        if len(whole) < len(lines):  # cut short while it was written
            path.write_text("".join(json.dumps(line) + "\n" for line in whole))

    def find(self, case: Case, number: int) -> dict[str, Any] | None:
        """The result of a round that the file holds."""
        return self._known.get((json.dumps(case.as_dict(), sort_keys=True), number))

    def add(self, case: Case, number: int, result: dict[str, Any]) -> None:
        """Appends a run."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"case": case.as_dict(), "round": number, "result": result}) + "\n")


def _objects(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The objects up to the first line that is none."""
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            return
        if not isinstance(found, dict):
            return
        yield found


@dataclass(frozen=True, slots=True)
class Step:
    """One run that is done."""

    case: Case
    round: int
    done: int  # runs so far
    total: int
    result: dict[str, Any]


def measure(
    engines: Sequence[BenchEngine],
    conditions: Sequence[Condition],
    rounds: int,
    ids: Callable[[Condition], Path],
    journal: Journal,
    measured: list[Measured],
) -> Iterator[Step]:
    """Runs every case `rounds` times, condition by condition, its engines alternating.

    ids: condition → the .npy file of the token ids that every engine is fed. Yields each run as it ends, and keeps it
    in `measured`, where an interrupted measurement finds what there is. What the journal holds is not run again, and
    neither is a case that failed.
    """
    planned = [
        [(engine, Case(engine.name, engine.preset, condition)) for engine in engines if engine.takes(condition)]
        for condition in conditions
    ]
    total, done = rounds * sum(map(len, planned)), 0
    for group in planned:
        by_case = {case: Measured(case) for _, case in group}
        measured += by_case.values()
        for number, (engine, case) in alternating(group, rounds):
            done += 1
            row = by_case[case]
            if row.error is not None:
                continue
            result = journal.find(case, number)
            if result is None:
                try:
                    result = engine.run(case.condition, ids(case.condition))
                except TiermoeError as error:
                    result = {"error": str(error)}
                journal.add(case, number, result)
            if "error" in result:
                row.error = result["error"]
            else:
                row.rounds[number] = result
            yield Step(case, number, done, total, result)


def memory_bandwidth(threads: int, timeout: float) -> float:
    """Bytes per second that memory gives, measured in a process of its own."""
    command = [sys.executable, "-m", "tiermoe.platform.bandwidth", str(threads)]
    return float(run_child(command, Bounds(None, timeout))["bandwidth"])


@dataclass(slots=True)
class Session:
    """A measurement."""

    config: BenchConfig
    machine: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    measured: list[Measured] = field(default_factory=list)  # what has been run so far
    skipped: list[dict[str, str]] = field(default_factory=list)  # engines that cannot run here, with the reason

    def run(self, progress: Any, skip: Callable[[str], None]) -> Iterator[Step]:
        """Checks, prepares and runs everything; yields each run as it ends.

        progress: called with (what, done, total) while something is made that is kept; skip: called with a line about
        an engine that is left out. A TiermoeError where nothing could be measured as asked.
        """
        config = self.config
        subject = Subject(config.model, config.text)
        check_lengths(config.conditions, len(subject.ids), subject.context)
        self.model = {"name": subject.name, "fingerprint": subject.fingerprint}
        options = {name: str(value) for name, value in config.options.items()}
        text = RANDOM if config.text is None else xxhash.xxh3_64_hexdigest(config.text.encode())
        key = {"model": subject.fingerprint, "text": text, "threads": config.threads, "kernels": cpu_kernels()}
        journal = Journal(config.out, {**key, **options})
        bandwidth = memory_bandwidth(config.threads, config.timeout)
        self.machine = {**describe_machine(), "threads": config.threads, "memory_bandwidth": bandwidth}
        base = subject.store_root.parent
        base.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="bench-", dir=base) as folder:
            common = Common(subject.directory, config.threads, config.timeout, Path(folder))
            engines = [engine for engine in self._engines(subject, common) if self._ready(engine, progress, skip)]
            if not engines:
                raise ConfigError("nothing can be measured: " + "; ".join(one["reason"] for one in self.skipped))
            yield from measure(
                engines, config.conditions, config.rounds, lambda condition: subject.ids_file(condition, Path(folder)),
                journal, self.measured,
            )  # fmt: skip

    def _engines(self, subject: Subject, common: Common) -> Iterator[BenchEngine]:
        config = self.config

        def packing(preset: str) -> Callable[[Any], tuple[Path, ...]]:
            return lambda progress: subject.ensure_packed(preset, config.options, progress)

        for preset in config.presets:
            yield Tiermoe(preset, config.options, common, packing(preset), self.machine["memory_bandwidth"])
        for peer in config.peers:
            if peer == LLAMA:
                yield LlamaCpp(common, config.gguf, config.peer_python)
            else:
                yield {TRANSFORMERS: Transformers, ACCELERATE: Accelerate}[peer](common)

    def _ready(self, engine: BenchEngine, progress: Any, skip: Callable[[str], None]) -> bool:
        """Whether an engine can run; else it is noted. An option of ours that is wrong is no reason to go on."""
        reason = engine.missing()
        if reason is None:
            try:
                engine.prepare(progress)
            except TiermoeError as error:
                if engine.name == OURS and not isinstance(error, ProfileError):
                    raise
                reason = str(error)
        if reason is None:
            return True
        self.skipped.append({"engine": engine.name, "reason": reason})
        skip(f"skipped: {named(_TITLES.get(engine.name, engine.name), engine.preset)}: {reason}")
        return False

    def document(self) -> dict[str, Any]:
        """What `--json` prints, of what has been run so far."""
        config = self.config
        used = make_settings(**config.options)
        return {
            "model": self.model,
            "machine": self.machine,
            "command": shlex.join(["tiermoe", *sys.argv[1:]]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "rounds": config.rounds,
            "options": {name: str(value) for name, value in config.options.items()}
            | {"bits": str(used.bits_used), "dense_bits": str(used.dense_bits_used), "kv_bits": str(used.kv_bits)},
            "skipped": self.skipped,
            "cases": summarise(self.measured),
        }


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
