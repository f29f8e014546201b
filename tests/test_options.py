"""No accepted option does nothing. Every value of every part is tried beside every value of every other part: where it
is accepted, taking it out changes a replay, where it is refused it does not, and what is refused names the part."""

from __future__ import annotations

import functools
import random
import re
from typing import Any

import pytest

from small_traces import TIMES, layer, trace_of
from tiermoe.config import CacheSize
from tiermoe.errors import ConfigError
from tiermoe.lab.simulate import ReplaySettings, replay
from tiermoe.lab.simulate.replay import BeladyHits
from tiermoe.lab.trace import LayerTrace, Little, Pass, Trace
from tiermoe.offload.composition import Composition, changed, declarations, unread
from tiermoe.offload.policies.prefetch_trial import STRETCH
from tiermoe.offload.policies.settings import declared
from tiermoe.offload.presets import PRESETS
from tiermoe.offload.profiles import Profile

PARTS = {
    name: [True, False] if name == "mask" else list(declarations()[name].setting.one_of)
    for name in (
        "routing", "precision", "prefetch", "speculate", "cache", "allotment", "records", "unit", "start",
        "on_mispredict", "mask",
    )
} | {"low_share": [0.0, 0.4]}  # fmt: skip
DEVICES = {"store", "misses"}  # no replay has them
UNSEEN = {
    "prefetch": ("hash", "hash+path"),
    "routing": ("cached",),
}  # no trace holds hash tables, or scores of what was not chosen
NEEDED: dict[Any, dict[str, Any]] = {
    "gate-score": {"t1": 0.3, "t2": 0.6}, "popularity": {"low_popularity": 0.5}, "percentile": {"window": 2},
    "weighted": {"weights": (0.4, 0.3, 0.2, 0.1)}, "shallow": {"boundary": 1}, "neuron": {"theta": 0.1},
    "adaptive": {"threshold": 0.2}, "expected-loads": {"layer_recall": (0.0, 0.9, 0.2), "layer_uses": (3.0, 2.0, 1.0)},
}  # fmt: skip
"""A part's value → settings that a calibration would give."""

LAYERS, EXPERTS, TOP_K = 3, 8, 3
FREQUENCIES = [5, 1, 4, 2, 3, 6, 0, 0]  # two that were never seen
FAVOURITES = [5, 0, 2]
Case = tuple[float, int, int, int]
SHORT: list[Case] = [(200.0, 9, 1, 1), (1000.0, 13, 1, 1), (200.0, 16, 2, 1), (1000.0, 7, 2, 0), (3000.0, 20, 2, 1)]
"""Bytes a second, slots of 100 bytes, layers ahead where a predictor can be told, and layers that are shallow."""

REFUSED = re.compile(r"(\w+)(?:=\S+)? does nothing with (\w+)=(\S+); it is read by \w+=(\S+)")


def _layers(chance: random.Random, tokens: int, favoured: float = 0.0) -> list[LayerTrace]:
    """One pass; forecasts are half right, and five of eight neurons active. favoured: how often a token chooses the
    experts that the profile has seen most."""
    chosen = [
        [FAVOURITES if chance.random() < favoured else chance.sample(range(EXPERTS), TOP_K) for _ in range(tokens)]
        for _ in range(LAYERS)
    ]
    found = []
    for number in range(LAYERS):
        ahead = {}
        for distance in range(1, LAYERS - number):
            right = sorted({expert for token in chosen[number + distance] for expert in token})
            order = chance.sample(right, len(right) // 2 + 1)
            order += [expert for expert in chance.sample(range(EXPERTS), EXPERTS) if expert not in order]
            ahead[distance] = [(expert, 1 / (rank + 1)) for rank, expert in enumerate(order)]
        neurons = {e: sum(1 << neuron for neuron in chance.sample(range(8), 5)) for row in chosen[number] for e in row}
        counts = {distance: [(expert, 1) for expert, _ in order[:6]] for distance, order in ahead.items()}
        more = {"neurons": neurons} if tokens == 1 else {"counts": counts}
        found.append(layer(*chosen[number], forecasts=ahead, **more))
    return found


@functools.cache
def trace(sequences: int, tokens: int) -> Trace:
    """Prompts of three tokens, and so many decoded ones after each; every other one falls back. What a long trace
    chooses is mostly what any prediction says, or a trial of prefetching would not begin."""
    chance = random.Random(1)
    favoured = 0.8 if tokens > STRETCH else 0.0
    passes = []
    for sequence in range(sequences):
        passes.append(Pass("prefill", sequence, [1, 2, 3], _layers(chance, 3)))
        for token in range(tokens):
            little = Little(0.9 if token % 2 else 0.5, _layers(chance, 1, favoured))
            passes.append(Pass("decode", sequence, [7], _layers(chance, 1, favoured), little))
    return trace_of(
        passes, experts=EXPERTS, top_k=TOP_K, times=TIMES, forecast_distances=[1, 2],
        head_bytes=36, neuron_bytes=8, neurons=8,
    )  # fmt: skip


@functools.cache
def belady(sequences: int, tokens: int) -> BeladyHits:
    return BeladyHits(trace(sequences, tokens))


@functools.cache
def profile() -> Profile:
    table = [[4 if expert % 2 else 2 for expert in range(EXPERTS)] for _ in range(LAYERS)]
    paths = {str(number): {"7": {"5": 3, "0": 2, "2": 1}} for number in range(1, LAYERS)}  # rarely met: by frequency
    return Profile("any", "", {}, {}, {"table": table, "frequencies": [FREQUENCIES] * LAYERS, "paths": paths})


def whole(parts: dict[str, Any]) -> dict[str, Any]:
    """Parts, with the settings that a calibration would give."""
    return {**parts, **{name: value for chosen in parts.values() for name, value in NEEDED.get(chosen, {}).items()}}


@functools.cache
def _outcome(parts: tuple[tuple[str, Any], ...], case: Case, long: bool) -> dict[str, Any]:
    bandwidth, slots, ahead, boundary = case
    composition = Composition("any", "", store="memory").having(whole(dict(parts)))  # a drive reads whole pages
    if composition.allotment == "shallow":
        composition = composition.having({"boundary": boundary})
    if "ahead" in declared(composition.policy("prefetch")):
        composition = composition.having({"ahead": ahead})
    size = (1, 84) if long else (2, 4)
    settings = ReplaySettings(CacheSize(nbytes=100 * slots), bandwidth, profile=profile())
    found = replay(trace(*size), composition, settings, belady(*size)).as_dict()
    return {name: value for name, value in found.items() if name not in ("eviction", "prefetching", "slots")}


def does_something(name: str, parts: dict[str, Any]) -> bool:
    """Whether a replay of `parts` differs from one without the value of `name`, in any case. A trial of prefetching has
    only begun where a trace ends after a few tokens."""
    without = {part: value for part, value in parts.items() if part != name}
    cases = [(case, False) for case in SHORT]
    cases += [(SHORT[0], True)] if parts.get("speculate") == "measured" else []
    return any(
        _outcome(tuple(sorted(parts.items())), *case) != _outcome(tuple(sorted(without.items())), *case)
        for case in cases
    )


def composed(parts: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, str] | None]:
    """`parts`, and what else it takes for them to be accepted: of the values that a refusal names, the first. With it,
    where they are refused by what they are themselves, (the option that does nothing, the part that says so)."""
    parts = dict(parts)
    while True:
        refusal = _refusal(parts)
        if refusal is None:
            return parts, None
        told = REFUSED.match(refusal)
        assert told, refusal
        option, part, value, reader = told.groups()
        if part in parts:
            assert str(parts[part]) == value
            return parts, (option, part)
        parts[part] = reader


def _refusal(parts: dict[str, Any]) -> str | None:
    try:
        changed(Composition("any", ""), whole(parts))
    except ConfigError as error:
        return str(error)
    return None


def options() -> list[tuple[str, Any]]:
    """Every value but the defaults."""
    known = declarations()
    return [
        (name, value)
        for name, values in PARTS.items()
        for value in values
        if value not in (known[name].default, *UNSEEN.get(name, ()))
    ]


@pytest.mark.parametrize(("name", "value"), options())
def test_it_does_something_beside_every_value_that_it_is_accepted_with(name: str, value: Any) -> None:
    wrong = []
    for other, values in PARTS.items():
        for beside in values:
            if other == name or beside in UNSEEN.get(other, ()):
                continue
            parts, refused = composed({name: value, other: beside})
            if refused is not None and refused[0] != name:
                assert refused == (other, name)  # the other one's turn
            elif (refused is None) is not does_something(name, parts):
                wrong.append(f"{other}={beside} is {'refused' if refused else 'accepted'}")
    assert not wrong


def test_every_part_is_tried() -> None:
    fields = list(declared(Composition))
    assert {*fields[: fields.index("profile")], "mask"} == {*PARTS, *DEVICES} - {"low_share"}


@pytest.mark.parametrize("name", [name for name, declaration in declarations().items() if declaration.setting.off])
def test_what_is_off_may_be_said_anywhere(name: str) -> None:
    default = declarations()[name].default
    nothing = {"cache": "none", "prefetch": "none", "precision": "fixed"}
    assert changed(Composition("any", "").having(nothing), {name: default})[name] == default


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"records": "sequence"}, "records=sequence does nothing with cache=lru; it is read by cache=lfu or"),
        ({"low_share": 0.2}, "low_share does nothing with precision=fixed; it is read by precision=gate-score or"),
        ({"mask": False}, "mask does nothing with prefetch=none; it is read by prefetch=next-gate or"),
        ({"speculate": "measured"}, "speculate=measured does nothing with prefetch=none"),
        ({"allotment": "even", "cache": "none"}, "allotment=even does nothing with cache=none"),
        ({"prefetch": "layer", "on_mispredict": "proceed"}, "on_mispredict=proceed does nothing with prefetch=layer"),
        ({"prefetch": "recalled"}, "prefetch=recalled does nothing with routing=all; it is read by routing=confident"),
        ({"prefetch": "next-gate", "ahead": 2, "cache": "all"}, "ahead does nothing with cache=all"),
    ],
)
def test_a_refusal_names_the_part_that_would_have_to_change(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        changed(Composition("any", ""), dict(reversed(given.items())))


def test_no_preset_has_a_part_that_nothing_reads() -> None:
    known = declarations()
    for preset in PRESETS.values():
        settings = preset.settings()
        given = [name for name in settings if name in PARTS and settings[name] != known[name].default]
        assert {name: unread(name, preset) for name in given} == dict.fromkeys(given)
