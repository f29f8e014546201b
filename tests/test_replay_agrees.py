"""A run of the engine and its replay hit and miss the same, phase by phase. With one lane: with several, loads arrive
in an order of their own, which decides what a recency rule evicts. Where experts are read ahead, each layer's loads end
before the next layer begins, and in the replay they take no time: what then differs is decided, not a matter of speed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiermoe.config import CacheSize, settings
from tiermoe.engine.load import load_blueprint
from tiermoe.engine.observer import Observer
from tiermoe.lab.measure.record import Recorder, header_of
from tiermoe.lab.measure.texts import Feed
from tiermoe.lab.papers.statistics import frequencies, routings
from tiermoe.lab.simulate import BeladyHits, ReplaySettings, Result, replay
from tiermoe.lab.trace import LayerTrace, Little, Pass, Times, Trace
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
        """The replay of a trace with this run's cache, in slots that it divides by itself."""
        options = ReplaySettings(CACHE, bandwidth, profile=self.profile)
        result = replay(trace, self.composition, options, NoBelady(trace))
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


class NoBelady(BeladyHits):
    """Takes no time."""

    def of(self, slots: int, bits: int) -> Metrics:
        return Metrics()


def assert_agree(run: Run, result: Result) -> None:
    for name, phase in run.metrics.by_phase.items():
        replayed = result.metrics.by_phase[name]
        assert (replayed.counts.hits, replayed.counts.misses) == (phase.counts.hits, phase.counts.misses)
        assert replayed.bytes_read == phase.bytes_read
        assert phase.counts.misses
    found = result.as_dict()
    for name in (
        "low_loads",
        "expert_skips",
        "discarded_hits",
        "discarded_misses",
        "dropped_experts",
        "cached_experts",
    ):
        assert found[name] == run.stats[name]


def _routing(trace: Trace) -> list[list[tuple[list[list[int]], list[list[float]]]]]:
    return [[(layer.experts, layer.weights) for layer in passed.layers] for passed in trace.passes]


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


EXACT = {
    "lru": {},
    "lfu by sequence": {"cache": "lfu", "records": "sequence"},
    "distance": {"cache": "distance"},
    "distance behind": {"cache": "distance", "distance": "behind"},
    "arc by layer": {"cache": "arc", "allotment": "even"},
    "arc with room": {"cache": "arc", "allotment": "even", "room": 6},
    "weighted": {"cache": "weighted", "weights": "0.4,0.3,0.2,0.1"},
    "next use, slots that move": {"cache": "next-use", "allotment": "by-use"},
    "together": {"start": "together"},
}  # fmt: skip


@pytest.mark.parametrize("changes", EXACT.values(), ids=EXACT)
def test_an_exact_run_hits_as_the_recorded_trace(
    changes: dict[str, Any], blueprint: Blueprint, sequences: torch.Tensor, recorded: Trace
) -> None:
    run = Run(blueprint, sequences, "lru", changes)
    assert run.metrics.decode.counts.hits
    assert _routing(run.trace) == _routing(recorded)
    assert_agree(run, run.replayed(recorded))


@pytest.mark.parametrize("preset", ["load-on-demand", "io-qexp"])
def test_baselines_without_a_cache_agree(
    preset: str, blueprint: Blueprint, sequences: torch.Tensor, recorded: Trace
) -> None:
    run = Run(blueprint, sequences, preset, {})
    assert_agree(run, run.replayed(recorded if preset == "load-on-demand" else run.trace))


def test_high_and_low_pools_agree(blueprint: Blueprint, sequences: torch.Tensor) -> None:
    """HOBBIT without prefetch: loads of either precision, and misses that are skipped."""
    changes = {"prefetch": "none", "t1": 0.4, "t2": 0.7, "weights": "0.4,0.3,0.2,0.1", "low_share": 0.3}
    run = Run(blueprint, sequences, "hobbit", changes)
    assert [pool.bits for pool in run.slots] == [(4,), (2,)]
    assert run.stats["low_loads"]
    assert run.stats["expert_skips"]
    assert_agree(run, run.replayed(run.trace))


def test_precisions_that_share_bytes_agree(blueprint: Blueprint, sequences: torch.Tensor) -> None:
    """Fate without prefetch: a copy at 2 bits takes less of the store and of the cache than one at 4."""
    changes = {"prefetch": "none", "low_popularity": 0.5, "mispredicted": "low", "allotment": "even"}
    run = Run(blueprint, sequences, "fate", changes)
    assert [pool.bits for pool in run.slots] == [(4, 2)]
    assert run.stats["low_loads"]
    header = run.trace.header
    assert header.expert_bytes[2][0] == header.slot_bytes[2][0] < header.slot_bytes[4][0]
    assert_agree(run, run.replayed(run.trace))


def test_fates_prompts_read_fewer_bytes_than_with_all_experts_high(
    blueprint: Blueprint, sequences: torch.Tensor, calibrated: Path
) -> None:
    """Low copies lie in slots of their own size. What was read ahead is in the bits that its layer then asks for."""
    run = Run(blueprint, sequences, "fate", {}, calibrated)
    assert [pool.bits for pool in run.slots] == [(4,), (2,)]
    fixed = Run(blueprint, sequences, "fate", {"precision": "fixed"}, calibrated)
    assert run.metrics.prefill.bytes_read < fixed.metrics.prefill.bytes_read
    assert_agree(run, run.replayed(run.trace, AT_ONCE))


def test_fallbacks_agree(blueprint: Blueprint, sequences: torch.Tensor, recorded: Trace) -> None:
    """MoBiLE without prefetch. With no little pass kept, each token follows what it follows with all K, as recorded."""
    by_tokens = {"cache": "weighted", "weights": "0.4,0.3,0.2,0.1"}  # a discarded pass counts no token
    run = Run(blueprint, sequences, "mobile", {"prefetch": "none", "gamma": 1.0, **by_tokens})
    assert run.stats["fallback_ratio"] == 1
    assert_agree(run, run.replayed(run.trace))
    assert_agree(run, run.replayed(recorded))


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
    paths = {"edgemoe": 2, "fate": 1, "corm": 1}
    found = {"theta": THETA, "boundary": 2, "window": 3, "low_popularity": 0.5}
    for name, order in paths.items():
        data["paths"] = paths_to_json(count_paths(routings(recorded), order))
        path = profile_path(store, name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(to_json(Profile(name, blueprint.checkpoint.fingerprint(), {}, found, data)))
    return store


THETA = 0.05


@pytest.mark.parametrize("preset", ["edgemoe", "corm"])
def test_bits_by_a_table_agree(preset: str, blueprint: Blueprint, sequences: torch.Tensor, calibrated: Path) -> None:
    """EdgeMoE and CORM without prefetch. Bytes of single neurons are not what a run of the neuron unit records here."""
    run = Run(blueprint, sequences, preset, {"prefetch": "none"}, calibrated)
    assert run.stats["low_loads"]
    found = run.replayed(run.trace)
    if preset == "edgemoe":
        assert_agree(run, found)
    for name, phase in run.metrics.by_phase.items():
        counts = found.metrics.by_phase[name].counts
        assert (counts.hits, counts.misses) == (phase.counts.hits, phase.counts.misses)
        assert phase.counts.misses


@pytest.mark.parametrize("preset", ["default", "frugal", "mixtral-offload", "eap", "sti", "io-free"])
def test_the_other_presets_agree(preset: str, blueprint: Blueprint, sequences: torch.Tensor, calibrated: Path) -> None:
    """Without prefetch."""
    changes = {} if preset in ("frugal", "io-free") else {"prefetch": "none"}
    run = Run(blueprint, sequences, preset, changes, calibrated if preset == "eap" else None)
    assert bool(run.stats["expert_skips"]) == (preset == "frugal")
    found = run.replayed(run.trace)
    for name, phase in run.metrics.by_phase.items():
        counts = found.metrics.by_phase[name].counts
        assert (counts.hits, counts.misses) == (phase.counts.hits, phase.counts.misses)
        assert found.metrics.by_phase[name].bytes_read == phase.bytes_read


AHEAD: dict[str, dict[str, Any]] = {
    "default": {"speculate": "always"},
    "mixtral-offload": {},
    "hobbit": {"t1": 0.4, "t2": 0.7, "weights": "0.4,0.3,0.2,0.1", "low_share": 0.3},
    "mobile": {"gamma": 0.5},
    "edgemoe": {},
    "fate": {},
    "eap": {},
    "corm": {},
}
CALIBRATED = ("edgemoe", "fate", "eap", "corm")


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
