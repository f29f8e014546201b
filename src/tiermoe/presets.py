"""Named compositions: which experts run, in which precision, what comes next, what stays, in what unit.

A published system is one choice of each part. `PRESETS` is the one table; `compose` applies `--set` to one of them.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections import ChainMap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tiermoe.config import BITS, DENSE_BITS
from tiermoe.errors import ConfigError
from tiermoe.policy.allotment import ALLOTMENTS
from tiermoe.policy.eviction import EVICTIONS
from tiermoe.policy.precision import PRECISIONS
from tiermoe.policy.prediction import PREDICTIONS

CHOICES: dict[str, Collection[str]] = {
    "routing": ("all", "half", "confident", "layer"),
    "precision": PRECISIONS.keys(),
    "prefetch": PREDICTIONS.keys(),
    "speculate": ("always", "measured"),
    "cache": ChainMap[str, Any](EVICTIONS, {"none": None, "all": None}).keys(),
    "allotment": ALLOTMENTS.keys(),
    "records": ("model", "sequence"),
    "unit": ("expert", "neuron"),
    "store": ("disk", "memory"),
    "start": ("arrival", "together"),
    "on_mispredict": ("reload", "proceed"),
    "mispredicted": ("high", "low"),
    "misses": ("load", "cpu", "measured"),
    "quantizer": ("hqq", "linear"),
}  # fmt: skip
"""Every part and its possible values: `tiermoe presets NAME` explains them, docs/systems.md cites their sources. What
a table of policies has, can be chosen."""


@dataclass(frozen=True, slots=True)
class Composition:
    """One system. The first group names parts (`CHOICES`), the second their settings; None is filled from the
    calibration profile `profile` (`tiermoe calibrate`).

    routing: 'all' K experts; 'half' the K/2 of the largest weights, rounded up; 'confident' half, and again with all
    where the likeliest next token has a probability of at most `gamma` (MoBiLE); 'layer' every expert of the layer is
    fetched, routed or not (STI).
    precision: 'fixed' the engine's bits; 'gate-score' a miss is loaded high, low or skipped by the weights ranked
    before it, thresholds `t1` and `t2` (HOBBIT); 'popularity' in prefill the least popular `low_popularity` share of
    the active experts is low (Fate); 'table' bits per expert from the profile (EdgeMoE, CORM).
    prefetch: see `policy/prediction/`. `ahead`: layers ahead. `percentile`: predicted weights above it are fetched,
    `window` at most in decode (Fate). `path`: previous layers that make a path (EdgeMoE 2, EAP 1).
    speculate: 'measured' prefetches in decode only where passes are measured to be faster for it, and goes on measuring
    (`policy/prediction/worth.py`); prefill always prefetches. By itself it changes no token.
    cache: eviction policy; 'none' room for one layer's K, 'all' every expert stays. `weights`: of recency, frequency,
    high-precision frequency and distance. `records`: forgotten at each sequence or kept for the model.
    allotment: 'pool' one for all layers, 'even' the same for each, 'shallow' all of the layers below `boundary` first;
    'pool' too where slots do not give every layer its K.
    `low_share`: of the cache's bytes, for a pool of low-precision copies.
    unit: 'expert', or 'neuron' where |act(W1 x)| > `theta` decides which rows are loaded, all above the share
    `upper_limit` (CORM).
    store: experts are read from 'disk', or copied from a store that is held in main memory whole ('memory').
    start: compute what is here while the rest arrives, or only when all is there ('together', HOBBIT).
    on_mispredict: 'proceed' runs a layer with the experts that were predicted (CORM).
    mispredicted: with precision=popularity, 'low' loads what was not predicted low in decode (Fate, small machines).
    misses: 'cpu' computes an expert that is missing in decode on the CPU, from its copy in main memory, while the GPU
    computes what it has (HOBBIT, section 4); prefill and prefetches load. Needs a GPU. It changes rounding alone, but
    where an expert is computed then depends on what is cached, so it counts as lossy. 'measured' computes so many of a
    layer's misses on the CPU that these end when the loads of the others do, by what both have taken so far.
    mask: predicted experts are kept from eviction until their layer has run.
    bits, dense_bits, quantizer: overrides of the engine's own settings, None leaves them.
    """

    name: str
    summary: str
    source: str = ""

    routing: str = "all"
    precision: str = "fixed"
    prefetch: str = "none"
    speculate: str = "always"
    cache: str = "lru"
    allotment: str = "pool"
    records: str = "model"
    unit: str = "expert"
    store: str = "disk"
    start: str = "arrival"
    on_mispredict: str = "reload"
    mispredicted: str = "high"
    misses: str = "load"
    mask: bool = True

    profile: str = ""
    gamma: float = 0.7
    low_bits: int = 2
    t1: float | None = None
    t2: float | None = None
    low_popularity: float | None = None
    ahead: int = 1
    percentile: float = 75.0
    window: int | None = None
    path: int = 2
    weights: tuple[float, float, float, float] | None = None
    boundary: int | None = None
    low_share: float = 0.0
    theta: float | None = None
    upper_limit: float = 0.75
    bits: int | None = None
    dense_bits: int | None = None
    quantizer: str | None = None

    @property
    def lossy(self) -> list[str]:
        """The parts that can change tokens, as they would be set; empty: exact."""
        parts = []
        if self.routing in ("half", "confident"):
            parts.append(f"routing={self.routing}")
        if self.precision != "fixed":
            parts.append(f"precision={self.precision}")
        if self.unit == "neuron":
            parts.append("unit=neuron")
        if self.on_mispredict == "proceed":
            parts.append("on_mispredict=proceed")
        if self.misses != "load":
            parts.append(f"misses={self.misses}")
        return parts

    def exact(self) -> Composition:
        """The same composition with every lossy part off: the exact preset's tokens, bit for bit."""
        routing = "all" if self.routing in ("half", "confident") else self.routing
        prefetch = {"recalled": "next-gate", "neurons": "next-gate"}.get(self.prefetch, self.prefetch)
        return replace(
            self, routing=routing, precision="fixed", prefetch=prefetch, low_share=0.0, unit="expert",
            on_mispredict="reload", misses="load",
        )  # fmt: skip

    def missing(self) -> list[str]:
        """Settings that a calibration must fill and has not."""
        needs = {
            "t1": self.precision == "gate-score",
            "t2": self.precision == "gate-score",
            "low_popularity": self.precision == "popularity",
            "window": self.prefetch == "percentile",
            "weights": self.cache == "weighted",
            "boundary": self.allotment == "shallow",
            "theta": self.unit == "neuron",
        }
        return [name for name, needed in needs.items() if needed and getattr(self, name) is None]

    @property
    def needs_profile(self) -> bool:
        """True where a setting is open or a part reads a calibrated table."""
        tables = self.precision == "table" or self.prefetch in ("path", "frequent")
        return bool(self.missing()) or tables

    def settings(self) -> dict[str, Any]:
        """Every part and setting by name."""
        described = ("name", "summary", "source")
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in described}


PRESETS: dict[str, Composition] = {
    preset.name: preset
    for preset in (
        Composition(
            "default",
            "exact: recency and uses decide who leaves a layer, the next two's routers who comes if that is faster",
            "the best exact composition measured, docs/systems.md",
            prefetch="stacked-gates", speculate="measured", cache="weighted", allotment="even", ahead=2,
            weights=(0.25, 0.25, 0.25, 0.25),
        ),
        Composition(
            "frugal",
            "what ranks behind 80 % of a token's gate weight is used where it is here and not fetched; no prefetch",
            "HOBBIT's skipping (2024, section 3.2) without its low precision",
            precision="gate-score", cache="weighted", allotment="even", weights=(0.25, 0.25, 0.25, 0.25),
            t1=0.8, t2=0.8,
        ),
        Composition(
            "hobbit",
            "low precision or none for unimportant misses, stacked gates, a weighted cache in two pools",
            "HOBBIT, mixed-precision expert loading (2024)",
            precision="gate-score", prefetch="stacked-gates", cache="weighted", records="sequence", start="together",
            profile="hobbit", ahead=3, low_share=0.2,
        ),
        Composition(
            "edgemoe",
            "a bitwidth per expert within a tolerated loss, activation paths, distance-by-frequency eviction",
            "EdgeMoE (2023)",
            precision="table", prefetch="path", cache="distance", profile="edgemoe", path=2, quantizer="linear",
        ),
        Composition(
            "mobile",
            "K/2 experts, and all K again where the next token is unsure, prefetched from the discarded pass",
            "MoBiLE (2025)",
            routing="confident", prefetch="recalled", ahead=2,
        ),
        Composition(
            "fate",
            "next gate above a percentile, shallow layers first, ARC per layer, 2 bits for unpopular ones in prefill",
            "Fate (2025)",
            precision="popularity", prefetch="percentile", cache="arc", allotment="shallow", profile="fate",
        ),
        Composition(
            "corm",
            "active neurons alone, two-level prediction and cache, rarely used experts in low precision",
            "CORM (2025)",
            precision="table", prefetch="neurons", cache="lru", allotment="even", unit="neuron",
            on_mispredict="proceed", profile="corm",
        ),
        Composition("io-free", "baseline: every expert in memory", "EdgeMoE, section 5", cache="all"),
        Composition(
            "load-on-demand", "baseline: no expert cache, room for one layer's K (LoD, IO-EXP)",
            "Fate, section 5; EdgeMoE, section 5", cache="none",
        ),
        Composition(
            "io-qexp", "baseline: load on demand with channel-wise 4 bits", "EdgeMoE, section 5",
            cache="none", bits=4, quantizer="linear",
        ),
        Composition(
            "sti", "baseline: layer by layer, everything quantised, EdgeMoE's memory", "EdgeMoE, section 5",
            routing="layer", prefetch="layer", bits=4, dense_bits=4, quantizer="linear",
        ),
        Composition(
            "eap", "baseline: prediction from the one previous block's choices, Fate's cache", "Fate, section 5",
            prefetch="path", path=1, cache="arc", allotment="shallow", profile="fate",
        ),
        Composition("lru", "baseline: a plain LRU cache, no prefetch", ""),
        Composition(
            "mixtral-offload", "baseline: LRU with the next layer's gate", "Eliseev and Mazur (2023)",
            prefetch="next-gate", allotment="even",
        ),
    )
}  # fmt: skip


def preset_named(name: str) -> Composition:
    """ConfigError names the near ones where there is none of that name."""
    if name in PRESETS:
        return PRESETS[name]
    raise ConfigError(f"unknown preset '{name}'{_near(name, PRESETS)}")


def compose(name: str, changes: Mapping[str, Any] | None = None) -> Composition:
    """A preset with parts and settings replaced: {'prefetch': 'none', 'gamma': '0.5'}, values also as text.
    ConfigError for an unknown preset, part or value, and for a setting that no part of the result reads."""
    preset = preset_named(name)
    known = preset.settings()
    values: dict[str, Any] = {}
    for part, value in (changes or {}).items():
        if part not in known:
            raise ConfigError(f"unknown part or setting '{part}'{_near(part, known)}")
        values[part] = _parsed(part, value)
    changed = replace(preset, **values)
    _check(changed)
    for name in values:
        _require_reader(name, changed)
    return changed


_TYPES: dict[str, type] = {
    "gamma": float, "low_bits": int, "t1": float, "t2": float, "low_popularity": float, "ahead": int,
    "percentile": float, "window": int, "path": int, "boundary": int, "low_share": float, "theta": float,
    "upper_limit": float, "bits": int, "dense_bits": int,
}  # fmt: skip
_RANGES: dict[str, tuple[float, float]] = {
    "gamma": (0, 1), "t1": (0, 1), "t2": (0, 1), "low_popularity": (0, 1), "ahead": (1, 64), "percentile": (0, 100),
    "window": (0, 1 << 16), "path": (1, 2), "boundary": (0, 1 << 16), "low_share": (0, 0.9), "theta": (0, 1e9),
    "upper_limit": (0, 1),
}  # fmt: skip
_READ_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    "gamma": ("routing", ("confident",)),
    "t1": ("precision", ("gate-score",)),
    "t2": ("precision", ("gate-score",)),
    "low_popularity": ("precision", ("popularity",)),
    "mispredicted": ("precision", ("popularity",)),
    "percentile": ("prefetch", ("percentile",)),
    "window": ("prefetch", ("percentile",)),
    "path": ("prefetch", ("path",)),
    "weights": ("cache", ("weighted",)),
    "boundary": ("allotment", ("shallow",)),
    "theta": ("unit", ("neuron",)),
    "upper_limit": ("unit", ("neuron",)),
}
"""Setting → the part that reads it, and with which values."""
_UNREAD_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    "low_bits": ("precision", ("fixed", "table")),
    "ahead": ("prefetch", ("none", "path")),
}
"""Setting → the part that reads it with any value but these."""
_ONE_OF: dict[str, tuple[int, ...]] = {"low_bits": tuple(sorted(BITS)[:-1]), "bits": BITS, "dense_bits": DENSE_BITS}


def _parsed(part: str, value: Any) -> Any:
    if part in CHOICES:
        if value in CHOICES[part]:
            return value
        raise ConfigError(f"{part} cannot be '{value}'{_near(str(value), CHOICES[part])}")
    if part == "profile":
        return str(value)
    try:
        if part == "mask":
            return {"true": True, "false": False}[str(value).lower()]
        if part == "weights":
            return _weights(value)
        return _TYPES[part](value)
    except (KeyError, TypeError, ValueError):
        kind = {"mask": "true or false", "weights": "four numbers that sum to 1, like 0.4,0.3,0.2,0.1"}
        raise ConfigError(f"{part} must be {kind.get(part, 'a number')}, got '{value}'") from None


def _weights(value: Any) -> tuple[float, ...]:
    numbers = tuple(float(number) for number in (value.split(",") if isinstance(value, str) else value))
    if len(numbers) != 4 or min(numbers) < 0 or abs(sum(numbers) - 1) > 1e-3:
        raise ValueError
    return numbers


def _check(composition: Composition) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(composition, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{name} must be from {low:g} to {high:g}, got {value:g}")
    for name, allowed in _ONE_OF.items():
        value = getattr(composition, name)
        if value is not None and value not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value}")
    if composition.t1 is not None and composition.t2 is not None and composition.t1 > composition.t2:
        raise ConfigError(f"t1 ({composition.t1:g}) must not be above t2 ({composition.t2:g})")


def _require_reader(name: str, composition: Composition) -> None:
    part, values = _readers(name)
    chosen = getattr(composition, part)
    if values and chosen not in values:
        raise ConfigError(f"{name} does nothing with {part}={chosen}; it is read by {part}={' or '.join(values)}")


def _readers(name: str) -> tuple[str, tuple[str, ...]]:
    """The part that reads a setting, and with which values; a part is its own, with any."""
    if name not in _UNREAD_BY:
        return _READ_BY.get(name, (name, ()))
    part, others = _UNREAD_BY[name]
    return part, tuple(value for value in CHOICES[part] if value not in others)


def _near(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(known)}"
