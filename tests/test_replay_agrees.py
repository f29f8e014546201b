"""A run of the engine and its replay hit and miss the same, phase by phase. With one lane: with several, loads arrive
in an order of their own, which decides what a recency rule evicts. Where experts are read ahead, each layer's loads end
before the next layer begins, and in the replay they take no time: what then differs is decided, not a matter of speed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tiermoe.config import CacheSize, settings
from tiermoe.engine.load import load_blueprint
from tiermoe.engine.observer import Observer
from tiermoe.lab.measure.record import Recorder, header_of
from tiermoe.lab.measure.texts import Feed
from tiermoe.lab.papers.statistics import routings
from tiermoe.lab.simulate import ReplaySettings, Result, replay
from tiermoe.lab.trace import LayerTrace, Little, Pass, Times, Trace, frequencies
from tiermoe.metrics import Metrics, PhaseMetrics
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.model.tokenizer import load_tokenizer
from tiermoe.offload.assembly import PrecisionSlots
from tiermoe.offload.policies.prediction import count_paths, paths_to_json
from tiermoe.offload.profiles import Profile, profile_path, read_profile, to_json
from tiermoe.types import Routed

PROMPT, LENGTH = 8, 28
CACHE = CacheSize(fraction=0.3)
TIMES = Times(1e-3, {4: 1e-4}, 1e-3, {4: 1e-5})
DISTANCES = (1, 2, 3)
AT_ONCE = 1e15
"""Bytes a second of a link that takes no time."""


@pytest.fixture(scope="module")
def sequences(shipped: Path) -> torch.Tensor:
    """Two of a held-out text: a sequence's records and the model's differ."""
    text = (shipped.parents[1] / "data" / "heldout.txt").read_text()[:2000]
    ids = load_tokenizer(shipped)(text, add_special_tokens=False).input_ids
    return torch.tensor(ids[: 2 * LENGTH]).view(2, LENGTH)


@pytest.fixture(scope="module")
def blueprint(shipped: Path) -> Blueprint:
    return inspect_model(shipped, "stories-7m")


@pytest.fixture(scope="module")
def recorded(blueprint: Blueprint, sequences: torch.Tensor) -> Trace:
    """The text as `tiermoe trace` records it."""
    model = load_blueprint(blueprint, settings(preset="lru", lanes=1, memory="4GiB", warm=False))
    with Recorder(model) as recorder:
        passes = [passed for number, ids in enumerate(sequences) for passed in recorder.passes(ids, PROMPT, number)]
        header = header_of(model, TIMES, recorder.holds, recorder.distances, {})
    model.tiermoe.close()
    return Trace(header, passes)


class Run:
    """A text fed to a model: its phases, and its own routing as a trace. That of a lossy composition is no other's."""

    def __init__(
        self,
        blueprint: Blueprint,
        sequences: torch.Tensor,
        preset: str,
        changes: dict[str, Any],
        store: Path | None = None,
    ) -> None:
        """store: with the preset's profile."""
        options = settings(preset=preset, set=changes, cache=CACHE, lanes=1, memory="4GiB", warm=False, store=store)
        model = load_blueprint(blueprint, options)
        self._engine = engine = model.tiermoe
        self.composition = engine.composition
        self.profile = None
        if store:
            self.profile = read_profile(profile_path(store, self.composition.profile), None, "")
        engine.observe(Watching(self))
        self.metrics = Metrics()
        self._passes: list[Pass] = []
        for number, ids in enumerate(sequences):
            feed = Feed(model, ids, PROMPT)
            self._feed("prefill", number, ids[:PROMPT], feed.prompt)
            for at in range(PROMPT, LENGTH):
                self._feed("decode", number, ids[at : at + 1], functools.partial(feed.token, at))
        holds = {"weights", "little", "tokens", "forecasts", "counts"}
        holds |= {"neurons"} if self.composition.unit == "neuron" else set()
        header = header_of(model, TIMES, frozenset(holds), DISTANCES, {})
        self.trace = Trace(header, self._passes)
        self.slots = tuple(PrecisionSlots(pool.bits, pool.slots, pool.sizes) for pool in engine.plan.pools)
        self.stats = engine.stats()
        engine.close()

    @torch.inference_mode()
    def _feed(self, phase: str, sequence: int, ids: torch.Tensor, run: Callable[[], Any]) -> None:
        self._little = self._nothing()
        passed = Pass(phase, sequence, ids.tolist(), self._nothing())
        self._passes.append(passed)
        with self.metrics.by_phase[phase].measured(self._engine.snapshot, len(ids)):
            run()
        if self._little[0].experts:
            fell_back = bool(passed.layers[0].experts)
            passed.little = Little(0.0 if fell_back else 1.0, self._little)

    def record(self, routed: Routed, hidden: torch.Tensor) -> None:
        current = self._engine.context
        if current.unsure == [] and current.phase == "decode":
            ranked = current.forecasts.little[routed.layer]
            traced = LayerTrace([[e for e, _ in ranked]], [[weight for _, weight in ranked]])
            self._little[routed.layer] = traced
        else:
            traced = LayerTrace([list(row) for row in routed.experts], [list(row) for row in routed.weights])
            self._passes[-1].layers[routed.layer] = traced
        for distance in DISTANCES:
            target = routed.layer + distance
            if target < len(self._engine.store.layers):
                traced.forecasts[distance] = list(self._engine.forecaster.rank(target, hidden))
                traced.counts[distance] = list(self._engine.forecaster.count(target, hidden))

    def land(self) -> None:
        """Lets what is read ahead come."""
        controller = self._engine.loader
        while controller.cache.in_flight:
            controller.record(controller.link.wait())

    def _nothing(self) -> list[LayerTrace]:
        return [LayerTrace([], []) for _ in self._engine.store.layers]

    def replayed(self, trace: Trace, bandwidth: float = 1e8) -> Result:
        """The replay of a trace with this run's cache, in slots that it divides by itself. Of its own trace all experts
        run: adaptive gating has left the others out of it."""
        options = ReplaySettings(CACHE, bandwidth, profile=self.profile)
        composition = replace(self.composition, threshold=0.0) if trace is self.trace else self.composition
        result = replay(trace, composition, options)
        assert result.slots == {",".join(map(str, each.bits)): each.slots for each in self.slots}
        return result


class Watching(Observer):
    """Tells a run of each layer."""

    weights = whole_rankings = True

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_route(self, routed: Routed, hidden: torch.Tensor) -> None:
        self._run.record(routed, hidden)
        self._land()

    def on_computed(self, layer: int) -> None:
        self._land()

    def _land(self) -> None:
        """Before the first layer too: a pass may begin with reading ahead."""
        if self._run.composition.prefetch != "none":
            self._run.land()


@dataclass(frozen=True)
class Case:
    """A preset with changes, without prefetch. moved: counters of the run that are not 0; pools: bits of its slots;
    recorded: its routing is that of the recorded trace, which replays as well."""

    preset: str
    changes: dict[str, Any]
    moved: Sequence[str] = ("expert_hits", "expert_misses")
    pools: Sequence[tuple[int, ...]] = ((4,),)
    recorded: bool = False


ALONE = {"prefetch": "none"}
HOBBIT = {"t1": 0.4, "t2": 0.7, "weights": "0.4,0.3,0.2,0.1", "low_share": 0.3}
WEIGHTED = {"cache": "weighted", "weights": "0.4,0.3,0.2,0.1"}  # a discarded pass counts no token
FATE = {"low_popularity": 0.5, "mispredicted": "low", "allotment": "even"}
LOW = ("expert_misses", "low_loads")
CASES = {
    "lru": Case("lru", {}, recorded=True),
    "lfu by sequence": Case("lru", {"cache": "lfu", "records": "sequence"}, recorded=True),
    "distance": Case("lru", {"cache": "distance"}, recorded=True),
    "distance behind": Case("lru", {"cache": "distance", "distance": "behind"}, recorded=True),
    "arc by layer": Case("lru", {"cache": "arc", "allotment": "even"}, recorded=True),
    "arc with room": Case("lru", {"cache": "arc", "allotment": "even", "room": 6}, recorded=True),
    "weighted": Case("lru", WEIGHTED, recorded=True),
    "next use, slots that move": Case("lru", {"cache": "next-use", "allotment": "by-use"}, recorded=True),
    "together": Case("lru", {"start": "together"}, recorded=True),
    "load-on-demand": Case("load-on-demand", {}, ("expert_misses",), recorded=True),
    "io-qexp": Case("io-qexp", {}, ("expert_misses",)),
    "high and low pools": Case("hobbit", HOBBIT | ALONE, (*LOW, "expert_skips"), [(4,), (2,)]),
    "precisions that share bytes": Case("fate", FATE | ALONE, LOW, [(4, 2)]),
    "all fall back": Case("mobile", {"gamma": 1.0, **WEIGHTED, **ALONE}, ("fallback_ratio",), recorded=True),
    "bits by a table": Case("edgemoe", ALONE, LOW, [(4, 2)]),
    "neurons": Case("corm", ALONE, LOW, [(4, 2)]),
    "default": Case("default", ALONE, recorded=True),
    "skipping": Case("frugal", {}, ("expert_skips",)),
    "mixtral-offload": Case("mixtral-offload", ALONE, recorded=True),
    "activation ratio": Case("moe-infinity", ALONE, recorded=True),
    "decayed counts": Case("moe-stream", ALONE, recorded=True),
    "recent scores": Case("hybrimoe", ALONE, recorded=True),
    "room for two layers": Case("pregated", ALONE, ("expert_misses",), recorded=True),
    "adaptive gating": Case("adapmoe", ALONE),
    "eap": Case("eap", ALONE, recorded=True),
    "whole layers": Case("sti", ALONE, ("expert_misses",)),
    "all in memory": Case("io-free", {}, ("expert_hits",), recorded=True),
}


def assert_agree(run: Run, result: Result) -> None:
    for name, phase in run.metrics.by_phase.items():
        replayed = result.metrics.by_phase[name]
        assert (replayed.counts.hits, replayed.counts.misses) == (phase.counts.hits, phase.counts.misses)
        # bytes of single neurons are not what a run of the neuron unit records here
        assert replayed.bytes_read == phase.bytes_read or run.composition.unit == "neuron"
    found = result.as_dict()
    for name in COUNTERS:
        assert found[name] == run.stats[name], name


COUNTERS = (
    "low_loads", "expert_skips", "discarded_hits", "discarded_misses", "dropped_experts", "cached_experts",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_run_and_its_replay_agree(
    case: Case, blueprint: Blueprint, sequences: torch.Tensor, recorded: Trace, calibrated: Path
) -> None:
    run = Run(blueprint, sequences, case.preset, case.changes, calibrated if case.preset in CALIBRATED else None)
    assert [name for name in case.moved if not run.stats[name]] == []
    assert [pool.bits for pool in run.slots] == list(case.pools)
    assert_agree(run, run.replayed(run.trace))
    if case.recorded:
        for mine, other in zip(run.trace.passes, recorded.passes, strict=True):
            assert [(layer.experts, layer.weights) for layer in mine.layers] == [
                (layer.experts, layer.weights) for layer in other.layers
            ]
        assert_agree(run, run.replayed(recorded))


def test_fates_prompts_read_fewer_bytes_than_with_all_experts_high(
    blueprint: Blueprint, sequences: torch.Tensor, calibrated: Path
) -> None:
    """Low copies lie in slots of their own size. What was read ahead is in the bits that its layer then asks for."""
    run, fixed = (Run(blueprint, sequences, "fate", changes, calibrated) for changes in ({}, {"precision": "fixed"}))
    header = run.trace.header
    assert header.expert_bytes[2][0] == header.slot_bytes[2][0] < header.slot_bytes[4][0]
    assert [pool.bits for pool in run.slots] == [(4,), (2,)]
    assert run.metrics.prefill.bytes_read < fixed.metrics.prefill.bytes_read
    assert_agree(run, run.replayed(run.trace, AT_ONCE))


def test_tokens_that_go_on_with_what_was_predicted_agree(
    blueprint: Blueprint, sequences: torch.Tensor, calibrated: Path
) -> None:
    """CORM's second reading. In the replay of its own trace nothing is left to exchange. Another trace gets other
    experts, and no layer that was predicted misses."""
    run = Run(blueprint, sequences, "corm", {"on_mispredict": "predicted"}, calibrated)
    assert run.stats["displaced_choices"]
    assert not run.stats["expert_skips"]
    own = run.replayed(run.trace, AT_ONCE)
    assert not own.as_dict()["displaced_choices"]
    exact = Run(blueprint, sequences, "corm", {"on_mispredict": "reload"}, calibrated)
    other = run.replayed(exact.trace, AT_ONCE)
    assert other.as_dict()["displaced_choices"]
    layers = len(blueprint.layers)
    tokens = 2 * (LENGTH - PROMPT)
    assert other.metrics.decode.counts.misses <= tokens * blueprint.layers[0].top_k < tokens * layers


def test_little_passes_that_are_kept_agree(blueprint: Blueprint, sequences: torch.Tensor, recorded: Trace) -> None:
    """The replay of the routing as it was. The recorded trace is that up to the first token whose little pass is kept:
    those after it see another past."""
    run = Run(blueprint, sequences, "mobile", {"prefetch": "none", "gamma": 0.5})
    assert 0 < run.stats["fallback_ratio"] < 1
    assert_agree(run, run.replayed(run.trace))
    decoded = [(mine.little, other.little) for mine, other in zip(run.trace.passes, recorded.passes, strict=True)]
    little = [(mine, other) for mine, other in decoded if mine and other]
    kept = next(number for number, (mine, _) in enumerate(little) if mine.confidence == 1)
    for mine, other in little[: kept + 1]:
        assert [layer.experts for layer in mine.layers] == [layer.experts for layer in other.layers]
        assert (mine.confidence == 1) == (other.confidence > 0.5)


@pytest.fixture(scope="module")
def calibrated(blueprint: Blueprint, recorded: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with profiles: bits by turns, and the paths of the recorded trace; and with whole experts, whose bytes a
    trace tells."""
    store = tmp_path_factory.mktemp("calibrated")
    load_blueprint(blueprint, settings(preset="lru", memory="4GiB", warm=False, store=store)).tiermoe.close()
    tables = [[2 if expert % 3 == 0 else 4 for expert in range(layer.experts)] for layer in blueprint.layers]
    data = {"table": tables, "frequencies": frequencies(recorded)}
    paths = {"edgemoe": 2, "fate": 1, "corm": 1, "adapmoe": 1}
    found = {"theta": 0.05, "boundary": 2, "window": 3, "low_popularity": 0.5}
    found |= {"layer_recall": [0.0, 0.2] + [0.8] * 6, "layer_uses": [3.5] * 8}
    for name, order in paths.items():
        data["paths"] = paths_to_json(count_paths(routings(recorded), order))
        path = profile_path(store, name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(to_json(Profile(name, blueprint.checkpoint.fingerprint(), {}, found, data)))
    return store


AHEAD: dict[str, dict[str, Any]] = {
    "default": {"speculate": "always"},
    "mixtral-offload": {},
    "moe-infinity": {},
    "hybrimoe": {},
    "moe-stream": {},
    "adapmoe": {},
    "pregated": {},
    "hobbit": HOBBIT,
    "mobile": {"gamma": 0.5},
    "edgemoe": {},
    "fate": {},
    "eap": {},
    "corm": {},
}
CALIBRATED = ("edgemoe", "fate", "eap", "corm", "adapmoe")


def _decided(phase: PhaseMetrics) -> dict[str, int]:
    counts = phase.counts
    names = ("hits", "misses", "loads", "speculative_loads", "prefetched", "low_loads", "skipped")
    return {name: getattr(counts, name) for name in names}


@pytest.mark.parametrize("preset", AHEAD)
def test_what_is_read_ahead_agrees(
    preset: str, blueprint: Blueprint, sequences: torch.Tensor, calibrated: Path
) -> None:
    """What is named, read ahead, used and left out is the same, phase by phase."""
    run = Run(blueprint, sequences, preset, AHEAD[preset], calibrated if preset in CALIBRATED else None)
    assert run.stats["speculative_loads"]
    assert run.stats["prefetched_hits"]
    found = run.replayed(run.trace, AT_ONCE)
    for name, phase in run.metrics.by_phase.items():
        assert _decided(found.metrics.by_phase[name]) == _decided(phase), name
    alone = {**AHEAD[preset], "prefetch": "none"}
    without = Run(blueprint, sequences, preset, alone, calibrated if preset in CALIBRATED else None)
    assert run.metrics.decode.counts.hit_rate != without.metrics.decode.counts.hit_rate
