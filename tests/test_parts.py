"""Each part of each system at work in the real engine: its own counter moves, and stands still with the part off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from profiles import write_profile
from tiermoe.config import CacheSize, settings
from tiermoe.engine.engine import Engine
from tiermoe.engine.load import load_blueprint
from tiermoe.engine.observer import Observer
from tiermoe.lab.measure.record import Recorder
from tiermoe.lab.measure.texts import Feed
from tiermoe.lab.papers.statistics import routings
from tiermoe.lab.trace import Header, Trace, frequencies
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.model.tokenizer import load_tokenizer
from tiermoe.offload.policies.eviction import EVICTIONS, EvictionContext
from tiermoe.offload.policies.eviction.classic import LeastRecentlyUsed
from tiermoe.offload.policies.eviction.edgemoe import DistanceByFrequency
from tiermoe.offload.policies.eviction.hobbit import Weighted
from tiermoe.offload.policies.prediction import PREDICTIONS, count_paths, paths_to_json
from tiermoe.offload.profiles import Profile
from tiermoe.types import Demand, ExpertKey, Ready, Routed, Wanted

PROMPT, LENGTH = 8, 16
TERMS = ("recency", "frequency", "high uses", "distance")
Counts = dict[str, float]


@pytest.fixture(scope="module")
def blueprint(shipped: Path) -> Blueprint:
    return inspect_model(shipped, "stories-7m")


@pytest.fixture(scope="module")
def sequences(shipped: Path) -> torch.Tensor:
    text = (shipped.parents[1] / "data" / "heldout.txt").read_text()[:2000]
    ids = load_tokenizer(shipped)(text, add_special_tokens=False).input_ids
    return torch.tensor(ids[: 2 * LENGTH]).view(2, LENGTH)


@pytest.fixture(scope="module")
def store(blueprint: Blueprint, sequences: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with profiles: bits by turns, and paths of the model's own routing."""
    folder = tmp_path_factory.mktemp("parts")
    model = load_blueprint(blueprint, settings(preset="lru", memory="4GiB", warm=False, store=folder))
    with Recorder(model, little=False) as recorder:
        passes = [passed for number, ids in enumerate(sequences) for passed in recorder.passes(ids, PROMPT, number)]
    model.tiermoe.close()
    trace = Trace(header_of(blueprint), passes)
    tables = [[2 if expert % 3 == 0 else 4 for expert in range(layer.experts)] for layer in blueprint.layers]
    data = {"table": tables, "frequencies": frequencies(trace), "paths": paths_to_json(count_paths(routings(trace), 2))}
    found = {"theta": 0.25, "boundary": 1, "window": 3, "low_popularity": 0.5}
    found |= {"layer_recall": [0.0, 0.2] + [0.8] * 6, "layer_uses": [3.5] * 8}
    for name in ("edgemoe", "fate", "corm", "adapmoe", "fiddler"):
        write_profile(folder, Profile(name, blueprint.checkpoint.fingerprint(), {}, found, data))
    return folder


def header_of(blueprint: Blueprint) -> Header:
    experts, top_k = ([getattr(layer, name) for layer in blueprint.layers] for name in ("experts", "top_k"))
    return Header("stories", "", experts, top_k, {4: [1] * len(experts)}, None, frozenset())


class Watching(Observer):
    """Counts what the engine's own counters do not say. Each layer's loads end before the next layer runs, so that no
    count depends on how fast anything is."""

    weights = True

    def __init__(self, engine: Engine) -> None:
        self.found: Counter[str] = Counter()
        self._engine = engine
        self._tokens: dict[int, int] = {}

    def on_route(self, routed: Routed, hidden: torch.Tensor) -> None:
        self._tokens = routed.tokens_per_expert()
        self.found["three of a token"] += routed.phase == "decode" and len(routed.experts[0]) == 3

    def on_ready(self, layer: int, ready: Ready) -> None:
        self.found["computed while others come"] += bool(self._engine.loader.cache.in_flight)
        self.found["experts of no token"] += ready.expert not in self._tokens
        self.found["low in decode"] += self._engine.context.phase == "decode" and ready.bits == 2
        self.found["low in prefill"] += self._engine.context.phase == "prefill" and ready.bits == 2

    def on_computed(self, layer: int) -> None:
        controller = self._engine.loader
        while controller.cache.in_flight:
            controller.record(controller.link.wait())


class Shadowed:
    """Goes before an eviction policy among the bases of a class: keeps others beside it that are told the same, and
    counts the victims that they would not have chosen, and those that left somebody else's place."""

    watch: Evictions

    def __init__(self, context: EvictionContext, **options: Any) -> None:
        super().__init__(context, **options)  # type: ignore[call-arg]
        policy = type(self).__mro__[2]
        self.others: dict[str, Any] = {
            "not the least recent": LeastRecentlyUsed(context),
            "forgotten at a sequence": policy(replace(context, per_sequence=False), **options),  # type: ignore[call-arg]
        }
        if policy is DistanceByFrequency:
            self.others["not the farthest ahead"] = policy(context)
        if policy is Weighted:
            for number, term in enumerate(TERMS):
                left = [0.0 if at == number else weight for at, weight in enumerate(self.weights)]
                self.others[term] = Weighted(context, weights=tuple(weight / sum(left) for weight in left))

    def _tell(self, name: str, *arguments: Any) -> None:
        getattr(super(), name)(*arguments)
        for policy in self.others.values():
            getattr(policy, name)(*arguments)

    def admitted(self, key: ExpertKey) -> None:
        self._tell("admitted", key)

    def used(self, key: ExpertKey, demand: Demand) -> None:
        self._tell("used", key, demand)

    def removed(self, key: ExpertKey) -> None:
        self._tell("removed", key)

    def new_sequence(self) -> None:
        self._tell("new_sequence")

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        chosen: ExpertKey | None = super().victim(incoming, evictable)  # type: ignore[misc]
        others = {name: policy.victim(incoming, evictable) for name, policy in self.others.items()}
        if chosen is not None:
            self.watch.note(incoming, chosen, [name for name, other in others.items() if other != chosen])
        return chosen


class Evictions:
    """Watches every eviction, and what predictors name: registers each policy and predictor as a class that tells."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.found: Counter[str] = Counter()
        self.named: set[tuple[int, int]] = set()
        for name, policy in list(EVICTIONS.items()):
            patch.setitem(EVICTIONS.data, name, type(f"Watched{name}", (Shadowed, policy), {"watch": self}))
        for name, predictor in list(PREDICTIONS.items()):
            patch.setitem(PREDICTIONS.data, name, type(f"Watched{name}", (Naming, predictor), {"watch": self}))

    def note(self, incoming: ExpertKey, victim: ExpertKey, differing: Sequence[str]) -> None:
        self.found.update(differing)
        self.found["victims"] += 1
        self.found["victims of other layers"] += victim.layer != incoming.layer
        self.found["victims of the first layer"] += victim.layer < 1
        self.found["victims when a layer has run"] += incoming.layer < 0
        self.found["victims of other bits"] += victim.bits != incoming.bits
        self.found["victims that were named"] += (victim.layer, victim.expert) in self.named


class Naming:
    """Goes before a predictor among the bases of a class: counts what it names."""

    watch: Evictions
    tokens: int
    phase: str

    def candidates(self, layer: int, forecasts: Any, here: Any) -> Iterator[Wanted]:
        self.watch.named = {place for place in self.watch.named if place[0] > layer}
        named: Counter[int] = Counter()
        decodes = self.phase == "decode"
        for wanted in super().candidates(layer, forecasts, here):  # type: ignore[misc]
            named[wanted.layer] += 1
            self.watch.found["named before a layer"] += layer < 0
            self.watch.found["named by a decoded token's gates"] += decodes and not forecasts.recalled(wanted.layer)
            self.watch.found["named two layers ahead"] += wanted.layer - layer > 1
            self.watch.found["named beyond the K"] += self.tokens == 1 and named[wanted.layer] > 4
            self.watch.named.add((wanted.layer, wanted.expert))
            yield wanted


@pytest.fixture(scope="module")
def counts(blueprint: Blueprint, sequences: torch.Tensor, store: Path) -> Callable[..., Counts]:
    """(preset, changes) → every counter after two sequences; a run that several parts share is made once."""
    made: dict[tuple[Any, ...], Counts] = {}

    def counted(preset: str, changes: dict[str, Any]) -> Counts:
        key = (preset, *sorted(changes.items()))
        if key not in made:
            made[key] = run(preset, changes)
        return made[key]

    def run(preset: str, changes: dict[str, Any]) -> Counts:
        options = {"cache": CacheSize(fraction=0.3), "lanes": 1, "memory": "4GiB", "warm": False, "store": store}
        with pytest.MonkeyPatch.context() as patched:
            evictions = Evictions(patched)
            model = load_blueprint(blueprint, settings(preset=preset, set=changes, **options))
            engine = model.tiermoe
            watching = Watching(engine)
            engine.observe(watching)
            with torch.inference_mode():
                for ids in sequences:
                    feed = Feed(model, ids, PROMPT)
                    feed.prompt()
                    for at in range(PROMPT, LENGTH):
                        feed.token(at)
            engine.observe(None)
            more = max(0, len(engine.loader.cache) - engine.plan.slots)
            found = {"more experts than slots": more}
            found |= {name: value for name, value in engine.stats().items() if isinstance(value, int | float)}
            engine.close()
        return {**found, **watching.found, **evictions.found}

    return counted


@dataclass(frozen=True)
class Part:
    """A part of a preset: `counter` moves with it and not with `off`, or, `still`, the other way round. having: what
    both have."""

    preset: str
    name: str
    counter: str
    off: dict[str, Any]
    having: dict[str, Any] = field(default_factory=dict)
    still: bool = False

    def __str__(self) -> str:
        return f"{self.preset}: {self.name}"


ALONE = {"prefetch": "none"}
HOBBIT = {"t1": 0.4, "t2": 0.7, "weights": "0.25,0.25,0.25,0.25", "low_share": 0.3}
FIXED = {"t1": 1.0, "t2": 1.0}
MOBILE = {"gamma": 0.3}
BOTH = {"gamma": 1.0, "prefetch": "recalled+next-gate"}  # every little pass is discarded
FIXED_BITS = {"precision": "fixed"}  # a layer's experts in two precisions are more than its slots
QUARTERS = {"recency": "0,0.4,0.3,0.3", "frequency": "0.4,0,0.3,0.3", "distance": "0.4,0.3,0.3,0"}
PARTS = [
    Part("hobbit", "low precision", "low_loads", {"t2": 0.4}, HOBBIT),
    Part("hobbit", "skipping", "expert_skips", {"t2": 1.0}, HOBBIT),
    Part("hobbit", "prefetch", "prefetched_hits", ALONE, HOBBIT),
    Part("hobbit", "the walk", "named two layers ahead", {"ahead": 1}, HOBBIT),
    Part("hobbit", "masking", "victims that were named", {"mask": False}, HOBBIT, still=True),
    Part("hobbit", "records of a sequence", "forgotten at a sequence", {"records": "model"}, HOBBIT),
    Part("hobbit", "one budget of bytes", "more experts than slots", {"low_share": 0.3}, HOBBIT | {"low_share": 0}),
    Part("hobbit", "two pools", "victims of other bits", {"low_share": 0}, HOBBIT, still=True),
    Part("hobbit", "waiting for all", "computed while others come", {"start": "arrival"}, HOBBIT | ALONE, still=True),
    Part("hobbit", "high uses", "high uses", {"weights": "0.4,0.3,0,0.3"}, HOBBIT),
    *(Part("hobbit", term, term, {"weights": weights}, HOBBIT) for term, weights in QUARTERS.items()),
    Part("edgemoe", "bits by a table", "low_loads", {"precision": "fixed"}),
    Part("edgemoe", "activation paths", "prefetched_hits", ALONE),
    Part("edgemoe", "one budget of bytes", "victims of other bits", {"precision": "fixed"}),
    Part("edgemoe", "distance by frequency", "not the least recent", {"cache": "lru"}),
    Part("edgemoe", "distance behind", "not the farthest ahead", {"distance": "ahead"}, {"distance": "behind"}),
    Part("mobile", "falling back", "fallback_ratio", {"gamma": 0}, MOBILE),
    Part("mobile", "the little pass", "discarded_hits", {"routing": "all"}, ALONE),
    Part("mobile", "recalled experts", "prefetched_hits", ALONE, MOBILE),
    Part(
        "mobile", "the next gates of a little pass", "named by a decoded token's gates", {"prefetch": "recalled"}, BOTH
    ),
    Part("mobile", "recalled beside them", "named before a layer", {"prefetch": "next-gate"}, BOTH),
    Part("mobile", "how little", "three of a token", {"little": 2}, ALONE | {"routing": "half", "little": 3}),
    Part("fate", "low in prefill", "low in prefill", {"low_popularity": 0}),
    Part("fate", "low on a misprediction", "low in decode", {"mispredicted": "high"}, {"mispredicted": "low"}),
    Part("fate", "prefetch", "prefetched_hits", ALONE),
    Part("fate", "above the percentile", "named beyond the K", {"percentile": 90}),
    Part("fate", "ARC", "not the least recent", {"cache": "lru"}),
    Part("fate", "room for fetched experts", "dropped_experts", {"room": 0}, {"room": 6}),
    Part("fate", "shallow first", "victims of the first layer", {"allotment": "pool"}, FIXED_BITS, still=True),
    Part("corm", "active neurons", "neurons_spared", {"upper_limit": 0}),
    Part("corm", "rare experts low", "low_loads", {"precision": "fixed"}),
    Part("corm", "prefetch", "prefetched_hits", ALONE, {"on_mispredict": "reload"}),
    Part("corm", "going on with experts", "expert_skips", {"on_mispredict": "reload"}),
    Part(
        "corm",
        "predicted experts stand in",
        "displaced_choices",
        {"on_mispredict": "proceed"},
        {"on_mispredict": "predicted"},
    ),
    Part("corm", "slots of a layer", "victims of other layers", {"allotment": "pool"}, still=True),
    Part("default", "prefetch", "prefetched_hits", ALONE, {"speculate": "always"}),
    Part("default", "slots that move", "victims of other layers", {"allotment": "even"}),
    Part("default", "estimated next uses", "not the least recent", {"cache": "lru"}),
    Part("frugal", "skipping", "expert_skips", FIXED),
    Part("mixtral-offload", "prefetch", "prefetched_hits", ALONE),
    Part("mixtral-offload", "slots of a layer", "victims of other layers", {"allotment": "pool"}, still=True),
    Part("moe-infinity", "matrices", "prefetched_hits", ALONE),
    Part("moe-infinity", "layers ahead", "named two layers ahead", {"ahead": 1}),
    Part("moe-infinity", "activation ratio", "not the least recent", {"cache": "lru", "records": "model"}),
    Part("moe-infinity", "records of a sequence", "forgotten at a sequence", {"records": "model"}),
    Part("adapmoe", "adaptive gating", "three of a token", {"routing": "all"}, ALONE),
    Part("adapmoe", "prefetch", "prefetched_hits", ALONE),
    Part("adapmoe", "slots of a layer", "victims of other layers", {"allotment": "pool"}, still=True),
    Part("hybrimoe", "recent scores", "not the least recent", {"cache": "lru"}),
    Part("hybrimoe", "layers ahead", "named two layers ahead", {"ahead": 1}),
    Part("pregated", "prefetch", "prefetched_hits", ALONE),
    Part("moe-stream", "decayed counts", "not the least recent", {"cache": "lru"}),
    Part("moe-stream", "prefetch", "prefetched_hits", ALONE),
    Part("fiddler", "the most frequent stay", "not the least recent", {"cache": "lru"}, {"misses": "load"}),
    Part("fiddler", "room for fetched experts", "dropped_experts", {"room": 0}, {"misses": "load"}),
    Part("llama-cpu-moe", "the last layers stay", "not the least recent", {"cache": "lru"}, {"misses": "load"}),
    Part("eap", "paths", "prefetched_hits", ALONE),
    Part("sti", "whole layers", "experts of no token", {"routing": "all"}),
    Part("load-on-demand", "no cache", "expert_hits", {"cache": "lru"}, still=True),
    Part("io-free", "all in memory", "victims", {"cache": "lru"}, still=True),
]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_its_counter_moves_with_the_part_alone(part: Part, counts: Callable[..., Counts]) -> None:
    with_it = counts(part.preset, part.having).get(part.counter, 0)
    without = counts(part.preset, {**part.having, **part.off}).get(part.counter, 0)
    moving, standing = (without, with_it) if part.still else (with_it, without)
    assert moving > 0
    assert standing == 0


def test_corm_as_it_comes_spares_neurons_which_a_drive_does_not(counts: Callable[..., Counts]) -> None:
    """A drive reads through the gaps between single neurons."""
    memory, disk = (counts("corm", changes)["neurons_spared"] for changes in ({}, {"store": "disk"}))
    assert memory > 0.3 > disk


def test_the_five_are_here() -> None:
    assert {part.preset for part in PARTS} >= {"hobbit", "edgemoe", "mobile", "fate", "corm"}
