"""Presets, which are named compositions: the exact default with its lossy variants, and baselines. `PRESETS` is the
table, `compose` applies `--set` to a preset, `resolve` makes one ready for a model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiermoe.config import CALIBRATED, DEFAULT_BITS, Settings
from tiermoe.errors import ConfigError, ProfileError
from tiermoe.offload.assembly import precisions
from tiermoe.offload.composition import Composition, changed, filled, parsed, require_settings, unread, with_low_share
from tiermoe.offload.plugins import load_packages
from tiermoe.offload.policies.registry import Registry
from tiermoe.offload.policies.settings import declared, near
from tiermoe.offload.profiles import Profile, Tables, profile_path, read_profile, tables

_OURS = (
    Composition(
        "default",
        "exact: estimated next uses decide who leaves a layer, the next two's routers who comes if that is faster",
        "the best exact composition measured, docs/systems.md",
        prefetch="stacked-gates", speculate="measured", cache="next-use", allotment="by-use",
        own={"ahead": 2},
    ),
    Composition(
        "frugal",
        "what ranks behind 80 % of a token's gate weight is used where it is here and not fetched; no prefetch",
        "HOBBIT's skipping (2024, section 3.2) without its low precision",
        precision="gate-score", cache="next-use", allotment="by-use",
        own={"t1": 0.8, "t2": 0.8},
    ),
    Composition(
        "nimble",
        "an expert that is here stands in for one that is not and scores little better; no prefetch",
        "Cache-Prior (Skliar and others, 2024)",
        routing="cached", cache="weighted", allotment="even", profile="nimble", prior=0.25, always=2, untouched=1,
        own={"weights": (0.25, 0.25, 0.25, 0.25)},
    ),
    Composition(
        "nimble-3bit",
        "nimble with a weaker prior, on experts that gptq packs at 3 bits: a miss is fewer bytes, and more are here",
        "Cache-Prior (Skliar and others, 2024); GPTQ (Frantar and others, 2023)",
        routing="cached", cache="weighted", allotment="even", prior=0.1, always=2, untouched=1,
        bits=3, quantizer="gptq-nonlinear",
        own={"weights": (0.25, 0.25, 0.25, 0.25)},
    ),
)  # fmt: skip
"""The exact default, and its lossy variants."""

_BASELINES = (
    Composition(
        "io-free", "baseline: every expert in memory", "EdgeMoE, section 5", cache="all"
    ),
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
        prefetch="path", cache="arc", allotment="shallow", profile="fate", own={"path": 1},
    ),
    Composition(
        "lru", "baseline: a plain LRU cache, no prefetch", ""
    ),
    Composition(
        "mixtral-offload", "baseline: LRU with the next layer's gate", "Eliseev and Mazur (2023)",
        prefetch="next-gate", allotment="even",
    ),
)  # fmt: skip
"""What the papers compare themselves with."""

_PAPERS = {name: f"tiermoe.lab.papers.{name}:PRESET" for name in ("hobbit", "edgemoe", "mobile", "fate", "corm")}
"""Published systems: their presets are the laboratory's."""


_LATER = {
    "moe-infinity": "moe_infinity",
    "adapmoe": "adapmoe",
    "hybrimoe": "hybrimoe",
    "pregated": "pregated",
    "moe-stream": "moe_stream",
    "fiddler": "fiddler",
    "llama-cpu-moe": "llama_cpp",
}
"""Later systems: preset → module of `lab.papers.later`."""


class Presets(Registry[Any]):
    """Preset by name. Ours may be given as "module:NAME", which is imported when it is first asked for; one that is
    added is a `Composition` of that name, whose parts and settings there are."""

    def __getitem__(self, name: str) -> Composition:
        preset = self.data[name]
        if isinstance(preset, str):
            module, _, constant = preset.partition(":")
            preset = self.data[name] = getattr(importlib.import_module(module), constant)
        assert isinstance(preset, Composition)
        return preset


def _fault(name: str, preset: Any) -> str:
    """What keeps a value from being a preset. ConfigError for a part or setting that there is none of."""
    if not isinstance(preset, Composition):
        return f"must be a Composition, not {preset!r}"
    if preset.name != name:
        return f"calls itself '{preset.name}'; give it one name"
    parsed({part: value for part, value in {**preset.settings(), **preset.own}.items() if value is not None})
    return _without_profile(preset) if preset.needs_profile and not preset.profile else ""


def _without_profile(preset: Composition) -> str:
    lacking = " and no ".join(preset.missing()) or "table"
    return f"has no {lacking}, and names no calibration that has it, like profile=hobbit; give it one of both"


PRESETS = Presets(
    "PRESETS",
    _fault,
    {
        **{preset.name: preset for preset in _OURS},
        **_PAPERS,
        **{name: f"tiermoe.lab.papers.later.{module}:PRESET" for name, module in _LATER.items()},
        **{preset.name: preset for preset in _BASELINES},
    },
)


def preset_named(name: str) -> Composition:
    """ConfigError names the near ones if there is none of that name, also in an installed package."""
    if name in PRESETS or (load_packages() and name in PRESETS):
        return PRESETS[name]
    raise ConfigError(f"unknown preset '{name}'{near(name, PRESETS)}")


def all_presets() -> list[str]:
    """Every preset's name, also of installed packages."""
    load_packages()
    return list(PRESETS)


def compose(name: str, changes: Mapping[str, Any] | None = None) -> Composition:
    """A preset with parts and settings replaced. ConfigError for an unknown preset, and as `changed` raises it."""
    return changed(preset_named(name), changes)


OPTIONS = ("bits", "dense_bits", "quantizer")
"""Options of the engine that a preset may set. The user's values take precedence."""


def first_steps(composition: Composition) -> list[str]:
    """Commands that must have run on a model, MODEL, before the composition runs on it for the first time."""
    steps = [_calibrate(composition, "MODEL")] if composition.needs_profile else []
    quantizer, high = composition.quantizer, composition.bits or DEFAULT_BITS
    low = [composition["low_bits"]] if "low_bits" in declared(composition.policy("precision")) else []
    packed = [bits for bits in (high, *low) if quantizer in CALIBRATED and bits < 8]
    return steps + [f"tiermoe pack MODEL --bits {bits} --quantizer {quantizer}" for bits in packed]


def _calibrate(composition: Composition, model: str) -> str:
    return f"tiermoe calibrate {model} --text FILE --for {composition.profile}"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A preset made ready for a model."""

    settings: Settings  # of the engine, with the composition's `OPTIONS`
    composition: Composition
    tables: Tables  # of the calibration
    precisions: tuple[int, ...]  # bits that experts are loaded in, highest first
    no_gpu: str = ""  # why the CPU computes where there is a GPU and `device` is auto, for people; else empty


def resolve(settings: Settings, store: Path, fingerprint: str, model: str, layers: int) -> Resolved:
    """Makes the preset of `settings` ready for a model of `layers` MoE layers. store: folder of the model's store, with
    the profiles. ConfigError for an unknown preset, part or value; ProfileError if a profile is needed and cannot be
    used."""
    options = {name: value for name in OPTIONS if (value := getattr(settings, name)) is not None}
    given = {**options, **settings.set}
    composition = compose(settings.preset, settings.set)
    composition = composition.having({name: value for name, value in options.items() if name not in settings.set})
    needed, asked = composition.needs_profile, given.get("quantizer")
    if needed and not composition.profile:
        raise ProfileError(f"preset {composition.name} {_without_profile(composition)}")
    command, path = _calibrate(composition, model), profile_path(store, composition.profile)
    composition, profile = calibrated(composition, given, path, lambda: read_profile(path, fingerprint, command))
    if needed and asked is not None and asked != composition.quantizer:
        raise ProfileError(
            f"the bitwidths of {settings.preset} were found for {composition.quantizer}, not for {asked}; "
            f"calibrate with --bitwidth-quantizer {asked}, or leave quantizer out"
        )
    require_settings(composition, model)
    composition = with_low_share(composition, layers)
    settings = replace(
        settings,
        bits=composition.bits or settings.bits_used,
        dense_bits=composition.dense_bits,
        quantizer=composition.quantizer,
    )
    found = tables(profile if needed else None)
    return Resolved(settings, composition, found, precisions(composition, settings.bits_used, found.bits))


def calibrated(
    composition: Composition, given: Collection[str], path: Path, read: Callable[[], Profile]
) -> tuple[Composition, Profile | None]:
    """A composition with what its calibration has found, and that profile: one that it needs, or one that is at `path`,
    whose values come before the preset's and after those that are `given`. read: the profile at `path`; raises what is
    wrong with it."""
    if composition.needs_profile:
        profile = read()
        return filled(composition, profile), profile
    if not composition.profile or not path.exists():
        return composition, None
    profile = read()
    found = {name: value for name, value in profile.settings.items() if name not in given}
    found = {name: value for name, value in found.items() if unread(name, composition) is None}
    return changed(composition, found), profile
