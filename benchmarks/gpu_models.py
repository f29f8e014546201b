"""The steps of `benchmarks.gpu` that run models of real shapes: the papers' presets beside load on demand, LRU and the
default, and llama.cpp within the same memory.

Weights are random. `PRESETS` has settings in the place of a calibration's. A profile's tables are counted in the
recorded routing; for a model without one they know nothing.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_run import Fed, Row, Run, engine_of, random_tokens
from benchmarks.llama_bench import experts_on_cpu, run_llama_bench
from benchmarks.random_model import ALL, SMALL, Config, config_of, write
from benchmarks.random_store import fill
from benchmarks.recorded_routing import Routing, routing_for
from tiermoe.config import DEFAULT_QUANTIZER, parse_size, settings
from tiermoe.errors import ConfigError, TiermoeError, TraceError, reason
from tiermoe.formats.store import precision_key
from tiermoe.formats.store_files import write_atomically
from tiermoe.lab.papers.corm import bits_by_usage
from tiermoe.lab.papers.statistics import routings
from tiermoe.lab.trace import Header, Trace, frequencies
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.offload.composition import NO_CACHE, require_device
from tiermoe.offload.policies.prediction.path import count_paths, paths_to_json
from tiermoe.offload.presets import compose
from tiermoe.offload.profiles import Profile, profile_path, to_json

BITS, LOW_BITS = 4, 2
PROMPT, BEFORE, MEASURED = 16, 16, 48  # tokens


@dataclass(frozen=True)
class Model:
    """layers: None is all. budgets: of the GPU, in bytes, or of the experts that it caches, a share."""

    layers: int | None
    budgets: tuple[str, ...]
    more: bool = False  # the later systems' presets too


MODELS: Mapping[str, Model] = {
    "qwen3-30b-a3b": Model(None, ("8GiB", "12GiB", "16GiB")),
    "mixtral-8x7b": Model(3, ("25%",)),
    "olmoe-1b-7b": Model(None, ("33%",), more=True),
    "qwen1.5-moe-a2.7b": Model(None, ("33%",)),
    "deepseek-v2-lite": Model(None, ("33%",)),
    "phi-3.5-moe": Model(3, ("25%",)),
}
"""Shapes in order of worth. A random router gives hits that no text has: its choices are all but even."""

PRESETS: Mapping[str, dict[str, Any]] = {
    "load-on-demand": {},
    "lru": {},
    "default": {},
    "hobbit": {"t1": 0.6, "t2": 0.9, "weights": "0.25,0.25,0.25,0.25"},
    "fate": {"boundary": 1, "window": 4, "low_popularity": 0},
    "mobile": {},
    "mixtral-offload": {},
    "nimble": {},
    "corm": {"theta": 0.266},
    "edgemoe": {},
}
"""Preset → settings in the place of a calibration's. HOBBIT's thresholds are the paper's (section 3.2). Fate's first
layer is the only one that nothing predicts. Of a random gate's neurons 55 % are below this theta, CORM's share
(`corm.INACTIVE_SHARE`). The last two need other codes of every expert: another 20 GB are written for each."""
LATER: Mapping[str, dict[str, Any]] = {
    "moe-infinity": {}, "adapmoe": {}, "hybrimoe": {}, "pregated": {}, "moe-stream": {}, "fiddler": {},
    "llama-cpu-moe": {},
}  # fmt: skip
"""Those of the later systems, on one model. AdapMoE's recall and uses are a value for each layer."""


@dataclass(frozen=True)
class Prepared:
    """A model on the drive."""

    kind: str
    config: Config
    directory: Path
    store: Path
    routing: Routing | None  # None: random

    @property
    def blueprint(self) -> Blueprint:
        return inspect_model(self.directory, str(self.directory), self.store)

    @property
    def title(self) -> str:
        layers = self.config["num_hidden_layers"]
        whole = layers == ALL[self.kind].config["num_hidden_layers"]
        return f"{self.kind}, {'whole' if whole else f'{layers} layers'}"

    def fed(self, engine: Any) -> Fed:
        if self.routing is None:
            tokens = random_tokens(PROMPT + BEFORE + MEASURED)
            return Fed(engine, tokens[:PROMPT], tokens[PROMPT:])
        decoded = self.routing.tokens(BEFORE + MEASURED, self.routing.prompt)
        return Fed(engine, self.routing.tokens(PROMPT), decoded)

    def remove(self) -> None:
        for folder in (self.directory, self.store):
            shutil.rmtree(folder, ignore_errors=True)


def prepare(kind: str, run: Run, layers: int | None) -> Prepared:
    """The checkpoint of a shape, with holes in the place of its experts. PackError if the drive has no room."""
    config = config_of(kind, layers, **(SMALL[kind] if run.quick else {}))
    routing = None
    if run.routing is not None:
        with contextlib.suppress(TraceError):  # of another model
            routing = routing_for(run.routing, config)
    directory = run.folder / f"{kind}-experts-apart{'-small' * run.quick}{'-routed' * (routing is not None)}"
    if not directory.exists():
        write(kind, directory, config, routing=routing, experts=False)
    return Prepared(kind, config, directory, run.store(directory), routing)


def presets_on(kind: str, run: Run) -> Iterator[Row]:
    """A preset a row at each budget: tokens a second, and their ratio to load on demand's; bytes moved a token; hits.
    Main memory holds all experts. The model is removed in the end: the next one needs the room."""
    of = MODELS[kind]
    layers, budgets = (3, ("50%",)) if run.quick else (of.layers, of.budgets)
    model = prepare(kind, run, layers)
    cases = [(name, name, changes, 16) for name, changes in {**PRESETS, **(LATER if of.more else {})}.items()]
    if not budgets[0].endswith("%"):
        cases.insert(3, ("default with dense layers at 4 bits", "default", {}, 4))
    on_demand = 0.0
    for label, preset, changes, dense_bits in cases:
        cached = compose(preset).cache not in NO_CACHE
        for budget in budgets if cached else budgets[:1]:
            place = f", {budget} {'of the experts' if budget.endswith('%') else 'of the GPU'}" if cached else ""
            what = f"{model.title}{place}, {label}"
            row = run.found(what)
            if row is None:
                row = {"what": what, "routing": "random" if model.routing is None else "recorded"}
                row |= _measured(model, run, preset, changes, budget, dense_bits)
                if on_demand and "tok_s" in row:
                    row["times_load_on_demand"] = row["tok_s"] / on_demand
                yield row
            if preset == "load-on-demand":
                on_demand = row.get("tok_s", 0.0)
    model.remove()


def _measured(
    model: Prepared, run: Run, preset: str, changes: dict[str, Any], budget: str, dense_bits: int
) -> dict[str, Any]:
    """The figures of a preset; or why it is left out, or the error."""
    blueprint, found = model.blueprint, dict[str, Any]()
    if preset == "adapmoe":
        each = [layer.top_k for layer in blueprint.layers]
        changes = {"layer_recall": [0.8] * len(each), "layer_uses": each}
    composition = compose(preset, changes)
    if composition.tables_read["prefetch"] == "paths" and model.routing is None:
        return {"left_out": "its activation paths are counted in a recorded routing; give --routing"}
    if changes:
        found["set"] = ", ".join(f"{name} {value}" for name, value in changes.items())
    share = {} if composition.cache in NO_CACHE else {"cache": budget}
    room = share if budget.endswith("%") else {"gpu_memory": budget}
    try:
        asked = settings(
            device=run.device, bits=BITS, dense_bits=dense_bits, context=512, store=model.store, preset=preset,
            set=changes, **room,
        )  # fmt: skip
        require_device(composition, run.kind)
        if composition.needs_profile:
            found["tables"] = "of the recorded routing" if model.routing else "nothing known"
            _write_tables(model, blueprint, composition.profile)
        unwritten = model.routing.columns if model.routing else 0
        fill(blueprint, asked, unwritten, kept=(precision_key(BITS, DEFAULT_QUANTIZER),))
        with engine_of(model.blueprint, asked) as engine:
            fed = model.fed(engine)
            fed.decode(2 if run.quick else BEFORE)
            used = fed.decode(2 if run.quick else MEASURED)
            found |= {
                "tok_s": used.tok_s, "bound_tok_s": used.bound_tok_s(engine.service.bandwidth),
                "hits": used.hit_rate, "copied_mb_a_token": used.bytes_copied / used.tokens / 1e6,
                "read_mb_a_token": used.bytes_per_token / 1e6, "waited_ms_a_token": 1e3 * used.wait_s / used.tokens,
                "slots": engine.plan.slots, "of": engine.plan.all_slots,
            }  # fmt: skip
            if run.on_gpu:
                found["gpu_gib"] = engine.stats()["peak_gpu_memory_bytes"] / 2**30
    except ConfigError as error:  # the device or the model cannot run it
        found["left_out"] = str(error)
    except (TiermoeError, RuntimeError) as error:
        found["error"] = reason(error)
    return found


def _write_tables(model: Prepared, blueprint: Blueprint, name: str) -> None:
    """A profile with the tables that presets read: counted in the recorded routing, or in nothing."""
    experts, top_k = [layer.experts for layer in blueprint.layers], [layer.top_k for layer in blueprint.layers]
    if model.routing is None:
        trace = Trace(Header(model.kind, "", experts, top_k, {}, None, frozenset()), [])
    else:
        tokens = model.routing.tokens(model.routing.classes)
        trace = model.routing.passes(tokens[: model.routing.prompt], tokens[model.routing.prompt :])
    data = {
        "table": bits_by_usage(trace, BITS, LOW_BITS), "frequencies": frequencies(trace),
        "paths": paths_to_json(count_paths(routings(trace), 2)),
    }  # fmt: skip
    profile = Profile(name, blueprint.checkpoint.fingerprint(), {}, {}, data, blueprint.name, experts, top_k)
    path = profile_path(model.store, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_json(profile))


def llama_cpp(run: Run) -> Iterator[Row]:
    """llama.cpp's program on a GGUF file of Qwen3-30B-A3B's shape in the budgets of `MODELS`: so many layers' experts
    stay in main memory (`--n-cpu-moe`) that the rest fits."""
    kind = "qwen3-30b-a3b"
    budgets = ("2GiB",) if run.quick else MODELS[kind].budgets
    if run.llama_bench is None:
        yield {"what": "llama.cpp", "left_out": "there is no llama-bench on the path; name it with --llama-bench"}
        return
    from benchmarks import random_gguf  # late: it needs the package gguf

    file = run.folder / f"{kind}{'-small' * run.quick}.gguf"
    if not file.exists():
        random_gguf.write(kind, file, config_of(kind, 3 if run.quick else None, **(SMALL[kind] if run.quick else {})))
    for budget in budgets:
        row: Row = {"what": f"{kind}, {budget} of the GPU, llama.cpp in Q4_K_M"}
        if run.found(row["what"]) is None:
            try:
                layers = experts_on_cpu(file, parse_size(budget))
                row |= {"n_cpu_moe": layers, **run_llama_bench(run.llama_bench, file, layers, PROMPT, MEASURED)}
            except TiermoeError as error:
                row["error"] = reason(error)
            yield row
    file.unlink()
