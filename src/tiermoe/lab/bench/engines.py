"""The programs that are measured: tiermoe with a preset, llama.cpp, transformers, and transformers with accelerate's
disk offload; and the bound of ours: the larger of reading the weights that a token uses from memory, and reading what
Belady's choice misses from the drive."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiermoe.config import format_size
from tiermoe.errors import TraceError
from tiermoe.formats.gguf_file import is_gguf
from tiermoe.lab.bench import run_peer
from tiermoe.lab.bench.cases import ACCELERATE, LLAMA, OURS, TRANSFORMERS, Condition
from tiermoe.lab.bench.child import Bounds, CaseFailed, run_child
from tiermoe.lab.simulate.evictions import hits_of
from tiermoe.lab.trace import Header, LayerTrace, Pass, Trace

_STARTING_S = 120.0  # that an interpreter may take to say what it has
NO_GGUF = (
    "it reads GGUF files and this model is none: name one with --gguf. llama.cpp's own converter writes one, "
    "convert_hf_to_gguf.py in vendor/llama.cpp of what `pip download --no-deps --no-binary llama-cpp-python "
    "llama-cpp-python` brings"
)


@dataclass(frozen=True, slots=True)
class Common:
    """What is the same for all engines."""

    directory: Path  # of the checkpoint, or the GGUF file
    threads: int  # that compute
    timeout: float  # seconds of one run
    scratch: Path  # a folder on a drive for what is made while running


class BenchEngine:
    """One program under measurement."""

    name = ""
    preset: str | None = None  # of ours

    def __init__(self, common: Common) -> None:
        self._common = common

    def missing(self) -> str | None:
        """Why the program cannot run here and what to do; None: it can. Asked once, before anything is measured."""
        return None

    def takes(self, condition: Condition) -> bool:
        """Whether the condition says something about the program."""
        return True

    def prepare(self, progress: Any) -> None:
        """Makes what runs need and keep. progress: called with (what, done, total). A TiermoeError where it cannot."""

    def run(self, condition: Condition, ids: Path) -> dict[str, Any]:
        """One run in a fresh process on the token ids in a .npy file of (batch, prompt + output).

        Speeds in tokens per second: `prefill_tok_s`, `decode_tok_s` (None where nothing is decoded); `first_token_s`
        since the process was started; bytes: `peak_memory_bytes`, `cgroup_peak_bytes`; `limited`: whether the bound on
        memory was a real one. CaseFailed with the reason.
        """
        raise NotImplementedError

    def _job(self, condition: Condition, ids: Path) -> dict[str, Any]:
        return {
            "ids": str(ids),
            "prompt": condition.prompt,
            "warm": condition.warm_tokens,
            "threads": self._common.threads,
        }


class Tiermoe(BenchEngine):
    """This program with a preset and `options` of `tiermoe.load`.

    ensure: packs what the store lacks, given a progress callback, and returns the files that a run reads;
    memory_bandwidth: bytes per second, for the bounds.
    """

    name = OURS

    def __init__(
        self,
        preset: str,
        options: dict[str, Any],
        common: Common,
        ensure: Callable[[Any], tuple[Path, ...]],
        memory_bandwidth: float,
    ) -> None:
        super().__init__(common)
        self.preset = preset
        self._options = options
        self._ensure = ensure
        self._memory_bandwidth = memory_bandwidth
        self._files: tuple[Path, ...] = ()
        self._ideals: dict[tuple[Condition, int], Ideal | None] = {}  # by condition and slots

    def prepare(self, progress: Any) -> None:
        self._files = self._ensure(progress)

    def run(self, condition: Condition, ids: Path) -> dict[str, Any]:
        known = any(asked == condition for asked, _ in self._ideals)
        routing = self._common.scratch / f"routing-{self.preset}.jsonl"
        routing.unlink(missing_ok=True)
        options = {
            "preset": self.preset,
            "threads": self._common.threads,
            "batch": condition.batch,
            "context": condition.prompt + condition.output,
            "device": "cpu",  # as the peers'
            **self._options,
        }
        if condition.memory is not None:
            options["memory"] = condition.memory
        job = {
            **self._job(condition, ids),
            "model": str(self._common.directory),
            "options": options,
            "routing": None if known else str(routing),
        }
        bounds = Bounds(condition.memory, self._common.timeout, condition.files_to_drop(self._files))
        result = run_child([sys.executable, "-m", "tiermoe.lab.bench.run_tiermoe", json.dumps(job)], bounds)
        result = with_bounds(result, self._ideal(condition, result["slots"], routing), self._memory_bandwidth)
        token, kernels, wait = (result.pop(name) * 1e3 for name in ("token_s", "kernel_s", "wait_s"))
        rest = max(token - kernels - wait, 0.0)
        return {**result, "token_ms": token, "compute_ms": kernels, "wait_ms": wait, "framework_ms": rest}

    def _ideal(self, condition: Condition, slots: int, path: Path) -> Ideal | None:
        if (condition, slots) not in self._ideals:
            routing, warm = read_routing(path, condition.output), condition.warm_tokens
            found = routing and ideal(routing, slots, warm > 0, warm > condition.prompt)
            self._ideals[condition, slots] = found or None
            path.unlink(missing_ok=True)
        return self._ideals[condition, slots]


class LlamaCpp(BenchEngine):
    """llama.cpp through llama-cpp-python: under a bound it maps its file and does not repack, without one it holds
    everything, repacked.

    gguf: a file of the same model; None takes the model's own where it is one. python: the interpreter that has
    llama-cpp-python.
    """

    name = LLAMA

    def __init__(self, common: Common, gguf: Path | None, python: str) -> None:
        super().__init__(common)
        self._python = python
        self.gguf = gguf or (common.directory if is_gguf(common.directory) else None)

    def missing(self) -> str | None:
        if self.gguf is None:
            return NO_GGUF
        if shutil.which(self._python) is None:
            return f"{self._python} is no interpreter; name one that has llama-cpp-python with --peer-python"
        done = subprocess.run(
            [self._python, "-c", "import llama_cpp, numpy"], capture_output=True, text=True, timeout=_STARTING_S,
            check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return None
        said = done.stderr.strip().splitlines()
        return (
            f"{said[-1] if said else 'import failed'} in {self._python}; pip install llama-cpp-python, or name an "
            f"interpreter that has it with --peer-python"
        )

    def run(self, condition: Condition, ids: Path) -> dict[str, Any]:
        assert self.gguf is not None
        resident = condition.memory is None
        job = {
            **self._job(condition, ids),
            "task": "llama.cpp",
            "gguf": str(self.gguf),
            "mmap": not resident,
            "repack": resident,
        }
        bounds = Bounds(condition.memory, self._common.timeout, condition.files_to_drop((self.gguf,)))
        return {**run_child([self._python, run_peer.__file__, json.dumps(job)], bounds), "gguf": self.gguf.name}


class Transformers(BenchEngine):
    """transformers alone: the checkpoint's own dtype, its default implementation of experts."""

    name = TRANSFORMERS

    def missing(self) -> str | None:
        if is_gguf(self._common.directory):
            return "it is measured on checkpoints alone, not on a GGUF file"
        return not_installed("transformers")

    def run(self, condition: Condition, ids: Path) -> dict[str, Any]:
        return self._child(condition, ids, condition.memory, {})

    def _child(self, condition: Condition, ids: Path, memory: int | None, more: dict[str, Any]) -> dict[str, Any]:
        directory = self._common.directory
        job = {**self._job(condition, ids), "task": "transformers", "model": str(directory), **more}
        files = condition.files_to_drop(tuple(sorted(directory.glob("*.safetensors"))))
        command = [sys.executable, run_peer.__file__, json.dumps(job)]
        return run_child(command, Bounds(memory, self._common.timeout, files))


class Accelerate(Transformers):
    """transformers with accelerate's disk offload: as many weights in memory as the budget, the others in a folder.

    The process holds far more than the budget. Where a cgroup of the budget kills it, it runs without one, and its
    figures say so: the page cache then serves what the budget would have it read.
    """

    name = ACCELERATE

    def __init__(self, common: Common) -> None:
        super().__init__(common)
        self._killed: set[int] = set()  # budgets

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


@dataclass(frozen=True, slots=True)
class Routing:
    """The routers' choices of one run."""

    header: Header
    bits: int  # of every expert
    prompt: list[Pass]
    decode: list[Pass]  # one for each decoded token, of all rows of the batch


@dataclass(frozen=True, slots=True)
class Ideal:
    """A decode pass at its best, on average."""

    hit_rate: float  # of Belady's choice
    missed_bytes: float  # by Belady's choice
    experts: float  # used in all layers together


def read_routing(path: Path, decoded: int) -> Routing | None:
    """What `run_tiermoe` wrote of a run of `decoded` tokens; None where it wrote nothing, as there is no one answer
    for the preset. TraceError where layers or tokens are missing: a bound of those that are there would be too high."""
    if not path.exists():
        return None
    with path.open() as file:
        first = json.loads(file.readline())
        passes = list(_passes(map(json.loads, file), len(first["experts"])))
    bits = first["bits"]
    header = Header(
        "", "", first["experts"], first["top_k"], {bits: first["expert_bytes"]}, times=None, holds=frozenset()
    )
    if any(not layer.experts for passed in passes for layer in passed.layers):
        raise TraceError("the routing of some layers was not seen, so the run has no bound: the engine did not tell it")
    kinds = {phase: [passed for passed in passes if passed.phase == phase] for phase in ("prefill", "decode")}
    if len(kinds["decode"]) != decoded:
        raise TraceError(f"the routing of {len(kinds['decode'])} of {decoded} tokens was seen, so the run has no bound")
    return Routing(header, bits, kinds["prefill"], kinds["decode"])


def _passes(events: Iterator[Any], layers: int) -> Iterator[Pass]:
    """Layers run in order, so a pass ends where the next layer is not a later one."""
    current: Pass | None = None
    last = layers
    for layer, phase, experts in events:
        if layer <= last:
            if current is not None:
                yield current
            current = Pass(phase, 0, [], [LayerTrace([], []) for _ in range(layers)])
        assert current is not None
        current.layers[layer] = LayerTrace(experts, [[] for _ in experts])
        last = layer
    if current is not None:
        yield current


def ideal(routing: Routing, slots: int, warm_prompt: bool, warm_output: bool) -> Ideal | None:
    """Belady's decoding in one pool of `slots`, after what ran before the clock started: nothing, the prompt, or the
    prompt and the output. None where nothing is decoded."""
    if not routing.decode:
        return None
    before = [*(routing.prompt if warm_prompt else []), *(routing.decode if warm_output else [])]
    passes = [_as(passed, "prefill", 0) for passed in before]
    passes += [_as(passed, passed.phase, 1) for passed in [*routing.prompt, *routing.decode]]
    slots = min(slots, sum(routing.header.experts))
    best = hits_of(Trace(routing.header, passes), "belady", slots, routing.bits).decode
    count = len(routing.decode)
    used = sum(len({e for row in layer.experts for e in row}) for passed in routing.decode for layer in passed.layers)
    return Ideal(best.counts.hit_rate or 0.0, best.bytes_read / count, used / count)


def _as(passed: Pass, phase: str, sequence: int) -> Pass:
    return Pass(phase, sequence, [], passed.layers)


def with_bounds(result: dict[str, Any], best: Ideal | None, memory_bandwidth: float) -> dict[str, Any]:
    """A run's result with `belady_hit_rate`, `bound_tok_s`, `own_bound_tok_s` and the fractions reached; None where
    there is no bound to give. memory_bandwidth: bytes per second."""
    named: dict[str, Any] = dict.fromkeys(
        ("belady_hit_rate", "bound_tok_s", "own_bound_tok_s", "fraction_of_bound", "fraction_of_own_bound")
    )
    speed = result["decode_tok_s"]
    if best is not None and speed:
        weights = result["dense_bytes"] + best.experts * result["slot_bytes"]
        own = result["bytes_per_token"] * result["batch"]
        for name, missed in (("bound", best.missed_bytes), ("own_bound", own)):
            bound_s = max(weights / memory_bandwidth, missed / result["link_bandwidth"])
            named[f"{name}_tok_s"] = result["batch"] / bound_s
            named[f"fraction_of_{name}"] = speed / named[f"{name}_tok_s"]
        named |= {"belady_hit_rate": best.hit_rate, "weight_bytes_per_pass": weights}
    return {**result, **named}
